"A poisoned batch on one core, on replicas, sharded and without a device: the guard names it, or trains as if it had not been there."
import math, os, warnings
import pytest
from fastai.basics import *
from fastai_xla.all import *
from threads import run_replicas, use_virtual_cores
from fresh import repo as here, run_ok

for _nm in [o for o in dir() if o.startswith('test')]: del globals()[_nm] # fastcore's own would be collected as tests

def vectors(n):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(0))
    return list(zip(x, x[:,:3].argmax(1)))

def close(want, got):
    for k in want: torch.testing.assert_close(got[k], want[k], rtol=1e-4, atol=2e-5, msg=lambda m: f'{k}: {m}')

@pytest.fixture(scope='module', autouse=True)
def cores(): use_virtual_cores(2)

bad_item = 17 # in the third batch of 8

def poisoned(n=40, without=False):
    items = [(x.clone(), y) for x,y in vectors(n)]
    items[bad_item][0][2] = math.nan
    return items[:16]+items[24:] if without else items

def norm_mlp(): return nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

def guarded(without=False, opt_func=Adam, bs=8, cbs=None, **kwargs):
    set_seed(3)
    dls = DataLoaders(*[TfmdDL(poisoned(without=without), bs=bs, num_workers=0) for _ in range(2)])
    return Learner(dls, norm_mlp(), loss_func=CrossEntropyLossFlat(), opt_func=opt_func, cbs=[NaNGuard(**kwargs), *L(cbs)])

def fit(learn):
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(2, 1e-2)
    return learn

def fit_flat(learn):
    with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-2)
    return learn

def numbers(learn): return {k: v.detach().cpu().float() for k,v in learn.model.state_dict().items() if 'tracked' not in k}

torch_adamw = partial(OptimWrapper, opt=torch.optim.AdamW)

@pytest.mark.parametrize('opt_func', [Adam, SGD, torch_adamw], ids=['Adam','SGD','AdamW'])
def test_skip_on_one_core(opt_func):
    "As plain fastai without that batch, with the optimizer's bias correction; twice over two epochs; and not a read more"
    want = numbers(fit_flat(guarded(without=True, opt_func=opt_func)))
    learn = guarded(opt_func=opt_func, action='skip').to_tpu(fetch_every=1e9)
    with pytest.warns(UserWarning, match=r'skipped 2 steps.*first at batch 3: \d of 5 parameters, 0.weight is the first'): fit_flat(learn)
    close(want, numbers(learn))
    assert learn.nan_guard.n_skipped==2
    steps = {int(st['step']) for st in getattr(learn.opt, 'opt', learn.opt).state.values() if 'step' in st}
    assert steps in (set(), {8})

def test_no_read_and_no_compilation():
    def cost(cbs):
        learn,stats = guarded(cbs=cbs),XLAStats()
        learn.dls = DataLoaders(*[TfmdDL(vectors(80), bs=8, num_workers=0) for _ in range(2)])
        learn.to_tpu(fetch_every=1e9)
        with learn.no_bar(),learn.no_logging(): learn.fit(1, cbs=stats)
        return [(o.reads,o.compiles) for o in stats.steps[2:]]
    assert set(cost([]))=={(0, 0)}

def test_stop_on_one_core_and_on_the_host():
    for to in (noop, lambda o: o.to_tpu(), lambda o: o.to_tpu(fetch_every=0)):
        with pytest.raises(NotFinite, match=r'Batch 3 of this fit \(epoch 0, batch 2 of it\).*\d of 5 parameters, 0.weight is the first. Look at'): fit(to(guarded()))

class SpoilFirst(Callback):
    "One parameter's gradient is infinite in one batch"
    def after_backward(self):
        if self.train_iter==3: self.model[3].bias.grad = self.model[3].bias.grad/0.
def test_the_first_parameter():
    learn = guarded(without=True, cbs=SpoilFirst()).to_tpu()
    with pytest.raises(NotFinite, match=r'Batch 4 of this fit .* 1 of 5 parameters, 3.bias is the first'): fit(learn)

def test_what_cannot_be_masked():
    learn = guarded(opt_func=ranger, action='skip').to_tpu()
    with pytest.raises(ValueError, match=r"`NaNGuard\('skip'\)` needs an optimizer whose step is one operation on the device, and Lookahead is not"): fit(learn)

def test_lr_find_goes_its_own_way():
    learn = guarded(without=True).to_tpu()
    with learn.no_bar(),learn.no_logging(): learn.lr_find(end_lr=1e6, num_it=20, show_plot=False)

def test_on_replicas():
    want = numbers(fit_flat(guarded(without=True, bs=8)))
    learns = [guarded(bs=4, action='skip') for _ in range(2)] # one after the other: replicas that are threads share the random state
    def f(rank):
        learn = learns[rank].to_tpu_distributed(sync_bn=True)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            fit_flat(learn)
        return numbers(learn),learn.nan_guard.n_skipped
    for got,n in run_replicas(f, n=2):
        close(want, got)
        assert n==2
    def g(rank): fit_flat(guarded(bs=4).to_tpu_distributed())
    with pytest.raises(NotFinite, match=r'\d of 5 parameters, 0.weight is the first'): run_replicas(g, n=2)

def test_sharded():
    out = run_ok("""
        import warnings
        from test_nan_guard import *
        want = numbers(fit_flat(guarded(without=True)))
        learn = guarded(action='skip').to_tpu_sharded(fsdp=2)
        with warnings.catch_warnings(record=True) as said: fit_flat(learn)
        close(want, numbers(learn))
        print(learn.nan_guard.n_skipped, any('first at batch 3' in str(o.message) for o in said))
        try: fit_flat(guarded().to_tpu_sharded(fsdp=2))
        except NotFinite as e: print('Batch 3 of this fit' in str(e))""", PYTHONPATH=f'{here}{os.pathsep}{here}/tests', CPU_NUM_DEVICES='2')
    assert out.splitlines()[-2:]==['2 True', 'True']
