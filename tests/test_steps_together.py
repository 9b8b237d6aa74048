"""`steps_per_execution`: several steps as one program come to what single ones come to, and to the last bit to the same wherever somebody looks, ends, interrupts or goes on; `python test_steps_together.py <case> ...` tries cases over two cores."""
import os, sys
from pathlib import Path
if __name__=='__main__':
    os.environ['CPU_NUM_DEVICES'] = '2'
    import shape
    shape.processes = True # `synth` leaves the device alone, which is to be SPMD's
import pytest
from synth import *
from fastai.callback.fp16 import AMPMode, MixedPrecision
from fastai.callback.mixup import MixUp
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation, GradientClip
from fresh import run
from torch.utils.checkpoint import checkpoint

TOGETHER = 4

def net(n=256): return nn.Sequential(nn.Linear(8, n, bias=False), nn.BatchNorm1d(n), nn.ReLU(), nn.Dropout(.3), nn.Linear(n, 3))

def learner(model=net, train_metrics=False, **kwargs):
    "Twenty batches of 8 to train, two and a half to validate"
    set_seed(3)
    dls = DataLoaders(DataLoader(vectors(160), bs=8, shuffle=True, num_workers=0), DataLoader(vectors(20, seed=1), bs=8, num_workers=0))
    learn = Learner(dls, model(), **{'loss_func': CrossEntropyLossFlat(), 'metrics': accuracy, **kwargs})
    learn.recorder.train_metrics = train_metrics
    return learn

def fit(learn): learn.fit_one_cycle(2, 1e-2)

def fit_until(learn):
    try: learn.fit(2, 1e-2)
    except (KeyboardInterrupt,ValueError): pass

def freeze_and_thaw(learn):
    learn.splitter = two_groups
    learn.create_opt()
    learn.freeze()
    learn.fit(1, 1e-2)
    learn.unfreeze()
    learn.fit_one_cycle(2, 1e-2)

class Reads(Callback):
    "Reads results now and then"
    order,run_valid,replayable,reads_weights = 60,False,True,False
    def before_fit(self): self.seen = []
    def after_batch(self):
        if self.train_iter%5==0: self.seen.append((self.loss.item(), float(self.smooth_loss), self.pred.sum().item()))

class Hurries(Callback):
    "Has no step wait"
    order,run_valid,replayable,reads_weights = 61,False,True,False
    def after_batch(self): float(self.learn.loss)

class Raises(Callback):
    order,run_valid,replayable,reads_weights = 60,False,True,False
    def __init__(self, exc, event='after_batch'): self.exc,self.event = exc,event
    def before_batch(self): self.act('before_batch', 13)
    def after_batch(self): self.act('after_batch', 13)
    def act(self, event, i):
        if event==self.event and self.train_iter==i: raise self.exc

class Saves(Callback):
    order,run_valid,replayable,reads_weights = 60,False,True,False
    def after_batch(self):
        if self.train_iter!=13: return
        with tempfile.TemporaryDirectory() as d:
            self.learn.save(Path(d)/'m', with_opt=False)
            self.seen = torch.load(Path(d)/'m.pth')

class Replaces(Callback):
    "Puts another count in place of that of the averages"
    order,run_valid,replayable,reads_weights = 60,False,True,False
    def after_batch(self):
        if self.train_iter==13: self.learn.ema.n = torch.zeros_like(self.learn.ema.n)

def convs():
    "Of which XLA:CPU makes something else in a loop than in a single step, in last digits"
    return nn.Sequential(nn.Unflatten(1, (1,2,4)), nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(.3), nn.Linear(16, 3))

class Remembers(nn.Module):
    "Adds a mean of the batches before, and a hidden state in a list"
    def __init__(self): super().__init__(); self.net,self.mean,self.hidden = net(),None,[]
    def forward(self, x):
        if self.mean is None: self.mean,self.hidden = torch.zeros_like(x[0]),[torch.zeros_like(x[0])]
        x = x+.1*self.mean+.1*self.hidden[0]
        self.mean = .9*self.mean+.1*x.detach().mean(0)
        self.hidden = [self.hidden[0]+x.detach().amax(0)]
        return self.net(x)

class Overwrites(nn.Module):
    "Has a buffer that a step writes and does not read"
    def __init__(self): super().__init__(); self.net = net(); self.register_buffer('last', torch.zeros(8))
    def forward(self, x):
        if self.training: self.last.copy_(x.mean(0))
        return self.net(x)

class Checkpointed(nn.Module):
    "Draws the same random numbers in its backward pass again"
    def __init__(self): super().__init__(); self.body,self.head = nn.Sequential(nn.Linear(8, 32), nn.Dropout(.3), nn.GELU()),nn.Linear(32, 3)
    def forward(self, x): return self.head(checkpoint(self.body, x, use_reentrant=False))

def evals(): return EvalEvery(DataLoader(vectors(24, seed=2), bs=8), 'other', steps=6)
def ema(): return EMACallback(decay=.9)

CASES = dict(
    adam=({}, fit), sgd=(dict(opt_func=partial(SGD, mom=.9)), fit_until), adamw=(dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), fit), ranger=(dict(opt_func=ranger), fit),
    clip=(lambda: dict(cbs=GradientClip(.1)), fit), bf16=(lambda: dict(cbs=MixedPrecision(amp_mode=AMPMode.BF16)), fit), mixup=(lambda: dict(cbs=MixUp()), fit), train_metrics=(dict(train_metrics=True), fit),
    f1=(lambda: dict(train_metrics=True, metrics=[F1Score(average='macro'),accuracy]), fit), convs=(dict(model=convs), fit), memory=(dict(model=Remembers), fit), overwrites=(dict(model=Overwrites), fit), checkpointed=(dict(model=Checkpointed), fit),
    ema=(lambda: dict(cbs=ema()), fit), other_ema=(lambda: dict(cbs=[ema(),Replaces()]), fit), norms=(lambda: dict(cbs=NormMeter()), fit), groups=({}, freeze_and_thaw), lr_find=({}, lambda l: (l.lr_find(num_it=30, show_plot=False), fit(l))),
    reads=(lambda: dict(cbs=Reads()), fit), saves=(lambda: dict(cbs=Saves()), fit), evals=(lambda: dict(cbs=evals()), fit),
    cancel_batch=(lambda: dict(cbs=Raises(CancelBatchException(), 'before_batch')), fit), cancel_train=(lambda: dict(cbs=Raises(CancelTrainException())), fit),
    cancel_epoch=(lambda: dict(cbs=Raises(CancelEpochException())), fit), cancel_fit=(lambda: dict(cbs=Raises(CancelFitException())), fit),
    interrupt=(lambda: dict(cbs=Raises(KeyboardInterrupt())), fit_until), error=(lambda: dict(cbs=Raises(ValueError('no'))), fit_until))

def to_device(learn, n, sharded=False): return learn.to_tpu_sharded(fsdp=2, steps_per_execution=n) if sharded else learn.to_tpu(steps_per_execution=n)

def outcome(case, n, sharded=False, cbs=()):
    "What came of a case with `n` steps to a program, and other callbacks, as nested tensors and numbers"
    kwargs,train = CASES[case]
    learn = to_device(learner(**(kwargs() if callable(kwargs) else kwargs)).add_cbs(cbs), n, sharded)
    with learn.no_bar(),learn.no_logging(): train(learn)
    opt,rec = learn.opt,learn.recorder
    own = [[vars(cb).get(k) for k in ('seen','history','grads','params','updates')] for cb in learn.cbs if isinstance(cb, (Reads,Saves,EvalEvery,NormMeter))]
    states = [{k: v for k,v in p[2].items() if torch.is_tensor(v)} for p in opt.all_params()] if isinstance(opt, Optimizer) else []
    return learn,to_host([[float(o) for o in rec.losses], [*map(float, rec.lrs)], [[float(v) for v in o] for o in rec.values], dict(learn.model.state_dict()), states, own, learn.train_iter])

def leaves(o):
    if isinstance(o, torch.Tensor): return o.double().flatten().tolist()
    if isinstance(o, dict): return leaves([*o.items()])
    return [v for p in o for v in leaves(p)] if isinstance(o, (list,tuple,L)) else [o]

def check(case, sharded=False):
    _,want = outcome(case, 1, sharded)
    learn,got = outcome(case, TOGETHER, sharded)
    want,got = leaves(want),leaves(got)
    assert len(got)==len(want)
    for a,b in zip(got, want): assert a==pytest.approx(b, rel=1e-4, abs=1e-6, nan_ok=True) if isinstance(a, float) else a==b
    hurried,alike = outcome(case, TOGETHER, sharded, Hurries())
    assert str(leaves(alike))==str(got) and not hurried.replay.n_together # nan are no matter
    return learn.replay

@pytest.mark.parametrize('case', CASES)
def test_together(case):
    "As single steps up to the last digits, as the loop is another program; to the last bit however many it runs at once"
    replay = check(case)
    assert replay.apart is None and replay.n_together>=8, replay

def test_over_cores():
    "One program for all cores: state stays spread as it was"
    res = run(__file__, 'adam', 'ema', 'ranger', 'reads', 'interrupt')
    assert res.returncode==0 and res.stdout.count('of them up to 4 in one program')==5 and '{devices=[2,1]0,1}' in res.stdout, res.stdout+res.stderr

# ---- what it costs

def test_one_execution_for_all():
    "No compilation but that of the loop, no read, and state in the memory that it had"
    def stats_of(n):
        learn = learner(partial(net, 40), cbs=(stats := XLAStats(warm=12))).to_tpu(fetch_every=1e9, steps_per_execution=n)
        with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-2)
        return learn,stats
    _,single = stats_of(1)
    learn,stats = stats_of(TOGETHER)
    steady = stats.steps[8:18]
    first, = [o for o in stats.steps if o.compiles]
    assert first.aliases==next(o for o in single.steps if o.compiles).aliases>10 and sum(o.reads for o in steady)==0
    assert 1<=sum(o.executions for o in steady)<=4
    assert repr(learn.replay).startswith('37 of 40 training steps were run again without tracing, 37 of them up to 4 in one program')

def test_strict():
    learn = learner().to_tpu(strict=True, steps_per_execution=TOGETHER)
    with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-2)
    assert learn.replay.n_together==37

# ---- where it is not done

class Looks(Callback):
    run_valid,replayable = False,True
    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append(self.model[0].weight.sum().item())

def looked(n):
    learn = learner(cbs=Looks()).to_tpu(steps_per_execution=n)
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2)
    return learn.looks.seen,learn.replay

def test_weights_that_are_looked_at():
    "Each step by itself, which is said with what to do"
    (want,_),(got,replay) = looked(1),looked(TOGETHER)
    assert got==want and replay.n_together==0 and replay.n_replayed>15
    assert 'each by itself because the callback Looks has `after_batch`, which may read weights; if it doesn\'t, write `reads_weights = False`' in repr(replay)

class Comes(Callback):
    "Brings a callback that looks at weights, in the middle of steps that wait, and takes it away later"
    order,run_valid,replayable,reads_weights = 60,False,True,False
    def after_batch(self):
        if self.train_iter==9: self.learn.add_cb(Looks()); self.learn.looks.before_fit()
        if self.train_iter==15: self.seen = self.learn.looks.seen; self.learn.remove_cb(Looks)

def come(n):
    learn = learner(cbs=Comes()).to_tpu(steps_per_execution=n)
    with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-2)
    return learn.comes.seen,learn.replay

def test_a_reader_that_comes():
    (want,_),(got,replay) = come(1),come(TOGETHER)
    assert got==want and len(got)==6 and 0<replay.n_together<32

class Validates(Callback):
    order,run_valid,replayable,reads_weights = 60,False,True,False
    def after_batch(self):
        if self.train_iter==13: self.seen = validate_beside(self.learn, self.dls.valid)

def test_validation_between():
    def losses(n):
        learn = learner(cbs=Validates()).to_tpu(steps_per_execution=n)
        with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2)
        return learn.validates.seen
    assert [*losses(TOGETHER)]==pytest.approx([*losses(1)], rel=1e-5)

def test_gradients_that_add_up():
    learn = learner(cbs=GradientAccumulation(16)).to_tpu(steps_per_execution=TOGETHER)
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2)
    assert repr(learn.replay).splitlines()[0].endswith('each by itself because gradients wait for the next batch')

def test_a_loop_that_is_refused(monkeypatch):
    "Steps are run one by one, nothing is lost, and it is said"
    def refuses(*args): raise ValueError('RESOURCE_EXHAUSTED')
    monkeypatch.setattr('fastai_xla.train.step_loop.compile_graph', refuses)
    replay = check('adam')
    assert replay.n_together==0 and 'each by itself because the compiler refuses so many in one program' in repr(replay)

class AtTwelve(Callback):
    "Keeps the loss of a step that waits, and acts"
    order,run_valid,replayable,reads_weights = 60,False,True,False
    def __init__(self, act): self.act = act
    def after_batch(self):
        if self.train_iter!=12: return
        self.loss_before = self.learn.loss
        self.act(self.learn)

def lost(act, exc, match):
    "A Learner whose steps that wait at the twelfth batch are lost by `act`"
    learn = learner(cbs=AtTwelve(act)).to_tpu(steps_per_execution=TOGETHER)
    with learn.no_bar(),learn.no_logging(),pytest.raises(exc, match=match): learn.fit(1, 1e-2)
    assert learn.at_twelve.loss_before.isnan()
    return learn

def test_a_step_that_fails():
    "The error is the step's own, and what the steps that waited owe is not a number"
    def breaks(learn): learn.replay.group.steps[0].numbers.clear()
    learn = lost(breaks, ValueError, 'longer')
    assert len(learn.recorder.losses)==13 and not np.isnan(float(learn.recorder.losses[9]))

@pytest.mark.filterwarnings('error::pytest.PytestUnraisableExceptionWarning')
def test_all_is_let_go():
    "As after a graph that failed: the error is the user's, and steps that waited were never run"
    def lets_go(learn):
        learn.replay.let_go()
        raise ValueError('mine')
    lost(lets_go, ValueError, 'mine')

def test_errors():
    for v in (0, 1.5, '2', None):
        with pytest.raises((TypeError,ValueError), match='steps_per_execution'): learner().to_tpu(steps_per_execution=v)

# ---- checkpoints

def test_goes_on_where_it_was(tmp_path):
    "To the last bit, after a checkpoint in the middle of steps that wait"
    def train(learn):
        with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-2)
        return to_host([*learn.model.state_dict().values()])
    single,want = [train(learner(convs).to_tpu(steps_per_execution=n)) for n in (1, TOGETHER)]
    def resumes(): return resume_from(tmp_path/'run', every=7)
    with pytest.raises(KeyboardInterrupt): train(learner(convs, cbs=[resumes(),Raises(KeyboardInterrupt())]).to_tpu(steps_per_execution=TOGETHER))
    again = learner(convs, cbs=resumes()).to_tpu(steps_per_execution=TOGETHER)
    got = train(again)
    assert len(again.recorder.losses)==40 and again.replay.n_together>=16
    assert leaves(got)==pytest.approx(leaves(single), rel=1e-4, abs=1e-6) and all(map(torch.equal, got, want))

if __name__=='__main__':
    for case in sys.argv[1:]: print(case, check(case, sharded=True))
    learn,_ = outcome('adam', TOGETHER, sharded=True)
    print({torch_xla._XLAC._get_xla_sharding_spec(p) for p in learn.model.parameters()})
