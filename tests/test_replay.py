"Replayed steps equal traced ones to the last bit, and all Python of a step runs, whatever it does; what is in no known list has a step traced."
import itertools, random, re, signal, tempfile, threading
from collections import OrderedDict
from contextlib import ExitStack
from copy import deepcopy
import pytest, torch.utils.checkpoint as torch_ckpt
from synth import *
from fastai.callback.fp16 import AMPMode, MixedPrecision
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.rnn import RNNCallback, RNNRegularizer
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation, GradientClip
from fresh import repo, run, run_ok
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from traced import is_close, is_same, trace_all
from fastai_xla.runtime.device import torch_xla
from fastai_xla.runtime.transfer import send
from fastai_xla.train.program import StepTracer

def eq(a, b): assert is_same(a, b), f"{a}\n!=\n{b}"

def mlp(mid=nn.ReLU): return nn.Sequential(nn.Linear(8, 16), mid(), nn.Linear(16, 3))
def net(): return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(.3), nn.Linear(16, 3))

def learner(model=net, n=80, n_last=0, n_valid=20, loss_func=None, cls=Learner, dl=DataLoader, train_metrics=False, **kwargs):
    "Ten batches of 8 to train"
    set_seed(3)
    dls = DataLoaders(dl(vectors(n+n_last), bs=8, shuffle=True, num_workers=0), dl(vectors(n_valid, seed=1), bs=8, num_workers=0))
    learn = cls(dls, model(), **{'loss_func': loss_func or CrossEntropyLossFlat(), 'metrics': accuracy, **kwargs})
    learn.recorder.train_metrics = train_metrics
    return learn

def one_cycle(learn): learn.fit_one_cycle(2, 1e-2)

def outcome(learn, replay, train=one_cycle, look=lambda l: None, programs=False, **kwargs):
    "Train, and return what came of it: losses, values, weights, optimizer state and what `look` sees"
    learn.to_tpu(replay=replay, **kwargs)
    if programs: trace_all(learn)
    with learn.no_bar(),learn.no_logging(): train(learn)
    states = [{k: to_host(v) for k,v in p[2].items()} for p in learn.opt.all_params()]
    return [float(o) for o in learn.recorder.losses], [list(o) for o in learn.recorder.values], to_host(dict(learn.model.state_dict())), states, to_host(look(learn))

def both(make, train=one_cycle, look=lambda l: None, **kwargs):
    "The Learner whose steps may be replayed; its outcome is that of one whose steps are all traced"
    want = outcome(make(), False, train, look, **kwargs)
    learn = make()
    got = outcome(learn, True, train, look, **kwargs)
    if learn._grab_cbs(GradientAccumulation):
        assert is_close(want[:2], got[:2])
        want = outcome(make(), True, train, look, programs=True, **kwargs)
    for w,g in zip(want, got): eq(w, g)
    return learn

def check(make, least=14, **kwargs):
    "Equal to the last bit, and at least so many steps of 20 are replayed"
    learn = both(make, **kwargs)
    assert learn.replay.n_replayed>=least, learn.replay
    return learn

def torch_opt(f, **kw): return partial(OptimWrapper, opt=partial(f, **kw))

@pytest.mark.parametrize('kwargs', [dict(), dict(opt_func=partial(SGD, mom=.9)), dict(opt_func=torch_opt(torch.optim.AdamW)), dict(opt_func=RAdam), dict(opt_func=Larc), dict(opt_func=ranger),
    dict(cbs=GradientClip(.1)), dict(cbs=MixedPrecision()), dict(train_metrics=True), dict(n_last=3), dict(cbs=NaNGuard('skip')), dict(cbs=NormMeter())],
    ids='adam sgd adamw radam larc ranger clip bf16 train_metrics smaller_last skip_nan norms'.split())
def test_replays(kwargs): check(lambda: learner(**kwargs), 11 if kwargs.get('opt_func') is ranger else 14)

@pytest.mark.parametrize('cbs', [lambda: [GradientAccumulation(24), GradientClip(.1)], lambda: [GradientAccumulation(24), EMACallback(.9)]], ids=['clip','ema'])
def test_accumulates(cbs):
    "A batch that begins a sum of gradients, one that adds to it, and one that steps are three programs; what is left over waits for the next fit"
    def grads(learn): return [None if p.grad is None else to_host(p.grad) for p in learn.model.parameters()]
    check(lambda: learner(cbs=cbs(), n=160), 24, look=grads)

@pytest.mark.parametrize('cb', [MixUp, CutMix])
def test_mixes(cb):
    def make():
        set_seed(3)
        return Learner(image_dls(n_trn=48), cnn(), loss_func=CrossEntropyLossFlat(), cbs=cb())
    check(make, 10)

def test_text():
    "The hidden state of an LSTM goes on from step to step"
    from fastai.text.all import AWD_LSTM, awd_lstm_lm_config, BaseTokenizer, ColReader, language_model_learner, TextBlock
    def make():
        set_seed(0)
        rng = np.random.default_rng(0)
        df = pd.DataFrame(dict(text=[' '.join(rng.choice(list('abcdefghij'), 80)) for _ in range(24)], is_valid=[i>=20 for i in range(24)]))
        block = DataBlock(TextBlock.from_df('text', is_lm=True, seq_len=8, tok=BaseTokenizer()), get_x=ColReader('text'), splitter=ColSplitter())
        dls = block.dataloaders(df, bs=4, seq_len=8)
        return language_model_learner(dls, AWD_LSTM, config={**awd_lstm_lm_config, 'emb_sz': 8, 'n_hid': 8, 'n_layers': 1}, pretrained=False)
    check(make, 50)

def test_freeze_unfreeze_and_lr_find():
    def train(learn):
        learn.fine_tune(2, 1e-2)
        learn.lr_find(num_it=30, show_plot=False)
        learn.fit(1, 1e-3)
    check(lambda: learner(splitter=two_groups), 40, train=train)

# ---- what it costs

class Costs(Callback):
    "What each batch of training, or of validation, costs"
    order = 200
    def __init__(self, training=True): self.of = training
    def before_fit(self): self.seen,self.at = [],xla_counts()
    def before_train(self): self.at = xla_counts()
    before_validate = before_train
    def after_batch(self):
        now = xla_counts()
        if self.training==self.of: self.seen.append(now-self.at)
        self.at = now

@pytest.mark.parametrize('training', [True, False])
def test_a_batch_costs_one_execution(training):
    "No compilation, no read, and one program for a batch, with callbacks that compute within it"
    class Noise(Callback):
        def before_batch(self): self.learn.xb = (self.x+.1*torch.randn_like(self.x),)
        def after_pred(self): self.spread = self.pred.std()
    learn = learner(n=160, n_valid=160, cbs=[Noise(), costs := Costs(training)]).to_tpu(fetch_every=1e9)
    with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-2)
    got = costs.seen[4:20]
    eq([sum(getattr(o, k) for o in got) for k in ('compiles','reads')], [0,0])
    assert abs(sum(o.executions for o in got)-16)<=1 # the device may lag behind

def test_strict():
    "Neither reads nor compiles, so nothing is raised"
    learn = learner().to_tpu(strict=True)
    with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-2)
    assert learn.replay.n_replayed>=17, learn.replay

def test_a_step_writes_in_place(monkeypatch):
    "The memory of the state becomes that of the new state; so who keeps a `detach()` of a weight has steps traced, and it follows"
    class Keep(Callback):
        def before_batch(self):
            if self.training and self.train_iter==6: self.old = [self.model[0].weight.detach()]
    learn = check(lambda: learner(cbs=Keep()), 3, look=lambda l: (l.keep.old, l.model[0].weight.detach()))
    assert 'something keeps `detach()` or `data` of a weight' in learn.replay.why
    eq(to_host(learn.keep.old[0]), to_host(learn.model[0].weight.detach()))
    monkeypatch.setattr(StepTracer, 'has_others', lambda *args: False) # nobody looks
    with pytest.raises(RuntimeError): both(lambda: learner(cbs=Keep())).keep.old[0].cpu()

def test_what_a_program_takes_is_kept_until_it_has_run(monkeypatch):
    "Who frees it earlier waits for the device with the interpreter's lock, and the thread that makes batches stands still"
    kept,stock,wait = [],StepTracer._execute,StepTracer.wait
    def noted(self, program, ins, targets):
        before,res = self.made,stock(self, program, ins, targets)
        kept.append((self.used is ins, self.old is before))
        return res
    def waited(self):
        wait(self)
        kept.append(self.used==())
    learn = learner(n=160).to_tpu()
    class After(Callback):
        def before_batch(self):
            if self.train_iter==5: monkeypatch.setattr(StepTracer, '_execute', noted); monkeypatch.setattr(StepTracer, 'wait', waited)
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2, cbs=After())
    assert len(kept)>15 and all(o is True or o==(True,True) for o in kept), kept

# ---- all Python runs

class Counts(nn.Module):
    "Counts, prints, draws, and its scale depends on that"
    def __init__(self): super().__init__(); self.n,self.draws,self.net = 0,[],mlp()
    def forward(self, x):
        self.n += 1
        self.draws.append(random.random())
        if self.n%5==0: print(end='')
        return self.net(x)*(1+self.n//8)*(1+self.draws[-1])

class Depth(nn.Module):
    "One of two ways"
    def __init__(self): super().__init__(); self.a,self.b,self.ways = nn.Linear(8, 8),nn.Linear(8, 3),[]
    def forward(self, x):
        self.ways.append(random.random()<.5)
        return self.b(x+self.a(x) if self.ways[-1] else x)

class OwnLearner(Learner):
    n = 0
    def _backward(self):
        self.n += 1
        (self.loss_grad*(1+self.n//10)).backward()
    def _step(self):
        if self.n%3: self.opt.step()

class OwnCall(Callback):
    n = 0
    def __call__(self, e):
        super().__call__(e)
        if e=='after_loss' and self.training: self.n += 1; self.learn.loss_grad = self.learn.loss_grad*(1+self.n//10)

class Every(Callback):
    "Has each event, and notes it with what it sees of the batch"
    def before_fit(self): self.seen = []
    def note(self, e):
        if self.training: self.seen.append((e, tuple(self.pred.shape) if e!='before_batch' else None, e!='after_backward' or all(p.grad is not None for p in self.model.parameters())))
    def before_batch(self): self.note('before_batch')
    def after_pred(self): self.note('after_pred')
    def after_loss(self): self.note('after_loss')
    def before_backward(self): self.note('before_backward')
    def after_backward(self): self.note('after_backward')
    def before_step(self): self.note('before_step')
    def after_step(self): self.note('after_step')
    def after_batch(self): self.note('after_batch')

class Hooks(Callback):
    "Forward hooks that count, and scale later"
    n = 0
    def before_train(self): self.h = self.model[0].register_forward_hook(self.hook)
    def hook(self, m, i, o): self.n += 1; return o*(1+self.n//10)
    def after_train(self): self.h.remove()

class EditGrads(Callback):
    def before_step(self):
        for p in self.model.parameters(): p.grad.mul_(1 if self.train_iter<5 else .1)
class Clamps(Callback):
    @torch.no_grad()
    def after_step(self):
        for p in self.model.parameters(): p.clamp_(-.2, .2)
class Freezes(Callback):
    def before_batch(self):
        if self.training and self.train_iter==6: self.model[0].requires_grad_(False)
class Swaps(Callback):
    def before_batch(self):
        if self.training and self.train_iter==6: self.model[1] = nn.Tanh()

def by_learner(f):
    "A loss that looks at its Learner"
    def make():
        l = learner(mlp)
        l.loss_func = lambda p,y: F.cross_entropy(p*f(l), y)
        return l
    return make

def seen(k): return lambda l: getattr(next(o for o in (*l.cbs, l, l.model) if k in {**vars(type(o)), **vars(o)}), k)

python = dict(counts=(lambda: learner(Counts), seen('draws'), 8), ways=(lambda: learner(Depth), seen('ways'), 8), own_learner=(lambda: learner(mlp, cls=OwnLearner), seen('n'), 8),
    own_call=(lambda: learner(mlp, cbs=OwnCall()), seen('n'), 8), events=(lambda: learner(cbs=Every()), seen('seen'), 14), hooks=(lambda: learner(mlp, cbs=Hooks()), seen('n'), 8),
    edits=(lambda: learner(cbs=EditGrads()), None, 8), clamps=(lambda: learner(cbs=Clamps()), None, 14), freezes=(lambda: learner(mlp, cbs=Freezes()), None, 12), swaps=(lambda: learner(mlp, cbs=Swaps()), None, 12),
    epoch=(by_learner(lambda l: 1+l.epoch), None, 10), progress=(by_learner(lambda l: 1+l.pct_train), None, 12), steps=(by_learner(lambda l: 1+next(iter(l.opt.state.values()), {}).get('step', 0)//9), None, 10))

@pytest.mark.parametrize('name', python)
def test_python_runs(name):
    make,look,least = python[name]
    check(make, least, look=look or (lambda l: None))

def test_numbers_that_vary_are_inputs():
    "Not constants: nothing is compiled for them, and nothing is read"
    learn = by_learner(lambda l: 1+l.pct_train)().to_tpu(fetch_every=1e9)
    learn.add_cb(costs := Costs())
    with learn.no_bar(),learn.no_logging(): learn.fit(3, 1e-2)
    assert learn.replay.n_replayed>=24 and sum(o.compiles+o.reads for o in costs.seen[5:])==0, (learn.replay, [o.compiles for o in costs.seen])

class Numbers(nn.Module):
    "Each kind of arithmetic with a number that is another in each step: within autograd, in 16 bits, and in place"
    def __init__(self): super().__init__(); self.net,self.n = mlp(),0; self.register_buffer('b', torch.ones(8))
    def forward(self, x):
        self.n += 1
        h,k,b,m = self.net[0](x),1+self.n/64,self.b,x.detach().mean(0)
        for o in (h, h.bfloat16()):
            a,d = o.sin(),o.abs()+1
            for t in (torch.mul(a, k), k-a, k/d, d/k, a+k, a-k): h = h+.1*t
        with torch.no_grad():
            b.lerp_(m, .1*k).add_(m, alpha=k).sub_(m, alpha=.5*k).mul_(1/k).div_(k).addcmul_(m, m, value=k).addcdiv_(m, b.abs()+1, value=k).clamp_(-k, k)
            a,d = h.sin(),h.abs()+1
            more = torch.add(h, a, alpha=k)+torch.add(h, a.bfloat16(), alpha=k)+h.sub(a, alpha=.3*k)+torch.addcmul(h, a, d, value=k)+h.addcdiv(a, d, value=-k)
            more += h.lerp(a, 1/k)+d**k+d.pow(k)+h.clamp(-1/k, k)+torch.clamp(h, min=-.1*k)+h.clamp(max=.1*k)
        return self.net[2](h+.1*more+b.mean())

def test_all_arithmetic_takes_numbers_that_vary(): check(lambda: learner(Numbers), 14)

# ---- tensors that are kept

class Shifts(nn.Module):
    "The batch before the last"
    def __init__(self): super().__init__(); self.net,self.last,self.before = mlp(),None,None
    def forward(self, x):
        if self.before is not None: x = x+.1*self.before
        self.before,self.last = self.last,x.detach().mean(0)
        return self.net(x)
class SwapsBuffers(nn.Module):
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
class Reassigns(nn.Module):
    "Its buffer is another tensor after each step, and a dict and a list outside of it have what it computes"
    kept = {'all': []}
    def __init__(self): super().__init__(); self.net = mlp(); self.register_buffer('mean', torch.zeros(8)); Reassigns.kept.clear()
    def forward(self, x):
        self.mean = .9*self.mean+.1*x.detach().mean(0)
        out = self.net(x-self.mean)
        self.kept.setdefault('all', []).append(out.detach().mean())
        self.kept['last'] = out.max(1)
        return out
class OldWeights(nn.Module):
    "Remembers its weights of the step before"
    def __init__(self): super().__init__(); self.layer,self.old = nn.Linear(8, 3),None
    def forward(self, x):
        if self.training: self.__dict__['old'] = self.layer.weight.detach().clone()
        return self.layer(x)

kept = dict(shifts=(Shifts, None, 12), swaps=(SwapsBuffers, None, 0), view=(View, None, 0), reassigns=(Reassigns, lambda l: (l.model.kept['all'], tuple(l.model.kept['last']), l.model.mean), 12), old=(OldWeights, seen('old'), 0))

@pytest.mark.parametrize('name', kept)
def test_kept_tensors(name):
    model,look,least = kept[name]
    check(lambda: learner(model), least, look=look or (lambda l: None))

def test_kept_at_times():
    "A step that keeps what the others don't is right, whoever holds it: a list, a closure, an attribute of another tensor"
    class Keeps(Callback):
        def before_fit(self): self.held,self.f = [],None
        def after_loss(self):
            if not self.training: return
            if self.train_iter%4==3: self.held.append(self.learn.loss_grad.detach()*2)
            if self.train_iter==9: t = self.pred.exp(); self.f = lambda: t.sum()
            if self.train_iter==14: self.pred.note = self.pred.detach()*3
            if self.train_iter==15: assert not hasattr(self.pred, 'note')
    check(lambda: learner(cbs=Keeps()), 5, look=lambda l: (l.keeps.held, l.keeps.f().detach()))

def test_values_that_are_read():
    "At times: the calls up to there are made, and the step goes on as a traced one; in each step: said, with the line"
    class Reads(Callback):
        def __init__(self, every): self.every,self.seen = every,[]
        def after_loss(self):
            if self.training and self.train_iter%self.every==self.every-1: self.seen.append(self.learn.loss_grad.item())
    check(lambda: learner(cbs=Reads(6)), 10, look=lambda l: l.reads.seen)
    learn = both(lambda: learner(cbs=Reads(1)), look=lambda l: l.reads.seen)
    assert re.search(r'0 of 20 .* `TensorBase.item` reads the device \(test_replay.py, line \d+\)', repr(learn.replay)), learn.replay

def test_gradients_that_add_up():
    "Those of a parameter that no optimizer clears, as in plain fastai"
    class Loose(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b,self.scale = nn.Linear(8, 8),nn.Linear(8, 3),nn.Parameter(torch.ones(8))
        def forward(self, x): return self.b(self.a(x)*self.scale)
    check(lambda: learner(Loose, splitter=lambda m: [params(m.a), params(m.b)]), 10, look=lambda l: l.model.scale.grad)

def test_a_graph_that_is_kept():
    "Is gone, which is an error once a backward pass comes to it; an average of losses is none"
    class Average(Callback):
        def before_fit(self): self.avg = 0.
        def after_loss(self):
            if self.training: self.avg = .9*self.avg+.1*self.learn.loss_grad
    check(lambda: learner(cbs=Average()), look=lambda l: l.average.avg.detach())
    class Through(Callback):
        def before_fit(self): self.last = 0.
        def after_loss(self):
            if self.training: self.learn.loss_grad,self.last = self.learn.loss_grad+self.last,self.pred.sum()
    with pytest.raises(RuntimeError, match='whose graph is gone.*Keep its `detach'): outcome(learner(cbs=Through()), True)

@pytest.mark.parametrize('at', ['between', 'after_batch', 'before_batch'])
def test_copies(at):
    "What `clone` gives shares memory until the next sync, and stays what it was all the same"
    class Copies(Callback):
        order = 70
        def before_fit(self): self.seen = []
        def keep(self): self.seen = [*self.seen, self.model[0].weight.clone()] if self.training and self.train_iter%3==0 else self.seen
        def after_batch(self): at=='after_batch' and self.keep()
        def before_batch(self): at=='before_batch' and self.keep()
    kept = []
    def train(learn):
        learn.fit(1, 1e-2)
        w = learn.model[0].weight.clone()
        learn.fit(1, 1e-2)
        kept[:] = [w]
    check(lambda: learner(cbs=Copies()), 5, train=train, look=lambda l: (kept[0].detach(), [o.detach() for o in l.copies.seen]))

@pytest.mark.parametrize('become', [lambda t, m: t.load_state_dict(m.state_dict()), lambda t, m: [a.mul_(.5).add_(b, alpha=.5) for a,b in zip(t.parameters(), m.parameters())]], ids=['load','half_way'])
@pytest.mark.parametrize('event', ['after_step','after_batch'])
def test_a_teacher(become, event):
    "What it is made of is no part of the model; where it has the model's memory, no step gives that away"
    class Teacher(Callback):
        def before_fit(self): self.teacher,self.learn.loss_func = deepcopy(self.model).requires_grad_(False),self.loss
        def loss(self, p, y):
            with torch.no_grad(): t = self.teacher(self.learn.x)
            return F.cross_entropy(p, y)+F.mse_loss(p, t)
        @torch.no_grad()
        def learn_from(self):
            if self.training and self.train_iter%7==0: become(self.teacher, self.model)
    setattr(Teacher, event, lambda self: self.learn_from())
    check(lambda: learner(mlp, cbs=Teacher()), 5, look=lambda l: dict(l.teacher.teacher.state_dict()))

# ---- what changes between steps

def ticks(f):
    "A fit that calls `f(learn, k)` before each step"
    def fit(learn):
        k = itertools.count()
        def lr(pct):
            f(learn, next(k))
            return 1e-2
        learn.fit(2, 1e-2, cbs=ParamScheduler({'lr': lr}))
    return fit

def at(n, f): return ticks(lambda learn, k: f(learn) if k==n else None)
def within(mode):
    "A fit in the last steps of which a mode is entered"
    def fit(learn):
        with ExitStack() as stack: at(12, lambda learn: stack.enter_context(mode()))(learn)
    return fit
class HalfRelu(TorchFunctionMode):
    def __torch_function__(self, f, types, args=(), kwargs=None):
        res = f(*args, **(kwargs or {}))
        return res*.5 if f is F.relu else res
class HalfAtenRelu(TorchDispatchMode):
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        res = f(*args, **(kwargs or {}))
        return res*.5 if f is torch.ops.aten.relu.default else res
def half_kept(): return torch.autograd.graph.saved_tensors_hooks(lambda t: t*.5, noop)
W = {}
class OfDevice(nn.Module):
    "Its scale is on the device, and no part of it"
    def __init__(self): super().__init__(); self.net = mlp(); W.clear()
    def forward(self, x):
        if not W: W['w'] = torch.ones(1, device=x.device)
        return self.net(x)*W['w']
def with_grads(learn):
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
def shrink(learn):
    for p in learn.model.parameters(): p.data.mul_(.5)
def new_state(learn):
    for s in learn.opt.state.values(): s['grad_avg'] = torch.zeros_like(s['grad_avg'])
def fewer(learn): learn.model[0].weight.data,learn.model[0].bias.data,learn.model[2].weight.data = learn.model[0].weight.data[:8].clone(),learn.model[0].bias.data[:8].clone(),learn.model[2].weight.data[:,:8].clone()

between = dict(weights=(mlp, at(12, shrink)), anew=(mlp, at(12, lambda l: nn.init.ones_(l.model[0].weight))), rebound=(OfDevice, at(12, lambda l: W.update(w=W['w']*2))), in_place=(OfDevice, at(12, lambda l: W['w'].mul_(2))),
    data=(OfDevice, at(12, lambda l: W['w'].data.mul_(2))), hook=(mlp, at(12, lambda l: l.model[1].register_forward_hook(lambda m, i, o: o*2))), weight_hook=(mlp, at(12, lambda l: l.model[0].weight.register_hook(lambda g: g*2))),
    gradients=(mlp, at(12, with_grads)), state=(mlp, at(12, new_state)), cleared=(mlp, at(12, lambda l: l.opt.clear_state())), shapes=(mlp, lambda l: (l.fit(1, 1e-2), fewer(l), l.create_opt(), l.fit(1, 1e-2))),
    eval_mode=(net, at(12, lambda l: l.model[1].eval())), dropout=(partial(mlp, nn.Dropout), at(12, lambda l: setattr(l.model[1], 'p', .9))), function_mode=(mlp, within(HalfRelu)), dispatch_mode=(mlp, within(HalfAtenRelu)),
    saved=(partial(mlp, nn.Tanh), within(half_kept)), clip=(mlp, at(12, lambda l: l.add_cb(GradientClip(.01)))), metrics=(mlp, at(12, lambda l: setattr(l.recorder, 'train_metrics', True))),
    loss=(mlp, at(12, lambda l: setattr(l.loss_func, 'func', nn.CrossEntropyLoss(label_smoothing=.4)))), flags=(mlp, ticks(lambda l, k: l.model[0].requires_grad_(k%5!=4))))

@pytest.mark.parametrize('name', between)
def test_changed_before_a_step(name):
    model,fit = between[name]
    check(lambda: learner(model), 5, train=fit)

def test_bf16_is_switched_off():
    class Off(Callback):
        def after_batch(self):
            if self.training and self.iter==7: self.mixed_precision.run = self.epoch>0
    check(lambda: learner(cbs=[MixedPrecision(amp_mode=AMPMode.BF16), Off()]), 10)

@pytest.mark.parametrize('name', [lambda p: p.detach(), lambda p: p.data, lambda p: p.detach()[0]], ids='detach data view'.split())
def test_names_of_weights(monkeypatch, name):
    "One that is kept, where no callback has it, goes on to be the weight"
    monkeypatch.setattr(torch, 'names', [], raising=False)
    def train(learn):
        learn.fit(2, 1e-2)
        torch.names[:] = [name(learn.model[0].weight)]
        learn.fit(2, 1e-2)
    learn = check(learner, 10, train=train, look=lambda l: (torch.names[0], name(l.model[0].weight)))
    eq(to_host(torch.names[0]), to_host(name(learn.model[0].weight)))

class ValidatesAverage(Callback):
    "Validates with an average of the weights, as is often written by hand"
    def before_fit(self): self.ema = [p.detach().clone() for p in self.model.parameters()]
    @torch.no_grad()
    def after_train(self):
        for e,p in zip(self.ema, self.model.parameters()): e.lerp_(p, .5)
    @torch.no_grad()
    def _set(self, ts):
        for t,p in zip(ts, self.model.parameters()): p.copy_(t)
    def before_validate(self):
        self.own = [p.detach().clone() for p in self.model.parameters()]
        self._set(self.ema)
    def after_validate(self): self._set(self.own)

def test_weights_are_set_between_loops(): assert check(lambda: learner(cbs=ValidatesAverage(), n_valid=40), 30, train=lambda l: l.fit(4, 1e-2)).replay.valid.n_replayed>=10

# ---- what no mode is told of, and other threads

class Fn(torch.autograd.Function):
    n = 0
    @staticmethod
    def forward(ctx, x): return x*1.
    @staticmethod
    def backward(ctx, g): Fn.n += 1; return g*(1+Fn.n//10)
early = Fn.apply
class UsesFn(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp(); Fn.n = 0
    def forward(self, x): return early(self.net(x))
class WeightHooks(Callback):
    n = 0
    def before_train(self): self.h = self.model[0].weight.register_hook(self.hook)
    def hook(self, g): self.n += 1; return g*(1+self.n//10)
    def after_train(self): self.h.remove()
class FullHooks(WeightHooks):
    def before_train(self): self.h = self.model[0].register_full_backward_hook(self.hook)
    def hook(self, m, gi, go): self.n += 1
class Seeds(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x):
        import torch_xla.core.xla_model as xm
        seed = xm.get_rng_state()
        xm.set_rng_state(5)
        x = F.dropout(x, .2, self.training)
        xm.set_rng_state(seed)
        return self.net(x)
class Syncs(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(8, 8),nn.Linear(8, 3)
    def forward(self, x):
        x = self.a(x)
        torch_xla.sync()
        return self.b(x)
class Numbered(nn.Module):
    def __init__(self): super().__init__(); self.lin,self.n = nn.Linear(8, 16),0
    def forward(self, x):
        self.n += 1
        return self.lin(x)*(1.+self.n/100)
class InThread(nn.Module):
    "Computes in another thread"
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x):
        res = []
        t = threading.Thread(target=lambda: res.append(self.net(x)))
        t.start()
        t.join()
        return res[0]

untold = dict(function=(lambda: learner(UsesFn), 'the `backward` of Fn must run in each step', lambda l: Fn.n), weight_hook=(lambda: learner(mlp, cbs=WeightHooks()), 'a parameter has a hook', seen('n')),
    backward_hook=(lambda: learner(mlp, cbs=FullHooks()), '`grad_fn`', seen('n')), seed=(lambda: learner(Seeds), "sets the seed of the device's random numbers", None), syncs=(lambda: learner(Syncs), 'several programs', None),
    script=(lambda: learner(lambda: nn.Sequential(torch.jit.script(Numbered()), nn.ReLU(), nn.Linear(16, 3))), 'what torch does not tell of', None), thread=(lambda: learner(InThread), 'what torch does not tell of', None))

@pytest.mark.parametrize('name', untold)
def test_traced_for_a_reason(name):
    make,why,look = untold[name]
    learn = both(make, look=look or (lambda l: None))
    assert learn.replay.n_replayed==0 and why in learn.replay.why, learn.replay

def test_backward_by_another_name():
    class Own(Learner):
        def _backward(self): torch.autograd.backward(self.loss_grad)
    class Penalty(Callback):
        def after_loss(self):
            if self.training:
                g, = torch.autograd.grad(self.learn.loss_grad, [self.model[0].weight], create_graph=True)
                self.learn.loss_grad = self.learn.loss_grad+g.square().sum()
    check(lambda: learner(partial(mlp, nn.Tanh), cls=Own, cbs=Penalty()))

def test_a_thread_beside():
    "Calls of another thread belong to no step"
    stop = threading.Event()
    def work():
        while not stop.is_set(): (torch.ones(4)*2).sum()
    t = threading.Thread(target=work)
    t.start()
    try: check(learner)
    finally: stop.set(); t.join()

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

@pytest.mark.parametrize('cbs', [lambda: [], lambda: [GradientAccumulation(16)]], ids=['alone','accumulates'])
@pytest.mark.parametrize('ckpt', [newer, *[pytest.param(o, marks=pytest.mark.slow) for o in (older, of_torch_xla)]], ids=lambda f: f.__name__)
def test_parts_that_are_computed_again(ckpt, cbs): check(lambda: learner(partial(Checked, ckpt), cbs=cbs()), 10)

def test_falls_back_within_a_checkpoint():
    "What was recognised of it is computed without being kept apart"
    class Ways(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b,self.n = nn.Linear(8, 8),nn.Linear(8, 3),0
        def part(self, x):
            self.n += 1
            x = F.gelu(self.a(x))
            return x*2 if self.n%7==6 else x+1
        def forward(self, x): return self.b(newer(self.part, F.dropout(x, .2, self.training)))
    assert outcome(l := learner(Ways), True) and l.replay.n_replayed>=3, l.replay

@torch.compile
def act(x): return torch.tanh(x)*x
class Acts(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x): return self.net(act(x))
@pytest.mark.parametrize('make', [lambda: torch.compile(mlp()), Acts], ids=['whole','part'])
def test_compiled_by_torch(make): check(lambda: learner(make))

# ---- batches of a validation

def test_validation():
    "Values, predictions in their order, losses and the training that follows are the same"
    got = []
    def train(learn):
        one_cycle(learn)
        got.append((list(learn.validate()), learn.get_preds(), learn.get_preds(with_loss=True, with_input=True)))
        learn.fit(1, 1e-3)
    learn = check(lambda: learner(n_valid=60), train=train)
    eq(*got)
    assert learn.replay.valid.n_replayed>=33 and 'of 48 batches of validation were replayed' in repr(learn.replay), learn.replay

def test_tta():
    got = []
    for replay in (False, True):
        set_seed(3)
        learn = Learner(image_dls(12, 36, tfms=[Flip(), Brightness()]), cnn(), loss_func=CrossEntropyLossFlat(), metrics=accuracy).to_tpu(replay=replay)
        with learn.no_bar(),learn.no_logging():
            learn.fit(1)
            set_seed(5)
            got.append(learn.tta(n=3))
        eq(learn.replay.valid.n_replayed>=12, replay)
    for a,b in zip(*got): eq(a, b)

# ---- around it

def test_validates_and_saves_in_a_batch(tmp_path):
    "What was recognised is computed first"
    class Looks(Callback):
        def before_fit(self): self.seen = []
        def after_step(self):
            if self.train_iter in (7,13):
                self.learn.save(tmp_path/'m', with_opt=False)
                self.seen.append(torch.load(tmp_path/'m.pth'))
        def after_batch(self):
            if self.training and self.train_iter==9: self.seen.append([*validate_beside(self.learn, self.dls.valid)])
    check(lambda: learner(mlp, cbs=Looks()), 10, look=lambda l: l.looks.seen)

class Raises(Callback):
    def __init__(self, exc, event='after_pred', i=13):
        self.exc,self.i = exc,i
        setattr(self, event, self.act)
    def act(self):
        if self.training and self.train_iter==self.i: raise self.exc

@pytest.mark.parametrize('exc', [CancelBatchException, CancelTrainException, CancelEpochException, CancelFitException, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize('event', ['before_batch','after_pred','before_step'])
def test_a_batch_that_is_left(exc, event):
    "The calls that it has made are computed, as in plain fastai, and nothing is left of placeholders"
    def train(learn):
        try: learn.fit(2, 1e-2)
        except (KeyboardInterrupt,ValueError): pass
        learn.fit(1, 1e-2)
    learn = check(lambda: learner(cbs=Raises(exc("left"), event)), 15, train=train)

def test_with_a_checkpoint(tmp_path):
    "It reads what the steps leave, and a training that was killed goes on bit for bit"
    def make(): return learner(cbs=TPUCheckpoint(tempfile.mkdtemp(dir=tmp_path), every=3))
    check(make)
    want,folder = outcome(make(), False),tempfile.mkdtemp(dir=tmp_path)
    first = learner(cbs=[TPUCheckpoint(folder, every=3), Raises(KeyboardInterrupt(), 'after_batch', 17)]).to_tpu()
    with first.no_bar(),first.no_logging(),pytest.raises(KeyboardInterrupt): first.fit_one_cycle(2, 1e-2)
    second = learner(cbs=resume_from(folder))
    for a,b in zip(outcome(second, True)[1:4], want[1:4]): eq(a, b)
    assert first.replay.n_replayed>10

@pytest.mark.parametrize('cbs', [(), GradientAccumulation(24)], ids=['step', 'micro_batch'])
def test_ctrl_c_in_a_step(cbs):
    "The state, whose memory a running step takes, is whole afterwards"
    class Interrupt(Callback):
        def after_batch(self):
            if self.training and self.train_iter==20: signal.setitimer(signal.ITIMER_REAL, 1e-4)
    learn = learner(n=800, cbs=[Interrupt(), *L(cbs)]).to_tpu()
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with learn.no_bar(),learn.no_logging(),pytest.raises(KeyboardInterrupt): learn.fit(1, 1e-2)
    finally: signal.signal(signal.SIGALRM, old)
    assert learn.replay.n_replayed>=4
    assert all(torch.isfinite(v).all() for v in to_host(list(learn.model.state_dict().values())))
    learn.remove_cb(Interrupt)
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2)

def test_a_graph_that_fails_spoils_no_later_one():
    class Widens(nn.Module):
        "Half of it in float64, which XLA refuses when it compiles"
        def __init__(self): super().__init__(); self.lin = nn.Linear(8, 3)
        def forward(self, x): return F.linear(x.double(), self.lin.weight, self.lin.bias)
    learn = learner(Widens).to_tpu()
    with learn.no_bar(),learn.no_logging(),pytest.raises(RuntimeError, match='XLA could not run the graph of this step'): learn.fit(1)
    check(learner)

# ---- one program over two cores

sharded = """
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.runtime.device import torch_xla
from traced import is_close, is_same, trace_all
import timm
class Odd(Callback):
    def before_batch(self): self.learn.xb = (self.x+.1*torch.rand_like(self.x),)
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad*(1+self.train_iter//15)
def vectors():
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
    dls = DataLoaders(*[DataLoader(list(zip(x, x[:,:3].argmax(1))), bs=10, num_workers=0) for _ in range(2)])
    return dls,nn.Sequential(nn.Linear(8, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(.3), nn.Linear(256, 3))
def images():
    x = torch.randn(160, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    dls = DataLoaders(*[DataLoader(list(zip(x, (x.mean((1,2,3))>0).long())), bs=8, num_workers=0) for _ in range(2)])
    return dls,timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=8, embed_dim=32, num_heads=2, num_classes=2, depth=3, drop_path_rate=.2, proj_drop_rate=.2)
def train(how, make, cbs=(), **kwargs):
    set_seed(3)
    dls,model = make()
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=list(cbs)).to_tpu_sharded(fsdp=2, replay=how!='traced', **kwargs)
    if how=='programs': trace_all(learn)
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(2, 1e-2)
    assert any('devices=' in torch_xla._XLAC._get_xla_sharding_spec(p) for p in learn.model.parameters())
    replay = learn.replay
    learn.detach_tpu_sharded()
    return replay,([float(o) for o in learn.recorder.losses], [list(o) for o in learn.recorder.values], [p.detach() for p in learn.model.state_dict().values()])
for make,cbs,kwargs,least in CASES:
    (a,got),(b,want) = train('replayed', make, cbs(), **kwargs),train('programs', make, cbs(), **kwargs)
    assert is_same(got, want) and not b.n_replayed and a.n_replayed>=least, (a, got[0], want[0])
    (_,close) = train('traced', make, cbs(), **kwargs)
    assert is_close(got[:2], close[:2])
    print(a)
"""

@pytest.mark.parametrize('cases', ["(vectors, lambda: [Odd()], {}, 20), (vectors, lambda: [GradientAccumulation(20)], {}, 20)",
    pytest.param("(images, lambda: [], {}, 30), (images, lambda: [], dict(grad_ckpt=True), 30)", marks=pytest.mark.slow)], ids=['vectors','vit'])
def test_sharded(cases):
    "Bit for bit the same, BatchNorm's statistics too; parameters stay spread"
    run_ok(sharded.replace('CASES', f'[{cases}]'), CPU_NUM_DEVICES='2', PYTHONPATH=f'{repo/"tests"}{os.pathsep}{repo}')

@pytest.mark.slow
def test_idioms():
    "Some of benchmarks/replay_idioms.py, each trained with steps that are replayed and with traced ones"
    names = 'tensor_of_validation number_of_validation loss_with_running_weights batchnorm_at_rest weights_come_back optimizer_forgets'.split()
    res = run(repo/'benchmarks'/'replay_idioms.py', '--idioms', *names)
    *rows,said = [o.split(maxsplit=1) for o in res.stdout.splitlines() if not o.startswith('No TPU found')]
    assert res.returncode==0 and [o[0] for o in rows]==names and all(re.match('the same: (2[5-9]|3.) of 36', o[1]) for o in rows) and said[0]==str(len(names)), f'{res.stdout}\n{res.stderr}'
