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

def test_a_callback_reads_what_the_recorder_holds():
    "Its losses come home about once a second, unless somebody looks"
    class Looks(Callback):
        order = 80
        def after_batch(self):
            if self.training: self.last = float(self.smooth_loss)
    assert at(Looks, 'float(') in complaint(strict(), cbs=Looks())

def test_in_validation():
    said = complaint(strict(n_val=40), cbs=Reads(train=False))
    assert 'Batch 2 of validation read the device by `item`' in said

def test_a_gradient_hook():
    learn = strict()
    learn.model[0].weight.register_hook(lambda g: g*0 if g.sum().item()>1e9 else g)
    said = complaint(learn)
    assert f'{__file__}:' in said and 'g.sum().item()' in said

def test_a_callback_of_fastai():
    said = complaint(strict(), cbs=TerminateOnNaNCallback())
    assert 'fastai/callback/tracker.py:' in said and 'torch.isinf(self.loss)' in said and 'Write `torch.where`' in said

class Peeks(Transform):
    def encodes(self, x:Tensor): return x*2 if x.max().item()>1e9 else x

def test_a_batch_transform():
    "Which `batch_tfms='auto'` would run on the host"
    dls = dls_of(vectors(48), vectors(20), after_batch=Peeks())
    learn = Learner(dls, mlp(), loss_func=CrossEntropyLossFlat())
    assert at(Peeks, 'def encodes') in complaint(learn.to_tpu(batch_tfms='device', strict=True))
    fit(learn.to_tpu(strict=True))

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
    def forward(self, x):
        if x.sum()>1e9: x = x*2
        return self.body(x)

def learner_of(model): return lambda: Learner(mlp_learner().dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)

def test_a_model_branches_on_a_value():
    said = complaint(strict(learner_of(Branches())))
    assert at(Branches, 'if x.sum()') in said and 'Write `torch.where` instead of `if`' in said

class Unlowered(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
    def forward(self, x): return self.body(x) + torch.special.zeta(x.detach().abs()+2, 2.)[:,:3]*0

def test_an_operator_without_lowering():
    said = complaint(strict(learner_of(Unlowered())))
    assert 'Batch 2 of training ran aten::special_zeta on the CPU' in said and at(Unlowered, 'zeta') in said

class HostNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
    def forward(self, x):
        noise = torch.randn(8)*.01
        return self.body(x + noise.to(x.device))

def test_a_tensor_of_the_host_in_each_step():
    "is an input of the step's program"
    learn = strict(learner_of(HostNoise()))
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2)
    assert learn.replay.n_replayed>0

class Exactly(Metric):
    def reset(self): self.n = 0
    def accumulate(self, learn): self.n += (learn.pred.argmax(-1)==learn.y).sum().item()
    @property
    def value(self): return self.n

def test_a_metric_that_is_fed_in_every_batch():
    said = complaint(strict(n_val=40, metrics=Exactly()))
    assert 'Batch 2 of validation' in said and f'for the metric Exactly ({at(Exactly, "def accumulate")})' in said and '`AvgMetric`' in said

class Grows(Callback):
    "Batches that get a sample smaller each time"
    order = 1
    def before_batch(self):
        n = 8-self.iter
        if self.training: self.learn.xb,self.learn.yb = (self.x[:n],),(self.y[:n],)

def test_a_third_shape():
    said = complaint(strict(), cbs=Grows())
    assert 'Batch 2 of training was compiled again: its shapes are [6, 8], [6], after [8, 8], [8] and [7, 8], [7]. Give all batches one size' in said

class Switches(nn.Module):
    def __init__(self):
        super().__init__()
        self.body,self.n = mlp(),0
    def forward(self, x):
        self.n += 1
        if self.n==4: x = x.tanh()
        return self.body(x)

def test_other_operations():
    said = complaint(strict(learner_of(Switches())))
    assert 'Batch 3 of training was compiled again: `tanh` of float32[8, 8] stands where the step before had `linear` of float32[8, 8]' in said
    assert at(Switches, 'x.tanh()') in said

def test_a_number_that_changes():
    "is an input of the step's program"
    class Scales(Callback):
        order = 80
        def after_loss(self):
            if self.training: self.learn.loss_grad = self.loss_grad * [.1,.2,.3,1.,.5,.6][self.iter]
    learn = strict()
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2, cbs=Scales())
    assert learn.replay.n_replayed>0

def test_a_tensor_that_stays_alive():
    class Keeps(nn.Module):
        def forward(self, x):
            if learn.training and learn.iter==3: self.kept = x
            return x
    learn = strict()
    learn.model.insert(2, Keeps())
    assert 'Batch 3 of training was compiled again: it calls the same functions of torch' in complaint(learn)

def test_one_program_on_all_cores():
    "`StrictSteps` is a callback like others: it can be added after `to_tpu_sharded`"
    out = run_ok("""
        from fastai.basics import *
        from fastai_xla.all import *
        from fastai_xla.train.strict import StrictSteps
        x = torch.randn(8*6, 8)
        ds = list(zip(x, x[:,:3].argmax(1)))
        dls = DataLoaders(TfmdDL(ds, bs=8, num_workers=0), TfmdDL(ds, bs=8, num_workers=0))
        learn = Learner(dls, nn.Linear(8, 3), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.').to_tpu_sharded(fsdp=2).add_cb(StrictSteps())
        class Reads(Callback):
            order = 80
            def after_batch(self): self.last = self.loss.item()
        with learn.no_bar(), learn.no_logging():
            learn.fit_one_cycle(2, 1e-2)
            try: learn.fit(1, cbs=Reads())
            except NotSteady as e: print(e)""", CPU_NUM_DEVICES='2')
    assert 'Batch 2 of training read the device by `item`' in out

def test_ranks_that_are_processes():
    "Each counts for itself; the line of the user's is named at home"
    out = run_ok("""
        from fastai.basics import *
        from fastai_xla.all import *
        x = torch.randn(16*6, 8)
        ds = list(zip(x, x[:,:3].argmax(1)))
        class Reads(Callback):
            order = 80
            def after_batch(self): self.last = self.loss.item()
        if __name__=='__main__':
            dls = DataLoaders(TfmdDL(ds, bs=8, num_workers=0), TfmdDL(ds, bs=8, num_workers=0))
            learn = Learner(dls, nn.Linear(8, 3), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.').to_tpu_distributed(2, processes=True, strict=True)
            with learn.no_bar(), learn.no_logging():
                learn.fit_one_cycle(2, 1e-2)
                learn.validate()
                print('steady')
                try: learn.fit(1, cbs=Reads())
                except Exception as e: print(e)""")
    assert out.startswith('steady') and 'Batch 2 of training read the device by `item`' in out
