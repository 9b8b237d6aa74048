"""Losses of all kinds train and validate on ranks, on the cores of one process and sharded as in plain fastai with the whole batch.

The cases stand in loss_cases.py, which runs in a process for each strategy. What a rank says of its losses is tested on two replicas that are threads of this process."""
import pickle, warnings
from contextlib import contextmanager
from functools import cache
import pytest
from threads import n_device_calls, run_replicas, use_virtual_cores
use_virtual_cores(2)
from synth import *
from torch.nn import functional as F
from fresh import run
import loss_cases as lc
from fastai_xla.distributed.loss import BatchLoss
from fastai_xla.runtime.counts import xla_counts
for o in [o for o in globals() if o.startswith('test')]: del globals()[o]  # fastai's, which pytest would collect

STRATEGIES = dict(plain=('plain',1), four_ranks=('ranks',4), two_ranks=('ranks',2), four_cores=('one_process',4), sharded=('sharded',4))
slow = 'four_ranks','sharded'
here = Path(__file__).parent

@pytest.fixture(scope='module')
def outcomes(tmp_path_factory):
    "{case: outcome} of a strategy by its name, from a process of its own"
    folder = tmp_path_factory.mktemp('losses')
    @cache
    def _run(name):
        own = dict.fromkeys(('CPU_NUM_DEVICES','CPU_NUM_PROCESSES','PJRT_CPU_ASYNC_CLIENT','XLA_THREAD_POOL_SIZE'))
        if name in ('four_cores','sharded'): own['XLA_FLAGS'] = '--xla_backend_optimization_level=0' # one process compiles all
        res = run(here/'loss_cases.py', *STRATEGIES[name], folder/name, cwd=folder, cold=False, **own)
        assert res.returncode==0, f'{name}: exit {res.returncode}\n{res.stdout}\n{res.stderr}'
        return pickle.loads((folder/name).read_bytes())
    return _run

def numbers(o): return torch.cat([torch.zeros(1)] + [torch.as_tensor(x, dtype=torch.float).flatten() for x in (o if isinstance(o, list) else [o])])

@pytest.mark.parametrize('name', lc.CASES)
@pytest.mark.parametrize('strategy', [pytest.param(o, marks=pytest.mark.slow) if o in slow else o for o in [*STRATEGIES][1:]])
def test_as_plain_fastai(outcomes, strategy, name):
    "losses, the table, weights with those of the loss, predictions: differences relative to the largest number of their kind, where that is above 1"
    want,got = outcomes('plain')[name],outcomes(strategy)[name]
    assert isinstance(want, dict) and isinstance(got, dict), got
    tol = lc.CASES[name].get('tol', 2e-6)
    for k in want:
        a,b = numbers(want[k]),numbers(got[k])
        assert a.shape==b.shape and a.isfinite().all(), k
        assert (a-b).abs().max()<=tol*max(1, a.abs().max()), (k, (a-b).abs().max())

def test_weights_of_a_loss_are_trained(outcomes):
    learn,held = lc.learner(**lc.CASES['arcface'])
    assert len(held)==1 and (held[0]-outcomes('plain')['arcface']['weights'][-1]).abs().max()>1e-2

# ---- what is said, and what it costs

def ranks(f, name='mean', cbs=None, n=1, **kwargs):
    "What `f(learn)` returns on each of two replicas, after `n` epochs"
    learns = [lc.learner(**{**lc.CASES[name], 'bs': 8})[0] for _ in range(2)]
    set_seed(7)
    def _one(r):
        learn = learns[r].to_tpu_distributed(**kwargs)
        with learn.no_bar(), learn.no_logging():
            learn.fit(n, .1, cbs=cbs and cbs())
            return f(learn)
    return run_replicas(_one)

@contextmanager
def nothing_said():
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*(of the first batch|drifted|of its own part).*')
        yield

@pytest.mark.parametrize('name', ['class_weights','dice'])
def test_own_losses_warn_where_they_differ(name):
    "the loss, both values, and what to do"
    with pytest.warns(UserWarning, match=r"of the first batch is [\d.]+, and the mean of what 2 ranks make of their parts is [\d.]+: .* `loss='rank'` was asked for. .*loss='batch'") as w:
        ranks(noop, name, loss='rank')
    said, = [str(o.message) for o in w if 'of the first batch' in str(o.message)]
    assert said.startswith(dict(class_weights='CrossEntropyLossFlat').get(name, name))

@pytest.mark.parametrize('name', ['mean','focal'])
def test_own_losses_that_are_means_are_not_told(name):
    with nothing_said(): ranks(noop, name, loss='rank')

def test_too_large(monkeypatch):
    "a loss of predictions above a size is each rank's own, with the warning, unless all of the batch is asked for"
    monkeypatch.setattr(BatchLoss, 'max_bytes', 100)
    with pytest.warns(UserWarning, match='dice of the first batch.*predictions and targets of all ranks have 0 MB'): own = ranks(lambda o: o.recorder.losses, 'dice')
    with nothing_said():
        ranks(noop, 'focal')
        all_ = ranks(lambda o: o.recorder.losses, 'dice', loss='batch')
    assert abs(own[0][0]-all_[0][0])>1e-4

def test_loss_that_uses_more_of_a_batch():
    "is each rank's own, and that is said"
    class Own(Callback):
        def before_fit(self): self.learn.loss_func = self.loss
        def loss(self, p, y): return F.mse_loss(p, self.x[:,:4])
    with pytest.warns(UserWarning, match='Own.loss of the whole batch fails .* `loss_func.is_sample_mean = True` says so'): ranks(noop, cbs=Own)

def test_loss_that_says_it_is_a_mean():
    calls = []
    def loss(p, y):
        calls.append(len(p))
        return F.cross_entropy(p, y)
    loss.is_sample_mean = True
    class Put(Callback):
        def before_fit(self): self.learn.loss_func = loss
    ranks(noop, cbs=Put)
    assert max(calls)==8

class Counts(Callback):
    order,run_valid = 2000,False
    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append((n_device_calls(), xla_counts()))

def test_steady_step_costs_no_execution_and_no_read():
    "of a loss that is gathered, as of one that is not"
    def steps(name):
        cb = []
        def _cbs(): return cb.append(Counts()) or cb[-1]
        ranks(noop, name, _cbs, n=3)
        (n,a),(m,b) = cb[0].seen[-3:-1]
        return m-n,b.reads-a.reads,b.compiles-a.compiles # the first are this replica's alone, beside the step's program
    for name in ('mean','dice','ignored_class'): assert steps(name)==(0,0,0), name

# ---- replicas that drift apart

class Drifts(Callback):
    "Adds to a bias what this rank alone has seen"
    run_valid = False
    def after_step(self):
        with torch.no_grad(): self.model[2].bias.add_(self.x.mean())

def test_drift_is_told():
    with pytest.warns(UserWarning, match='Replicas have drifted apart: 2.bias'): ranks(noop, cbs=Drifts)

class Adversary(Callback):
    "Has a weight and an optimizer of its own"
    run_valid = False
    def __init__(self, mk): self.mk = mk
    def before_fit(self):
        self.w = nn.Parameter(torch.zeros(8, device=self.tpu_distributed_trainer.device if hasattr(self.learn, 'tpu_distributed_trainer') else 'cpu'))
        self.own = self.mk([self.w])
    def after_batch(self):
        (self.x@self.w-1).pow(2).mean().backward()
        self.own.step()
        self.own.zero_grad()

@pytest.mark.parametrize('mk', [partial(torch.optim.SGD, lr=.1), partial(SGD, lr=.1)], ids=['torch','fastai'])
def test_optimizer_of_a_callback(mk):
    "steps by the gradients of all ranks"
    learn,_ = lc.learner(**{**lc.CASES['mean'], 'bs': 16})
    set_seed(7)
    learn.dls.train.drop_last = True
    with learn.no_bar(), learn.no_logging(): learn.fit(1, .1, cbs=(cb := Adversary(mk)))
    learns = [lc.learner(**{**lc.CASES['mean'], 'bs': 8})[0] for _ in range(2)]
    for o in learns: o.dls.train.drop_last = True
    set_seed(7)
    cbs = [Adversary(mk) for _ in range(2)]
    def _one(r):
        o = learns[r].to_tpu_distributed()
        with o.no_bar(), o.no_logging(): o.fit(1, .1, cbs=cbs[r])
        return cbs[r].w.detach().cpu()
    for w in run_replicas(_one): close(cb.w.detach(), w)
