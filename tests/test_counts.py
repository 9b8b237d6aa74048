"A steady training epoch compiles nothing, reads the device in no batch and falls back nowhere, with recorder, progress bar and metrics on"
import gc, math, os
from forks import flags
os.environ['XLA_FLAGS'] = flags('--xla_backend_optimization_level=1') # resnet18 runs long enough to pay for it; read when the runtime starts
import pytest, torch
from fastai.basics import Callback
from fastai.callback.progress import ProgressCallback
from count_models import COUNTED, BatchCounts

END_READS = 2 # one transfer for what is waiting when the epoch starts or ends, one for the value to be shown

class Uncollected(Callback):
    "The device tensors that a training batch leaves to the garbage collector, in `found`"
    order = 9 # after the loader's transforms, before the batch is used
    def before_fit(self): self.found,self.seen = None,0
    def before_batch(self):
        self.seen += 1
        if self.seen==3:
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
        if self.seen==4: self.stop()
    def stop(self):
        gc.collect()
        gc.set_debug(0)
        gc.enable()
        self.found = [tuple(o.shape) for o in gc.garbage if isinstance(o, torch.Tensor) and o.device.type=='xla']
        gc.garbage.clear()

@pytest.mark.parametrize('name', COUNTED)
def test_steady_epoch(name):
    """With no fetch due while it lasts, and with the usual interval between fetches, of at most one a second.
    A tensor in a reference cycle is an output of the graph until it is collected, at a random time: memory lost, and a new graph to compile"""
    learn = COUNTED[name]().to_tpu(batch_tfms='auto', **({} if name=='tabular' else dict(fetch_every=1e9)))
    assert learn._grab_cbs(ProgressCallback) and learn.recorder and len(learn.metrics)==2
    learn.fit(2, 1e-3, cbs=[cb := BatchCounts(), left := Uncollected()])
    assert cb.n_batches>=4 and len(learn.recorder.losses)==2*cb.n_batches and len(learn.recorder.values)==2
    c,e,fetches = cb.batches[1],cb.epochs[1],math.ceil(cb.seconds[1]) if name=='tabular' else 0
    assert (c.compiles,c.fallbacks,e.compiles,e.fallbacks)==(0,{},0,{})
    assert c.reads<=fetches and e.reads<=fetches+END_READS
    assert c.executions==cb.n_batches
    assert left.found==[]
