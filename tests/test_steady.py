"In the steady state nothing compiles, however long the schedule, and the optimizer sends one small tensor a step."
import fastai.callback.schedule, pytest
from synth import *
from torch.nn.utils import parametrizations
from fastai.callback.training import GradientAccumulation

def net(): return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))

def long_learner(n, **kwargs):
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
    learn.add_cb(cb := Steps())
    with learn.no_bar(),learn.no_logging(): getattr(learn, f)(*args, **kwargs)
    learn.remove_cb(cb)
    return cb

def steady(cb, after=2, own=1):
    "Assert that from batch `after` on nothing compiled and nothing was read, and the optimizer sent `own` tensors a batch; the loader sends one"
    c = cb.steps[after:]
    assert [i for i in cb.compiled if i>=after]==[]
    assert sum(o.reads for o in c)==0
    assert sum(o.uploads for o in c)<=(1+own)*len(c)+8 # batches are sent ahead, in each epoch

torch_opt = partial(partial, OptimWrapper)
once,twice = {0},{0,1} # the programs
LONG = dict( # optimizer, fit, batches, the batches that compile
    Adam=(Adam, 'fit_one_cycle', (1,1e-2), 400, once), torch_AdamW=(torch_opt(opt=torch.optim.AdamW), 'fit_one_cycle', (1,slice(1e-4,1e-2)), 100, once),
    SGD=(partial(SGD, mom=.9, wd=.1), 'fit_flat_cos', (1,1e-2), 100, once), RAdam=(RAdam, 'fit_sgdr', (2,1,1e-2), 40, once), QHAdam=(QHAdam, 'fit_one_cycle', (1,1e-2), 100, once),
    Lamb=(Lamb, 'fit_one_cycle', (1,1e-2), 100, once), lr_find=(Adam, 'lr_find', (), 100, once), ranger=(ranger, 'fit_one_cycle', (1,1e-2), 100, {0,1,5})) # its slow weights are made in the sixth step

@pytest.mark.parametrize('name', LONG)
def test_schedules(name):
    opt,f,args,n,compiled = LONG[name]
    cb = steps(long_learner(n, opt_func=opt), f, *args, **(dict(show_plot=False) if f=='lr_find' else {}))
    assert len(cb.steps)>=50 and set(cb.compiled)<=compiled
    steady(cb, after=1+max(1, *compiled))

@pytest.mark.parametrize('kwargs', [dict(start_lr=1e-3, end_lr=1e4), dict(start_lr=1e-3, end_lr=.5, stop_div=False)], ids=['diverges','goes_on'])
def test_lr_find_is_that_of_fastai(kwargs):
    "Also when it learns late that the training has diverged: what it should not have seen is dropped"
    sugs = tuple(getattr(fastai.callback.schedule, o) for o in ('minimum','steep','valley','slide'))
    def f(learn):
        with learn.no_bar(): res = learn.lr_find(**kwargs, suggest_funcs=sugs)
        return tuple(res), learn.train_iter, learn.epoch, float(learn.smooth_loss)
    plain,tpu = [twin(lambda: mlp_learner(n_trn=8*30, opt_func=partial(SGD, mom=.9))) for _ in range(2)]
    tpu.to_tpu(fetch_every=1e9)
    res = []
    for learn in (plain,tpu):
        set_seed(7)
        res.append(f(learn))
    close(*res, rtol=1e-3)
    close(record(plain), record(tpu), rtol=1e-3)
    close(state(plain)['model'], state(tpu)['model'])
    assert (len(tpu.recorder.losses)<95)==kwargs.get('stop_div', True)

@pytest.mark.parametrize('wrap', [nn.utils.spectral_norm, parametrizations.weight_norm], ids=['before','now'])
@pytest.mark.filterwarnings('ignore:.*is deprecated')
def test_normalized_weights_stay_on_the_device(wrap):
    def mk():
        set_seed(1)
        model = nn.Sequential(wrap(nn.Linear(8, 4)), nn.ReLU(), wrap(nn.Linear(4, 3)))
        return Learner(dls_of(vectors(40), vectors(10, seed=1), bs=4), model, loss_func=CrossEntropyLossFlat(), opt_func=Adam)
    plain,learn = mk(),mk().to_tpu(fetch_every=1e9)
    before = xla_counts()
    set_seed(7); cb = steps(learn, 'fit', 2, 1e-2)
    assert cb.compiled in ([0],[0,1]) and (xla_counts()-before).fallbacks=={}
    steady(cb)
    set_seed(7); steps(plain, 'fit', 2, 1e-2)
    same(plain, learn)

def test_nothing_is_sent_when_nothing_changes():
    steady(steps(long_learner(40, opt_func=partial(SGD, mom=.9)), 'fit', 1, 1e-2), own=0)

def test_freezing_compiles_in_the_first_two_steps_alone():
    "And a second fit compiles nothing"
    learn = long_learner(12, opt_func=Adam)
    for f in ('freeze','unfreeze','freeze','unfreeze'):
        getattr(learn, f)()
        assert set(steps(learn, 'fit_one_cycle', 1, 1e-2).compiled)<=twice
    assert steps(learn, 'fit_one_cycle', 1, 1e-2).compiled==[]

def test_accumulation_has_two_graphs():
    cb = steps(long_learner(40, opt_func=Adam, cbs=GradientAccumulation(8)), 'fit_one_cycle', 1, 1e-2)
    assert cb.compiled==[0,1]
    steady(cb, after=5) # until both are known

def test_validation_fetches_once():
    "What all metrics need comes home together, when the first is asked for its value; training reads nothing"
    learn = long_learner(8, metrics=[accuracy, F1Score(average='macro'), Perplexity()])
    learn.add_cb(stats := XLAStats())
    with learn.no_logging(): learn.fit(3, 1e-2)
    assert [o.reads for o in stats.valid]==[1]*3
    assert sum(o.reads for o in stats.steps[2:])==0 and all(o.reads<=1 for o in stats.train[1:])
    assert stats.usual['compiles']==stats.usual['fallbacks']==0 and stats.usual['executions']==pytest.approx(1, abs=.1)

class Looks(Callback):
    "Reads parameters and the optimizer's state between epochs, as checkpoints and a user do"
    order = 200
    def after_epoch(self):
        self.seen = to_host([list(self.model.parameters()), self.opt.state_dict()])
        self.learn.save('looked')
        self.cpu = [p.cpu() for p in self.model.parameters()]
    after_train = after_epoch

@pytest.mark.parametrize('opt', [Adam, ranger], ids=lambda f: f.__name__)
def test_reading_parameters_compiles_nothing(opt):
    "Between epochs, and before validation"
    cb = steps(long_learner(12, opt_func=opt, metrics=accuracy, cbs=Looks()), 'fit', 4, 1e-2)
    assert not [i for i in cb.compiled if i>=6], cb.compiled
