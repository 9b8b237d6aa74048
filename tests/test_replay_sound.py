"Programs of which only a part is in the graph: whatever a step looks at or keeps on the host, it ends as when every step is traced"
import argparse, os, sys, time
from collections import OrderedDict
from contextlib import ExitStack
from copy import deepcopy
from itertools import count
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
import numpy as np, pytest, torch.utils.checkpoint as torch_ckpt
from synth import *
from fastai.callback.fp16 import AMPMode, MixedPrecision
from fastai.callback.rnn import RNNCallback, RNNRegularizer
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation, GradientClip
from fastcore.all import L
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from fastai_xla.patches.registry import Loans
from traced import is_close, is_same, trace_all

def mlp(mid=nn.ReLU): return nn.Sequential(nn.Linear(8, 16), mid(), nn.Linear(16, 3))

def one_fit(learn): learn.fit(2, 1e-2)

def learner(model=mlp, dl=DataLoader, cls=Learner, loss_func=None, **kwargs):
    "Twenty batches of 8 to train, six to validate"
    set_seed(3)
    dls = DataLoaders(dl(vectors(160), bs=8, shuffle=True, num_workers=0), dl(vectors(48, seed=1), bs=8, num_workers=0))
    return cls(dls, model(), **{'loss_func': loss_func or CrossEntropyLossFlat(), 'metrics': accuracy, **kwargs})

def outcome(make, replay, fit=one_fit, look=lambda l: None, programs=False):
    learn = make().to_tpu(replay=replay)
    if programs: trace_all(learn)
    with learn.no_bar(),learn.no_logging(): fit(learn)
    seen = to_host(look(learn))
    return learn,([float(o) for o in learn.recorder.losses], [list(o) for o in learn.recorder.values], to_host(dict(learn.model.state_dict())), seen)

def again(make, *args):
    "The Learner whose steps may run again, which ends to the last bit as one whose steps are all traced"
    traced,want = outcome(make, False, *args)
    learn,got = outcome(make, True, *args)
    if traced.cbs.filter(lambda o: isinstance(o, GradientAccumulation)):
        for a,b in zip(got, want): assert is_close(a, b), f'{learn.replay}\n{a}\n!=\n{b}'
        traced,want = outcome(make, True, *args, programs=True)
    for a,b in zip(got, want): assert is_same(a, b), f'{learn.replay}\n{a}\n!=\n{b}'
    assert not traced.replay.n_replayed
    return learn

def check(make, why=None, look=lambda l: None, fit=one_fit):
    "Equal to the last bit; run again if there is no reason `why` not"
    learn = again(make, fit, look)
    if why is None: assert learn.replay.n_replayed>15, learn.replay
    else: assert why in repr(learn.replay), learn.replay

# ---- tensors that are kept

class Shifts(nn.Module):
    "The batch before the last"
    def __init__(self): super().__init__(); self.net,self.last,self.before = mlp(),None,None
    def forward(self, x):
        if self.before is not None: x = x+.1*self.before
        self.before,self.last = self.last,x.detach().mean(0)
        return self.net(x)

class Swaps(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp(); self.register_buffer('a', torch.zeros(8)); self.register_buffer('b', torch.ones(8))
    def forward(self, x):
        self.a,self.b = self.b,self.a
        self.a.mul_(.9).add_(x.detach().mean(0))
        return self.net(x+.1*self.b)

class View(nn.Module):
    def __init__(self): super().__init__(); self.net,self.row = mlp(),None; self.register_buffer('bank', torch.zeros(4, 8))
    def forward(self, x):
        if self.row is None: self.row = self.bank[0]
        out = self.net(x+self.row)
        with torch.no_grad(): self.bank.mul_(.9).add_(x.mean(0)*.1)
        return out

class WeightView(nn.Module):
    def __init__(self): super().__init__(); self.net,self.v = mlp(),None
    def forward(self, x):
        if self.v is None: self.v = self.net[0].weight.detach()[:8]
        return self.net(x+.1*x@self.v)

class Writes(nn.Module):
    def __init__(self, s): super().__init__(); self.s = s
    def forward(self, x):
        if not self.s: self.s.append(x.detach().mean(0))
        self.s[0] = self.s[0]*.9+x.detach().mean(0)
        return x
class Reads(Writes):
    def forward(self, x): return x+self.s[0]
def shared_list():
    s = []
    return nn.Sequential(Writes(s), Reads(s), mlp())

STATE,KEPT = {},[]
class InDict(nn.Module):
    def __init__(self): super().__init__(); STATE.clear(); self.net,self.state = mlp(),STATE
    def forward(self, x):
        self.state['m'] = self.state.get('m', 0)*.9+x.detach().mean(0)
        return self.net(x+.01*self.state['m'])
class InPlace(nn.Module):
    def __init__(self): super().__init__(); self.net,self.acc = mlp(),None
    def forward(self, x):
        if self.acc is None: self.acc = torch.zeros(8, device=x.device); KEPT[:] = [self.acc]
        if self.training: self.acc.add_(x.detach().mean(0))
        return self.net(x+.01*self.acc)
class Ordered(nn.Module):
    def __init__(self): super().__init__(); self.net,self.s = mlp(),OrderedDict()
    def forward(self, x):
        self.s['k'] = x.detach().mean(0)
        self.s.move_to_end('k')
        return self.net(x)

kept = dict(shifts=(Shifts,), swaps=(Swaps, 'modules of the model'), view=(View, '`row` is a view'), weight_view=(WeightView, '`v` is a view'),
    shared_list=(shared_list, 'two attributes share `s`'), in_dict=(InDict, '`state` elsewhere', lambda l: (STATE['m'], l.model.state is STATE)),
    in_place=(InPlace, '`acc` elsewhere', lambda l: (KEPT[0], l.model.acc is KEPT[0])), ordered=(Ordered, None, lambda l: type(l.model.s) is OrderedDict))

@pytest.mark.parametrize('name', kept)
def test_kept_tensors(name):
    model,*more = kept[name]
    check(lambda: learner(model), *more)

# ---- what is given, and what forward does to modules

class Tasks(DataLoader):
    k = 0
    def create_batch(self, b):
        x,y = default_collate(list(b))
        Tasks.k += 1
        return x,('b' if Tasks.k%3==0 else 'a'),y
class OfTask(nn.Module):
    def __init__(self): super().__init__(); Tasks.k,self.net = 0,mlp()
    def forward(self, x, task): return self.net(x)*(2 if task=='a' else .5)
class Weights(DataLoader):
    k = 0
    def create_batch(self, b):
        x,y = default_collate(list(b))
        Weights.k += 1
        return {'x': x, 'w': 2. if Weights.k%3==0 else 1.},y
class OfDict(nn.Module):
    def __init__(self): super().__init__(); Weights.k,self.net = 0,mlp()
    def forward(self, d): return self.net(d['x'])*d['w']

@pytest.mark.parametrize('dl,model', [(Tasks,OfTask), (Weights,OfDict)])
def test_what_is_no_tensor_in_a_batch(dl, model):
    "Each kind of batch has a program of its own"
    check(lambda: learner(model, dl))

class Halves(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x):
        if self.training:
            on = not self.net[0].weight.requires_grad
            self.net[0].requires_grad_(on)
            self.net[2].requires_grad_(not on)
        return self.net(x)
class Flags(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp(partial(nn.Dropout, 1.))
    def forward(self, x):
        if self.training: self.net[1].training = not self.net[1].training
        return self.net(x)
class SwapsModules(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b,self.c = nn.Linear(8, 8),nn.Linear(8, 8),nn.Linear(8, 3)
    def forward(self, x):
        if self.training: self.a,self.b = self.b,self.a
        return self.c(torch.relu(self.a(x)))

@pytest.mark.parametrize('model', [Halves, Flags, SwapsModules])
def test_forward_changes_the_model(model): check(lambda: learner(model), 'a step changes modules of the model, or their flags')

# ---- code that must run

class OwnBackward(Learner):
    n = 0
    def _backward(self):
        self.n += 1
        (self.loss_grad*(1+self.n//10)).backward()
class OwnStep(Learner):
    n = 0
    def _step(self):
        self.n += 1
        if self.n%3: self.opt.step()

@pytest.mark.parametrize('cls,name', [(OwnBackward,'_backward'), (OwnStep,'_step')])
def test_learners_of_the_users(cls, name): check(lambda: learner(cls=cls), f'the Learner has a `{name}` of its own', lambda l: l.n)

class OwnCall(Callback):
    n = 0
    def __call__(self, e):
        super().__call__(e)
        if e=='after_loss' and self.training: self.n += 1; self.learn.loss_grad = self.learn.loss_grad*(1+self.n//10)
class Hooks(Callback):
    n = 0
    def before_train(self): self.h = self.model[0].register_forward_hook(self.hook)
    def hook(self, m, i, o): self.n += 1; return o*(1+self.n//10)
    def after_train(self): self.h.remove()
class WeightHooks(Hooks):
    def before_train(self): self.h = self.model[0].weight.register_hook(self.hook)
    def hook(self, g): self.n += 1; return g*(1+self.n//10)
class ValidHooks(Hooks):
    def before_train(self): pass
    def after_train(self): pass
    def before_validate(self): self.h = self.model[0].register_forward_hook(self.hook)
    def after_validate(self): self.h.remove()
class Scales(Callback):
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.learn.loss_grad*(1+self.train_iter//10)
class Adds(Callback):
    n = 0
    def before_train(self):
        if self.epoch==0: self.learn.add_cb(Scales())
class OwnUpdate(ParamScheduler):
    n = 0
    def __init__(self): super().__init__({'lr': lambda p: 1e-2})
    def _update_val(self, pct): self.model[1].p = 0. if pct<.25 else 1.

callbacks = dict(own_call=(OwnCall, 'its own `__call__`'), hooks=(Hooks, 'Hooks.hook'), weight_hooks=(WeightHooks, 'has a hook'), valid_hooks=(ValidHooks, 'Hooks.hook'),
    adds=(Adds, 'Scales has `after_loss`'), own_update=(OwnUpdate, 'its own `_update_val`'))

@pytest.mark.parametrize('name', callbacks)
def test_callbacks_of_the_users(name):
    cb,why = callbacks[name]
    check(lambda: learner(partial(mlp, nn.Dropout), cbs=cb()), why, lambda l: next(o for o in l.cbs if type(o) is cb).n)

# ---- state of the host that a step changes

def scale(n): return 1+n//10
class CFG: step = 0
class Counter:
    n = 0
    def loss(self, p, y): self.n += 1; return F.cross_entropy(p*scale(self.n), y)
N = [0]
def counted(p, y, k): N[0] += 1; return F.cross_entropy(p*scale(N[0]), y)
class Base(nn.Module):
    def __init__(self): super().__init__(); N[0],self.net = 0,mlp()
    def forward(self, x): N[0] += 1; return self.net(x)*scale(N[0])
class Derived(Base): pass
class Property(Base):
    @property
    def s(self): N[0] += 1; return scale(N[0])
    def forward(self, x): return self.net(x)*self.s
def bump(x): N[0] += 1; return x*scale(N[0])
class Fn(torch.autograd.Function):
    n = 0
    @staticmethod
    def forward(ctx, x): Fn.n += 1; return x*float(scale(Fn.n))
    @staticmethod
    def backward(ctx, g): return g*float(scale(Fn.n))
class UsesFn(Base):
    def __init__(self): super().__init__(); Fn.n = 0
    def forward(self, x): return Fn.apply(self.net(x))
class Holds(nn.Module):
    def __init__(self, c, get): super().__init__(); self.net,self.c,self.get = mlp(),c,get
    def forward(self, x): return self.net(x)*scale(self.get(self.c))
def first_of(c): c[0] += 1; return int(c[0])
def deep_in(c): c['a']['b']['n'] += 1; return c['a']['b']['n']
def loss_of(count): return lambda p,y: F.cross_entropy(p*scale(count()), y)
def cfg():
    CFG.step = 0
    def count(): CFG.step += 1; return CFG.step
    return learner(loss_func=loss_of(count))
def namespace():
    args = argparse.Namespace(step=0)
    def count(): args.step += 1; return args.step
    return learner(loss_func=loss_of(count))
def fastcore_list():
    h = L()
    def count(): h.append(1); return len(h)
    return learner(loss_func=loss_of(count))
def default():
    def loss(p, y, c=[0]): c[0] += 1; return F.cross_entropy(p*scale(c[0]), y)
    return learner(loss_func=loss)
def partial_loss(): N[0] = 0; return learner(loss_func=partial(counted, k=1))
def layer(): N[0] = 0; return learner(lambda: nn.Sequential(Lambda(bump), mlp()))
def forward_of_an_instance():
    def forward(self, x): N[0] += 1; return nn.Sequential.forward(self, x)*scale(N[0])
    def model():
        N[0],m = 0,mlp()
        m.forward = MethodType(forward, m)
        return m
    return learner(model)
def by_getattr():
    l = learner()
    l.loss_func = lambda p,y: F.cross_entropy(p*scale(getattr(l, 'train_iter')), y)
    return l
def by_object():
    l = learner()
    class S:
        @property
        def k(self): return scale(l.train_iter)
    s = S()
    l.loss_func = lambda p,y: F.cross_entropy(p*s.k, y)
    return l
def by_optimizer():
    l = learner()
    l.loss_func = lambda p,y: F.cross_entropy(p*scale(next(iter(l.opt.state.values()), {}).get('step', 0)), y)
    return l
def prints():
    def loss(p, y): print('.', end=''); return F.cross_entropy(p, y)
    return learner(loss_func=loss)

changed = dict(cfg=(cfg, 'count`'), namespace=(namespace, 'count`'), fastcore_list=(fastcore_list, 'count`'), default=(default, 'the default 0'), partial=(partial_loss, '`N`'),
    bound=(lambda: learner(loss_func=Counter().loss), 'a Counter'), base=(lambda: learner(Derived), '`N`'), property=(lambda: learner(Property), '`N`'), layer=(layer, '0.func'),
    forward=(forward_of_an_instance, 'the model.forward'), function=(lambda: learner(UsesFn), '`Fn`'), array=(lambda: learner(lambda: Holds(np.zeros(65), first_of)), 'the model.c'),
    list=(lambda: learner(lambda: Holds([0]*33, first_of)), 'the model.c'), nested=(lambda: learner(lambda: Holds({'a': {'b': {'n': 0}}}, deep_in)), 'the model.c'),
    getattr=(by_getattr, 'whose `train_iter`'), object=(by_object, 'whose `train_iter`'), optimizer=(by_optimizer, 'l`'), prints=(prints, 'calls `print`'))

@pytest.mark.parametrize('name', changed)
def test_changed_by_a_step(name): check(*changed[name])

class Called:
    n,__name__ = 0,'called'
    def __call__(self, p, y): self.n += 1; return (p.argmax(1)==y).float().mean()*(1+self.n//3)

def test_a_metric_that_counts(): check(lambda: learner(metrics=AvgMetric(Called())), 'a Called')

# ---- state of the host that changes between steps

class Heavier(Metric):
    "Makes the loss heavier after ten batches"
    def __init__(self, w): self.w,self.n = w,0
    def reset(self): pass
    def accumulate(self, learn):
        self.n += 1
        if self.n==10: self.w['w'] = 3.
    value,name = property(lambda self: self.n),'acc'

def heavier():
    w = {'w': 1.}
    l = learner(loss_func=lambda p,y: F.cross_entropy(p, y)*w['w'], metrics=Heavier(w))
    l.recorder.train_metrics = True
    return l

def with_schedule(learn):
    def lr(pct):
        learn.model[1].p = 0. if pct<.3 else 1.
        return 1e-2
    learn.fit(2, 1e-2, cbs=ParamScheduler({'lr': lr}))

@pytest.mark.parametrize('make,fit', [(heavier,one_fit), (lambda: learner(partial(mlp, nn.Dropout)),with_schedule)], ids='metric schedule'.split())
def test_changed_between_steps(make, fit): check(make, fit=fit)

def test_a_large_constant_is_the_same():
    "A frozen teacher that only the loss holds"
    def make():
        set_seed(1)
        teacher = torch.randn(8, 1000)
        class Distills:
            def __call__(self, p, y):
                if self.w.device!=p.device: self.w = self.w.to(p.device)
                return F.cross_entropy(p, y)+(p@self.w[:3]).square().mean()*1e-3
        loss = Distills()
        loss.w = teacher
        return learner(loss_func=loss)
    check(make)

# ---- what is looked at between steps, as users' schedules change it

def ticks(f):
    "A fit that calls `f(learn, k)` before each step"
    def fit(learn):
        k = count()
        def lr(pct):
            f(learn, next(k))
            return 1e-2
        learn.fit(2, 1e-2, cbs=ParamScheduler({'lr': lr}))
    return fit

def at(n, f): return ticks(lambda learn, k: f(learn) if k==n else None)

class Scaled(nn.Module):
    by,scale = 1.,1
    def __init__(self, scale=1):
        super().__init__()
        Scaled.by,self.net,self.scale = 1.,mlp(),scale
    def forward(self, x):
        by = self.scale[0] if isinstance(self.scale, (list,torch.Tensor)) else self.scale
        return self.net(x)*(2 if by is True else 3 if isinstance(by, float) and np.signbit(by) else .5 if isinstance(by, float) else 1)*self.by*float(by or 1)

class Slots(Scaled):
    __slots__ = 'n'
    def __init__(self): super().__init__(); self.n = 1.
    def forward(self, x): return super().forward(x)*self.n
class Crops(Scaled):
    def __init__(self): super().__init__(); self.crop = slice(0, 3)
    def forward(self, x): return super().forward(F.pad(x[:,self.crop], (0, 8-self.crop.stop)))

W = {}
class OfDevice(Scaled):
    "Its scale is on the device, and no part of it"
    def __init__(self): super().__init__(); W.clear()
    def forward(self, x):
        if not W: W['w'] = torch.ones(1, device=x.device)
        return self.net(x)*W['w']

def rebind(learn): W['w'] = torch.full((1,), 2., device=W['w'].device)
def put(k, v): return lambda learn: setattr(learn.model, k, v)
def tenth(learn, k): learn.model.crop = slice(0, 3+k//5%3)
def new_scale(learn, k):
    if k%4==3: learn.model.register_parameter('noise', nn.Parameter(torch.full((1,), float(k), device=learn.model.net[0].weight.device), requires_grad=False))
class Noisy(Scaled):
    def __init__(self): super().__init__(); self.noise = nn.Parameter(torch.ones(1), requires_grad=False)
    def forward(self, x): return self.net(x)*self.noise

class ByName(Scaled):
    "What it does is decided by which attribute, or part, it has"
    def __init__(self):
        super().__init__()
        self.single,self.act,self.k = 2.,nn.Identity(),nn.Buffer(torch.ones(1))
    def forward(self, x): return self.net(x)*(self.twice if hasattr(self, 'twice') else 1)*(3 if hasattr(self, 'acts') else 1)*self.k
class Tripled(ByName):
    def forward(self, x): return super().forward(x)*3
def renamed(learn): learn.model.twice = vars(learn.model).pop('single')
def renamed_part(learn): learn.model._modules['acts'] = learn.model._modules.pop('act')
class HalfRelu(TorchFunctionMode):
    def __torch_function__(self, f, types, args=(), kwargs=None):
        res = f(*args, **(kwargs or {}))
        return res*.5 if f is F.relu else res
class HalfAtenRelu(TorchDispatchMode):
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        res = f(*args, **(kwargs or {}))
        return res*.5 if f is torch.ops.aten.relu.default else res
def within(mode):
    "A fit in the last steps of which a mode is entered"
    def fit(learn):
        with ExitStack() as stack: at(12, lambda learn: stack.enter_context(mode()))(learn)
    return fit
def with_method(cls, name, f):
    "A fit in the last steps of which a class has another method"
    def fit(learn):
        with Loans() as loans: at(12, lambda learn: loans.put(cls, name, f))(learn)
    return fit
def doubled(self, x): return nn.Module.__call__(self, x)*2
def other_buffers(learn): learn.model._buffers = {k: t*2 for k,t in learn.model._buffers.items()}
def other_dict(learn): learn.model.__dict__ = {**vars(learn.model), 'scale': 2.}
def hooked(learn): learn.model[1]._forward_hooks = OrderedDict({0: lambda m, i, o: o*2})
def smoothed(learn): learn.loss_func.func = nn.CrossEntropyLoss(label_smoothing=.4)
def half_kept(): return torch.autograd.graph.saved_tensors_hooks(lambda t: t*.5, noop)
def with_grads(learn):
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
class Deterministic(nn.Module):
    def forward(self, x): return x*(2. if torch.are_deterministic_algorithms_enabled() else 1.)
def deterministic():
    stack = ExitStack()
    stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(True)
    return stack
class OfCode(nn.Module):
    def __init__(self): super().__init__(); OfCode.by.__code__ = (lambda self: 1.).__code__
    def by(self): return 1.
    def forward(self, x): return x*self.by()
class Takes:
    def __call__(self, x): return x*2
class OfCall(nn.Module):
    def __init__(self): super().__init__(); self.takes = Takes()
    def forward(self, x): return self.takes(x)
class Hides(nn.Module):
    def __init__(self): super().__init__(); vars(self)['drop'] = nn.Dropout(0.)
    def forward(self, x): return self.drop(x)
def of(mid): return partial(mlp, mid)

between = dict(class_attribute=(Scaled, at(12, lambda l: setattr(Scaled, 'by', 2.))), whole=(Scaled, at(12, put('scale', True))), float=(Scaled, at(12, put('scale', 1.))),
    zero=(partial(Scaled, 0.), at(12, put('scale', -0.))), on_host=(lambda: Scaled(torch.ones(1)), at(12, lambda l: l.model.scale.fill_(2))), slot=(Slots, at(12, put('n', 2.))),
    ids=(Crops, ticks(tenth)), frozen=(Noisy, ticks(new_scale)), rebound=(OfDevice, at(12, rebind)), in_place=(OfDevice, at(12, lambda l: W['w'].mul_(2))),
    data=(OfDevice, at(12, lambda l: W['w'].data.mul_(2))), weight_hook=(mlp, at(12, lambda l: l.model[0].weight.register_hook(lambda g: g*2))),
    renamed=(ByName, at(12, renamed)), renamed_part=(ByName, at(12, renamed_part)), other_buffers=(ByName, at(12, other_buffers)), other_class=(ByName, at(12, put('__class__', Tripled))),
    other_dict=(Scaled, at(12, other_dict)), hook_in_another_dict=(mlp, at(12, hooked)), loss=(mlp, at(12, smoothed)), saved_for_backward=(of(nn.Tanh), within(half_kept)),
    gradients=(mlp, at(12, with_grads)), flag_of_torch=(of(Deterministic), within(deterministic)), function_of_torch=(mlp, with_method(F, 'relu', lambda x, inplace: x.tanh())),
    code=(of(OfCode), at(12, lambda l: setattr(OfCode.by, '__code__', (lambda self: 3.).__code__))), users_call=(of(OfCall), with_method(Takes, '__call__', lambda self, x: x*5)), hidden=(of(Hides), at(12, lambda l: setattr(l.model[1].drop, 'p', .7))),
    function_mode=(mlp, within(HalfRelu)), dispatch_mode=(mlp, within(HalfAtenRelu)), call=(mlp, with_method(nn.Linear, '__call__', doubled)))

@pytest.mark.parametrize('name', between)
def test_changed_before_a_step(name):
    model,fit = between[name]
    learn = again(lambda: learner(model), fit)
    assert learn.replay.n_replayed>9, learn.replay

# ---- who takes a weight between two steps, and looks at it later

others = dict(data=lambda l: l.model[0].weight.data, detached=lambda l: l.model[0].weight.detach(), state_dict=lambda l: l.model.state_dict()['0.weight'], row=lambda l: l.model[0].weight.detach()[0])

@pytest.mark.parametrize('name', others)
def test_another_tensor_follows_a_weight(name):
    "As in torch: what is written there is written to the weight"
    kept = []
    def fit(learn): ticks(lambda l, k: kept.append(others[name](l)) if k==10 else kept.pop().mul_(2) if k==15 else None)(learn)
    learn = again(learner, fit)
    assert 'because something keeps' in repr(learn.replay) and learn.replay.n_replayed>5, learn.replay

# ---- who else makes a step, as callbacks change that while it trains

class HalfGrads(Callback):
    def after_backward(self):
        for p in self.model.parameters(): p.grad.mul_(.5)
class Recurrent(nn.Module):
    def __init__(self): super().__init__(); self.rnn,self.lin = nn.RNN(4, 8, batch_first=True),nn.Linear(8, 3)
    def forward(self, x):
        out,_ = self.rnn(x.view(-1, 2, 4))
        return self.lin(out[:,-1]),out,out
class OfNames(nn.Module):
    def __init__(self): super().__init__(); self.net,self.names = mlp(),SimpleNamespace(by=1.)
    def forward(self, x): return self.net(x)*self.names.by
def tempered(temp, p, y, by): return F.cross_entropy(p*temp['t']*by, y)
def of_partials(): return partial(partial(tempered, dict(t=1.)), by=1.)
def half_step(learn, stock): learn._step = lambda: stock() if learn.iter%2 else None
def set_cb(cls, **kwargs): return lambda l: [setattr(cb, k, v) for cb in l.cbs.filter(lambda o: type(o) is cls) for k,v in kwargs.items()]
def clipped(): return learner(cbs=GradientClip(.1))

makers = dict(norm=(clipped, set_cb(GradientClip, max_norm=.01)), kind_of_norm=(clipped, set_cb(GradientClip, norm_type=1.)), off=(clipped, set_cb(GradientClip, run=False)),
    added=(learner, lambda l: l.add_cb(GradientClip(.01))), removed=(clipped, lambda l: l.remove_cb(GradientClip)), users=(learner, lambda l: l.add_cb(HalfGrads()), 'HalfGrads has `after_backward`'),
    own_event=(learner, lambda l: setattr(l.recorder, 'after_backward', lambda: [p.grad.mul_(.5) for p in l.model.parameters()]), 'Recorder has `after_backward`'),
    own_step=(learner, lambda l: half_step(l, l._step), 'a `_step` of its own'),
    keyword=(lambda: learner(loss_func=of_partials()), lambda l: l.loss_func.keywords.update(by=2.)), argument=(lambda: learner(loss_func=of_partials()), lambda l: l.loss_func.args[0].update(t=2.)),
    order=(lambda: learner(cbs=[GradientClip(.1), GradientAccumulation(12)]), set_cb(GradientClip, order=-9)),
    name=(lambda: learner(OfNames), lambda l: setattr(l.model.names, 'by', 2.)),
    regularizer=(lambda: learner(Recurrent, cbs=[RNNCallback(), RNNRegularizer(1., 1.)], loss_func=lambda p, y: F.cross_entropy(p, y)), set_cb(RNNRegularizer, alpha=3.)))

@pytest.mark.parametrize('name', makers)
def test_who_makes_a_step_changes(name):
    make,f,*why = makers[name]
    learn = again(make, at(12, f))
    assert learn.replay.n_replayed>=(5 if why else 20) and all(o in repr(learn.replay) for o in why), learn.replay

def test_training_metrics_are_switched_on(): check(learner, fit=at(25, lambda l: setattr(l.recorder, 'train_metrics', True)))

def test_metrics_of_the_later_epochs():
    "A callback adds one and takes it away: values are those of plain fastai, and the metrics are then fastai's own"
    class Adds(Callback):
        replayable = True
        def before_batch(self):
            if self.epoch and self.training and self.iter==5: self.learn.metrics = [*self.metrics, lambda p, y: p.mean()] if self.epoch==1 else self.metrics[:1]
    def fit(learn): learn.fit(3, 1e-2)
    def make(): return learner(cbs=Adds())
    plain = make()
    with plain.no_bar(),plain.no_logging(): fit(plain)
    check(make, fit=fit)
    learn,(_,values,*_) = outcome(make, True, fit)
    assert [len(o) for o in values]==[3,4,3]
    for a,b in zip(values, plain.recorder.values): np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert [type(m).__name__ for m in learn.metrics]==['AvgMetric']

def test_bf16_is_switched_off():
    class Off(Callback):
        replayable = True
        def after_batch(self):
            if self.training and self.iter==12: self.mixed_precision.run = self.epoch>0
    check(lambda: learner(cbs=[MixedPrecision(amp_mode=AMPMode.BF16), Off()]))

def test_autocast_around_a_training():
    "It keeps what it has cast from step to step, where no program finds it"
    def fit(learn):
        with torch.autocast('xla', torch.bfloat16): learn.fit(2, 1e-2)
    check(learner, 'autocast is still on', fit=fit)

def test_hooks_and_methods_of_all_modules():
    for put_in in (lambda: nn.modules.module.register_module_forward_hook(lambda m, i, o: o*2 if isinstance(m, nn.ReLU) else o).remove, patched_relu):
        undo = []
        fit = at(12, lambda l: undo.append(put_in()))
        def go(learn):
            try: fit(learn)
            finally: undo.pop()()
        check(learner, None if put_in is patched_relu else 'has the hook', fit=go)

def patched_relu():
    stock = nn.ReLU.forward
    nn.ReLU.forward = lambda self, x: F.leaky_relu(x, .3)
    return partial(setattr, nn.ReLU, 'forward', stock)

class Numbered(nn.Module):
    def __init__(self): super().__init__(); self.lin,self.n = nn.Linear(8, 16),0
    def forward(self, x):
        self.n += 1
        return self.lin(x)*(1.+self.n/100)

def test_torchscript():
    "Its counter is where nobody can look; it trains as on the CPU"
    def make(): return learner(lambda: nn.Sequential(torch.jit.script(Numbered()), nn.ReLU(), nn.Linear(16, 3)))
    check(make, 'a module is TorchScript (Numbered)')
    plain = make()
    with plain.no_bar(),plain.no_logging(): one_fit(plain)
    _,(losses,*_) = outcome(make, True)
    np.testing.assert_allclose([float(o) for o in plain.recorder.losses], losses, rtol=1e-5)

@pytest.mark.parametrize('loss', [FocalLossFlat, LabelSmoothingCrossEntropyFlat])
def test_losses_with_annotations(loss): check(lambda: learner(loss_func=loss()))

def test_a_number_in_a_module_by_a_name_that_is_made():
    module = ModuleType('settings')
    def tempered(p, y): return F.cross_entropy(p*getattr(module, ''.join(['te','mp'])), y)
    def make():
        module.temp = 1.
        return learner(loss_func=tempered)
    check(make, fit=at(12, lambda l: setattr(module, 'temp', 2.)))

LIB = """
n,scale = [0],1.
def counted(x):
    n[0] += 1
    return x*(1+n[0]//10)
def scaled(x): return x*scale
class Counter:
    __slots__ = 'n'
    def __init__(self): self.n = 0
    def __call__(self, x): self.n += 1; return x*(1+self.n//10)
"""

def test_libraries_that_are_not_known(tmp_path, monkeypatch):
    "Their code is looked at as the user's is"
    (tmp_path/'site-packages').mkdir()
    (tmp_path/'site-packages'/'some_lib.py').write_text(LIB)
    monkeypatch.syspath_prepend(tmp_path/'site-packages')
    import some_lib
    def fresh(f):
        def make():
            some_lib.n[0],some_lib.scale = 0,1.
            return learner(loss_func=f() if isinstance(f, type) else lambda p,y: F.cross_entropy(f(p), y))
        return make
    check(fresh(some_lib.counted), 'a step changes')
    check(fresh(some_lib.scaled), fit=at(12, lambda l: setattr(some_lib, 'scale', 2.)))
    class Holds:
        def __init__(self): self.c = some_lib.Counter()
        def __call__(self, p, y): return F.cross_entropy(self.c(p), y)
    check(fresh(Holds), 'a step changes')

class Asks:
    def __init__(self, f): self.f = f
    def __call__(self, p, y): return F.cross_entropy(p*(1 if self.f() else 2), y)

def no_file(): return not Path('nothing at all').exists()
def environment(): return os.getenv('nothing at all') is None
def clock(): return time.time()>0
def imports():
    from test_replay_sound import N
    N[0] += 1
    return N[0]<10
def pops(): return [True]*12+[False]*999
asked = dict(file=(lambda: Asks(no_file), 'no_file calls `stat`'), environment=(lambda: Asks(environment), 'names `os`'), clock=(lambda: Asks(clock), 'names `time`'),
    imports=(lambda: N.__setitem__(0, 0) or Asks(imports), 'a step changes'), pop=(lambda: Asks(pops().pop), 'a step changes'), iterator=(lambda: Asks(iter(pops()).__next__), 'nobody can look into'))

@pytest.mark.parametrize('name', asked)
def test_asks_the_world(name):
    loss,why = asked[name]
    check(lambda: learner(loss_func=loss()), why)

class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): N[0] += 1; return g*scale(N[0])
reverse = Counted.apply
class Reverses(Scaled):
    def __init__(self): super().__init__(); N[0] = 0
    def forward(self, x): return self.net(reverse(x*self.net[0].weight.sum()))

def test_autograds_functions_by_another_name(): check(lambda: learner(Reverses), '`N`, which Counted.backward names')

class Bound:
    def __init__(self): self.n = 0
    def right(self, p, y): self.n += 1; return (p.argmax(1)==y).float().mean()*(1+self.n//3)

def test_a_metric_that_is_a_method():
    b = []
    def make():
        b[:] = [Bound()]
        return learner(metrics=AvgMetric(b[0].right))
    check(make, 'a Bound', lambda l: b[0].n)

class Noise(Callback):
    replayable = True
    def before_batch(self): self.learn.xb = (self.x+.1*torch.randn_like(self.x),)
class NoiseAfter(Callback):
    replayable,order,run_valid = True,200,False
    def after_batch(self): self.drawn = torch.rand(3, device=self.x.device)

@pytest.mark.parametrize('cb', [Noise, NoiseAfter])
def test_drawn_beside_a_step(cb): check(lambda: learner(partial(mlp, partial(nn.Dropout, .3)), cbs=cb()))

class Teacher(Callback):
    "A copy of the model, which it becomes at times"
    replayable = True
    def __init__(self, become): self.become = become
    def before_fit(self):
        self.teacher = deepcopy(self.model).requires_grad_(False)
        self.learn.loss_func = self.loss
    def loss(self, p, y):
        with torch.no_grad(): t = self.teacher(self.learn.x)
        return F.cross_entropy(p, y)+F.mse_loss(p, t)
    def after_batch(self):
        if self.training and self.train_iter%7==0: self.become(self.teacher, self.model)

@torch.no_grad()
def half_way(t, m):
    for a,b in zip(t.parameters(), m.parameters()): a.mul_(.5).add_(b, alpha=.5)

@pytest.mark.parametrize('become', [half_way, lambda t, m: t.load_state_dict(m.state_dict())], ids=['half_way','load'])
def test_a_teacher(become):
    "What it is made of is no part of the model; where it has the model's memory, no step gives that away"
    check(lambda: learner(cbs=Teacher(become)), look=lambda l: dict(l.teacher.teacher.state_dict()))

def test_under_a_profiler():
    "Who profiles sees steps that are traced, as nobody else can see what they call"
    def fit(learn):
        sys.setprofile(lambda *args: None)
        try: learn.fit(1, 1e-2)
        finally: sys.setprofile(None)
    check(learner, 'a profiler is at work', fit=fit)

class Odd:
    "Says that it equals nothing"
    __hash__,__eq__ = None,lambda self, o: False

@pytest.mark.parametrize('v', [np.void(b'abc'), Odd(), {'a': Odd()}, np.float32(1), [1.,float('nan')]], ids=str)
def test_odd_values(v):
    "They do not stop a training"
    class Has(Scaled):
        def __init__(self): super().__init__(); self.odd = v
    check(lambda: learner(Has))

def test_a_loss_that_is_a_module_and_notes_its_parts():
    class Parts(nn.Module):
        def forward(self, p, y):
            res = F.cross_entropy(p, y)
            self.logs = {'ce': res.detach()}
            return res
    check(lambda: learner(loss_func=Parts()), look=lambda l: l.loss_func.logs)

# ---- what draws random numbers again in the backward pass

def newer(f, x): return torch_ckpt.checkpoint(f, x, use_reentrant=False)
def older(f, x): return torch_ckpt.checkpoint(f, x, use_reentrant=True)
def of_torch_xla(f, x):
    from torch_xla.utils.checkpoint import checkpoint
    return checkpoint(f, x) if torch.is_grad_enabled() else f(x)

class Checked(nn.Module):
    "Parts with dropout, which `ckpt` computes again; what comes between and after them draws too"
    def __init__(self, ckpt, n=3):
        super().__init__()
        self.ckpt,self.stem,self.head = ckpt,nn.Linear(8, 16),nn.Linear(16, 3)
        self.parts = nn.ModuleList(nn.Sequential(nn.Dropout(.3), nn.Linear(16, 16), nn.GELU(), nn.Dropout(.2)) for _ in range(n))
    def forward(self, x):
        x = self.stem(x)
        for o in self.parts: x = F.dropout(self.ckpt(o, x), .1, self.training)
        return self.head(x)

@pytest.mark.parametrize('ckpt', [newer, older, of_torch_xla], ids=lambda f: f.__name__)
def test_parts_that_are_computed_again(ckpt): check(lambda: learner(partial(Checked, ckpt)))

@pytest.mark.parametrize('cb', [GradientClip, partial(GradientAccumulation, 16), NoiseAfter])
def test_parts_that_are_computed_again_beside_others(cb): check(lambda: learner(partial(Checked, newer), cbs=cb()))

class SetsSeed(Scaled):
    "Draws from a seed of its own, and goes back to the device's if it is `kind`"
    def __init__(self, kind): super().__init__(); self.kind = kind
    def forward(self, x):
        import torch_xla.core.xla_model as xm
        seed = xm.get_rng_state()
        xm.set_rng_state(5)
        x = F.dropout(x, .2, self.training)
        if self.kind: xm.set_rng_state(seed)
        return self.net(F.dropout(x, .2, self.training))

@pytest.mark.parametrize('kind,why', [(True, None), (False, "sets the seed of the device's random numbers")])
def test_a_seed_of_its_own(kind, why): check(lambda: learner(partial(SetsSeed, kind)), why)

# ---- what `torch.compile` has wrapped

@torch.compile
def act(x): return torch.tanh(x)*x*scale(N[0])

class Acts(Scaled):
    def forward(self, x): return self.net(act(x))

def compiled_whole(): return torch.compile(mlp())
def compiled_in_place():
    m = mlp()
    m.compile()
    return m
def compiled_part():
    m = mlp(partial(nn.Dropout, .3))
    m[0] = torch.compile(m[0])
    return m

@pytest.mark.parametrize('make', [compiled_whole, compiled_in_place, compiled_part, Acts], ids=lambda f: f.__name__)
def test_compiled_by_torch(make): check(lambda: learner(make))

def test_a_loss_that_torch_compiled(): check(lambda: learner(loss_func=torch.compile(F.cross_entropy)))

def test_what_a_compiled_function_names():
    "Its number changes in an epoch, and it is seen"
    class Steps(Callback):
        replayable = True
        def after_batch(self): N[0] = self.learn.iter//5
    def make():
        N[0] = 0
        return learner(Acts, cbs=Steps())
    check(make)

def test_torch_compiles_again_after_a_fit():
    "Its wrapper is in place all the time, and the names of the weights are its"
    graphs = []
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    learn = learner(lambda: torch.compile(mlp(), backend=backend)).to_tpu()
    one_fit(learn)
    assert not graphs and learn.replay.n_replayed>15
    learn.detach_tpu()
    with torch.no_grad(): learn.model.cpu()(torch.ones(2, 8))
    assert graphs and all(k.startswith('_orig_mod.') for k in learn.model.state_dict())

class Attends(nn.Module):
    "torch's encoder with a mask, which it would read"
    def __init__(self, padding):
        super().__init__()
        self.enc,self.head,self.padding = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False),nn.Linear(8, 3),padding
    def forward(self, x):
        t = x.view(-1, 2, 4)
        mask = nn.Transformer.generate_square_subsequent_mask(2, device=x.device)
        return self.head(self.enc(t, mask=mask, src_key_padding_mask=(t[...,0]>9).float() if self.padding else None).flatten(1))

@pytest.mark.parametrize('padding', [False, True])
def test_a_transformer_with_a_mask(padding): check(lambda: learner(partial(Attends, padding)))

class Parts(nn.Module):
    "Operators that torch_xla has no form for"
    def __init__(self): super().__init__(); self.net,self.conv = nn.Sequential(nn.Linear(8, 32), nn.GLU(), nn.Linear(16, 3)),nn.Linear(6, 8)
    def forward(self, x):
        up = F.interpolate(x[:,None], scale_factor=2, mode='linear')[:,0]
        patches = F.unfold(up.view(-1, 1, 4, 4), (2, 3), stride=2)
        return self.net(x+self.conv(patches.mean(2)))

def test_operators_by_their_parts(): check(lambda: learner(Parts, loss_func=lambda p, y: F.huber_loss(p, F.one_hot(y, 3).float())))
