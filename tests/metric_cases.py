"Every metric of fastai, and metrics as users write them, on data for which each has a value: for the test and the table that compare several cores with one process"
import torch, torch.nn.functional as F
from torch import nn
from fastai.basics import AvgMetric, Learner, Metric, TfmdDL, DataLoaders, ValueMetric, CrossEntropyLossFlat, BCEWithLogitsLossFlat, MSELossFlat
from fastai.metrics import *
from fastai.metrics import AccumMetric, skm_to_fastai
from fastai.callback.progress import ProgressCallback
import sklearn.metrics as skm

# ---- data: predictions as input, so that a model that changes nothing predicts as well as one would like

def _class_logits(n_cls, *shape):
    "Noisy logits with the class in dimension 1, and the classes"
    def make(n, g):
        y = torch.randint(0, n_cls, (n, *shape), generator=g)
        return F.one_hot(y, n_cls).movedim(-1, 1)+torch.randn(n, n_cls, *shape, generator=g), y
    return make

def _words(n, g):
    y = torch.randint(0, 7, (n, 6), generator=g)
    return 2.*F.one_hot(y, 7)+torch.randn(n, 6, 7, generator=g), y

def _tags(n_tags):
    def make(n, g):
        y = torch.randint(0, 2, (n, n_tags), generator=g).float()
        return y-.5+torch.randn(n, n_tags, generator=g), y
    return make

def _amounts(n, g):
    y = torch.rand(n, 1, generator=g)*2
    return (y+torch.randn(n, 1, generator=g)/4).abs(), y

class PartsLoss(nn.Module):
    "A loss that leaves its parts where `LossMetric` finds them"
    def __init__(self, reduction='mean'):
        super().__init__()
        self.reduction = reduction
    def forward(self, inp, targ):
        self.near,self.far = F.smooth_l1_loss(inp, targ),F.mse_loss(inp, targ)
        return F.l1_loss(inp, targ, reduction=self.reduction)+self.near+self.far

KINDS = dict(
    binary=(_class_logits(2), CrossEntropyLossFlat), classes=(_class_logits(4), CrossEntropyLossFlat), tags=(_tags(3), BCEWithLogitsLossFlat),
    tag=(_tags(1), BCEWithLogitsLossFlat),
    amounts=(_amounts, MSELossFlat), mask=(_class_logits(2, 4, 4), lambda: CrossEntropyLossFlat(axis=1)),
    segments=(_class_logits(3, 4, 4), lambda: CrossEntropyLossFlat(axis=1)), words=(_words, CrossEntropyLossFlat), parts=(_amounts, PartsLoss))
"What the predictions of a kind are, and the loss that goes with them"

class Scale(nn.Module):
    "Returns its input, exactly, and can be trained"
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
    def forward(self, x): return x*self.weight

def samples(kind, n, seed): return list(zip(*KINDS[kind][0](n, torch.Generator().manual_seed(seed))))

def metric_learner(kind, metrics, bs=4, n_valid=53, n_train=37, **kwargs):
    "A Learner whose predictions are its inputs, with `metrics`"
    dls = DataLoaders(*[TfmdDL(samples(kind, n, seed), bs=bs, num_workers=0) for seed,n in enumerate((n_train, n_valid))])
    return Learner(dls, Scale(), loss_func=KINDS[kind][1](), metrics=metrics, **kwargs)

# ---- metrics as users write them

def half_right(inp, targ): return (inp.argmax(1)//2==targ//2).float().mean()

class Confusion(Metric):
    "Share of the most frequent mistake"
    def __init__(self, n_cls=4): self.n_cls = n_cls
    def reset(self): self.counts = torch.zeros(self.n_cls, self.n_cls)
    def accumulate(self, learn):
        for p,t in zip(learn.pred.argmax(1).cpu(), learn.y.cpu()): self.counts[t,p] += 1
    @property
    def value(self): return (self.counts*(1-torch.eye(self.n_cls))).max()/self.counts.sum()

class InputMean(Metric):
    "Reads the inputs of a batch"
    def reset(self): self.total,self.n = 0.,0
    def accumulate(self, learn):
        self.total += learn.xb[0].abs().sum().item()
        self.n += len(learn.y)
    @property
    def value(self): return self.total/self.n

class InputMeanByMethod(InputMean):
    "Reads the inputs of a batch in a method of its own"
    def accumulate(self, learn): self._add(learn)
    def _add(self, learn): InputMean.accumulate(self, learn)

class Fading(Metric):
    "Depends on the order of the batches"
    def reset(self): self.seen = 0.
    def accumulate(self, learn): self.seen = .7*self.seen+learn.pred[0,0].item()+learn.loss.item()
    @property
    def value(self): return self.seen

class InputWeighted(AccumMetric):
    "An `AccumMetric` that keeps something more of each batch"
    def __init__(self): super().__init__(half_right, flatten=False)
    def reset(self):
        super().reset()
        self.ws = []
    def accum_values(self, preds, targs, learn=None):
        super().accum_values(preds, targs, learn)
        self.ws.append(self.preds[-1].exp().sum(1))
    @property
    def value(self):
        preds,targs,ws = map(torch.cat, (self.preds, self.targs, self.ws))
        return ((preds.argmax(1)==targs)*ws).sum()/ws.sum()

class CountedDice(Dice):
    "A `Dice` that counts its batches"
    def reset(self):
        super().reset()
        self.n = 0
    def accumulate(self, learn):
        super().accumulate(learn)
        self.n += 1
    @property
    def value(self): return super().value*self.n

class Doubled(AvgMetric):
    "An `AvgMetric` with another value"
    @property
    def value(self): return 2*super().value

# ---- the cases: name, kind of data, and what makes the metric

def _best_f1():
    f1 = lambda preds, targs, thresh: skm.f1_score(targs, preds.softmax(1)[:,1]>thresh)
    f1.__name__ = 'f1'
    return AccumMetric(optim_metric(f1, 'thresh', (.2, .8)), flatten=False)

def _top2(inp, targ): return top_k_accuracy(inp, targ, k=2)

CASES = dict(
    accuracy=('classes', lambda: accuracy), error_rate=('classes', lambda: error_rate), top_k_accuracy=('classes', lambda: _top2),
    APScoreBinary=('binary', APScoreBinary), BalancedAccuracy=('classes', BalancedAccuracy), BrierScore=('binary', BrierScore),
    CohenKappa=('classes', CohenKappa), F1Score=('classes', lambda: F1Score(average='macro')), FBeta=('binary', lambda: FBeta(beta=2)),
    HammingLoss=('classes', HammingLoss), Jaccard=('binary', Jaccard), Precision=('binary', Precision), Recall=('binary', Recall), RocAuc=('classes', RocAuc),
    RocAucBinary=('binary', RocAucBinary), MatthewsCorrCoef=('classes', MatthewsCorrCoef), accuracy_multi=('tags', lambda: accuracy_multi),
    APScoreMulti=('tags', APScoreMulti), F1ScoreMulti=('tags', F1ScoreMulti), FBetaMulti=('tags', lambda: FBetaMulti(beta=.5)),
    HammingLossMulti=('tags', HammingLossMulti), JaccardMulti=('tags', JaccardMulti), PrecisionMulti=('tags', PrecisionMulti), RecallMulti=('tags', RecallMulti),
    RocAucMulti=('tags', RocAucMulti), BrierScoreMulti=('tag', BrierScoreMulti), MatthewsCorrCoefMulti=('tag', MatthewsCorrCoefMulti),
    mse=('amounts', lambda: mse), mae=('amounts', lambda: mae), msle=('amounts', lambda: msle), rmse=('amounts', lambda: rmse), exp_rmspe=('amounts', lambda: exp_rmspe),
    ExplainedVariance=('amounts', ExplainedVariance), R2Score=('amounts', R2Score), PearsonCorrCoef=('amounts', PearsonCorrCoef),
    SpearmanCorrCoef=('amounts', SpearmanCorrCoef), foreground_acc=('segments', lambda: foreground_acc), Dice=('mask', Dice), JaccardCoeff=('mask', JaccardCoeff),
    DiceMulti=('segments', DiceMulti), JaccardCoeffMulti=('segments', JaccardCoeffMulti), CorpusBLEUMetric=('words', lambda: CorpusBLEUMetric(vocab_sz=7)),
    Perplexity=('words', Perplexity), perplexity=('classes', lambda: perplexity), LossMetric=('parts', lambda: LossMetric('far', 'distant')),
    LossMetrics=('parts', lambda: LossMetrics('near')[0]), optim_metric=('binary', _best_f1), AccumMetric=('classes', lambda: AccumMetric(half_right, flatten=False)),
    skm_to_fastai=('classes', lambda: skm_to_fastai(skm.zero_one_loss)), ValueMetric=('classes', lambda: ValueMetric(lambda: .25, 'quarter')),
    AvgMetric=('classes', lambda: AvgMetric(half_right)))
"Each name of `fastai.metrics`, with `AvgMetric` and `ValueMetric`; scikit-learn takes one tag alone in `matthews_corrcoef`, and before 1.7 in `brier_score_loss`"

USER_CASES = dict(
    user_function=('classes', lambda: half_right), user_lambda=('amounts', lambda: lambda inp, targ: (inp-targ).abs().mean()),
    user_metric=('classes', Confusion), user_metric_of_inputs=('classes', InputMean), user_metric_of_inputs_by_method=('classes', InputMeanByMethod),
    user_metric_of_order=('classes', Fading), user_AccumMetric=('classes', InputWeighted), user_Dice=('mask', CountedDice),
    user_AvgMetric=('classes', lambda: Doubled(accuracy)))

def metric_values(learn, names):
    "{name: value} of a validation"
    with learn.no_bar(), learn.no_logging(): loss,*vals = learn.validate()
    return dict(valid_loss=float(loss), **{k: float(v) for k,v in zip(names, vals)})
