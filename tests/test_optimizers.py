"Twelve steps of a small MLP with every optimizer equal plain fastai's. Tolerance: 1e-4 relative, 1e-5 absolute, unless said."
import pytest
from synth import *

def lookahead_adam(params, lr): return Lookahead(Adam(params, lr=lr), k=5)
def torch_opt(opt, **kwargs): return partial(OptimWrapper, opt=opt, **kwargs)

OPTS = dict(
    SGD          = SGD,
    SGD_mom      = partial(SGD, mom=.9),
    SGD_wd       = partial(SGD, mom=.9, wd=.1),
    SGD_l2       = partial(SGD, mom=.9, wd=.1, decouple_wd=False),
    RMSProp      = RMSProp,
    RMSProp_mom  = partial(RMSProp, mom=.9, wd=.1),
    Adam         = Adam,
    Adam_l2      = partial(Adam, wd=.1, decouple_wd=False),
    RAdam        = RAdam,
    SAdam        = partial(RAdam, beta=50.),
    QHAdam       = QHAdam,
    Larc         = Larc,
    Lars         = partial(Larc, clip=False, wd=.1),
    Lamb         = Lamb,
    Lamb_wd      = partial(Lamb, wd=.1),
    ranger       = ranger,
    lookahead    = lookahead_adam,
    torch_SGD    = torch_opt(torch.optim.SGD, momentum=.9, weight_decay=.1),
    torch_Adam   = torch_opt(torch.optim.Adam),
    torch_AdamW  = torch_opt(torch.optim.AdamW),
    torch_RMSprop= torch_opt(torch.optim.RMSprop, momentum=.9))
SOME = 'SGD_mom Adam Larc ranger torch_SGD torch_AdamW'.split()

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

@pytest.mark.parametrize('opt', SOME)
def test_attach_a_fitted_learner(opt):
    "State that was made on the CPU goes to the device and is used there"
    def f(learn, attach=noop):
        learn.fit(1, 1e-2)
        attach(learn)
        learn.fit(1, 1e-2)
        return learn
    plain,tpu = f(twin(opt_func=OPTS[opt])),f(twin(opt_func=OPTS[opt]), Learner.to_tpu)
    on_device(tpu)
    same(plain, tpu)

@pytest.mark.parametrize('opt', SOME)
def test_optimizer_state_in_a_file(opt, tmp_path):
    def f(learn):
        learn.fit(1, 1e-2)
        file = learn.save('half')
        learn.fit(1, 1e-1)
        learn.load('half')
        learn.fit(1, 1e-2)
        return file
    plain,tpu,want,got = both(f, opt_func=OPTS[opt], path=tmp_path)
    assert_no_xla(got)
    on_device(tpu)
    same(plain, tpu)

@pytest.mark.parametrize('opt', SOME)
def test_discriminative_lrs_and_frozen_groups(opt):
    weight = lambda learn: learn.model[0].weight.detach().cpu().clone()
    def f(learn):
        start = weight(learn)
        learn.freeze()
        learn.fit(1, slice(1e-2))
        assert torch.equal(start, weight(learn))
        learn.unfreeze()
        learn.fit_one_cycle(1, slice(1e-3, 1e-1))
        assert not torch.equal(start, weight(learn))
        learn.freeze()
        learn.fit(1, slice(1e-3, 1e-1))         # fastai decays frozen weights whose gradient is zero, not None
        return [h['lr'] for h in learn.opt.hypers], weight(learn)
    plain,tpu,want,got = both(f, opt_func=OPTS[opt])
    assert got[0]==want[0] and len(got[0])==2 and got[0][1]==pytest.approx(100*got[0][0])
    close(want, got)
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
