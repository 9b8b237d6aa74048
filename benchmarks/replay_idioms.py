"""What users write into models, losses, callbacks and optimizers, and fastai's own callbacks, trained with steps that are replayed and with traced steps: how many are replayed, and is it the same to the last bit?

    python benchmarks/replay_idioms.py                                   # every idiom on one core
    python benchmarks/replay_idioms.py --form sharded                    # parameters sharded over two cores; `distributed`: the batch split over them
    python benchmarks/replay_idioms.py --idioms deque dropout_by_epoch   # some

Prints for each how many steps and batches of validation were replayed, and else why they were traced; and at the end how many idioms had at least half of their steps replayed.
The exit status is 1 if losses, metrics or weights differ anywhere: in a bit on one core, by more than 1e-6 on two.
"""
import itertools, os, random, sys, tempfile, time, warnings
for k,v in dict(OMP_NUM_THREADS='1', PJRT_DEVICE='CPU', XLA_FLAGS='--xla_backend_optimization_level=0').items(): os.environ.setdefault(k, v) # compiles faster
warnings.filterwarnings('ignore')
from argparse import ArgumentParser
from collections import Counter, deque
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
import numpy as np, torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from fastai.basics import *
from fastai.callback.all import *
from fastai.callback.fp16 import MixedPrecision
from fastai_xla.all import *

# ---- Learners

def samples():
    x = torch.randn(96, 12, generator=torch.Generator().manual_seed(0))
    return list(zip(x, x[:,:4].argmax(1)))

def mlp(mid=nn.ReLU): return nn.Sequential(nn.Linear(12, 16), mid(), nn.Linear(16, 4))

def learner(model=None, loss=None, cbs=None, drop_last=True, cls=Learner, **kwargs):
    dls = DataLoaders(TfmdDL(samples(), bs=10, shuffle=True, drop_last=drop_last, num_workers=0), TfmdDL(samples()[:64], bs=8, num_workers=0))
    return cls(dls, model or mlp(), loss_func=loss or CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs, **kwargs)

class Pre(nn.Module):
    "A model whose inputs go through `pre(self, x)` first; `parts` are its attributes, tensors among them its buffers"
    def __init__(self, pre, **parts):
        super().__init__()
        self.net,self._pre = mlp(),pre
        for k,v in parts.items(): (partial(self.register_buffer, k) if isinstance(v, torch.Tensor) else partial(setattr, self, k))(v)
    def forward(self, x): return self.net(self._pre(self, x))

class At(Callback):
    "Calls `f(self)` in the event `name`"
    def __init__(self, name, f): setattr(self, name, partial(f, self))

def each_epoch(f): return At('before_epoch', f)

# ---- idioms: functions that return a Learner

IDIOMS = {}
def idiom(f): IDIOMS[f.__name__] = f; return f

def pre_idiom(name, **parts):
    "Decorator: a model with this `pre`, and the callbacks of `parts`"
    cbs = parts.pop('cbs', None)
    def _inner(pre): IDIOMS[name] = lambda: learner(Pre(pre, **deepcopy(parts)), cbs=cbs() if cbs else None)
    return _inner

@pre_idiom('buffer_in_place', n=torch.zeros(()))
def _(m, x):
    m.n.add_(1)
    return x*(1+m.n/50)

@pre_idiom('buffer_made_anew', mean=torch.zeros(12))
def _(m, x):
    m.mean = .9*m.mean+.1*x.detach().mean(0)
    return x-m.mean

@pre_idiom('tensor_of_the_step_before', last=None)
def _(m, x):
    was,m.last = m.last,x.detach().mean(0)
    return x if was is None else x+was

@pre_idiom('deque', seen=deque(maxlen=3))
def _(m, x):
    was = sum(m.seen)
    m.seen.append(x.detach().mean(0))
    return x+was

@pre_idiom('dict', seen={})
def _(m, x):
    was,m.seen['mean'] = m.seen.get('mean', 0),x.detach().mean(0)
    return x+was

@pre_idiom('tensor_of_validation', last=None)
def _(m, x):
    if not m.training: m.last = x.detach().mean(0)
    return x if m.last is None or not m.training else x+m.last

@pre_idiom('number_of_validation', scale=1.)
def _(m, x):
    if not m.training: m.scale *= 1.1
    return x*m.scale

@pre_idiom('every_third', k=0)
def _(m, x):
    m.k = (m.k+1)%3
    return x*2 if m.k==0 else x

@pre_idiom('list_that_turns', scales=[1.,1.1,1.2])
def _(m, x):
    m.scales.append(m.scales.pop(0))
    return x*m.scales[0]

@pre_idiom('counter', count=itertools.count())
def _(m, x): return x*(1+next(m.count)/100)

@pre_idiom('own_random', rng=random.Random(0))
def _(m, x): return x*(1+m.rng.random())

@pre_idiom('own_generator', rng=np.random.default_rng(0))
def _(m, x): return x*(1+float(m.rng.random()))

@pre_idiom('drawn_on_the_device')
def _(m, x): return x*(1+torch.rand(12, device=x.device))

def set_scale(cb): cb.model.scale = 1+cb.epoch/2
@pre_idiom('number_by_epoch', scale=1., cbs=lambda: each_epoch(set_scale))
def _(m, x): return x*m.scale

def set_vector(cb): cb.model.by = torch.full((12,), 1.+cb.epoch).to(next(cb.model.parameters()).device)
@pre_idiom('buffer_by_epoch', by=torch.ones(12), cbs=lambda: each_epoch(set_vector))
def _(m, x): return x*m.by

@pre_idiom('tensor_by_epoch', by=None, cbs=lambda: each_epoch(set_vector))
def _(m, x): return x if m.by is None else x*m.by

@idiom
def teacher_in_the_model():
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.s = mlp()
            self.t = deepcopy(self.s).requires_grad_(False)
        def forward(self, x):
            with torch.no_grad():
                for t,s in zip(self.t.parameters(), self.s.parameters()) if self.training else (): t.mul_(.9).add_(s, alpha=.1)
            return self.s(x)+.1*self.t(x)
    return learner(Student())

@idiom
def center_as_parameter():
    class Centered(nn.Module):
        def __init__(self): super().__init__(); self.net,self.c = mlp(),nn.Parameter(torch.zeros(12), requires_grad=False)
        def forward(self, x):
            self.c.data = .9*self.c.data+.1*x.detach().mean(0)
            return self.net(x-self.c)
    return learner(Centered())

@idiom
def spectral_norm():
    model = mlp()
    model[0] = nn.utils.parametrizations.spectral_norm(model[0])
    return learner(model)

@idiom
def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b,self.c = nn.Linear(12, 12),nn.Linear(12, 12),nn.Linear(12, 4)
            self.b.weight = self.a.weight
        def forward(self, x): return self.c(F.relu(self.b(F.relu(self.a(x)))))
    return learner(Tied())

# of losses

def smoothed(logits, y, t=1.): return F.cross_entropy(logits*t, y)

@idiom
def loss_with_a_temperature():
    class Loss(nn.Module):
        def __init__(self): super().__init__(); self.t = 1.
        def forward(self, p, y): return smoothed(p, y, self.t)
    def warm(cb): cb.loss_func.t = 1.+cb.epoch
    return learner(loss=Loss(), cbs=each_epoch(warm))

@idiom
def loss_with_running_weights():
    class Loss(nn.Module):
        def __init__(self): super().__init__(); self.w = None
        def forward(self, p, y):
            now = F.one_hot(y, 4).float().mean(0)
            self.w = now if self.w is None else .9*self.w+.1*now
            return F.cross_entropy(p, y, weight=1/(self.w+.1))
    return learner(loss=Loss())

@idiom
def loss_of_the_epoch():
    learn = learner(loss=lambda p, y: smoothed(p, y, 1+learn.epoch))
    return learn

@idiom
def loss_of_the_progress():
    learn = learner(loss=lambda p, y: smoothed(p, y, 1+learn.pct_train))
    return learn

@idiom
def loss_that_is_exchanged():
    def exchange(cb):
        if cb.epoch==1: cb.learn.loss_func = LabelSmoothingCrossEntropyFlat()
    return learner(cbs=each_epoch(exchange))

# of callbacks

@idiom
def dropout_by_epoch():
    def more(cb): cb.model[1].p = .1+.2*cb.epoch
    return learner(mlp(nn.Dropout), cbs=each_epoch(more))

@idiom
def momentum_of_batchnorm():
    def less(cb): cb.model[1].momentum = .1/(1+cb.epoch)
    return learner(mlp(partial(nn.BatchNorm1d, 16)), cbs=each_epoch(less))

@idiom
def batchnorm_at_rest():
    def rest(cb):
        if cb.epoch==1: cb.model[1].eval()
    return learner(mlp(partial(nn.BatchNorm1d, 16)), cbs=At('before_train', rest))

@idiom
def hook_for_an_epoch():
    def hook(cb):
        if cb.epoch==1: cb.handle = cb.model[0].register_forward_hook(lambda m, i, o: o*2)
        if cb.epoch==2: cb.handle.remove()
    return learner(cbs=each_epoch(hook))

@idiom
def thaws():
    def thaw(cb): (cb.learn.unfreeze if cb.epoch else cb.learn.freeze)()
    return learner(cbs=each_epoch(thaw), splitter=lambda m: L(m[0], m[2]).map(params))

@idiom
def weights_come_back():
    def back(cb):
        if cb.epoch==0: cb.first = {k: v.detach().cpu().clone() for k,v in cb.model.state_dict().items()}
        if cb.epoch==2: cb.model.load_state_dict(cb.first)
    return learner(cbs=each_epoch(back))

@idiom
def optimizer_forgets():
    def forget(cb):
        if cb.epoch==1: cb.opt.clear_state()
    return learner(cbs=each_epoch(forget))

@idiom
def weight_decay_by_epoch(): return learner(cbs=each_epoch(lambda cb: cb.opt.set_hyper('wd', .1*(1+cb.epoch))))

@idiom
def learning_rate_by_batch(): return learner(cbs=At('before_batch', lambda cb: cb.opt.set_hyper('lr', 1e-3*(1+cb.iter))))

@idiom
def noise_on_inputs():
    def noise(cb):
        if cb.training: cb.learn.xb = (cb.x+.1*torch.randn_like(cb.x),)
    return learner(cbs=At('before_batch', noise))

@idiom
def penalty():
    def add(cb):
        if cb.training: cb.learn.loss_grad = cb.learn.loss_grad+1e-3*sum(p.abs().sum() for p in cb.model.parameters())
    return learner(cbs=At('after_loss', add))

@idiom
def weights_in_bounds():
    @torch.no_grad()
    def bound(cb):
        for p in cb.model.parameters(): p.clamp_(-.2, .2)
    return learner(cbs=At('after_step', bound))

@idiom
def average_of_weights():
    @torch.no_grad()
    def average(cb):
        cb.mean = getattr(cb, 'mean', None) or [p.clone() for p in cb.model.parameters()]
        for m,p in zip(cb.mean, cb.model.parameters()): m.mul_(.9).add_(p, alpha=.1)
    return learner(cbs=At('after_step', average))

@idiom
def batches_left_out():
    def skip(cb):
        if cb.training and cb.iter%5==4: raise CancelBatchException()
    return learner(cbs=At('before_batch', skip))

@idiom
def smaller_last_batch(): return learner(drop_last=False)

for name,cb in dict(mixup=MixUp, accumulation=partial(GradientAccumulation, 24), clip=partial(GradientClip, .1), statistics=ActivationStats,
        statistics_of_some=partial(ActivationStats, every=5)).items():
    IDIOMS[name] = lambda cb=cb: learner(cbs=cb())
for name,opt in dict(ranger=ranger, larc=Larc, lamb=Lamb, rmsprop=partial(RMSProp, mom=.9), qhadam=QHAdam, radam=RAdam, amsgrad=partial(OptimWrapper,
        opt=partial(torch.optim.AdamW, amsgrad=True))).items():
    IDIOMS[name] = lambda opt=opt: learner(opt_func=opt)

# of callbacks that change something in the middle of an epoch, after steps were run again

class Mid(Callback):
    "Calls `f(self)` before some of the training batches; `off` is True at every second of these"
    def __init__(self, f, at=(12,20)): self.f,self.at,self.n,self.off = f,at,0,False
    def before_batch(self):
        if not self.training: return
        self.n += 1
        if self.n not in self.at: return
        self.off = not self.off
        self.f(self)

def mid(f, *cbs, at=(12,20), **kwargs): return learner(cbs=[*cbs, Mid(f, at)], **kwargs)

def tempered(temp, p, y, by=1.): return F.cross_entropy(p*temp['t']*by, y)

@idiom
def keyword_of_a_partial():
    loss = partial(partial(tempered, dict(t=1.)), by=1.)
    return mid(lambda cb: loss.keywords.update(by=1+cb.off), loss=loss)

@idiom
def argument_of_a_partial():
    temp = dict(t=1.)
    return mid(lambda cb: temp.update(t=1.+cb.off), loss=partial(tempered, temp))

@idiom
def settings():
    s = SimpleNamespace(by=1.)
    return mid(lambda cb: setattr(s, 'by', 1.+cb.off), model=Pre(lambda m, x: x*s.by))

@idiom
def variable_of_a_function():
    t = 1.
    def loss(p, y): return smoothed(p, y, t)
    def change(cb):
        nonlocal t
        t = 1.+cb.off
    return mid(change, loss=loss)

@idiom
def weights_made_smaller():
    def shrink(cb):
        for p in cb.model.parameters(): p.data.mul_(.5)
    return mid(shrink)

@idiom
def average_of_the_optimizer_cleared():
    def clear(cb):
        for st in cb.opt.state.values(): st['grad_avg'].zero_()
    return mid(clear)

@idiom
def a_layer_is_pruned():
    def prune_or_end(cb): prune.l1_unstructured(cb.model[0], 'weight', .3) if cb.off else prune.remove(cb.model[0], 'weight')
    return mid(prune_or_end)

@idiom
def gradients_hooked():
    def hook(cb):
        if cb.off: cb.handle = cb.model[0].weight.register_hook(lambda g: g/2)
        else: cb.handle.remove()
    return mid(hook)

@idiom
def clipping_begins_and_ends():
    clip = GradientClip(.01)
    return mid(lambda cb: cb.learn.add_cb(clip) if cb.off else cb.learn.remove_cb(clip))

@idiom
def gradients_halved_from_then_on():
    class Half(Callback):
        def after_backward(self):
            for p in self.model.parameters(): p.grad.mul_(.5)
    return mid(lambda cb: cb.learn.add_cb(Half()), at=(12,))

IDIOMS.update(norm_of_clipping=lambda: mid(lambda cb: setattr(cb.gradient_clip, 'max_norm', .01 if cb.off else .1), GradientClip(.1)),
    clipping_off=lambda: mid(lambda cb: setattr(cb.gradient_clip, 'run', not cb.off), GradientClip(.1)),
    samples_of_a_step=lambda: mid(lambda cb: setattr(cb.gradient_accumulation, 'n_acc', 30 if cb.off else 20), GradientAccumulation(20)),
    another_layer=lambda: mid(lambda cb: cb.model.__setitem__(1, nn.GELU() if cb.off else nn.Tanh())),
    layer_frozen=lambda: mid(lambda cb: cb.model[0].requires_grad_(not cb.off)),
    group_frozen=lambda: mid(lambda cb: cb.learn.freeze_to(int(cb.off)), splitter=lambda m: L(m[0], m[2]).map(params)),
    rates_of_groups=lambda: mid(lambda cb: cb.opt.set_hyper('lr', [1e-3*(1+cb.off),1e-2]), splitter=lambda m: L(m[0], m[2]).map(params)),
    state_forgotten=lambda: mid(lambda cb: cb.opt.clear_state()),
    another_loss=lambda: mid(lambda cb: setattr(cb.learn, 'loss_func', FocalLossFlat(gamma=2.-cb.off))),
    weights_begin_anew=lambda: mid(lambda cb: nn.init.kaiming_normal_(cb.model[0].weight)),
    statistics_begin_anew=lambda: mid(lambda cb: cb.model[1].reset_running_stats(), model=mlp(partial(nn.BatchNorm1d, 16))),
    training_metrics=lambda: mid(lambda cb: setattr(cb.learn.recorder, 'train_metrics', cb.off)),
    targets_turn=lambda: mid(lambda cb: setattr(cb.learn, 'yb', ((cb.y+1)%4,)), at=range(12, 20)),
    no_step=lambda: mid(lambda cb: setattr(cb.learn, '_step', noop), at=(12,)))

# ---- what the host does beside computing

@pre_idiom('prints', n=0)
def _(m, x):
    m.n += 1
    if m.n%10==0: print(end='')
    return x

@pre_idiom('looks_at_the_clock', secs=0.)
def _(m, x):
    m.secs += time.perf_counter()
    return x

@pre_idiom('layer_drop', ways=2)
def _(m, x): return x*2 if random.randrange(m.ways) else x

@pre_idiom('asserts_on_shapes')
def _(m, x):
    assert x.ndim==2 and x.dtype==torch.float32 and x.shape[-1]==12
    return x

@pre_idiom('keeps_activations_in_a_list', seen=[])
def _(m, x):
    m.seen.append(x.detach().mean())
    if len(m.seen)>5: m.seen.clear()
    return x

class Clock(Callback):
    def before_fit(self): self.n,self.secs,self.shapes = 0,0.,set()
    def before_batch(self): self.start = time.perf_counter()
    def after_pred(self): self.shapes.add(tuple(self.pred.shape))
    def after_batch(self): self.n,self.secs = self.n+1,self.secs+time.perf_counter()-self.start

class EveryEvent(Callback):
    "Counts all events of a batch"
    def before_fit(self): self.seen = Counter()
    def __getattr__(self, k):
        if k in ('before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch'): return lambda: self.seen.update([k])
        raise AttributeError(k)

class LossesOfEpoch(Callback):
    "Keeps losses on the device, and reads them at the end of the epoch"
    def before_train(self): self.kept = []
    def after_loss(self):
        if self.training: self.kept.append(self.loss_grad.detach())
    def after_train(self): self.mean = torch.stack(self.kept).mean().item()

class GradNorms(Callback):
    "Norms of gradients, kept for the end of the epoch"
    def before_train(self): self.kept = []
    def before_step(self): self.kept.append(torch.stack([p.grad.norm() for p in self.model.parameters()]).norm())
    def after_train(self): self.norms = torch.stack(self.kept).tolist()

class ForwardHooks(Callback):
    def before_fit(self): self.n,self.handles = 0,[m.register_forward_hook(self.seen) for m in self.model]
    def seen(self, m, i, o): self.n += 1
    def after_fit(self):
        for h in self.handles: h.remove()

class OwnLearner(Learner):
    "Has a step of its own"
    def _do_one_batch(self):
        self.n_batches = getattr(self, 'n_batches', 0)+1
        super()._do_one_batch()

IDIOMS.update({k: lambda cb=cb: learner(cbs=cb()) for k,cb in dict(clock=Clock, every_event=EveryEvent, losses_of_epoch=LossesOfEpoch, norms_of_gradients=GradNorms, forward_hooks=ForwardHooks).items()})
IDIOMS['own_learner'] = lambda: learner(cls=OwnLearner)

# fastai's own callbacks

FASTAI = dict(csv_logger=lambda: CSVLogger(tempfile.mkdtemp()+'/log.csv'), early_stopping=lambda: EarlyStoppingCallback(patience=9), save_model=lambda: SaveModelCallback(fname=tempfile.mkdtemp()+'/m'),
    reduce_lr=lambda: ReduceLROnPlateau(patience=9), terminate_on_nan=TerminateOnNaNCallback, bn_freeze=BnFreeze, short_epoch=lambda: ShortEpochCallback(.5),
    mixed_precision=MixedPrecision, fetch_preds=lambda: FetchPredsCallback(),
    schedule=lambda: ParamScheduler({'lr': SchedCos(1e-2, 1e-3)}), collect_data=lambda: CollectDataCallback())
IDIOMS.update({f'fastai_{k}': lambda cb=cb: learner(cbs=cb()) for k,cb in FASTAI.items()})

# ---- parts that the backward pass computes again, with the random numbers that they had

class Parts(nn.Module):
    def __init__(self, ckpt):
        super().__init__()
        self.ckpt,self.stem,self.head = ckpt,nn.Linear(12, 16),nn.Linear(16, 4)
        self.parts = nn.ModuleList(nn.Sequential(nn.Dropout(.2), nn.Linear(16, 16), nn.GELU()) for _ in range(2))
    def forward(self, x):
        x = self.stem(x)
        for o in self.parts: x = F.dropout(self.ckpt(o, x), .1, self.training)
        return self.head(x)

IDIOMS.update(parts_checkpointed=lambda: learner(Parts(partial(checkpoint, use_reentrant=False))), parts_checkpointed_reentrant=lambda: learner(Parts(partial(checkpoint, use_reentrant=True))))

# ---- both ways

def trained(learn):
    "What a training leaves, and what `learn.replay` says"
    set_seed(8)
    with learn.no_bar(), learn.no_logging():
        learn.fit(3, 1e-2)
        learn.fit_one_cycle(1, 1e-2)
    numbers,weights = [learn.recorder.losses, *learn.recorder.values],to_host(list(learn.model.state_dict().values()))
    r = learn.replay
    return [*(np.array(list(map(float, o))) for o in numbers), *(o.numpy() for o in weights)],(r.n_replayed/max(1, r.n_replayed+r.n_traced),repr(r))

def made(name):
    set_seed(7)
    return IDIOMS[name]()

FORMS = dict(tpu=lambda name, **kwargs: trained(made(name).to_tpu(**kwargs)),
    sharded=lambda name, **kwargs: trained(made(name).to_tpu_sharded(fsdp=2, **kwargs)),
    distributed=lambda name, **kwargs: trained(made(name).to_tpu_distributed(**kwargs)))

def compare(form, name):
    "Is what is trained the same both ways, to the last bit or, where cores add up what they have, to 1e-6; and what was said of it"
    (want,_),(got,(share,said)) = FORMS[form](name, replay=False),FORMS[form](name, replay=True)
    def same(equal): return len(want)==len(got) and all(map(partial(equal, equal_nan=True), want, got))
    if same(np.array_equal): return 'the same',share,said
    return 'within 1e-6' if form!='tpu' and same(partial(np.allclose, rtol=1e-6, atol=1e-6)) else 'DIFFERS',share,said

def main():
    p = ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--form', choices=FORMS, default='tpu')
    p.add_argument('--idioms', metavar='IDIOM', nargs='+', choices=IDIOMS, default=list(IDIOMS))
    a = p.parse_args()
    if a.form!='tpu': os.environ['CPU_NUM_DEVICES'] = '2' # read when the runtime starts
    ok,shares = True,[]
    for name in a.idioms:
        try: same,share,said = compare(a.form, name)
        except Exception as e: same,share,said = 'DIFFERS',0,f'{type(e).__name__}: {str(e)[:200]}'
        ok = ok and same!='DIFFERS'
        shares.append(share)
        print(f"{name:26} {same}: {'; '.join(said.splitlines())}", flush=True)
    print(f"{sum(o>=.5 for o in shares)} of {len(shares)} had half of their steps replayed or more", flush=True)
    sys.exit(not ok)

if __name__=='__main__': main()
