"A steady step compiles nothing, reads nothing from the device, and is few programs"
import sys
from pathlib import Path
import pytest, torch
sys.path.insert(0, str(Path(__file__).parent.parent.parent/'benchmarks'))
from torch_tpu_programs import as_it_comes, by_to_tpu
from parity_models import cnn, partial
from fastai.vision.all import Callback, CutMix, GradientAccumulation, GradientClip, Lamb, MixUp, OptimWrapper, ranger, ShowGraphCallback
import fastai_xla.all
from torch.utils._python_dispatch import TorchDispatchMode

class Reads(TorchDispatchMode):
    "Notes what is read from the device"
    def __init__(self): super().__init__(); self.seen = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type=='tpu': self.seen.append('item')
        if func is torch.ops.aten._to_copy.default and args[0].device.type=='tpu' and torch.device((kwargs or {}).get('device') or 'tpu').type=='cpu': self.seen.append('cpu')
        return func(*args, **(kwargs or {}))

def test_programs():
    before,_ = as_it_comes(cnn)
    assert before>80
    n,compiles = by_to_tpu(cnn, replay=False)
    assert (n<=30, compiles)==(True, 0), n
    n,compiles = by_to_tpu(cnn)
    assert (n<=5, compiles)==(True, 0), n

@pytest.mark.parametrize('opt', [Lamb, ranger, partial(OptimWrapper, opt=torch.optim.AdamW)])
def test_programs_of_other_optimizers(opt):
    "A step of Lamb has the norms of each of its eight parameters"
    n,compiles = by_to_tpu(partial(cnn, opt))
    assert compiles==0 and n<(40 if opt is Lamb else 10), n

@pytest.mark.parametrize('cbs', [[], [MixUp()], [CutMix()], [GradientClip(.1), GradientAccumulation(16)], [ShowGraphCallback()]], ids=str)
def test_nothing_is_read(cbs):
    "Between two fetches of what the bar shows; the second epoch is watched"
    learn = cnn(cbs=cbs).to_tpu(replay=False, fetch_every=1e6)
    reads = []
    class Watch(Callback):
        order = -1000
        def before_train(self):
            if self.epoch: self.mode = Reads(); self.mode.__enter__()
        def after_batch(self): pass
    class Unwatch(Callback):
        order = -1000
        def after_train(self):
            if self.epoch: self.watch.mode.__exit__(None, None, None); reads.append(list(self.watch.mode.seen))
    learn.add_cbs([Watch(), Unwatch()])
    with learn.no_logging(): learn.fit(2, 1e-3)
    assert reads==[[]]

