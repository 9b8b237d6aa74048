"`to_tpu(strict=True)` lets a steady training pass, raises at what slows a step down, and names the line"
import inspect, pytest
from fresh import run_ok
from synth import *
from fastai.callback.hook import ActivationStats
from fastai_xla.train.strict import StrictSteps

def strict(mk=mlp_learner, **kwargs):
    learn = mk(**kwargs).to_tpu(strict=True)
    learn.remove_cbs(ProgressCallback)
    return learn

def fit(learn, n=1, **kwargs):
    with learn.no_logging(): learn.fit(n, 1e-2, **kwargs)

def complaint(learn, **kwargs):
    "What `NotSteady` says"
    with pytest.raises(NotSteady) as e: fit(learn, **kwargs)
    return str(e.value)

def at(f, text):
    "Where `text` stands in the code of `f`: file and line"
    lines,start = inspect.getsourcelines(f)
    return f'{inspect.getsourcefile(f)}:{start + next(i for i,o in enumerate(lines) if text in o)}'

# ---- what may pass

def test_usual_training_is_steady():
    "Progress bar, metrics of fastai, clipping and bf16 included"
    learn = mlp_learner(metrics=[accuracy, F1Score(average='macro')], cbs=GradientClip(.1)).to_bf16().to_tpu(strict=True, fetch_every=0.)
    with learn.no_logging():
        learn.fit_one_cycle(2, 1e-2)
        learn.freeze()
        learn.fit_one_cycle(1, 1e-2)
        learn.validate()
        learn.get_preds()
        learn.fit(1, cbs=FetchPredsCallback())
        learn.lr_find(show_plot=False)
    assert not torch.overrides._get_current_function_mode_stack()

@pytest.mark.parametrize('kwargs', [dict(opt_func=partial(ranger)), dict(cbs=GradientAccumulation(16)), dict(cbs=[MixUp(.4), SaveModelCallback()])], ids=['lookahead','accumulation','mixup'])
def test_what_has_several_graphs_is_steady(kwargs): fit(strict(n_trn=8*24, **kwargs), 2)

def test_a_second_shape_is_steady():
    dls = DataLoaders(TfmdDL(vectors(8*6+3), bs=8, num_workers=0), TfmdDL(vectors(20), bs=8, num_workers=0))
    fit(strict(lambda: Learner(dls, mlp(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)), 3)

def test_nothing_of_it_stays():
    learn = strict()
    complaint(learn, cbs=Reads())
    assert not torch.overrides._get_current_function_mode_stack()
    assert not learn.to_tpu()._grab_cbs(StrictSteps)
    fit(learn, cbs=Reads())
    assert not strict().detach_tpu()._grab_cbs(StrictSteps)

# ---- what may not

class Reads(Callback):
    order = 80
    def __init__(self, f=lambda t: t.item(), name='after_batch', train=True):
        self.train_only = train
        setattr(self, name, lambda: self._read(f))
    def _read(self, f):
        if self.training==self.train_only: self.seen = f(self.loss)

READS = dict(item=lambda t: t.item(), cpu=lambda t: t.detach().cpu(), to=lambda t: t.to('cpu'), float=lambda t: float(t), bool=lambda t: t>0 and 1, print=lambda t: f'{t}',
             numpy=lambda t: np.array(t.detach().cpu()), equal=lambda t: torch.equal(t, t), smooth_loss=lambda t: to_detach(t))

@pytest.mark.parametrize('f', READS.values(), ids=READS)
def test_a_callback_reads(f):
    said = complaint(strict(), cbs=Reads(f))
    assert said.startswith("Exception occured in `Reads` when calling event `after_batch`") and 'Batch 2 of training' in said and ('read the device' in said or 'ran aten::equal on the CPU' in said)
    assert f'{__file__}:{inspect.getsourcelines(f)[1]}, in <lambda>' in said or f'{__file__}:' in said and 'smooth_loss=' in said

class Looks(Callback):
    "Losses come home about once a second, unless somebody looks"
    order = 80
    def after_batch(self):
        if self.training: self.last = float(self.smooth_loss)

class Peeks(Transform):
    def encodes(self, x:Tensor): return x*2 if x.max().item()>1e9 else x

def test_a_batch_transform():
    "Which `batch_tfms='auto'` would run on the host"
    dls = dls_of(vectors(48), vectors(20), after_batch=Peeks())
    learn = Learner(dls, mlp(), loss_func=CrossEntropyLossFlat())
    assert at(Peeks, 'def encodes') in complaint(learn.to_tpu(batch_tfms='device', strict=True))
    fit(learn.to_tpu(strict=True))

class Hooks(Callback):
    def before_fit(self): self.model[0].weight.register_hook(lambda g: g*0 if g.sum().item()>1e9 else g)

class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.body,self.n = mlp(),0
    def forward(self, x): return self.body(x)

class Branches(Body):
    def forward(self, x):
        if x.sum()>1e9: x = x*2
        return self.body(x)

class Unlowered(Body):
    def forward(self, x): return self.body(x) + torch.special.zeta(x.detach().abs()+2, 2.)[:,:3]*0

class Switches(Body):
    def forward(self, x):
        self.n += 1
        if self.n==4: x = x.tanh()
        return self.body(x)

class Keeps(Body):
    def forward(self, x):
        self.n,h = self.n+1,self.body[:2](x)
        if self.n==4: self.kept = h
        return self.body[2:](h)

class HostNoise(Body):
    def forward(self, x):
        noise = torch.randn(8)*.01
        return self.body(x + noise.to(x.device))

class Scales(Callback):
    order = 80
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad * [.1,.2,.3,1.,.5,.6][self.iter]

class Grows(Callback):
    "Batches that get a sample smaller each time"
    order = 1
    def before_batch(self):
        n = 8-self.iter
        if self.training: self.learn.xb,self.learn.yb = (self.x[:n],),(self.y[:n],)

class Exactly(Metric):
    def reset(self): self.n = 0
    def accumulate(self, learn): self.n += (learn.pred.argmax(-1)==learn.y).sum().item()
    @property
    def value(self): return self.n

def of(cls): return lambda: Learner(mlp_learner().dls, cls(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

SAID = dict(
    recorder   = (mlp_learner, Looks(), at(Looks, 'float(')),
    validation = (partial(mlp_learner, n_val=40), Reads(train=False), 'Batch 2 of validation read the device by `item`'),
    hook       = (mlp_learner, Hooks(), f'{__file__}:', 'g.sum().item()'),
    fastai     = (mlp_learner, TerminateOnNaNCallback(), 'fastai/callback/tracker.py:', 'torch.isinf(self.loss)', 'Write `torch.where`'),
    branches   = (of(Branches), None, at(Branches, 'if x.sum()'), 'Write `torch.where` instead of `if`'),
    unlowered  = (of(Unlowered), None, 'Batch 2 of training ran aten::special_zeta on the CPU', at(Unlowered, 'zeta')),
    metric     = (partial(mlp_learner, n_val=40, metrics=Exactly()), None, 'Batch 2 of validation', f'for the metric Exactly ({at(Exactly, "def accumulate")})', '`AvgMetric`'),
    shapes     = (mlp_learner, Grows(), 'Batch 2 of training was compiled again: its shapes are [6, 8], [6], after [8, 8], [8] and [7, 8], [7]. Give all batches one size'),
    operations = (of(Switches), None, 'Batch 3 of training was compiled again: `tanh` of float32[8, 8] stands where the step before had `linear` of float32[8, 8]', at(Switches, 'x.tanh()')),
    kept       = (of(Keeps), None, 'Batch 3 of training was compiled again: it calls the same functions of torch'))

@pytest.mark.parametrize('mk,cbs,parts', [(mk,cb,parts) for mk,cb,*parts in SAID.values()], ids=SAID)
def test_what_is_said(mk, cbs, parts):
    said = complaint(strict(mk), cbs=cbs)
    for o in parts: assert o in said, said

@pytest.mark.parametrize('mk,cbs', [(of(HostNoise), None), (mlp_learner, Scales())], ids=['tensor','number'])
def test_what_is_an_input_of_the_steps_program(mk, cbs):
    "A tensor of the host in each step, a number that changes"
    learn = strict(mk)
    with learn.no_bar(): fit(learn, cbs=cbs)
    assert learn.replay.n_replayed>0

@pytest.mark.parametrize('attach,n', [('to_tpu_sharded(fsdp=2, strict=True)', '2'), ('to_tpu_distributed(2, processes=True, strict=True)', None)], ids=['sharded','ranks'])
def test_several_cores(attach, n):
    "One program on all, or processes that count for themselves; the line of the user's is named at home"
    out = run_ok(f"""
        from fastai.basics import *
        from fastai_xla.all import *
        x = torch.randn(16*6, 8)
        ds = list(zip(x, x[:,:3].argmax(1)))
        class Reads(Callback):
            order = 80
            def after_batch(self): self.last = self.loss.item()
        if __name__=='__main__':
            dls = DataLoaders(TfmdDL(ds, bs=8, num_workers=0), TfmdDL(ds, bs=8, num_workers=0))
            learn = Learner(dls, nn.Linear(8, 3), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.').{attach}
            with learn.no_bar(), learn.no_logging():
                learn.fit_one_cycle(2, 1e-2)
                learn.validate()
                print('steady')
                try: learn.fit(1, cbs=Reads())
                except Exception as e: print(e)""", CPU_NUM_DEVICES=n)
    assert out.startswith('steady') and 'Batch 2 of training read the device by `item`' in out
