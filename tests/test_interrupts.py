"Ctrl-C at any place of a step that is run again: the step is whole, nothing stays lent, and nobody waits for ever"
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
    "Weights, buffers and the optimizer's averages"
    return to_host([tensors(learn.model.state_dict()), tensors(learn.opt.state_dict()['state'])])

class Keeps(Callback):
    "Keeps the state after each step"
    replayable,order = True,100
    def before_fit(self): self.states = []
    def after_batch(self):
        if self.training: self.states.append(state(self.learn))

class InterruptAt(Callback):
    "Presses Ctrl-C `presses` times at the first `event` of a function called `name` from the `n`th step on: a call of it, or a return to it from one of C's"
    replayable,order = True,-100
    def __init__(self, name, event, presses, n=11): self.name_,self.event,self.presses,self.n = name,event,presses,n
    def before_batch(self):
        if self.training and self.train_iter==self.n: sys.setprofile(self._interrupt)
    def _interrupt(self, frame, event, arg):
        if event!=self.event or frame.f_code.co_name!=self.name_ or 'fastai_xla' not in frame.f_code.co_filename: return
        sys.setprofile(None)
        for _ in range(self.presses): signal.raise_signal(signal.SIGINT)

@pytest.fixture(scope='module')
def states():
    learn = learner(keeps := Keeps(), replay=False)
    fit(learn)
    return keeps.states

places = dict(
    one=[('take','c_return'), ('took','call'), ('count_step','call'), ('run','call'), ('of','call'), ('_execute','call'), ('_execute','c_return'), ('fill','call')],
    together=[('take','c_return'), ('count_step','call'), ('seeds_ahead','call'), ('add','call'), ('owe','call'), ('value','c_return'), ('run_loop','call'), ('_pay','call'), ('_end','call')])

@pytest.mark.filterwarnings('error::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('presses', [1, 2])
@pytest.mark.parametrize('form,name,event', [(k,*o) for k,v in places.items() for o in v])
def test_ctrl_c_anywhere(form, name, event, presses, states):
    "The second press does not wait for the end of the step: losses that were on their way may be missing then, but neither weights nor averages are half changed"
    learn = learner(at := InterruptAt(name, event, presses), **(dict(steps_per_execution=3) if form=='together' else {}))
    try:
        with pytest.raises(KeyboardInterrupt): fit(learn)
    finally: sys.setprofile(None)
    assert learn.replay.n_replayed>=5
    now,losses = state(learn),learn.recorder.losses
    n = [i for i,o in enumerate(states, 1) if is_close(now, o)]
    assert len(n)==1 and 11<=n[0]<=16
    if presses==1: assert len(losses)==n[0] and all(map(torch.isfinite, losses))
    assert not learn.tpu_trainer.loans
    assert not [o.name for o in threading.enumerate() if o.name=='XLADL']
    learn.remove_cb(at)
    fit(learn)
    assert all(torch.isfinite(t).all() for t in tensors(state(learn)))
