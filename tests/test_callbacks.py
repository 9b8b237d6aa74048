"Callbacks, losses, metrics, progress and precision do on the device what they do in plain fastai. Tolerance: 1e-4 relative, 1e-5 absolute, unless said."
import pytest
import sklearn.metrics as skm
from fastprogress.fastprogress import ConsoleMasterBar
from fastai.callback.data import CollectDataCallback
from fastai.callback.training import BnFreeze, ShortEpochCallback
from synth import *

@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close('all')

# ---- callbacks that change training

TRAINING = dict(
    accumulate      = lambda: GradientAccumulation(16),
    accumulate_3    = lambda: GradientAccumulation(24),
    clip            = lambda: GradientClip(.1),
    clip_inf        = lambda: GradientClip(.05, norm_type=float('inf')),
    accumulate_clip = lambda: [GradientAccumulation(16), GradientClip(.1)],
    mixup           = lambda: MixUp(.4),
    short_epoch     = lambda: ShortEpochCallback(.5))    # cancels before the Recorder has seen the batch

@pytest.mark.parametrize('cbs', TRAINING.values(), ids=TRAINING)
def test_training_callbacks(cbs):
    plain,tpu,*_ = both(lambda l: (l.fit_one_cycle(1, 1e-2, cbs=cbs()), l.fit(1, 1e-2, cbs=cbs())))
    on_device(tpu)
    same(plain, tpu)

def test_callbacks_have_an_effect():
    "The comparisons above would pass if a callback did nothing on either side"
    def losses(*cbs):
        learn = twin(tpu=True)
        learn.fit(1, 1e-2, cbs=list(cbs))
        return [float(o) for o in learn.recorder.losses]
    base = losses()
    for cbs in TRAINING.values(): assert losses(*L(cbs()))!=pytest.approx(base, rel=1e-4)

def test_bn_freeze():
    def f(learn):
        learn.freeze()
        learn.fit(1, 1e-2, cbs=BnFreeze())
        return learn.model[1].running_mean.cpu()
    plain,tpu,want,got = both(f, train_bn=False)
    assert torch.equal(got, torch.zeros(16))
    same(plain, tpu)

def test_callbacks_that_are_there_before_and_after_to_tpu():
    before,after = twin(cbs=GradientClip(.1)).to_tpu(),twin(tpu=True).add_cb(GradientClip(.1))
    plain = twin(cbs=GradientClip(.1))
    for learn in (plain,before,after): learn.fit(1, 1e-2)
    same(plain, before)
    same(plain, after)

@pytest.mark.parametrize('stack_y', [True, False], ids=['y_int', 'float_y'])
def test_mixup_with_and_without_interpolated_targets(stack_y):
    def mk():
        targs = torch.eye(3)
        one_hot = lambda items: items if stack_y else [(x,targs[y]) for x,y in items]
        return Learner(dls_of(one_hot(vectors(48)), one_hot(vectors(20, seed=1))), mlp(), loss_func=CrossEntropyLossFlat() if stack_y else BCEWithLogitsLossFlat())
    plain,tpu,*_ = both(lambda l: l.fit(2, 1e-2, cbs=MixUp(.4)), mk)
    same(plain, tpu)
    assert not isinstance(tpu.loss_func, MethodType)

def test_cutmix():
    plain,tpu,*_ = both(lambda l: l.fit(1, 1e-2, cbs=CutMix(1.)), image_learner)
    on_device(tpu)
    assert all(torch.isfinite(o) for o in tpu.recorder.losses) and np.isfinite(tpu.recorder.values[0][1])
    same(plain, tpu)

class ClipTwice(GradientClip):
    "A user's own event, which is to run as it is"
    def before_step(self):
        super().before_step()
        self.n = getattr(self, 'n', 0)+1

class ClipMore(GradientClip):
    "One that inherits all"

@pytest.mark.parametrize('cls', [ClipTwice, ClipMore])
def test_a_callback_that_inherits_from_fastais(cls):
    plain,tpu,want,got = both(lambda l: (l.fit(1, 1e-2, cbs=(cb := cls(.1))), cb)[1])
    assert vars(want).get('n')==vars(got).get('n')==(6 if cls is ClipTwice else None)
    same(plain, tpu)

def test_accumulation_of_ones_own():
    class Every(GradientAccumulation):
        def before_step(self):
            self.learn.loss_grad *= 2
            if self.train_iter%2==0: raise CancelBatchException()
    plain,tpu,*_ = both(lambda l: l.fit(1, 1e-2, cbs=Every(16)))
    same(plain, tpu)

def test_a_plain_learner_beside_one_on_a_device():
    "Nothing is lent to it, also while the other one's fit runs"
    other = twin(cbs=GradientClip(.1))
    class Fits(Callback):
        order = 90
        def after_batch(self): self.learn.seen = lent(other)
    tpu = twin(tpu=True, cbs=GradientClip(.1))
    tpu.fit(1, cbs=Fits())
    assert tpu.seen==[]
    other.fit(1)
    assert lent(other)==[]

LOSSES = dict(smooth=lambda: LabelSmoothingCrossEntropy(), smooth_flat=lambda: LabelSmoothingCrossEntropyFlat(eps=.2), focal=lambda: FocalLossFlat(),
    function=lambda: F.cross_entropy, torch=lambda: nn.CrossEntropyLoss(label_smoothing=.1), sum=lambda: CrossEntropyLossFlat(reduction='sum'))

@pytest.mark.parametrize('loss', LOSSES.values(), ids=LOSSES)
def test_losses(loss):
    plain,tpu,want,got = both(lambda l: (l.fit(2, 1e-3), l.validate(), l.get_preds(with_loss=True)), lambda: mlp_learner(loss_func=loss()))
    same(plain, tpu)
    close(want, got)

# ---- callbacks that watch

class Watch(Callback):
    "What a user's callback can read in each batch"
    order = 70
    def before_fit(self): self.seen,self.kinds,self.meters = [],set(),[]
    def after_batch(self):
        self.meters.append([(m.count, float(m.total)) for m in (self.recorder.metrics if self.training else [self.recorder.loss, *self.recorder.metrics])])
        if not self.training: return self.seen.append((float(self.loss),))
        self.seen.append((float(self.loss), self.smooth_loss.item(), float(self.recorder.losses[-1]), float(self.recorder.smooth_loss.value), self.recorder.lrs[-1]))
        self.meters.append((self.recorder.smooth_loss.count, float(self.recorder.smooth_loss.val)))
        self.kinds |= {type(self.smooth_loss.item()), len(self.recorder.losses)==self.train_iter}

def test_a_callback_reads_true_losses():
    def f(learn):
        learn.recorder.train_metrics = True
        learn.fit(2, 1e-2, cbs=(cb := Watch()))
        return cb
    plain,tpu,want,got = both(f)
    assert len(got.seen)==2*(6+3) and got.kinds=={float,True}
    close(want.seen, got.seen)
    close(want.meters, got.meters)
    same(plain, tpu)

def test_a_callback_reads_losses_late():
    "Values that are kept and read after the fit are those of their time"
    class Keep(Callback):
        order = 70
        def before_fit(self): self.kept = []
        def after_batch(self):
            if self.training: self.kept.append((self.smooth_loss, self.recorder.losses[-1], self.loss))
    plain,tpu,want,got = both(lambda l: (l.fit(2, 1e-2, cbs=(cb := Keep())), cb)[1])
    close([[float(o) for o in row] for row in want.kept], [[float(o) for o in row] for row in got.kept])
    assert len({float(row[0]) for row in got.kept})==12

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
    assert torch.equal(torch.stack(b.losses), torch.tensor([float(o) for o in b.losses]))
    ax = b.plot_loss(skip_start=0, show_epochs=True)
    close([float(o) for o in a.losses], [float(o) for o in ax.lines[0].get_ydata()])
    close([v[1] for v in a.values], [float(o) for o in ax.lines[-1].get_ydata()])

def test_plot_sched():
    learn = twin(tpu=True)
    learn.fit_one_cycle(1, 1e-2)
    learn.recorder.plot_sched()
    assert len(plt.gcf().axes)==2 and len(learn.recorder.hps['lr'])==6

def test_collected_data():
    plain,tpu,want,got = both(lambda l: (l.fit(1, 1e-2, cbs=(cb := CollectDataCallback())), cb)[1])
    assert len(got.data)==9 and devices(got.data)=={'cpu'}
    close(want.data, got.data)

def test_fetched_preds():
    "`get_preds` inside a fit"
    plain,tpu,want,got = both(lambda l: (l.fit(2, 1e-2, cbs=(cb := FetchPredsCallback())), cb)[1])
    close(want.preds, got.preds)
    same(plain, tpu)

def test_validate_inside_a_fit():
    class Inner(Callback):
        order = 75
        def before_fit(self): self.res = []
        def after_epoch(self): self.res.append(self.learn.get_preds(dl=self.dls.valid, inner=True)[0])
    plain,tpu,want,got = both(lambda l: (l.fit(2, 1e-2, cbs=(cb := Inner())), cb)[1])
    close(want.res, got.res)
    on_device(tpu)

def test_activation_stats():
    from fastai.callback.hook import ActivationStats
    plain,tpu,want,got = both(lambda l: (l.fit(1, 1e-2, cbs=(cb := ActivationStats())), cb)[1])
    close([[dict(o) if o else o for o in row] for row in want.stats], [[dict(o) if o else o for o in row] for row in got.stats])

# ---- callbacks that keep, stop and log

@pytest.mark.parametrize('kwargs', [dict(), dict(every_epoch=True, with_opt=True), dict(at_end=True, with_opt=True), dict(monitor='accuracy', with_opt=True)],
                         ids=['best', 'every_epoch', 'at_end', 'metric'])
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

def test_load_in_mid_fit(tmp_path):
    "A callback may go back to a file between two epochs, optimizer state included"
    class Restore(Callback):
        def after_epoch(self):
            if self.epoch==0: self.learn.save('first')
            if self.epoch==1: self.learn.load('first')
    plain,tpu,*_ = both(lambda l: l.fit(3, 1e-2, cbs=Restore()), path=tmp_path)
    on_device(tpu)
    same(plain, tpu)

@pytest.mark.parametrize('monitor', ['valid_loss', 'accuracy', 'train_loss'])
def test_early_stopping(monitor):
    plain,tpu,*_ = both(lambda l: l.fit(8, 1e-2, cbs=EarlyStoppingCallback(monitor, min_delta=10., patience=2)))
    assert 2 <= len(tpu.recorder.values) < 8
    same(plain, tpu)
    tpu.fit(1)
    assert len(tpu.recorder.values)==1

def test_reduce_lr_on_plateau():
    plain,tpu,*_ = both(lambda l: l.fit(4, 1e-2, cbs=ReduceLROnPlateau(min_delta=10., patience=1, factor=2.)))
    assert tpu.recorder.lrs[0]==1e-2 and tpu.recorder.lrs[-1]<5.1e-3
    same(plain, tpu)

def test_terminate_on_nan():
    plain,tpu,*_ = both(lambda l: l.fit(3, 1e30, cbs=TerminateOnNaNCallback()), opt_func=SGD)
    assert len(tpu.recorder.losses)==len(plain.recorder.losses)<18

def test_csv_logger(tmp_path):
    def f(learn):
        learn.path = tmp_path/('tpu' if hasattr(learn, 'tpu_trainer') else 'plain')
        learn.path.mkdir()
        learn.add_cb(CSVLogger())
        learn.fit(2, 1e-2)
        learn.add_cb(CSVLogger('more.csv', append=True))
        learn.fit(1, 1e-2)
        return [learn.csv_logger.read_log(), pd.read_csv(learn.path/'history.csv')]
    _,tpu,want,got = both(f)
    for a,b in zip(want, got):
        assert list(b.columns)==['epoch','train_loss','valid_loss','accuracy','time'] and len(b)==len(a)
        np.testing.assert_allclose(b.drop(columns='time').astype(float), a.drop(columns='time').astype(float), rtol=1e-4)

def test_show_graph(monkeypatch):
    "The console draws no graph, so look at what it is given"
    graphs = []
    monkeypatch.setattr(ConsoleMasterBar, 'update_graph', lambda self, gs, *bounds: graphs.append(([[float(o) for o in ys] for _,ys in gs], bounds[1][1].item())))
    plain,tpu,*_ = both(lambda l: l.fit(2, 1e-2, cbs=ShowGraphCallback()))
    assert len(graphs)==4 and [len(o) for o in graphs[-1][0]]==[12,2]
    close(graphs[:2], graphs[2:])

def test_weight_average():
    "An average of the weights that a user keeps on the device, as fastai has none"
    class Average(Callback):
        order = 70
        def before_fit(self): self.avg = [p.detach().clone() for p in self.model.parameters()]
        def after_batch(self):
            if self.training:
                for a,p in zip(self.avg, self.model.parameters()): a.lerp_(p.detach(), .3)
        def after_epoch(self): self.norms = [a.norm().item() for a in self.avg]
    plain,tpu,want,got = both(lambda l: (l.fit(2, 1e-2, cbs=(cb := Average())), cb)[1])
    close([a.cpu() for a in want.avg], [a.cpu() for a in got.avg])
    close(want.norms, got.norms)
    same(plain, tpu)

# ---- precision

class Probe(Callback):
    "Dtypes inside the model, of predictions, loss and gradients"
    order = 80
    def before_fit(self):
        self.dtypes = {}
        self.hook = self.model[-1].register_forward_hook(lambda m,i,o: self.dtypes.setdefault('inside', set()).add(o.dtype))
    def after_loss(self): self.dtypes.setdefault('pred', set()).add(self.pred.dtype); self.dtypes.setdefault('loss', set()).add(self.loss.dtype)
    def before_step(self): self.dtypes.setdefault('grad', set()).add(self.model[0].weight.grad.dtype)
    def after_batch(self): self.dtypes.setdefault('weight', set()).add(self.model[0].weight.dtype)
    def after_fit(self): self.hook.remove()

@pytest.mark.parametrize('to', [Learner.to_bf16, Learner.to_fp16], ids=['to_bf16', 'to_fp16'])
@pytest.mark.parametrize('first', [True, False], ids=['before', 'after'])
def test_mixed_precision_is_bf16_autocast(to, first):
    full = twin(tpu=True)
    full.fit(2, 1e-2)
    learn = twin()
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

def test_gradients_are_not_scaled():
    "Without a scaler the gradients of fp16 are those of a full-precision run"
    class Grad(Callback):
        order = 5
        def before_step(self): self.grad = self.model[-1].weight.grad.detach().cpu().clone()
    def grad(f):
        learn = f(twin(tpu=True))
        learn.fit(1, 0., wd=0., cbs=(cb := Grad()))
        return cb.grad
    close(grad(noop), grad(Learner.to_fp16), rtol=.05, atol=.005)

def test_mixed_precision_with_clipping_and_accumulation():
    def run(f):
        learn = f(twin(tpu=True, cbs=[GradientAccumulation(16), GradientClip(.1)]))
        learn.fit(2, 1e-2)
        return [float(o) for o in learn.recorder.losses]
    np.testing.assert_allclose(run(Learner.to_fp16), run(noop), rtol=.02)

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
    def __init__(self, wait): self.wait = wait
    def before_fit(self): self.said = []
    def after_batch(self):
        if not self.training: return
        self.said.append(self.learn.progress.pbar.comment)
        time.sleep(self.wait)

def bars(wait, n_trn, n_epoch):
    learn = twin(tpu=True, n_trn=n_trn)
    learn.fit(n_epoch, 1e-2, cbs=(cb := Bars(wait)))
    return [o and o.split(' | ')[0] for o in cb.said], [float(o) for o in learn.recorder.losses] # beside the loss stands the speed

def test_progress_bar_shows_an_updating_loss():
    "Each value shown is a smoothed loss of some batch up to then, at most about a second old"
    said,true = bars(.1, 8*40, 1)
    said = [float(o) if o else None for o in said]
    assert len(set(said))>4 and None not in said[15:]
    for i,o in enumerate(said):
        if o is not None: assert min(abs(o-t) for t in true[max(0,i-15):i+1])<1e-4

def test_progress_bar_of_short_epochs():
    "A later epoch starts with the loss that is known, not with none"
    said,true = bars(0., 48, 3)
    assert all(np.isfinite(float(o)) for o in said[6:])

def test_table_of_epochs(capsys):
    learn = twin(tpu=True)
    learn.fit(2, 1e-2)
    out = capsys.readouterr().out
    rows = [o.split() for o in re.split(r'[\r\n]', out) if re.match(r'^[01] +\d+\.\d+', o)]
    assert 'train_loss' in out and len(rows)==2
    close([v[:3] for v in learn.recorder.values], [[float(o) for o in row[1:4]] for row in rows], atol=1e-5)

def test_no_bar(capsys):
    plain = twin()
    with plain.no_bar():
        plain.fit(1, 1e-2)
        plain.validate()
    want = capsys.readouterr().out
    tpu = twin(tpu=True)
    with tpu.no_bar():
        assert not hasattr(tpu, 'progress')
        capsys.readouterr() # what it trains on
        tpu.fit(1, 1e-2)
        tpu.validate()
    numbers = lambda out: [float(o) for o in re.findall(r'\d+\.\d+', out)]
    got = re.sub(r'.*(samples/s, |graphs? compiled ).*\n', '', capsys.readouterr().out)
    assert len(numbers(want))==3 and got.count('\n')==want.count('\n')
    close(numbers(want), numbers(got))
    assert hasattr(tpu, 'progress')
    on_device(tpu)
    same(plain, tpu)

def test_no_logging(capsys):
    plain,tpu,*_ = both(noop)
    capsys.readouterr()
    for learn in (plain,tpu):
        with learn.no_logging(), learn.no_bar(): learn.fit(1, 1e-2)
    assert capsys.readouterr().out.strip()==''
    same(plain, tpu)

def test_a_logger_of_ones_own():
    plain,tpu = twin(),twin(tpu=True)
    logs = []
    for learn in (plain,tpu):
        with learn.no_bar():
            learn.logger = lambda o: logs.append(list(o)[:-1])
            learn.fit(2, 1e-2)
    close(logs[:2], logs[2:])

@pytest.mark.parametrize('kwargs', [dict(train_metrics=True), dict(train_metrics=True, valid_metrics=False), dict(add_time=False), dict(beta=.5)],
                         ids=['train', 'only_train', 'no_time', 'beta'])
def test_recorder_options(kwargs):
    def mk():
        learn = mlp_learner(metrics=[accuracy, F1Score(average='macro')])
        learn.remove_cb(Recorder)
        return learn.add_cb(Recorder(**kwargs))
    plain,tpu,*_ = both(lambda l: l.fit(2, 1e-2), mk)
    same(plain, tpu)

def test_without_a_recorder():
    def f(learn):
        with learn.removed_cbs([learn.progress, learn.recorder]): learn.fit(1, 1e-2)
        return learn.validate()
    plain,tpu,want,got = both(f)
    close(state(plain), state(tpu))
    close(want, got)

# ---- metrics

def top2(inp, targ): return (inp.topk(2, dim=-1)[1]==targ[:,None]).any(-1).float().mean()
def confident(inp, targ): return sum(float(p.softmax(0)[t])>.3 for p,t in zip(inp, targ))/len(targ)

class Counted(Metric):
    "A user's metric that reads the Learner in each batch"
    def reset(self): self.n,self.seen = 0,[]
    def accumulate(self, learn):
        self.n += len(learn.y)
        self.seen.append(learn.pred.argmax(-1).eq(learn.yb[0]).sum().item())
    @property
    def value(self): return sum(self.seen)/self.n
    @property
    def name(self): return 'counted'

METRICS = dict(
    averages  = lambda: [accuracy, error_rate, top2, partial(top_k_accuracy, k=2)],
    sklearn   = lambda: [F1Score(average='macro'), RocAuc(), skm_to_fastai(skm.matthews_corrcoef), skm_to_fastai(skm.log_loss, is_class=False, activation='softmax', axis=-1, flatten=False, labels=[0,1,2]), CohenKappa(), BalancedAccuracy()],
    states    = lambda: [Perplexity(), Dice(), JaccardCoeff()],
    user      = lambda: [confident, Counted(), AccumMetric(top2, flatten=False)],
    value     = lambda: [ValueMetric(_answer, 'answer'), accuracy])
def _answer(): return 42.

@pytest.mark.parametrize('name', METRICS)
def test_metrics(name):
    binary = name=='states'
    def f(learn):
        learn.fit(2, 1e-2)
        return learn.validate(), learn.validate(ds_idx=0)
    plain,tpu,want,got = both(f, lambda: mlp_learner(n_cls=2 if binary else 3, metrics=METRICS[name]()))
    close(want, got)
    same(plain, tpu)
    assert len(got[0])==1+len(tpu.metrics) and all(np.isfinite(o) for o in got[0])
    tpu.detach_tpu()
    close(want[0], tpu.validate())

def test_metrics_of_multi_labels_and_regression():
    targs = lambda items, f: [(x,f(x)) for x,_ in items]
    def mk(f, loss, metrics): return lambda: Learner(dls_of(targs(vectors(48), f), targs(vectors(20, seed=1), f)), mlp(), loss_func=loss, metrics=metrics())
    multi = mk(lambda x: (x[:3]>0).float(), BCEWithLogitsLossFlat(), lambda: [accuracy_multi, partial(accuracy_multi, thresh=.3), F1ScoreMulti(), RocAucMulti(), HammingLossMulti()])
    regression = mk(lambda x: x[:3]*2, MSELossFlat(), lambda: [mse, mae, rmse, R2Score(), ExplainedVariance(), PearsonCorrCoef()])
    for m in (multi, regression):
        plain,tpu,want,got = both(lambda l: (l.fit(2, 1e-2), l.validate()), m)
        close(want, got)
        same(plain, tpu)

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
