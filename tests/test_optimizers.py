"Twelve steps of a small MLP with every optimizer equal plain fastai's. Tolerance: 1e-4 relative, 1e-5 absolute, unless said."
import fastai.optimizer as fo, pytest
from functools import wraps
from synth import *
from timm.optim import create_optimizer_v2
from fastai_xla.train.optimizer import lend_step
from fastai_xla.patches.registry import Loans

def lookahead_adam(params, lr): return Lookahead(Adam(params, lr=lr), k=5)
def torch_opt(opt, **kwargs): return partial(OptimWrapper, opt=opt, **kwargs)

OPTS = dict(
    SGD          = SGD,
    SGD_l2       = partial(SGD, mom=.9, wd=.1, decouple_wd=False),
    RMSProp      = RMSProp,
    RMSProp_mom  = partial(RMSProp, mom=.9, wd=.1),
    Adam         = Adam,
    RAdam        = RAdam,
    SAdam        = partial(RAdam, beta=50.),
    QHAdam       = QHAdam,
    Larc         = Larc,
    Lars         = partial(Larc, clip=False, wd=.1),
    Lamb         = partial(Lamb, wd=.1),
    ranger       = ranger,
    lookahead    = lookahead_adam,
    torch_SGD    = torch_opt(torch.optim.SGD, momentum=.9, weight_decay=.1),
    torch_SGD_plain = torch_opt(torch.optim.SGD),
    torch_Adam   = torch_opt(torch.optim.Adam, weight_decay=.1),
    torch_AdamW  = torch_opt(torch.optim.AdamW))

class Where(Callback):
    "Where the optimizer's tensors were after each step"
    order = 70
    def before_fit(self): self.devices,self.n = set(),0
    def after_batch(self):
        if not self.training: return
        ts = opt_params(self.opt)+[p.grad for p in opt_params(self.opt) if p.grad is not None]+[t for t in opt_tensors(self.opt) if t.ndim]
        self.devices |= devices(ts)
        self.n = len(opt_tensors(self.opt))

def two_fits(learn):
    learn.fit_one_cycle(1, 1e-2, cbs=Where())
    learn.fit(1, 1e-2, cbs=(cb := Where()))
    return cb

@pytest.mark.parametrize('opt', OPTS)
def test_twelve_steps(opt):
    plain,tpu,want,got = both(two_fits, opt_func=OPTS[opt])
    assert want.devices=={'cpu'} and got.devices=={'xla'} and got.n==want.n
    on_device(tpu)
    same(plain, tpu)
    on_host(tpu.detach_tpu())
    assert len(opt_tensors(tpu.opt))==want.n
    for learn in (plain,tpu): learn.fit(1, 1e-2)
    same(plain, tpu)

@pytest.mark.parametrize('opt', ['Adam','ranger','torch_AdamW'])
def test_attached_saved_and_frozen(opt, tmp_path):
    "State that was made on the CPU is used on the device, comes back from a file, and stays where layers are frozen"
    weight = lambda learn: learn.model[0].weight.detach().cpu().clone()
    def f(learn, attach=noop):
        start = weight(learn)
        learn.freeze()
        learn.fit(1, slice(1e-2))
        assert torch.equal(start, weight(learn))
        learn.unfreeze()
        learn.fit_one_cycle(1, slice(1e-3, 1e-1))
        assert not torch.equal(start, weight(learn))
        attach(learn)
        learn.fit(1, 1e-2)
        file = learn.save('half')
        learn.fit(1, 1e-1)
        learn.load('half')
        learn.fit_one_cycle(1, slice(1e-3, 1e-1))
        learn.freeze()
        learn.fit(1, slice(1e-3, 1e-1))         # fastai decays frozen weights whose gradient is zero, not None
        return learn,file,[h['lr'] for h in learn.opt.hypers]
    (plain,_,want),(tpu,file,got) = f(twin(opt_func=OPTS[opt], path=tmp_path/'a')),f(twin(opt_func=OPTS[opt], path=tmp_path/'b'), Learner.to_tpu)
    assert got==want and len(got)==2 and got[1]==pytest.approx(100*got[0])
    assert_no_xla(file)
    on_device(tpu)
    same(plain, tpu)

def test_clear_state_and_reset_opt():
    def f(learn):
        learn.fit(1, 1e-2)
        learn.opt.clear_state()
        learn.fit(1, 1e-2)
        learn.fit(1, 1e-2, reset_opt=True)
    plain,tpu,*_ = both(f, opt_func=Adam)
    on_device(tpu)
    same(plain, tpu)

def test_a_built_torch_optimizer():
    "`opt_func` may be an `OptimWrapper` around an optimizer that already holds the parameters"
    def mk():
        learn = mlp_learner()
        learn.opt_func = OptimWrapper(opt=torch.optim.SGD(learn.model.parameters(), lr=1e-2, momentum=.9))
        return learn
    plain,tpu,*_ = both(lambda l: (l.fit(1, 1e-2), l.fit(1, 1e-2)), mk)
    on_device(tpu)
    same(plain, tpu)
    on_host(tpu.detach_tpu())
    for learn in (plain,tpu): learn.fit(1, 1e-2)
    same(plain, tpu)

def test_torch_parameter_groups():
    "Groups of dicts with their own hyper-parameters, passed unaltered to torch"
    def groups(m): return [dict(params=list(m[:2].parameters()), weight_decay=0.), dict(params=list(m[2:].parameters()), weight_decay=.1)]
    plain,tpu,*_ = both(lambda l: l.fit(2, slice(1e-3,1e-2)), splitter=groups, opt_func=torch_opt(torch.optim.AdamW, convert_groups=False))
    assert [h['wd'] for h in tpu.opt.hypers]==[0., .1]
    on_device(tpu)
    same(plain, tpu)

def test_parameters_without_gradient():
    "A parameter that the forward does not use keeps no state, and moves with the rest"
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.spare = mlp(),nn.Parameter(torch.ones(3))
        def forward(self, x): return self.body(x)
    def mk(): return Learner(mlp_learner().dls, Unused(), loss_func=CrossEntropyLossFlat())
    plain,tpu,*_ = both(lambda l: l.fit(1, 1e-2), mk)
    on_device(tpu)
    same(plain, tpu)
    assert torch.equal(tpu.detach_tpu().model.spare, torch.ones(3))

def test_a_schedule_of_every_hyper():
    "Values that callbacks set reach the device in each step: ParamScheduler on lr, mom, wd and eps"
    scheds = dict(lr=combined_cos(.3, 1e-3, 1e-2, 1e-4), mom=SchedLin(.8, .95), wd=SchedLin(0., .3), eps=SchedExp(1e-5, 1e-3))
    plain,tpu,*_ = both(lambda l: l.fit(2, cbs=ParamScheduler(scheds)))
    same(plain, tpu)
    close(plain.recorder.hps, tpu.recorder.hps)

@pytest.mark.parametrize('dtype', [torch.float64,torch.bfloat16])
def test_types(dtype):
    def f(dev):
        p = nn.Parameter(torch.linspace(-1, 1, 8).to(dev, dtype))
        opt = Adam([p], lr=.01)
        with Loans() as loans:
            if dev!='cpu': lend_step(opt, loans) # as the trainer does
            for i in range(10):
                p.grad = (p.detach()*(i+1)).cos()
                opt.step()
        return p.detach().cpu(),opt.state[p]['sqr_avg'].cpu()
    tol = 1e-9 if dtype is torch.float64 else 3e-2
    close(f('cpu'), f(DEVICE), rtol=tol, atol=tol)

def test_a_stepper_around_fastais():
    "One that only looks like fastai's runs itself"
    @wraps(fo.sgd_step)
    def half(p, lr, **kwargs): fo.sgd_step(p, lr/2)
    plain,tpu,*_ = both(lambda l: l.fit(1, 1e-2), opt_func=lambda ps, **kw: Optimizer(ps, [half], lr=1e-2))
    same(plain, tpu)

# ---- steps that are replayed

class Changes(Callback):
    "Does `f` to the optimizer after batch `at` of each epoch"
    run_valid = False
    def __init__(self, f, at=8): self.f,self.at = f,at
    def after_batch(self):
        if self.train_iter==self.at: self.f(self.opt)

def two_epochs(learn): learn.fit(2, 1e-2)

def replayed(train=two_epochs, cbs=lambda: None, **kwargs):
    "The Learner whose steps are replayed where they can, after it is seen to be that whose steps are all traced"
    def go(replay):
        learn = twin(n_trn=160, cbs=cbs(), **kwargs).to_tpu(replay=replay)
        with learn.no_bar(),learn.no_logging(): train(learn)
        return learn
    traced,learn = go(False),go(True)
    close(record(traced), record(learn), rtol=1e-5, atol=1e-6)
    close(state(traced), state(learn), rtol=1e-5, atol=1e-6)
    return learn

def set_all(key, value):
    "Sets an option of torch's optimizer"
    def f(opt):
        for pg in opt.opt.param_groups: pg[key] = value
    return f

def set_decay(opt):
    for p in opt_params(opt)[:2]: opt.state[p]['do_wd'] = not opt.state[p].get('do_wd', True)

def regroup(opt):
    (a,*more),b = opt.param_lists
    opt.param_lists = L(L(a), L(*more, *b))
    opt.set_hyper('lr', [1e-3,3e-2])

def other_steppers(opt): opt.cbs = L(fo.weight_decay, fo.sgd_step) if fo.momentum_step in opt.cbs else L(fo.weight_decay, fo.average_grad, fo.momentum_step)

CHANGES = dict( # the optimizer, what is done to it, and how many of 40 steps are run again at least
    beta           = (partial(RAdam, beta=0.), lambda o: o.set_hyper('beta', 5.-o.hypers[0]['beta']), 28),
    do_wd          = (partial(Adam, wd=.5), set_decay, 28),
    steppers       = (partial(SGD, mom=.9, wd=.1), other_steppers, 28),
    groups         = (partial(Adam, wd=.5), regroup, 28),
    lookahead      = (lookahead_adam, lambda o: setattr(o, 'alpha', .9-o.alpha), 18),
    momentum       = (torch_opt(torch.optim.SGD, momentum=.9), set_all('momentum', 0), 24),
    maximize       = (torch_opt(torch.optim.AdamW), set_all('maximize', True), 6),
    torch_state    = (torch_opt(torch.optim.AdamW), lambda o: o.clear_state(), 28))

@pytest.mark.parametrize('name', CHANGES)
def test_changed_between_steps(name):
    "What of an optimizer decides about the program of a step is seen to change"
    opt,f,n = CHANGES[name]
    replay = replayed(opt_func=opt, cbs=lambda: Changes(f)).replay
    assert n<=replay.n_replayed<=36, replay

COUNTING = dict(RMSprop=partial(torch.optim.RMSprop, momentum=.9), RAdam=torch.optim.RAdam, **{k: partial(create_optimizer_v2, opt=k) for k in ('lamb','lion')})

@pytest.mark.parametrize('name', COUNTING)
def test_numbers_of_others_optimizers(name):
    "Are inputs of the step's program: all but the first steps are replayed, with groups of two learning rates and a schedule, and all equal plain fastai"
    plain,tpu,*_ = both(lambda l: l.fit_one_cycle(2, slice(1e-3, 1e-2)), n_trn=160, opt_func=torch_opt(COUNTING[name]))
    same(plain, tpu)
    assert tpu.replay.n_replayed>=30, tpu.replay

class Counts:
    "Calls `f` nine times of ten, and counts"
    def __init__(self, f): self.f,self.n = f,0
    def __call__(self, *args, **kwargs):
        self.n += 1
        if self.n%10: return self.f(*args, **kwargs)

def sgd_by_hand(opt):
    def step(closure=None):
        for p,*_ in opt.all_params(with_grad=True): p.data.add_(p.grad, alpha=-1e-2)
    return step

def with_own(name, of=None, owner=noop):
    "Give the optimizer a `name` that calls another, its own if not one that `of` makes, after a fit"
    def train(learn):
        learn.fit(1, 1e-2)
        o = owner(learn.opt)
        setattr(o, name, Counts(of(o) if of else getattr(o, name)))
        learn.fit(1, 1e-2)
        learn.n = vars(o)[name].n
    return train

def within_fit(name):
    "Give it one within a fit"
    def train(learn):
        learn.fit(2, 1e-2, cbs=Changes(lambda opt: name in vars(opt) and isinstance(vars(opt)[name], Counts) or setattr(opt, name, Counts(getattr(opt, name)))))
        learn.n = vars(learn.opt)[name].n
    return train

OWN = dict( # the optimizer, how it trains, how often the own method is called
    step              = (SGD, with_own('step', sgd_by_hand), 20),
    step_within       = (SGD, within_fit('step'), 32),
    torch_inner       = (torch_opt(torch.optim.SGD), with_own('step', owner=lambda o: o.opt), 20),
    lookahead         = (lookahead_adam, with_own('step'), 20),
    zeros_within      = (SGD, within_fit('zero_grad'), 32),
    torch_zeros_inner = (torch_opt(torch.optim.SGD), with_own('zero_grad', owner=lambda o: o.opt), 20))

@pytest.mark.parametrize('name', OWN)
def test_methods_that_are_replaced(name):
    "A `step` or `zero_grad` that somebody puts on an optimizer runs in each step, replayed or not"
    opt,train,n = OWN[name]
    learn = replayed(train, opt_func=opt)
    assert learn.n==n and learn.replay.n_replayed>=25, (learn.n, learn.replay)

def test_hooks_of_a_torch_optimizer_run():
    seen = []
    def opt(ps, **kw):
        res = OptimWrapper(ps, torch.optim.Adam, **kw)
        res.opt.register_step_post_hook(lambda *args: seen.append(1))
        return res
    twin(opt_func=opt).to_tpu().fit(1, 1e-2)
    assert len(seen)==6

def test_a_class_with_all_params():
    "Parameters that an optimizer leaves out stay as they are"
    class Fewer(Optimizer):
        def all_params(self, n=slice(None), with_grad=False): return super().all_params(n, with_grad)[1:]
    plain,tpu,*_ = both(lambda l: l.fit(2, 1e-2), n_trn=160, opt_func=lambda ps, **kw: Fewer(ps, [fo.sgd_step], lr=1e-2))
    same(plain, tpu)
    assert tpu.replay.n_replayed>=30, tpu.replay

@pytest.mark.parametrize('name', ['step','zero_grad'])
def test_fastai_is_patched(name, monkeypatch):
    "Who replaces a method of fastai's has it called, in each step"
    stock,n = getattr(Optimizer, name),[0]
    @wraps(stock)
    def own(self, *args, **kwargs):
        n[0] += 1
        return stock(self, *args, **kwargs)
    monkeypatch.setattr(Optimizer, name, own)
    learn = replayed(opt_func=SGD)
    assert n==[80] and learn.replay.n_replayed>=30, (n, learn.replay)

def test_masked_steps_after_others():
    "Their numbers depend on those that were left out"
    def train(learn):
        learn.fit(1, 1e-2)
        learn.fit(1, 1e-2, cbs=NaNGuard('skip'))
        learn.fit(1, 1e-2)
    assert replayed(train).replay.n_replayed>=45
