"In the steady state nothing compiles, however long the schedule, and the optimizer sends one small tensor a step; its steps are fastai's"
import fastai.optimizer, pytest
from synth import *
from contextlib import contextmanager
from torch.nn.utils import parametrizations
from fastai.callback.training import GradientAccumulation
from fastai_xla.train.optimizer import lend_step
from fastai_xla.patches.registry import Loans

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
TORCH = dict(
    torch_SGD     = partial(torch.optim.SGD, momentum=.9, weight_decay=.1),
    torch_SGD_plain = torch.optim.SGD,
    torch_RMSprop = torch.optim.RMSprop,
    torch_RMSprop_mom = partial(torch.optim.RMSprop, momentum=.9, weight_decay=.1),
    torch_Adam    = partial(torch.optim.Adam, weight_decay=.1),
    torch_AdamW   = torch.optim.AdamW)
OPTS.update({k: partial(OptimWrapper, opt=v) for k,v in TORCH.items()})
LONG = 'SGD SGD_wd RMSProp Adam RAdam QHAdam Larc Lamb torch_SGD torch_RMSprop torch_Adam torch_AdamW'.split()

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

def steady(cb, after=2, own=1, reads=0):
    "Assert that from batch `after` on nothing compiled and no more than `reads` was read, and the optimizer sent `own` tensors a batch; the loader sends one"
    c = cb.steps[after:]
    assert [i for i in cb.compiled if i>=after]==[]
    assert sum(o.reads for o in c)<=reads
    assert sum(o.uploads for o in c)<=(1+own)*len(c)+8 # batches are sent ahead, in each epoch

@pytest.mark.parametrize('opt', LONG)
def test_400_steps_of_one_cycle(opt):
    cb = steps(long_learner(opt_func=OPTS[opt]), 'fit_one_cycle', 1, 1e-2)
    assert len(cb.steps)==400
    assert cb.compiled==([0,1] if opt=='torch_RMSprop' else [0]) # the schedule gives it a momentum, so state, that it did not have when the training began
    steady(cb)

def test_lookahead_has_two_graphs():
    "And one more for its first step, which makes the slow weights"
    cb = steps(long_learner(opt_func=ranger), 'fit_one_cycle', 1, 1e-2)
    assert len(cb.steps)==400 and set(cb.compiled)<={0,1,5}
    steady(cb, after=6)

@pytest.mark.parametrize('f,args', [('fit_flat_cos', (1,1e-2)), ('fit_sgdr', (2,1,1e-2)), ('fit_one_cycle', (1,slice(1e-4,1e-2))), ('lr_find', ())], ids=str)
def test_schedules(f, args):
    learn = long_learner(n=100)
    learn.add_cb(cb := Steps())
    with learn.no_bar(),learn.no_logging(): getattr(learn, f)(*args, **(dict(show_plot=False) if f=='lr_find' else {}))
    assert len(cb.steps)>=50 and set(cb.compiled)<={0,1}
    steady(cb)

@pytest.mark.parametrize('fetch_every', [0.,1e9], ids=['at_once','late'])
@pytest.mark.parametrize('kwargs', [dict(), dict(start_lr=1e-3, end_lr=1e4), dict(start_lr=1e-3, end_lr=.5, stop_div=False)], ids=['usual','diverges','goes_on'])
def test_lr_find_is_that_of_fastai(kwargs, fetch_every):
    "Also when it learns late that the training has diverged: what it should not have seen is dropped"
    sugs = tuple(getattr(fastai.callback.schedule, o) for o in ('minimum','steep','valley','slide'))
    def f(learn):
        with learn.no_bar(): res = learn.lr_find(**kwargs, suggest_funcs=sugs)
        ax = plt.gcf().axes[0]
        return tuple(res),[[(list(o.get_xdata()),[float(v) for v in o.get_ydata()]) for o in ax.lines[:1]], learn.train_iter, learn.epoch, float(learn.smooth_loss)]
    mk = lambda: mlp_learner(n_trn=8*30, opt_func=partial(SGD, mom=.9))
    plain,tpu = twin(mk),twin(mk)
    tpu.to_tpu(fetch_every=fetch_every)
    set_seed(7); want = f(plain)
    set_seed(7); got = f(tpu)
    close(want, got, rtol=1e-3)
    close(record(plain), record(tpu), rtol=1e-3)
    close(state(plain)['model'], state(tpu)['model'])
    assert (len(tpu.recorder.losses)<95)==(kwargs.get('end_lr')==1e4 and kwargs.get('stop_div', True))

def test_lr_find_reads_once():
    learn = long_learner(n=60)
    learn.add_cb(cb := Steps())
    a = xla_counts()
    with learn.no_bar(),learn.no_logging(): learn.lr_find(show_plot=False)
    assert sum(o.reads for o in cb.steps[2:])==0

@pytest.mark.parametrize('wrap', [nn.utils.weight_norm, nn.utils.spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm],
    ids=['weight_norm','spectral_norm','weight_norm_now','spectral_norm_now'])
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
    steady(steps(long_learner(n=40, opt_func=partial(SGD, mom=.9)), 'fit', 1, 1e-2), own=0)

def test_freezing_compiles_in_the_first_two_steps_alone():
    learn = long_learner(n=12, opt_func=Adam)
    for f in ('freeze','unfreeze','freeze','unfreeze'):
        getattr(learn, f)()
        assert set(steps(learn, 'fit_one_cycle', 1, 1e-2).compiled)<={0,1}

def test_accumulation_has_two_graphs():
    learn = long_learner(n=40, opt_func=Adam)
    learn.add_cb(GradientAccumulation(8))
    cb = steps(learn, 'fit_one_cycle', 1, 1e-2)
    assert cb.compiled==[0,1]
    steady(cb, after=5) # until both are known

def test_validation_fetches_once():
    "What all metrics need comes home together, when the first is asked for its value; training reads nothing"
    learn = long_learner(n=8, metrics=[accuracy, F1Score(average='macro'), Perplexity()])
    learn.add_cb(stats := XLAStats())
    with learn.no_logging(): learn.fit(3, 1e-2)
    assert [o.reads for o in stats.valid]==[1]*3
    assert sum(o.reads for o in stats.steps[2:])==0 and all(o.reads<=1 for o in stats.train[1:])
    assert stats.usual['compiles']==stats.usual['fallbacks']==0 and stats.usual['executions']==pytest.approx(1, abs=.1)

def test_a_second_fit_compiles_nothing():
    learn = long_learner(n=6, opt_func=Adam)
    steps(learn, 'fit_one_cycle', 1, 1e-2)
    assert steps(learn, 'fit_one_cycle', 1, 1e-2).compiled==[]

class Looks(Callback):
    "Reads parameters and the optimizer's state between epochs, as checkpoints and a user do"
    order = 200
    def after_epoch(self):
        self.seen = to_host([list(self.model.parameters()), self.opt.state_dict()])
        self.learn.save('looked')
        self.cpu = [p.cpu() for p in self.model.parameters()]
    after_train = after_epoch

@pytest.mark.parametrize('opt', ['SGD_wd','Adam','ranger','torch_AdamW'])
def test_reading_parameters_compiles_nothing(opt):
    "Between epochs, and before validation"
    learn = long_learner(n=12, opt_func=OPTS[opt], metrics=accuracy)
    learn.add_cb(Looks())
    cb = steps(learn, 'fit', 4, 1e-2)
    assert not [i for i in cb.compiled if i>=6], cb.compiled

# ---- the same steps as fastai's

def made(opt_func, dev):
    ps = [nn.Parameter((torch.arange(1,n+1)/n-.4).to(dev)) for n in (6,4,1)]
    return opt_func([ps[:2], ps[2:]], lr=.01),ps

@contextmanager
def as_in_a_fit(opt, p):
    "The step is lent on a device, as the trainer does"
    with Loans() as loans:
        if p.device.type=='xla': lend_step(opt, loans)
        yield

def step_on(opt, ps, rng):
    "Steps whose rates, momentums and gradients change; the last parameter has no gradient at times, and the first no decay"
    if isinstance(opt, Optimizer): opt.state[ps[0]]['do_wd'] = False
    with as_in_a_fit(opt, ps[0]):
        for i in rng:
            opt.set_hyper('lr', [.02/(i+1),.01])
            if i==20 and 'mom' in opt.hypers[0] and type(getattr(opt, 'opt', None)) is not torch.optim.SGD: opt.set_hyper('mom', 0.)
            for j,p in enumerate(ps):
                g = torch.sin(torch.arange(1,p.numel()+1)*(i+j+1.))
                if j<2 or i%3: p.grad = g.to(p.device)
            opt.step()
            opt.zero_grad()

def steps_and_file(opt_func, dev, file):
    "15 steps, the state through a file into another optimizer with other parameters, and 15 more"
    opt,ps = made(opt_func, dev)
    step_on(opt, ps, range(15))
    torch.save([opt.state_dict(), [p.detach() for p in ps]], file)
    opt,qs = made(opt_func, dev)
    sd,ws = torch.load(file, weights_only=False, map_location='cpu')
    for q,w in zip(qs, ws): q.data.copy_(w)
    opt.load_state_dict(sd)
    step_on(opt, qs, range(15, 30))
    return as_numbers(opt.state_dict()),[p.detach() for p in qs]

@pytest.mark.parametrize('opt', OPTS)
def test_30_steps(opt, tmp_path):
    want,got = (steps_and_file(OPTS[opt], dev, tmp_path/f'{dev}.pth') for dev in ('cpu',DEVICE))
    assert devices(got)=={'xla'}
    close(want, got, rtol=2e-4, atol=1e-5)

@pytest.mark.parametrize('dtype', [torch.float64,torch.bfloat16])
def test_types(dtype):
    def f(dev):
        p = nn.Parameter(torch.linspace(-1, 1, 8).to(dev, dtype))
        opt = Adam([p], lr=.01)
        with as_in_a_fit(opt, p):
            for i in range(10):
                p.grad = (p.detach()*(i+1)).cos()
                opt.step()
        return p.detach().cpu(),opt.state[p]['sqr_avg'].cpu()
    tol = 1e-9 if dtype is torch.float64 else 3e-2
    close(f('cpu'), f(DEVICE), rtol=tol, atol=tol)

def test_steppers_of_ones_own_run_in_fastais_step():
    seen = []
    def signed(p, lr, **kwargs):
        seen.append(p.device.type)
        p.data.add_(p.grad.sign(), alpha=-lr)
    def f(dev):
        opt,ps = made(lambda ps,lr: Optimizer(ps, [fastai.optimizer.average_grad, signed], lr=lr), dev)
        step_on(opt, ps, range(3))
        return [p.detach() for p in ps]
    close(f('cpu'), f(DEVICE))
    assert seen.count('xla')==seen.count('cpu')>0

def test_outside_of_a_fit_the_step_is_fastais():
    "And `zero_grad` when patches are undone, also on the device"
    opt,ps = made(Adam, DEVICE)
    assert opt.step.__func__ is Optimizer.step and Optimizer.step.__module__=='fastai.optimizer' and not hasattr(Optimizer.step, '__wrapped__')
    for p in ps: p.grad = torch.ones_like(p)
    opt.step()
    undo_patches()
    try:
        opt.zero_grad()
        assert ps[0].grad is not None
    finally: apply_patches()
    qopt,qs = made(Adam, 'cpu')
    for q in qs: q.grad = torch.ones_like(q)
    qopt.step()
    close([q.detach() for q in qs], [p.detach() for p in ps])

@pytest.mark.parametrize('opt', [partial(torch.optim.SGD, momentum=.9, nesterov=True), partial(torch.optim.Adam, amsgrad=True), torch.optim.NAdam], ids=['nesterov','amsgrad','NAdam'])
def test_other_torch_optimizers_step_as_torch_does(opt):
    def f(dev):
        w,ps = made(lambda ps,lr: OptimWrapper(ps, opt, lr=lr), dev)
        step_on(w, ps, range(4))
        return [p.detach() for p in ps]
    close(f('cpu'), f(DEVICE))

def test_hooks_of_a_torch_optimizer_run():
    w,ps = made(partial(OptimWrapper, opt=torch.optim.Adam), DEVICE)
    seen = []
    w.opt.register_step_post_hook(lambda *args: seen.append(1))
    step_on(w, ps, range(2))
    assert seen==[1,1]
