"`to_tpu_distributed(fsdp=True)` from a notebook's process: parts on the cores, the whole Learner at home."
import os, signal, time
import pytest
import test_fsdp as t
from fastai.basics import *
from fastai.callback.all import *
from fastai_xla.all import *
from fastai_xla.launch import LaunchError, LaunchInterrupt
from fastai_xla.runtime import runtime_started
for o in [o for o in globals() if o.startswith('test') and o!='t']: del globals()[o]  # fastai's, which pytest would collect

@pytest.fixture(scope='module')
def pair():
    "Plain fastai with the batches of all cores, and the same on the cores after the same training"
    plain,learn = t.learner(bs=t.N*t.B),t.learner().to_tpu_distributed(n_cores=t.N, fsdp=True, sync_bn=True)
    for o in (plain, learn): t.quiet(o, lambda o: o.fine_tune(1, 1e-2))
    yield plain,learn
    learn.detach_tpu_distributed()

def test_state_comes_home(pair):
    plain,learn = pair
    t.near(t.outcome(plain), t.outcome(learn))
    assert not runtime_started() and type(learn.model) is nn.Sequential
    for f in (lambda o: o.get_preds(), lambda o: o.validate()): t.near(t.quiet(plain, f), t.quiet(learn, f))

def test_file(pair):
    plain,learn = pair
    learn.save('m')
    t.near(plain.model.state_dict(), t.learner().load('m').model.state_dict())

def test_ctrl_c_brings_the_whole_home(pair):
    _,learn = pair
    before = {k: v.clone() for k,v in learn.model.state_dict().items()}
    class Press(Callback):
        order = 2000
        def after_batch(self):
            if self.iter==1 and self.epoch==0 and rank()==0: os.kill(os.getppid(), signal.SIGINT)
            time.sleep(.3)
    with pytest.raises(LaunchInterrupt), learn.no_bar(), learn.no_logging(): learn.fit(50, 1e-2, cbs=Press())
    after = learn.model.state_dict()
    assert after.keys()==before.keys() and after['0.weight'].shape==before['0.weight'].shape and (after['0.weight']!=before['0.weight']).any()

def test_killed_and_gone_on_with(tmp_path):
    "at a batch in the middle of an epoch, on the same number of cores"
    class Dies(Callback):
        order = 2000
        def after_batch(self):
            if self.train_iter==7 and rank()==1:
                time.sleep(1)
                raise ValueError('died')
    def train(cbs):
        set_seed(1)
        learn = t.learner(cbs=cbs).to_tpu_distributed(n_cores=t.N, fsdp=True, sync_bn=True)
        t.quiet(learn, lambda o: o.fit(2, 1e-2))
        return t.outcome(learn)
    whole = train(())
    with pytest.raises(LaunchError, match='died'): train([TPUCheckpoint('run', every=2), Dies()])
    assert sorted(os.listdir('run'))==['fit00-epoch0000-batch0000004','fit00-epoch0001-batch0000002']
    t.near(whole, train(resume_from('run', every=2)), 0)
