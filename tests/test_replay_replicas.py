"Each replica recognises its own steps: to the last bit what traced steps give; one that traces meets the collectives of those that replay."
import random
import pytest
from threads import run_replicas, use_virtual_cores
use_virtual_cores(2)
from synth import *
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai_xla.train.program import StepTracer
from traced import is_close, is_same, trace_all
from fastai_xla.runtime.ranks import rank

N,B = 2,8 # replicas, and samples of a batch of one

def net(): return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(.3), nn.Linear(16, 3))

def learner(model=net, n=10*N*B, n_valid=21, train_metrics=False, before_batch=None, **kwargs):
    "Ten batches of each replica to train"
    set_seed(3)
    dls = DataLoaders(TfmdDL(vectors(n), bs=B, shuffle=True, num_workers=0, before_batch=before_batch), TfmdDL(vectors(n_valid, seed=1), bs=B, num_workers=0))
    learn = Learner(dls, model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.', **kwargs)
    learn.recorder.train_metrics = train_metrics
    return learn

def one_cycle(learn): learn.fit_one_cycle(2, 1e-2)

def on_ranks(make, train=one_cycle, cbs=lambda r: [], programs=False, **attach):
    "Of each replica: losses, values, weights and optimizer state, and its `replay`"
    learns = [make() for _ in range(N)]
    set_seed(7)
    def f(r):
        learn = learns[r].to_tpu_distributed(**attach)
        if programs: trace_all(learn)
        learn.add_cbs(cbs(r))
        with learn.no_bar(),learn.no_logging(): train(learn)
        states = [to_host({k: v for k,v in p[2].items()}) for p in learn.opt.all_params()]
        return ([float(o) for o in learn.recorder.losses], [list(o) for o in learn.recorder.values], to_host(dict(learn.model.state_dict())), states), learn.replay
    return run_replicas(f)

def both(make, train=one_cycle, accumulates=False, **kwargs):
    "`replay` of each replica; what came out of the training is what it is if all steps are traced"
    traced,got = on_ranks(make, train, replay=False, **kwargs),on_ranks(make, train, **kwargs)
    if accumulates: assert all(is_close(w[0][:2], g[0][:2]) for w,g in zip(traced, got)) # a bias before a BatchNorm has gradients that are last digits only
    want = on_ranks(make, train, programs=True, **kwargs) if accumulates else traced
    for w,g in zip(want, got):
        assert w[1].n_replayed==0
        assert is_same(w[0], g[0]), f"{w[0]}\n!=\n{g[0]}"
    return [o[1] for o in got]

cases = dict(sgd=dict(opt_func=partial(SGD, mom=.9)), clip=dict(cbs=lambda r: GradientClip(.1)), bf16=dict(cbs=lambda r: MixedPrecision()), global_norms=dict(sync_bn=True, scale_lr=True),
    accumulates=dict(cbs=lambda r: GradientAccumulation(2*B)), validation=dict(n_valid=149, train_metrics=True))

@pytest.mark.parametrize('kind', cases)
def test_replays(kind):
    kwargs = dict(cases[kind])
    make = partial(learner, **{k: kwargs.pop(k) for k in ('opt_func','train_metrics','n_valid') if k in kwargs})
    replays = both(make, accumulates=kind=='accumulates', **kwargs)
    assert all(o.n_replayed>=14 and not o.why for o in replays), replays
    if kind=='validation': assert all(o.valid.n_replayed>=6 and not o.valid.why for o in replays), replays

def test_smaller_last_step():
    "Its sizes differ from rank to rank, so it is traced, and the others are replayed"
    assert all(o.n_replayed>=14 and o.n_traced>=2 for o in both(partial(learner, n=9*N*B+5), lambda o: o.fit(2, 1e-2)))

def test_costs():
    "Steps that are replayed neither compile nor read, and each is one execution on each replica"
    class Counts(Callback):
        order = 200
        def before_fit(self): self.seen = []
        def after_batch(self):
            if self.training and self.epoch==1: self.seen.append(xla_counts())
    counts = Counts()
    on_ranks(partial(learner, n=24*N*B), lambda o: o.fit(2, 1e-2), cbs=lambda r: [counts] if r==0 else [], fetch_every=1e9)
    c = counts.seen[20]-counts.seen[4]
    assert (c.compiles, c.reads)==(0, 0)
    assert abs(c.executions-16*N)<=N # the devices may lag behind

# ---- what one of them alone does

class Reads(nn.Module):
    "Its scale decides on the host"
    def __init__(self): super().__init__(); self.lin,self.scale = nn.Linear(8, 3),nn.Parameter(torch.tensor(1.))
    def forward(self, x): return self.lin(x)*self.scale*(2. if self.scale.item()>.97 else .5)

class Depth(nn.Module):
    "Leaves a layer out now and then, on each replica at another time"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(8, 8),nn.Linear(8, 3)
    def forward(self, x): return self.b(self.a(x) if random.random()<.7 else x)

class Scales(Callback):
    "Has the loss of some batches be larger"
    def __init__(self, at): self.at = at
    def after_loss(self):
        if self.training and self.train_iter in self.at: self.learn.loss_grad = self.learn.loss_grad*2

class Hooks(Callback):
    def before_fit(self): self.h = self.model[0].weight.register_hook(lambda g: g)
    def after_fit(self): self.h.remove()

refused = dict(reads=(partial(learner, Reads), {}, 'runs a program of its own'),
    ragged=(partial(learner, before_batch=noop), {}, 'the shapes of its batches may differ from replica to replica'))

@pytest.mark.parametrize('name', refused)
def test_traced_for_a_reason(name):
    make,kwargs,why = refused[name]
    for _,replay in on_ranks(make, **kwargs): assert replay.n_replayed==0 and why in repr(replay), replay

@pytest.mark.parametrize('at', [[6,12], range(6, 40), range(6, 40, 3)], ids=['twice','for_good','now_and_then'])
def test_one_replica_changes_something(at):
    "It traces what it does not know while the other replays, and then replays that too"
    a,b = both(partial(learner, n=20*N*B), lambda o: o.fit(2, 1e-2), cbs=lambda r: [Scales(at)] if r==0 else [])
    assert 20<=a.n_replayed<b.n_replayed and b.n_replayed>=36, (a, b)

def test_one_replica_has_a_reason():
    "That one traces each step, by the other's program"
    a,b = both(learner, cbs=lambda r: [Hooks()] if r==1 else [])
    assert a.n_replayed>=16 and b.n_replayed==0 and 'a parameter has a hook' in b.why, (a, b)

def test_each_at_a_time_of_its_own():
    "Replicas that go different ways: none waits for another, and each is right by itself"
    for _,replay in on_ranks(partial(learner, Depth, n=20*N*B), lambda o: o.fit(2, 1e-2)): assert replay.n_replayed>=25, replay

def test_runs_the_program_of_the_others(monkeypatch):
    "A step that is traced has the graph of one that is replayed: as on a TPU cores that exchange must run one program"
    ran = [[] for _ in range(N)]
    def noted(self, program, *args, stock=StepTracer._execute):
        ran[rank()].append(program.key)
        return stock(self, program, *args)
    monkeypatch.setattr(StepTracer, '_execute', noted)
    class Looks(Callback):
        def after_loss(self):
            if self.training and self.train_iter in (8,9,15): self.seen = self.learn.loss_grad.dtype, self.learn.loss_grad.detach()*1
    on_ranks(learner, cbs=lambda r: [Looks()] if r==1 else [])
    assert len(ran[0])==len(ran[1])==20 and sum(a!=b for a,b in zip(*ran))<=3
