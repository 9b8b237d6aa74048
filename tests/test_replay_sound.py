"Programs of which only a part is in the graph: whatever a step looks at or keeps on the host, it ends as when every step is traced"
import argparse
from collections import OrderedDict
from types import MethodType
import numpy as np, pytest
from synth import *
from fastai.callback.schedule import *
from fastcore.all import L
from torch.nn import functional as F

def is_same(a, b):
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(map(is_same, a, b))
    if isinstance(a, dict): return a.keys()==b.keys() and all(is_same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a==b

def mlp(mid=nn.ReLU): return nn.Sequential(nn.Linear(8, 16), mid(), nn.Linear(16, 3))

def learner(model=mlp, dl=DataLoader, cls=Learner, loss_func=None, **kwargs):
    "Twenty batches of 8 to train, six to validate"
    set_seed(3)
    dls = DataLoaders(dl(vectors(160), bs=8, shuffle=True, num_workers=0), dl(vectors(48, seed=1), bs=8, num_workers=0))
    return cls(dls, model(), **{'loss_func': loss_func or CrossEntropyLossFlat(), 'metrics': accuracy, **kwargs})

def outcome(make, replay, fit, look):
    learn = make().to_tpu(replay=replay)
    with learn.no_bar(),learn.no_logging(): fit(learn)
    seen = to_host(look(learn))
    return learn,([float(o) for o in learn.recorder.losses], [list(o) for o in learn.recorder.values], to_host(dict(learn.model.state_dict())), seen)

def one_fit(learn): learn.fit(2, 1e-2)

def check(make, why=None, look=lambda l: None, fit=one_fit):
    "Equal to the last bit; run again if there is no reason `why` not"
    _,want = outcome(make, False, fit, look)
    learn,got = outcome(make, True, fit, look)
    for a,b in zip(got, want): assert is_same(a, b), f'{learn.replay}\n{a}\n!=\n{b}'
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
    getattr=(by_getattr, 'reads `train_iter`'), object=(by_object, 'reads `train_iter`'), optimizer=(by_optimizer, 'l`'), prints=(prints, 'uses `print`'))

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
