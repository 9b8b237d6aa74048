"Ctrl-C at any place of a step that is replayed: the step is whole, nothing stays lent, and nobody waits for ever"
import signal, sys, threading
import pytest, torch
from synth import *
from traced import is_close
import fastai_xla
from fastai_xla.all import *

def net(): return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(.3), nn.Linear(16, 3))

def learner(*cbs, **kwargs):
    set_seed(3)
    dls = DataLoaders(*[DataLoader(vectors(n, seed=n), bs=8, num_workers=0) for n in (160,16)])
    return Learner(dls, net(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs).to_tpu(**kwargs)

def fit(learn):
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2)

def state(learn):
    "Weights, the optimizer's averages, and buffers"
    return to_host([list(learn.model.parameters()), tensors(learn.opt.state_dict()['state']), list(learn.model.buffers())])

class Keeps(Callback):
    "Keeps the state after each step"
    order = 100
    def before_fit(self): self.states = []
    def after_batch(self):
        if self.training: self.states.append(state(self.learn))

class InterruptAt(Callback):
    "Presses Ctrl-C `presses` times at the `k`th event in this package's code from step `n` on: a call of a function, or a return from one of C's"
    order = -100
    def __init__(self, k, presses, n=11): self.k,self.presses,self.n,self.seen,self.whole = k,presses,n,0,None
    def before_batch(self):
        if not self.training: return
        if self.train_iter==self.n: sys.setprofile(self._count)
        elif self.whole is None and self.train_iter==self.n+3: self.whole = self.seen # events of three steps
    def _count(self, frame, event, arg):
        if event not in ('call','c_return') or 'fastai_xla' not in frame.f_code.co_filename: return
        self.seen += 1
        if self.seen!=self.k: return
        sys.setprofile(None)
        for _ in range(self.presses): signal.raise_signal(signal.SIGINT)

@pytest.fixture(scope='module')
def states():
    learn = learner(keeps := Keeps(), replay=False)
    fit(learn)
    return keeps.states

@pytest.fixture(scope='module')
def n_events():
    "Of three steps that are replayed"
    learn = learner(at := InterruptAt(None, 0))
    try: fit(learn)
    finally: sys.setprofile(None)
    return at.whole

@pytest.mark.filterwarnings('error::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('presses', [1, 2])
@pytest.mark.parametrize('tenth', range(10))
def test_ctrl_c_anywhere(tenth, presses, states, n_events):
    """The second press does not wait for the end of the step: neither weights nor averages are half changed, but losses that were on their way may be missing,
    and BatchNorm may have counted a batch that made no step, as in plain fastai"""
    learn = learner(at := InterruptAt(1+tenth*n_events//10, presses))
    try:
        with pytest.raises(KeyboardInterrupt): fit(learn)
    finally: sys.setprofile(None)
    assert learn.replay.n_replayed>=5
    now,losses = state(learn),learn.recorder.losses
    parts = 3 if presses==1 else 2
    n = [i for i,o in enumerate(states, 1) if is_close(now[:parts], o[:parts])]
    assert len(n)==1 and 11<=n[0]<=17
    if presses==1: assert len(losses)==n[0] and all(map(torch.isfinite, losses))
    assert not learn.tpu_trainer.loans
    assert not [o.name for o in threading.enumerate() if o.name=='XLADL']
    learn.remove_cb(at)
    fit(learn)
    assert all(torch.isfinite(t).all() for t in tensors(state(learn)))
