"Replayed steps equal traced ones to the last bit, and all Python of a step runs, whatever it does; what is in no known list has a step traced."
import itertools, random, re, signal, sys, threading
from contextlib import ExitStack, suppress
from copy import deepcopy
from functools import partialmethod
import pytest
from synth import *
from fastai.callback.fp16 import AMPMode, MixedPrecision
from fastai.callback.mixup import CutMix
from fastai.callback.rnn import RNNCallback, RNNRegularizer
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation
from fresh import repo, run_ok
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from traced import is_same, trace_all
from fastai_xla.runtime.device import torch_xla
from fastai_xla.train.program import StepTracer
sys.path.append(str(repo/'benchmarks'))
from replay_idioms import compare, IDIOMS

def eq(a, b): assert is_same(a, b), f"{a}\n!=\n{b}"

def mlp(mid=nn.ReLU): return nn.Sequential(nn.Linear(8, 16), mid(), nn.Linear(16, 3))
def net(): return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(.3), nn.Linear(16, 3))

def learner(model=net, n=80, n_valid=20, cls=Learner, **kwargs):
    "Ten batches of 8 to train"
    set_seed(3)
    dls = DataLoaders(DataLoader(vectors(n), bs=8, shuffle=True, num_workers=0), DataLoader(vectors(n_valid, seed=1), bs=8, num_workers=0))
    return cls(dls, model(), **{'loss_func': CrossEntropyLossFlat(), 'metrics': accuracy, **kwargs})

def one_cycle(learn): learn.fit_one_cycle(2, 1e-2)

def quiet(learn, train=one_cycle):
    with learn.no_bar(),learn.no_logging(): train(learn)

def outcome(learn, train=one_cycle, look=lambda l: None):
    "Train, and return what came of it: losses, values, weights, optimizer state and what `look` sees"
    quiet(learn, train)
    states = [{k: to_host(v) for k,v in p[2].items()} for p in learn.opt.all_params()]
    return [float(o) for o in learn.recorder.losses], [list(o) for o in learn.recorder.values], to_host(dict(learn.model.state_dict())), states, to_host(look(learn))

def both(make, replay=True, **kwargs):
    "The Learner whose steps may be replayed; its outcome is that of one that traces each step, into the same programs or, without `replay`, as torch_xla does"
    want = outcome(trace_all(make().to_tpu()) if replay else make().to_tpu(replay=False), **kwargs)
    learn = make().to_tpu(fetch_every=1e9)
    for w,g in zip(want, outcome(learn, **kwargs)): eq(w, g)
    return learn

def check(make, least=14, **kwargs):
    "Equal to the last bit, and at least so many steps of 20 are replayed"
    learn = both(make, **kwargs)
    assert learn.replay.n_replayed>=least, learn.replay
    return learn

# ---- what users write

SOON = 'layer_drop loss_of_the_progress smaller_last_batch parts_checkpointed'.split()

@pytest.mark.parametrize('name', [o if o in SOON else pytest.param(o, marks=pytest.mark.slow) for o in IDIOMS])
def test_idioms(name):
    same,share,said = compare('tpu', name)
    assert same=='the same' and (share>=.5)==(name!='statistics'), said

def cutmix():
    set_seed(3)
    return Learner(image_dls(n_trn=48), cnn(), loss_func=CrossEntropyLossFlat(), cbs=CutMix())

def text():
    "The hidden state of an LSTM goes on from step to step"
    from fastai.text.all import AWD_LSTM, awd_lstm_lm_config, BaseTokenizer, ColReader, language_model_learner, TextBlock
    set_seed(0)
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(text=[' '.join(rng.choice(list('abcdefghij'), 80)) for _ in range(24)], is_valid=[i>=20 for i in range(24)]))
    block = DataBlock(TextBlock.from_df('text', is_lm=True, seq_len=8, tok=BaseTokenizer()), get_x=ColReader('text'), splitter=ColSplitter())
    return language_model_learner(block.dataloaders(df, bs=4, seq_len=8), AWD_LSTM, config={**awd_lstm_lm_config, 'emb_sz': 8, 'n_hid': 8, 'n_layers': 1}, pretrained=False)

def accumulates(): return learner(cbs=[GradientAccumulation(24), EMACallback(.9)], n=160)
def grads(learn): return [None if p.grad is None else to_host(p.grad) for p in learn.model.parameters()]

def tune_and_find(learn):
    learn.fine_tune(2, 1e-2)
    learn.lr_find(num_it=30, show_plot=False)
    learn.fit(1, 1e-3)

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

trainings = dict(adam=(learner, 14, dict(replay=False)), accumulates=(accumulates, 24, dict(look=grads)), cutmix=(cutmix, 10, {}), text=(text, 50, {}),
    tuned=(lambda: learner(splitter=two_groups), 40, dict(train=tune_and_find)), average=(lambda: learner(cbs=ValidatesAverage(), n_valid=40), 30, dict(train=lambda l: l.fit(4, 1e-2))))

@pytest.mark.parametrize('name', [pytest.param(o, marks=pytest.mark.slow) if o in ('text','average') else o for o in trainings])
def test_trainings(name):
    make,least,kwargs = trainings[name]
    learn = check(make, least, **kwargs)
    assert name!='average' or learn.replay.valid.n_replayed>=10

# ---- what it costs

class Costs(Callback):
    "What each batch costs, by whether it is of the training"
    order = 200
    def before_fit(self): self.seen,self.at = {True: [], False: []},xla_counts()
    def before_train(self): self.at = xla_counts()
    before_validate = before_train
    def after_batch(self):
        now = xla_counts()
        self.seen[self.training].append(now-self.at)
        self.at = now

def test_a_batch_costs_one_execution():
    "No compilation, no read, and one program for a batch, with callbacks that compute within it; so `strict` raises nothing"
    class Noise(Callback):
        def before_batch(self): self.learn.xb = (self.x+.1*torch.randn_like(self.x),)
        def after_pred(self): self.spread = self.pred.std()
    learn = learner(n=160, n_valid=160, cbs=[Noise(), costs := Costs()]).to_tpu(fetch_every=1e9, strict=True)
    quiet(learn, lambda l: l.fit(2, 1e-2))
    for got in (o[4:20] for o in costs.seen.values()):
        eq([sum(getattr(o, k) for o in got) for k in ('compiles','reads')], [0,0])
        assert abs(sum(o.executions for o in got)-16)<=1 # the device may lag behind

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

# ---- all Python runs

class Counts(nn.Module):
    "Counts, prints, draws, and its scale depends on that"
    def __init__(self): super().__init__(); self.n,self.draws,self.net = 0,[],mlp()
    def forward(self, x):
        self.n += 1
        self.draws.append(random.random())
        if self.n%5==0: print(end='')
        return self.net(x)*(1+self.n//8)*(1+self.draws[-1])

class OwnLearner(Learner):
    n = 0
    def _backward(self):
        self.n += 1
        torch.autograd.backward(self.loss_grad*(1+self.n//10))
    def _step(self):
        if self.n%3: self.opt.step()

class Every(Callback):
    "Has each event, and notes it with what it sees of the batch"
    def before_fit(self): self.seen = []
    def note(self, e):
        if self.training: self.seen.append((e, tuple(self.pred.shape) if e!='before_batch' else None, e!='after_backward' or all(p.grad is not None for p in self.model.parameters())))
for e in 'before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch'.split(): setattr(Every, e, partialmethod(Every.note, e))

class Penalty(Callback):
    def after_loss(self):
        if self.training:
            g, = torch.autograd.grad(self.learn.loss_grad, [self.model[0].weight], create_graph=True)
            self.learn.loss_grad = self.learn.loss_grad+g.square().sum()

def seen(k): return lambda l: getattr(next(o for o in (*l.cbs, l, l.model) if k in {**vars(type(o)), **vars(o)}), k)

python = dict(counts=(lambda: learner(Counts), 'draws', 8), own_learner=(lambda: learner(mlp, cls=OwnLearner), 'n', 8),
    events=(lambda: learner(cbs=Every()), 'seen', 14), penalty=(lambda: learner(partial(mlp, nn.Tanh), cbs=Penalty()), 'n_iter', 14))

@pytest.mark.parametrize('name', python)
def test_python_runs(name):
    make,k,least = python[name]
    check(make, least, look=seen(k))

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

def test_numbers_that_vary_are_inputs():
    "Not constants: nothing is compiled for them, and nothing is read"
    learn = check(lambda: learner(Numbers, cbs=Costs()), replay=False)
    assert sum(o.compiles+o.reads for o in learn.costs.seen[True][6:])==0, [o.compiles for o in learn.costs.seen[True]]

# ---- tensors that are kept

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
class Keeps(nn.Module):
    "Keeps weights, a buffer that is another tensor after each step, and results in a dict and a list outside of it"
    kept = {'all': []}
    def __init__(self): super().__init__(); self.layer = nn.Linear(8, 3); self.register_buffer('mean', torch.zeros(8)); self.kept.clear()
    def forward(self, x):
        self.mean = .9*self.mean+.1*x.detach().mean(0)
        if self.training: self.kept['old'] = self.layer.weight.detach().clone()
        out = self.layer(x-self.mean)
        self.kept.setdefault('all', []).append(out.detach().mean())
        self.kept['last'] = out.max(1)
        return out
class Loose(nn.Module):
    "A parameter that no optimizer clears: its gradients add up"
    def __init__(self): super().__init__(); self.a,self.b,self.scale = nn.Linear(8, 8),nn.Linear(8, 3),nn.Parameter(torch.ones(8))
    def forward(self, x): return self.b(self.a(x)*self.scale)

kept = dict(swaps=(SwapsBuffers, lambda l: None, 0, {}), view=(View, lambda l: None, 0, {}), keeps=(Keeps, lambda l: (l.model.kept['all'], tuple(l.model.kept['last']), l.model.kept['old'], l.model.mean), 0, {}),
    loose=(Loose, lambda l: l.model.scale.grad, 10, dict(splitter=lambda m: [params(m.a), params(m.b)])))

@pytest.mark.parametrize('name', kept)
def test_kept_tensors(name):
    model,look,least,kwargs = kept[name]
    check(lambda: learner(model, **kwargs), least, look=look, replay=False)

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
    check(lambda: learner(cbs=Keeps()), 5, replay=False, look=lambda l: (l.keeps.held, l.keeps.f().detach()))

def test_values_that_are_read():
    "At times: the calls up to there are made, and the step goes on as a traced one; in each step: said, with the line"
    class Reads(Callback):
        def __init__(self, every): self.every,self.seen = every,[]
        def after_loss(self):
            if self.training and self.train_iter%self.every==self.every-1: self.seen.append(self.learn.loss_grad.item())
    check(lambda: learner(cbs=Reads(6)), 10, look=lambda l: l.reads.seen)
    learn = both(lambda: learner(cbs=Reads(1)), look=lambda l: l.reads.seen)
    assert re.search(r'0 of 20 .* `TensorBase.item` reads the device \(test_replay.py, line \d+\)', repr(learn.replay)), learn.replay

def test_a_graph_that_is_kept():
    "Is gone, which is an error once a backward pass comes to it; an average of losses is none"
    class Average(Callback):
        def before_fit(self): self.avg = 0.
        def after_loss(self):
            if self.training: self.avg = .9*self.avg+.1*self.learn.loss_grad
    check(lambda: learner(cbs=Average()), replay=False, look=lambda l: l.average.avg.detach())
    class Through(Callback):
        def before_fit(self): self.last = 0.
        def after_loss(self):
            if self.training: self.learn.loss_grad,self.last = self.learn.loss_grad+self.last,self.pred.sum()
    with pytest.raises(RuntimeError, match='whose graph is gone.*Keep its `detach'): outcome(learner(cbs=Through()).to_tpu())

def test_copies():
    "What `clone` gives shares memory until the next sync, and stays what it was all the same: in a batch and between fits"
    class Copies(Callback):
        order = 70
        def before_fit(self): self.seen = []
        def keep(self): self.seen = [*self.seen, self.model[0].weight.clone()] if self.training and self.train_iter%3==0 else self.seen
        before_batch = after_batch = keep
    kept = []
    def train(learn):
        learn.fit(1, 1e-2)
        w = learn.model[0].weight.clone()
        learn.fit(1, 1e-2)
        kept[:] = [w]
    check(lambda: learner(cbs=Copies()), 5, replay=False, train=train, look=lambda l: (kept[0].detach(), [o.detach() for o in l.copies.seen]))

def test_a_teacher():
    "What it is made of is no part of the model; where it has the model's memory, no step gives that away"
    class Teacher(Callback):
        def before_fit(self): self.teacher,self.learn.loss_func = deepcopy(self.model).requires_grad_(False),self.loss
        def loss(self, p, y):
            with torch.no_grad(): t = self.teacher(self.learn.x)
            return F.cross_entropy(p, y)+F.mse_loss(p, t)
        def after_batch(self):
            if self.training and self.train_iter%7==0: self.teacher.load_state_dict(self.model.state_dict())
    check(lambda: learner(mlp, cbs=Teacher()), 5, look=lambda l: dict(l.teacher.teacher.state_dict()), replay=False)

def test_a_view_of_a_weight(monkeypatch):
    "One that is kept, where no callback has it, goes on to be the weight"
    monkeypatch.setattr(torch, 'names', [], raising=False)
    def name(w): return w.detach()[0]
    def train(learn):
        learn.fit(2, 1e-2)
        torch.names[:] = [name(learn.model[0].weight)]
        learn.fit(2, 1e-2)
    learn = check(learner, 10, train=train, look=lambda l: (torch.names[0], name(l.model[0].weight)))
    eq(to_host(torch.names[0]), to_host(name(learn.model[0].weight)))

# ---- what changes between steps

def at(n, f):
    "A fit that calls `f(learn)` before its step `n`"
    def fit(learn):
        k = itertools.count()
        def lr(pct):
            if next(k)==n: f(learn)
            return 1e-2
        learn.fit(2, 1e-2, cbs=ParamScheduler({'lr': lr}))
    return fit

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
def new_state(learn):
    for s in learn.opt.state.values(): s['grad_avg'] = torch.zeros_like(s['grad_avg'])
def fewer(learn): learn.model[0].weight.data,learn.model[0].bias.data,learn.model[2].weight.data = learn.model[0].weight.data[:8].clone(),learn.model[0].bias.data[:8].clone(),learn.model[2].weight.data[:,:8].clone()

between = dict(data=(OfDevice, at(12, lambda l: W['w'].data.mul_(2))), state=(mlp, at(12, new_state)), shapes=(mlp, lambda l: (l.fit(1, 1e-2), fewer(l), l.create_opt(), l.fit(1, 1e-2))),
    function_mode=(mlp, within(HalfRelu)), dispatch_mode=(mlp, within(HalfAtenRelu)), saved=(partial(mlp, nn.Tanh), within(half_kept)))

@pytest.mark.parametrize('name', between)
def test_changed_before_a_step(name):
    model,fit = between[name]
    check(lambda: learner(model), 5, train=fit)

def test_bf16_is_switched_off():
    class Off(Callback):
        def after_batch(self):
            if self.training and self.iter==7: self.mixed_precision.run = self.epoch>0
    check(lambda: learner(cbs=[MixedPrecision(amp_mode=AMPMode.BF16), Off()]), 10)

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
class ByTorchXLA(nn.Module):
    "Its dropout is computed again in the backward pass by torch_xla's own checkpointing"
    def __init__(self): super().__init__(); self.stem,self.net = nn.Linear(8, 8),net()
    def forward(self, x):
        from torch_xla.utils.checkpoint import checkpoint
        x = self.stem(x)
        return checkpoint(self.net, x) if self.training else self.net(x)
untold = dict(checkpoint=(lambda: learner(ByTorchXLA), 'CheckpointFunction is given a function, which must run in each step', None), function=(lambda: learner(UsesFn), 'the `backward` of Fn must run in each step', lambda l: Fn.n), weight_hook=(lambda: learner(mlp, cbs=WeightHooks()), 'a parameter has a hook', seen('n')),
    backward_hook=(lambda: learner(mlp, cbs=FullHooks()), '`grad_fn`', seen('n')), seed=(lambda: learner(Seeds), "sets the seed of the device's random numbers", None), syncs=(lambda: learner(Syncs), 'several programs', None),
    script=(lambda: learner(lambda: nn.Sequential(torch.jit.script(Numbered()), nn.ReLU(), nn.Linear(16, 3))), 'what torch does not tell of', None))

@pytest.mark.parametrize('name', untold)
def test_traced_for_a_reason(name):
    make,why,look = untold[name]
    learn = both(make, look=look or (lambda l: None))
    assert learn.replay.n_replayed==0 and why in learn.replay.why, learn.replay

def test_a_thread_beside():
    "Calls of another thread belong to no step"
    stop = threading.Event()
    def work():
        while not stop.is_set(): (torch.ones(4)*2).sum()
    t = threading.Thread(target=work)
    t.start()
    try: check(learner)
    finally: stop.set(); t.join()

def test_falls_back_within_a_checkpoint():
    "What was recognised of it is computed without being kept apart"
    class Ways(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b,self.n = nn.Linear(8, 8),nn.Linear(8, 3),0
        def part(self, x):
            self.n += 1
            x = F.gelu(self.a(x))
            return x*2 if self.n%7==6 else x+1
        def forward(self, x): return self.b(checkpoint(self.part, F.dropout(x, .2, self.training), use_reentrant=False))
    quiet(learn := learner(Ways).to_tpu())
    assert learn.replay.n_replayed>=3, learn.replay

@torch.compile
def act(x): return torch.tanh(x)*x
class Acts(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x): return self.net(act(x))
def test_compiled_by_torch(): check(lambda: learner(lambda: torch.compile(Acts())))

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
    def __init__(self, exc, event, i=13):
        self.exc,self.i = exc,i
        setattr(self, event, self.act)
    def act(self):
        if self.training and self.train_iter==self.i: raise self.exc

@pytest.mark.parametrize('exc,event', [(CancelBatchException,'before_step'), (CancelFitException,'after_pred'), (KeyboardInterrupt,'before_batch')])
def test_a_batch_that_is_left(exc, event):
    "The calls that it has made are computed, as in plain fastai, and nothing is left of placeholders"
    def train(learn):
        with suppress(KeyboardInterrupt): learn.fit(2, 1e-2)
        learn.fit(1, 1e-2)
    check(lambda: learner(cbs=Raises(exc("left"), event)), 15, train=train)

def test_ctrl_c_in_a_step():
    "The state, whose memory a running step takes, is whole afterwards"
    class Interrupt(Callback):
        def after_batch(self):
            if self.training and self.train_iter==20: signal.setitimer(signal.ITIMER_REAL, 1e-4)
    learn = learner(n=800, cbs=Interrupt()).to_tpu()
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt): quiet(learn)
    finally: signal.signal(signal.SIGALRM, old)
    assert learn.replay.n_replayed>=4
    assert all(torch.isfinite(v).all() for v in to_host(list(learn.model.state_dict().values())))
    learn.remove_cb(Interrupt)
    quiet(learn, lambda l: l.fit(1, 1e-2))

def test_a_graph_that_fails_spoils_no_later_one():
    class Widens(nn.Module):
        "Half of it in float64, which XLA refuses when it compiles"
        def __init__(self): super().__init__(); self.lin = nn.Linear(8, 3)
        def forward(self, x): return F.linear(x.double(), self.lin.weight, self.lin.bias)
    with pytest.raises(RuntimeError, match='XLA could not run the graph of this step'): quiet(learner(Widens).to_tpu())
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
    (a,got),(b,want) = train('replayed', make, deepcopy(cbs), **kwargs),train('programs', make, deepcopy(cbs), **kwargs)
    assert is_same(got, want) and not b.n_replayed and a.n_replayed>=least, (a, got[0], want[0])
    (_,close) = train('traced', make, cbs, **kwargs)
    assert is_close(got[:2], close[:2])
    print(a)
"""

@pytest.mark.parametrize('cases', ["(vectors, [Odd()], {}, 20)",
    pytest.param("(vectors, [GradientAccumulation(20)], {}, 20), (images, [], {}, 30), (images, [], dict(grad_ckpt=True), 30)", marks=pytest.mark.slow)], ids=['vectors','more'])
def test_sharded(cases):
    "Bit for bit the same, BatchNorm's statistics too; parameters stay spread"
    run_ok(sharded.replace('CASES', f'[{cases}]'), CPU_NUM_DEVICES='2', PYTHONPATH=f'{repo/"tests"}{os.pathsep}{repo}')
