"Callbacks, losses, metrics, progress and precision do on the device what they do in plain fastai. Tolerance: 1e-4 relative, 1e-5 absolute, unless said."
import collections
from contextlib import nullcontext
import pytest
import sklearn.metrics as skm
from fastai.callback.data import CollectDataCallback
from fastai.callback.hook import ActivationStats
from fastai.callback.training import ShortEpochCallback
from synth import *

@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close('all')

def cases(table, names):
    "One test for each row"
    return pytest.mark.parametrize(names, table.values(), ids=table)

def with_cb(mk, f=lambda o: None):
    "Fit with the callback that `mk` makes; what `f` makes of it"
    def _inner(learn):
        cbs = mk()
        learn.fit(2, 1e-2, cbs=cbs)
        return f(cbs)
    return _inner

# ---- callbacks that change training

class ClipTwice(GradientClip):
    "A user's own event, which is to run as it is"
    def before_step(self):
        super().before_step()
        self.n = getattr(self, 'n', 0)+1

class ClipMore(GradientClip):
    "One that inherits all"

class Every(GradientAccumulation):
    def before_step(self):
        self.learn.loss_grad *= 2
        if self.train_iter%2==0: raise CancelBatchException()

TRAINING = dict(
    accumulate      = lambda: GradientAccumulation(16),
    accumulate_3    = lambda: GradientAccumulation(24),
    clip            = lambda: GradientClip(.1),
    clip_inf        = lambda: GradientClip(.05, norm_type=float('inf')),
    accumulate_clip = lambda: [GradientAccumulation(16), GradientClip(.1)],
    inherits        = lambda: ClipMore(.1),
    inherits_event  = lambda: ClipTwice(.05),
    accumulate_own  = lambda: Every(16),
    mixup           = lambda: MixUp(.4),
    short_epoch     = lambda: ShortEpochCallback(.5))    # cancels before the Recorder has seen the batch

@cases(TRAINING, 'cbs')
def test_training_callbacks(cbs):
    plain,tpu,want,got = both(lambda l: (l.fit_one_cycle(1, 1e-2, cbs=cbs()), l.fit(1, 1e-2, cbs=(own := cbs())), getattr(own, 'n', None))[-1])
    assert want==got
    on_device(tpu)
    same(plain, tpu)
    base = twin(tpu=True)
    base.fit_one_cycle(1, 1e-2)
    base.fit(1, 1e-2)
    assert [float(o) for o in base.recorder.losses]!=pytest.approx([float(o) for o in tpu.recorder.losses], rel=1e-4) # it does something

def float_targets():
    targs = torch.eye(3)
    return Learner(dls_of(*[[(x,targs[y]) for x,y in vectors(n, seed=s)] for n,s in ((48,0), (20,1))]), mlp(), loss_func=BCEWithLogitsLossFlat())

@cases(dict(mixup=(float_targets, lambda: MixUp(.4)), cutmix=(image_learner, lambda: CutMix(1.))), 'mk,cb')
def test_mixing(mk, cb):
    plain,tpu,*_ = both(lambda l: l.fit(1, 1e-2, cbs=cb()), mk)
    on_device(tpu)
    same(plain, tpu)
    assert not isinstance(tpu.loss_func, MethodType)

def test_a_plain_learner_beside_one_on_a_device():
    "Nothing is lent to it, also while the other one's fit runs; and a callback may be there before `to_tpu` or come later"
    plain = twin(cbs=GradientClip(.1))
    class Fits(Callback):
        order = 90
        def after_batch(self): self.learn.seen = lent(plain)
    before,after = twin(cbs=GradientClip(.1)).to_tpu(),twin(tpu=True).add_cb(GradientClip(.1))
    for learn in (before,after): learn.fit(1, 1e-2, cbs=Fits())
    assert before.seen==after.seen==[]
    plain.fit(1, 1e-2)
    same(plain, before)
    same(plain, after)

@cases(dict(smooth=lambda: LabelSmoothingCrossEntropy(), smooth_flat=lambda: LabelSmoothingCrossEntropyFlat(eps=.2), focal=lambda: FocalLossFlat(),
    function=lambda: F.cross_entropy, torch=lambda: nn.CrossEntropyLoss(label_smoothing=.1), sum=lambda: CrossEntropyLossFlat(reduction='sum'),
    weights=lambda: CrossEntropyLossFlat(weight=tensor([1.,2.,3.])), torch_weights=lambda: nn.CrossEntropyLoss(weight=tensor([1.,2.,3.]))), 'loss')
def test_losses(loss):
    plain,tpu,want,got = both(lambda l: (l.fit(2, 1e-3), l.validate(), l.get_preds(with_loss=True)), lambda: mlp_learner(loss_func=loss()))
    same(plain, tpu)
    close(want, got)
    tpu.detach_tpu()
    for learn in (plain,tpu): learn.fit(1, 1e-3)
    same(plain, tpu)
    assert devices([o for m in (tpu.loss_func, getattr(tpu.loss_func, 'func', None)) if isinstance(m, nn.Module) for o in m.buffers()]) <= {'cpu'}

# ---- callbacks that watch

class Watch(Callback):
    "What a user's callback can read in each batch"
    order = 70
    def before_fit(self): self.seen,self.meters = [],[]
    def after_batch(self):
        self.meters.append([(m.count, float(m.total)) for m in (self.recorder.metrics if self.training else [self.recorder.loss, *self.recorder.metrics])])
        if not self.training: return self.seen.append((float(self.loss),))
        self.seen.append((float(self.loss), self.smooth_loss.item(), float(self.recorder.losses[-1]), float(self.recorder.smooth_loss.value), self.recorder.lrs[-1]))
        self.meters.append((self.recorder.smooth_loss.count, float(self.recorder.smooth_loss.val), len(self.recorder.losses)==self.train_iter))

class Keep(Callback):
    "Values that are kept and read after the fit are those of their time"
    order = 70
    def before_fit(self): self.kept = []
    def after_batch(self):
        if self.training: self.kept.append((self.smooth_loss, self.recorder.losses[-1], self.loss))

class Inner(Callback):
    order = 75
    def before_fit(self): self.res = []
    def after_epoch(self): self.res.append(self.learn.get_preds(dl=self.dls.valid, inner=True)[0])

class Average(Callback):
    "An average of the weights that a user keeps on the device, as fastai has none"
    order = 70
    def before_fit(self): self.avg = [p.detach().clone() for p in self.model.parameters()]
    def after_batch(self):
        if self.training:
            for a,p in zip(self.avg, self.model.parameters()): a.lerp_(p.detach(), .3)
    def after_epoch(self): self.norms = [a.norm().item() for a in self.avg]

class Restore(Callback):
    "Goes back to a file between two epochs, optimizer state included"
    def after_epoch(self):
        if self.epoch==0: self.learn.save('first')
        if self.epoch==1: self.learn.load('first')

@cases(dict(
    losses    = lambda l: (setattr(l.recorder, 'train_metrics', True), with_cb(Watch, lambda o: (o.seen, o.meters))(l)),
    later     = with_cb(Keep, lambda o: [[float(v) for v in row] for row in o.kept]),
    collected = with_cb(CollectDataCallback, lambda o: o.data),
    preds     = with_cb(FetchPredsCallback, lambda o: o.preds),
    inner     = with_cb(Inner, lambda o: o.res),
    stats     = with_cb(ActivationStats, lambda o: [[dict(v) if v else v for v in row] for row in o.stats]),
    average   = with_cb(Average, lambda o: ([a.cpu() for a in o.avg], o.norms)),
    restore   = with_cb(Restore)), 'f')
def test_callbacks_that_watch(f, tmp_path):
    plain,tpu,want,got = both(f, path=tmp_path)
    on_device(tpu)
    close(want, got)
    assert devices(got) <= {'cpu'}
    same(plain, tpu)

def test_recorder_holds_what_plain_fastai_holds():
    plain,tpu,*_ = both(lambda l: l.fit(2, 1e-2))
    a,b = plain.recorder,tpu.recorder
    for name in ('losses','values','lrs','iters'):
        want,got = getattr(a, name),getattr(b, name)
        assert type(got) is type(want) and [type(o) for o in got]==[type(o) for o in want], name
    assert [[type(o) for o in row] for row in b.values]==[[type(o) for o in row] for row in a.values]
    assert devices(b.losses)=={'cpu'} and all(o.shape==p.shape and o.dtype==p.dtype for o,p in zip(b.losses, a.losses))
    assert type(tpu.smooth_loss) is type(plain.smooth_loss) and devices(tpu.smooth_loss)=={'cpu'}
    assert type(b.loss) is AvgLoss and type(b.smooth_loss) is AvgSmoothLoss and [type(m) for m in tpu.metrics]==[AvgMetric]
    ax = b.plot_loss(skip_start=0, show_epochs=True)
    close([float(o) for o in a.losses], [float(o) for o in ax.lines[0].get_ydata()])
    close([v[1] for v in a.values], [float(o) for o in ax.lines[-1].get_ydata()])

# ---- callbacks that keep, stop and log

@cases(dict(best=dict(), every_epoch=dict(every_epoch=True, with_opt=True), at_end=dict(at_end=True, with_opt=True), metric=dict(monitor='accuracy', with_opt=True)), 'kwargs')
def test_save_model(tmp_path, kwargs):
    def f(learn):
        learn.path = tmp_path/('tpu' if hasattr(learn, 'tpu_trainer') else 'plain')
        learn.fit(3, 1e-1, cbs=SaveModelCallback(**kwargs))
        learn.fit(1, 1e-2)
        return {o.name: o for o in (learn.path/'models').ls()}
    plain,tpu,want,got = both(f)
    on_device(tpu)
    same(plain, tpu)
    assert set(want)==set(got) and len(got)==(3 if 'every_epoch' in kwargs else 1)
    for name in want:
        assert_no_xla(got[name])
        close(*[as_numbers(torch.load(o[name], weights_only=False)) for o in (want,got)])

@cases(dict(valid_loss=(lambda: EarlyStoppingCallback('valid_loss', min_delta=10., patience=2), 1e-2), train_loss=(lambda: EarlyStoppingCallback('train_loss', min_delta=10., patience=2), 1e-2),
    nan=(TerminateOnNaNCallback, 1e30)), 'cb,lr')
def test_early_stopping(cb, lr):
    plain,tpu,*_ = both(lambda l: l.fit(8, lr, cbs=cb()), opt_func=SGD)
    assert len(tpu.recorder.losses)==len(plain.recorder.losses)<48
    if lr<1: same(plain, tpu)
    tpu.fit(1)
    assert len(tpu.recorder.values)==1

def test_reduce_lr_on_plateau():
    plain,tpu,*_ = both(lambda l: l.fit(4, 1e-2, cbs=ReduceLROnPlateau(min_delta=10., patience=1, factor=2.)))
    assert tpu.recorder.lrs[0]==1e-2 and tpu.recorder.lrs[-1]<5.1e-3
    same(plain, tpu)

# ---- precision

class Probe(Callback):
    "Dtypes inside the model, of predictions, loss and gradients"
    order = 80
    def before_fit(self):
        self.dtypes = collections.defaultdict(set)
        self.hook = self.model[-1].register_forward_hook(lambda m,i,o: self._see(inside=o))
    def _see(self, **kwargs):
        for k,v in kwargs.items(): self.dtypes[k].add(v.dtype)
    def after_loss(self): self._see(pred=self.pred, loss=self.loss)
    def before_step(self): self._see(grad=self.model[0].weight.grad, weight=self.model[0].weight)
    def after_fit(self): self.hook.remove()

@cases(dict(to_bf16=Learner.to_bf16, to_fp16=Learner.to_fp16), 'to')
@cases(dict(before=True, after=False), 'first')
def test_mixed_precision_is_bf16_autocast(to, first):
    "Without a scaler, also with clipping and accumulation; and after `to_fp32` or `detach_tpu` it is full precision"
    def cbs(): return [GradientAccumulation(16), GradientClip(.1)]
    full,learn = twin(tpu=True, cbs=cbs()),twin(cbs=cbs())
    full.fit(2, 1e-2)
    for f in ((to, Learner.to_tpu) if first else (Learner.to_tpu, to)): assert f(learn) is learn
    learn.fit(2, 1e-2, cbs=(cb := Probe()))
    f32 = {torch.float32}
    assert cb.dtypes==dict(inside={torch.bfloat16}, pred=f32, loss=f32, weight=f32, grad=f32)
    assert getattr(learn, 'scaler', None) is None
    on_device(learn)
    losses = [[float(o) for o in l.recorder.losses] for l in (full,learn)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=.02)
    assert losses[1]!=losses[0]
    preds,targs = learn.get_preds(cbs=(cb := Probe()))
    assert cb.dtypes['inside']=={torch.bfloat16} and preds.dtype==torch.float32 and len(preds)==20
    assert learn.to_fp32() is learn
    learn.fit(1, 1e-2, cbs=(cb := Probe()))
    assert cb.dtypes['inside']==f32

def test_mixed_precision_after_detach_is_plain_again():
    plain,tpu = twin().to_fp16(),twin(tpu=True).to_fp16()
    tpu.detach_tpu()
    for learn in (plain,tpu): learn.fit(1, 1e-2)
    same(plain, tpu)
    on_host(tpu)

# ---- bars and logs

class Bars(Callback):
    "What the progress bar says after each training batch, in batches that take a while"
    order = 90
    def before_fit(self): self.said = []
    def after_batch(self):
        if not self.training: return
        self.said.append(self.learn.progress.pbar.comment)
        time.sleep(.1)

def test_progress_bar_shows_an_updating_loss():
    "Each value shown is a smoothed loss of some batch up to then, at most about a second old"
    learn = twin(tpu=True, n_trn=8*40)
    learn.fit(1, 1e-2, cbs=(cb := Bars()))
    said,true = [o and float(o.split(' | ')[0]) for o in cb.said],[float(o) for o in learn.recorder.losses] # beside the loss stands the speed
    assert len(set(said))>4 and all(said[15:])
    for i,o in enumerate(said):
        if o: assert min(abs(o-t) for t in true[max(0,i-15):i+1])<1e-4

def test_table_of_epochs(capsys):
    learn = twin(tpu=True)
    learn.fit(2, 1e-2)
    out = capsys.readouterr().out
    rows = [o.split() for o in re.split(r'[\r\n]', out) if re.match(r'^[01] +\d+\.\d+', o)]
    assert 'train_loss' in out and len(rows)==2
    close([v[:3] for v in learn.recorder.values], [[float(o) for o in row[1:4]] for row in rows], atol=1e-5)
    with learn.no_logging(), learn.no_bar(): learn.fit(1, 1e-2)
    assert capsys.readouterr().out.strip()==''

@cases(dict(train=dict(train_metrics=True), only_train=dict(train_metrics=True, valid_metrics=False), no_time=dict(add_time=False), beta=dict(beta=.5), none=None), 'kwargs')
def test_recorder_options(kwargs):
    "Also without a Recorder"
    def mk():
        learn = mlp_learner(metrics=[accuracy, F1Score(average='macro')])
        learn.remove_cb(Recorder)
        return learn if kwargs is None else learn.add_cb(Recorder(**kwargs))
    def f(learn):
        with learn.no_bar() if kwargs is None else nullcontext(): return learn.fit(2, 1e-2),kwargs is None and learn.validate()
    plain,tpu,want,got = both(f, mk)
    close(want, got)
    if kwargs is None: close(state(plain), state(tpu))
    else: same(plain, tpu)

# ---- metrics

def top2(inp, targ): return (inp.topk(2, dim=-1)[1]==targ[:,None]).any(-1).float().mean()
def answer(): return 42.
def confident(inp, targ): return sum(float(p.softmax(0)[t])>.3 for p,t in zip(inp, targ))/len(targ)

class Counted(Metric):
    "A user's metric that reads the Learner in each batch"
    def reset(self): self.n,self.seen = 0,[]
    def accumulate(self, learn):
        self.n += len(learn.y)
        self.seen.append(learn.pred.argmax(-1).eq(learn.yb[0]).sum().item() + (learn.x.sum().item()>0))
    @property
    def value(self): return sum(self.seen)/self.n
    @property
    def name(self): return 'counted'

def of_classes(*metrics, n_cls=3): return lambda: mlp_learner(n_cls=n_cls, metrics=deepcopy(metrics))

def of_targets(f, loss, *metrics):
    "A Learner whose targets are made of the inputs"
    return lambda: Learner(dls_of(*[[(x,f(x)) for x,_ in vectors(n, seed=s)] for n,s in ((48,0), (20,1))]), mlp(), loss_func=loss, metrics=deepcopy(metrics))

@cases(dict(
    averages = of_classes(accuracy, error_rate, top2, partial(top_k_accuracy, k=2)),
    sklearn  = of_classes(F1Score(average='macro'), RocAuc(), skm_to_fastai(skm.matthews_corrcoef), CohenKappa(), BalancedAccuracy(),
        skm_to_fastai(skm.log_loss, is_class=False, activation='softmax', axis=-1, flatten=False, labels=[0,1,2])),
    states   = of_classes(Perplexity(), Dice(), JaccardCoeff(), n_cls=2),
    user     = of_classes(confident, Counted(), AccumMetric(top2, flatten=False)),
    value    = of_classes(ValueMetric(answer, 'answer'), accuracy),
    multi    = of_targets(lambda x: (x[:3]>0).float(), BCEWithLogitsLossFlat(), accuracy_multi, partial(accuracy_multi, thresh=.3), F1ScoreMulti(), RocAucMulti(), HammingLossMulti()),
    numbers  = of_targets(lambda x: x[:3]*2, MSELossFlat(), mse, mae, rmse, R2Score(), ExplainedVariance(), PearsonCorrCoef())), 'mk')
def test_metrics(mk):
    plain,tpu,want,got = both(lambda l: (l.fit(2, 1e-2), l.validate(), l.validate(ds_idx=0)), mk)
    close(want, got)
    same(plain, tpu)
    assert len(got[1])==1+len(tpu.metrics) and all(np.isfinite(o) for o in got[1])
    tpu.detach_tpu()
    close(want[1], tpu.validate())

def test_metrics_change_while_attached():
    plain,tpu = twin(),twin(tpu=True)
    for learn in (plain,tpu):
        learn.fit(1)
        learn.metrics = [error_rate, F1Score(average='macro')]
        learn.fit(1)
        learn.metrics += [accuracy]
        learn.fit(1)
    same(plain, tpu)
    assert len(tpu.recorder.metric_names)==7
