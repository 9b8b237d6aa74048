"Replicas run their steps again together: to the last bit what traced steps give; if one of them can't, all trace and say why."
import random, signal, threading, time
from contextlib import contextmanager
import pytest, torch_xla
from fastai_xla.virtual_cores import run_replicas, use_virtual_cores
use_virtual_cores(2)
from synth import *
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.mixup import MixUp
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation, GradientClip
from torch.utils.checkpoint import checkpoint
from fastai_xla.data.rng import RNGWatch, rng_state
from fastai_xla.distributed import loader as distributed
from fastai_xla.train.capture import StepCapture
from traced import is_close, is_same, trace_all

N,B = 2,8 # replicas, and samples of a batch of one

def net(): return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(.3), nn.Linear(16, 3))

class Checked(nn.Module):
    "Parts that are computed again in the backward pass, with the random numbers that they had"
    def __init__(self):
        super().__init__()
        self.stem,self.parts,self.head = nn.Linear(8, 16),nn.ModuleList(nn.Sequential(nn.Dropout(.3), nn.Linear(16, 16), nn.GELU()) for _ in range(3)),nn.Linear(16, 3)
    def forward(self, x):
        x = self.stem(x)
        for o in self.parts: x = checkpoint(o, x, use_reentrant=False)
        return self.head(x)

def learner(model=net, n=10*N*B, n_valid=21, train_metrics=False, before_batch=None, **kwargs):
    "Ten batches of each replica to train"
    set_seed(3)
    dls = DataLoaders(TfmdDL(vectors(n), bs=B, shuffle=True, num_workers=0, before_batch=before_batch), TfmdDL(vectors(n_valid, seed=1), bs=B, num_workers=0))
    learn = Learner(dls, model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.', **kwargs)
    learn.recorder.train_metrics = train_metrics
    return learn

def one_cycle(learn): learn.fit_one_cycle(2, 1e-2)

def on_ranks(make, train=one_cycle, cbs=lambda r: [], programs=False, **attach):
    "Of each replica: losses, values, weights, optimizer state, and its `replay` and what that says"
    learns = [make() for _ in range(N)]
    set_seed(7)
    def f(r):
        learn = learns[r].to_tpu_distributed(**attach)
        if programs: trace_all(learn)
        learn.add_cbs(cbs(r))
        with learn.no_bar(),learn.no_logging(): train(learn)
        states = [to_host({k: v for k,v in p[2].items()}) for p in learn.opt.all_params()]
        return ([float(o) for o in learn.recorder.losses], [list(o) for o in learn.recorder.values], to_host(dict(learn.model.state_dict())), states), learn.replay, repr(learn.replay)
    return run_replicas(f)

def again(ranks, accumulates):
    "What `ranks` brings home; what came out of the training is what it is if all steps are traced"
    traced,got = ranks(replay=False),ranks()
    assert all('`replay=False` was asked for' in said for *_,said in traced)
    if accumulates: assert all(is_close(w[0][:2], g[0][:2]) for w,g in zip(traced, got)) # a bias before a BatchNorm has gradients that are last digits only
    want = ranks(programs=True) if accumulates else traced
    for w,g in zip(want, got):
        assert w[1].n_replayed==0
        assert is_same(w[0], g[0]), f"{w[0]}\n!=\n{g[0]}"
    return got

def both(make, train=one_cycle, accumulates=False, **kwargs):
    "`replay` of each replica and what it says"
    got = again(partial(on_ranks, make, train, **kwargs), accumulates)
    assert len({(o.n_replayed, o.n_traced) for _,o,_ in got})==1 # each step is run again by all of them, or by none
    return [o[1] for o in got],[o[2] for o in got]

@contextmanager
def in_time(seconds=300):
    "The body must end by then"
    def late(*_): raise TimeoutError(f'not done after {seconds} s')
    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try: yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)

cases = dict(adam=dict(), sgd=dict(opt_func=partial(SGD, mom=.9)), clip=dict(cbs=lambda r: GradientClip(.1)), bf16=dict(cbs=lambda r: MixedPrecision()),
    train_metrics=dict(train_metrics=True), global_norms=dict(sync_bn=True), mixup=dict(cbs=lambda r: MixUp()),
    accumulates=dict(cbs=lambda r: GradientAccumulation(2*B)), validation=dict(n_valid=149), checkpointed=dict(model=Checked))

@pytest.mark.parametrize('kind', cases)
def test_runs_again(kind):
    kwargs = dict(cases[kind])
    make = partial(learner, **{k: kwargs.pop(k) for k in ('model','opt_func','train_metrics','n_valid') if k in kwargs})
    replays,said = both(make, accumulates=kind=='accumulates', **kwargs)
    if kind=='mixup': assert all(o.n_replayed>=12 for o in replays), said # its state of the optimizer is made in the first step
    elif kind=='accumulates': assert all(o.n_replayed>=12 and not o.why for o in replays), said
    else: assert {(o.n_replayed, o.n_traced, o.why) for o in replays}=={(17,3,None)}, said
    if kind=='validation': assert all(o.valid.n_replayed>=6 and not o.valid.why for o in replays), said

def test_main_draws_late(monkeypatch):
    "The main rank draws for its loader from the random state that threads share, when the other is in the middle of a step: that has not drawn"
    waits,seen = [threading.Event() for _ in range(2)],[]
    def watch_made(self, stock=RNGWatch.__init__):
        stock(self)
        if rank() and not waits[0].is_set():
            waits[0].set()
            waits[1].wait(60)
    def order_taken(*args, stock=distributed.start_iter, **kwargs):
        before = rng_state()[2]
        res = stock(*args, **kwargs)
        if not rank() and not waits[1].is_set():
            seen.append((waits[0].is_set(), torch.equal(before, rng_state()[2])))
            waits[1].set()
        return res
    def own_draws(self, stock=distributed.ShardedDL._own_draws):
        if not rank() and self.share is not None and self._todo is None: waits[0].wait(60)
        return stock(self)
    for o,k,f in (RNGWatch, '__init__', watch_made),(distributed, 'start_iter', order_taken),(distributed.ShardedDL, '_own_draws', own_draws): monkeypatch.setattr(o, k, f)
    with in_time(): res = on_ranks(learner)
    assert seen==[(True, False)]
    assert {(o.n_replayed, o.n_traced, o.why) for _,o,_ in res}=={(17,3,None)}, [o for *_,o in res]

def test_smaller_last_step():
    "Its sizes differ from rank to rank, so it is traced, and the others are run again"
    replays,said = both(partial(learner, n=9*N*B+5), lambda o: o.fit(2, 1e-2))
    assert {(o.n_replayed, o.n_traced, o.why) for o in replays}=={(15,5,None)}, said

def test_freeze_unfreeze_and_lr_find():
    def train(learn):
        learn.fine_tune(1, 1e-2)
        learn.lr_find(num_it=20, show_plot=False)
        learn.fit(1, 1e-3)
    replays,said = both(partial(learner, splitter=lambda m: L(m[:1], m[1:]).map(params)), train)
    assert all(o.n_replayed>=25 for o in replays), said

def test_costs():
    "Steps that are run again neither compile nor read, and each is one execution on each replica"
    class Counts(Callback):
        replayable,order = True,200
        def before_fit(self): self.seen = []
        def after_batch(self):
            if self.training and self.epoch==1: self.seen.append(xla_counts())
    counts = Counts()
    on_ranks(partial(learner, n=24*N*B), lambda o: o.fit(2, 1e-2), cbs=lambda r: [counts] if r==0 else [], fetch_every=1e9)
    c = counts.seen[20]-counts.seen[4]
    assert (c.compiles, c.reads)==(0, 0)
    assert abs(c.executions-16*N)<=N # the devices may lag behind

def test_writes_in_place(monkeypatch):
    "On each replica the memory of a weight becomes that of the new one, so what still has the old one has lost it; also where one compiles later than the other"
    X,waited,flags = torch_xla._XLAC,[],[]
    flag = X._xla_get_enable_alias_with_buffer_donor_config
    def hash_later(ts, stock=X._get_graph_hash):
        until = time.monotonic()+(3 if rank() and not waited else 0) # for the other, if it can take away the flag by which memory is given
        while time.monotonic()<until and flag(): time.sleep(.01)
        waited.extend([1]*rank())
        return stock(ts)
    def compile_noted(*args, stock=X._xla_warm_up_cache):
        flags.append(flag())
        return stock(*args)
    monkeypatch.setattr(X, '_get_graph_hash', hash_later)
    monkeypatch.setattr(X, '_xla_warm_up_cache', compile_noted)
    monkeypatch.setattr(StepCapture, 'has_others', lambda *args: False) # else who keeps a `detach()` has steps traced
    class Keep(Callback):
        replayable = True
        def before_batch(self):
            if self.training and self.train_iter==6: self.old = self.model[0].weight.detach()
    keeps = [Keep() for _ in range(N)]
    for _,replay,said in on_ranks(learner, lambda o: o.fit(1, 1e-2), cbs=lambda r: keeps[r]): assert replay.n_replayed==8, said
    assert flags and all(flags) and not flag()
    for o in keeps:
        with pytest.raises(RuntimeError): o.old.cpu()

# ---- what keeps them from it

def test_one_replica_has_a_reason():
    "Then none of them runs a step again"
    class Scales(Callback):
        def after_backward(self):
            for p in self.model.parameters(): p.grad.mul_(1.)
    replays,said = both(learner, cbs=lambda r: [Scales()] if r==1 else [])
    assert all(o.n_replayed==0 for o in replays)
    why = 'the callback Scales has `after_backward`'
    assert all(why in o and ('on replica 1' in o)==(r!=1) for r,o in enumerate(said)), said

def test_one_replica_finds_a_reason():
    "In its steps, which the others learn of"
    class Kept(Callback):
        replayable = True
        def before_fit(self): self.kept_one = None
        def after_batch(self):
            if self.training: self.kept_one = [self.model[0].weight.detach()]
    replays,said = both(learner, cbs=lambda r: [Kept()] if r==1 else [])
    assert all(o.n_replayed==0 for o in replays)
    assert all('`kept_one` is `detach()`' in o and ('on replica 1' in o)==(r!=1) for r,o in enumerate(said)), said

class Reads(nn.Module):
    "Its scale decides on the host"
    def __init__(self): super().__init__(); self.lin,self.scale = nn.Linear(8, 3),nn.Parameter(torch.tensor(1.))
    def forward(self, x): return self.lin(x)*self.scale*(2. if self.scale.item()>.97 else .5)

class Depth(nn.Module):
    "Leaves a layer out now and then"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(8, 8),nn.Linear(8, 3)
    def forward(self, x): return self.b(self.a(x) if random.random()<2 else x)

refused = dict(reads=(partial(learner, Reads), {}, 'a step reads the device'), draws=(partial(learner, Depth), {}, "a step changes Python's random numbers"),
    ragged=(partial(learner, before_batch=noop), {}, 'the shapes of its batches may differ from replica to replica'),
    scales_lr=(learner, dict(scale_lr=True), 'GradientReducer has `before_step`'), fsdp=(learner, dict(fsdp=True), 'with `fsdp` a step gathers'))

@pytest.mark.parametrize('name', refused)
def test_traced_for_a_reason(name):
    make,kwargs,why = refused[name]
    for _,replay,said in on_ranks(make, **kwargs): assert replay.n_replayed==0 and why in said, said

# ---- what one of them alone can see

class Scaled(nn.Module):
    "Its forward can see `note`, which changes nothing"
    def __init__(self): super().__init__(); self.net,self.scale,self.note,self.says = net(),1.,0,False
    def forward(self, x):
        if self.says: print(end='')
        return self.net(x.float())*self.scale

class Sets(Callback):
    "Calls `f(learn, value)` before some steps"
    replayable = True
    def __init__(self, f, at): self.f,self.at,self.n = f,at,0
    def before_batch(self):
        if not self.training: return
        self.n += 1
        if self.n in self.at: self.f(self.learn, self.at[self.n])

class Casts(Callback):
    "Gives batches of another type"
    replayable,on = True,False
    def before_batch(self):
        if self.training and self.on: self.learn.xb = self.x.bfloat16(),

def set_attr(k, *values): return lambda learn, on: setattr(learn.model, k, values[on])
def set_wd(learn, on):
    for o in learn.opt.state.values(): o['do_wd'] = not on
def set_loss(learn, on): learn.loss_func = CrossEntropyLossFlat()
def set_type(learn, on): learn.casts.on = on

changes = dict(note=set_attr('note', 0, 1), scale=set_attr('scale', 1., 2.), wd=set_wd, loss=set_loss, type=set_type)
times = dict(and_back=({6: True, 12: False},), at_the_end=({40: True},), for_good=({6: True},), now_and_then=({o: o//9%2==1 for o in range(9, 80, 9)},),
    each_in_turn=({6: True, 30: False}, {11: True, 26: False}))

def as_traced(f, ats, cbs=lambda: [], model=Scaled, accumulates=False, **kwargs):
    "`replay` of each replica and what it says, where at `ats` of each `f` is called"
    def ranks(**how):
        sets = [Sets(f, o) for o in ats]
        def on(r): return [Casts(), *cbs(), *sets[r:r+1]]
        with in_time(): return on_ranks(partial(learner, model, n=40*N*B, **kwargs), lambda o: o.fit(2, 1e-2, wd=.1), cbs=on, **how)
    got = again(ranks, accumulates)
    assert all(o.n_replayed+o.n_traced==80 for _,o,_ in got)
    return [o[1] for o in got],[o[2] for o in got]

@pytest.mark.parametrize('what,at', [(w, t) for w in changes for t in times if w in ('note','scale') or t in ('and_back','each_in_turn')])
def test_one_replica_changes_something(what, at):
    "It traces alone, and before long what it then does is run again; who has changed nothing runs its steps again all the time"
    replays,said = as_traced(changes[what], times[at])
    most = 50 if at=='now_and_then' else 20
    for r,o in enumerate(replays): assert not o.why and o.n_traced<=(most if r<len(times[at]) else 5), said
    assert replays[0].n_traced>3, said

@pytest.mark.parametrize('kind', ['bf16','accumulates','train_metrics','mixup'])
def test_one_replica_changes_something_where(kind):
    kwargs = dict(cases[kind])
    cbs = kwargs.pop('cbs', lambda r: [])
    replays,said = as_traced(changes['scale'], times['and_back'], lambda: [cbs(0)] if kind!='train_metrics' else [], accumulates=kind=='accumulates', **kwargs)
    assert all(not o.why and o.n_replayed>50 for o in replays), said

def test_one_replica_clips_otherwise():
    def norm(learn, on): learn.gradient_clip.max_norm = .01 if on else .1
    replays,said = as_traced(norm, times['and_back'], lambda: [GradientClip(.1)])
    assert 3<replays[0].n_traced<=20 and replays[1].n_traced<=5 and not any(o.why for o in replays), said

def test_runs_the_program_of_the_others(monkeypatch):
    "Where what has changed leaves the graph as it was, as on a TPU cores that exchange must run one program"
    ran = [[] for _ in range(N)]
    def noted(self, program, *args, stock=StepCapture._execute):
        ran[rank()].append(program.key)
        return stock(self, program, *args)
    monkeypatch.setattr(StepCapture, '_execute', noted)
    as_traced(changes['note'], times['each_in_turn'])
    assert ran[0]==ran[1] and len(ran[0])==80

@pytest.mark.parametrize('what', changes)
def test_all_change_at_once(what):
    "None of them knows of the others, until they ask each other"
    replays,said = as_traced(changes[what], [{30: True}, {30: True}])
    assert all(not o.why and 3<o.n_traced<=20 for o in replays), said

def test_one_replica_finds_a_reason_later():
    "The others learn of it when they ask each other next"
    replays,said = as_traced(set_attr('says', False, True), [{}, {6: True}])
    assert all(o.n_replayed<=8 and 'calls `print`' in o.why for o in replays), said
    assert [('on replica 1' in o) for o in said]==[True, False], said
