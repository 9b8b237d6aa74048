"In the steady state nothing compiles, however long the schedule, and the optimizer sends one small tensor a step; its steps are fastai's"
import os
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0') # compiles three times as fast; read when the runtime starts
import pytest
from synth import *
from fastai.callback.training import GradientAccumulation

def lookahead(params, lr): return Lookahead(SGD(params, lr=lr, mom=.9), k=5)

OPTS = dict(
    SGD      = SGD,
    SGD_l2   = partial(SGD, mom=.9, wd=.1, decouple_wd=False),
    SGD_wd   = partial(SGD, mom=.9, wd=.1),
    RMSProp  = partial(RMSProp, wd=.1),
    RMSProp_mom = partial(RMSProp, mom=.9),
    Adam     = Adam,
    Adam_l2  = partial(Adam, wd=.1, decouple_wd=False),
    RAdam    = RAdam,
    SAdam    = partial(RAdam, beta=50.),
    QHAdam   = QHAdam,
    Larc     = Larc,
    Lars     = partial(Larc, clip=False, wd=.1),
    Lamb     = partial(Lamb, wd=.1),
    ranger   = ranger,
    lookahead= lookahead)
LONG = 'SGD SGD_wd RMSProp Adam RAdam QHAdam Larc Lamb ranger'.split()

def net(): return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))

def long_learner(n=400, **kwargs):
    "`n` batches of 4, and one to validate"
    dls = dls_of(vectors(4*n), vectors(4, seed=1), bs=4)
    return Learner(dls, net(), loss_func=CrossEntropyLossFlat(), splitter=lambda m: L(m[:1], m[1:]).map(params), path='.', **kwargs).to_tpu(fetch_every=1e9)

class Steps(Callback):
    "What each training batch cost, from the end of the one before"
    order = 200
    def before_fit(self): self.steps = []
    def before_train(self): self.at = xla_counts()
    def after_batch(self):
        if not self.training: return
        now = xla_counts()
        self.steps.append(now-self.at)
        self.at = now
    @property
    def compiled(self): return [i for i,o in enumerate(self.steps) if o.compiles]

def steps(learn, f, *args, **kwargs):
    "The costs of the batches of `learn.f(...)`"
    with learn.no_bar(),learn.no_logging(): getattr(learn, f)(*args, cbs=(cb := Steps()), **kwargs)
    return cb

BATCH = 2 # uploads: inputs and targets

@pytest.mark.parametrize('opt', LONG)
def test_400_steps_of_one_cycle(opt):
    cb = steps(long_learner(opt_func=OPTS[opt]), 'fit_one_cycle', 1, 1e-2)
    late = [i for i in cb.compiled if i>1]
    print(opt, cb.compiled, Counter((o.uploads,o.executions,o.reads) for o in cb.steps[2:]))
    assert len(cb.steps)==400
    assert late==([5] if opt=='ranger' else [])
