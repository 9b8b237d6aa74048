"""With `FASTAI_XLA_FORM=all_cores` (`make test-all-cores`), what suites test of `to_tpu` they test of `to_tpu_distributed` in one process:
`learn.to_tpu()` then halves the batch sizes of its DataLoaders and trains on two cores, so that a step has as many samples as it had."""
import os
from functools import wraps

all_cores = os.environ.get('FASTAI_XLA_FORM')=='all_cores'

def _loaders(learn): return [dl for dl in getattr(learn.dls, 'loaders', ()) if isinstance(getattr(dl, 'bs', None), int)]

def _halve(learn):
    for dl in _loaders(learn):
        if hasattr(dl, 'whole_bs'): continue
        assert dl.bs%2==0, f'bs={dl.bs} cannot be halved: this test needs an even one'
        if hasattr(dl, 'make_chunks'): vars(dl).update({k: v for k,v in vars(dl.new(bs=dl.bs//2)).items() if isinstance(v, int)}, whole_bs=dl.bs)
        else: dl.bs,dl.whole_bs = dl.bs//2,dl.bs

def _restore(learn):
    for dl in _loaders(learn):
        if not hasattr(dl, 'whole_bs'): continue
        if hasattr(dl, 'make_chunks'): vars(dl).update({k: v for k,v in vars(dl.new(bs=dl.whole_bs)).items() if isinstance(v, int)})
        else: dl.bs = dl.whole_bs
        del dl.whole_bs

def take_form():
    "Have `to_tpu` and `detach_tpu` be those of all cores, which are two"
    if not all_cores: return
    from fastai.basics import Learner
    from fastai_xla.runtime.device import xla_device
    from fastai_xla.sharding.mesh import start_spmd
    detach = Learner.detach_tpu
    def to_tpu(self, **kwargs):
        _halve(self)
        self.to_tpu_distributed(n_cores=2, **kwargs)
        self.tpu_trainer = self.tpu_data_parallel_trainer
        return self
    def detach_tpu(self):
        vars(self).pop('tpu_trainer', None)
        _restore(self)
        return detach(self)
    Learner.to_tpu,Learner.detach_tpu = to_tpu,detach_tpu
    start_spmd(2)
    xla_device()
