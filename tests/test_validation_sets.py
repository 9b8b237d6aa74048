"Validation sets of their own cadence, mixtures of datasets, and timm's augmented splits: on one core and on replicas, beside plain fastai and timm."
import pytest
from threads import ReplicaError
from threads import run_replicas, use_virtual_cores
use_virtual_cores(2)
from synth import * # starts the device
from recipes import *
from fastai.callback.tracker import EarlyStoppingCallback
from timm.loss import JsdCrossEntropy

def to_tpu(learn): return learn.to_tpu()

def same(want, got): torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-5, equal_nan=True)

def test_training_is_what_it_is_without():
    "To the last bit, with the draws of dropout; as many steps are run again, and a validation reads once and, but for the first, compiles nothing"
    for to in (noop, partial(Learner.to_tpu, strict=True, fetch_every=1e9)):
        (clean,noisy),stats = every(),[XLAStats(), XLAStats()]
        plain,learn = (fit(to(learner(model=dropping)), 3, [*evals, *([] if to is noop else [o])]) for evals,o in zip(([], [clean, noisy]), stats))
        near(weights(plain.model), weights(learn.model), 0, 0)
        assert plain.recorder.losses==learn.recorder.losses and [list(o) for o in plain.recorder.values]==[list(o[:3]) for o in learn.recorder.values]
        assert [o[0] for o in noisy.history]==[*range(3, 25, 3)] and [o[0] for o in clean.history]==[16]
        with learn.added_cbs(noisy): assert noisy.history[-1][1:]==list(learn.validate(dl=noisy.valid_dl))==noisy.history[-1][1:]
    assert [b.reads-a.reads for a,b in zip(*[o.steps for o in stats])]==[0,0,1]*8 and {o.compiles for o in stats[1].steps[3:]}=={0}
    assert learn.replay.n_replayed==plain.replay.n_replayed>10

def test_recorded_saved_and_stopped_as_in_plain_fastai():
    seen = []
    for to in (noop, to_tpu):
        (clean,noisy),learn = every(),to(learner())
        fit(learn, 3, [clean, noisy, SaveModelCallback('noisy_valid_loss', fname='best'), EarlyStoppingCallback('clean_accuracy', patience=2), CSVLogger()])
        seen.append((clean.history, noisy.history, [list(o) for o in learn.recorder.values]))
        assert learn.recorder.metric_names[4:]==['clean_valid_loss','clean_accuracy','noisy_valid_loss','noisy_accuracy','time']
        table = pd.read_csv(learn.path/'history.csv')
        assert table.clean_accuracy.isna().tolist()==[True,False,True] and not table.noisy_accuracy.isna().any()
        assert abs(learn.validate(dl=noisy.valid_dl)[0]-table.noisy_valid_loss.min())<1e-5
    for want,got in zip(*seen): same(want, got)

def test_cadences_metrics_and_predictions():
    "By samples and percent, before the first step and at the end, as in plain fastai; and what is predicted goes through a function"
    seen = []
    for to in (noop, to_tpu):
        cbs,learn = cadences(),to(learner())
        fit(learn, 2, cbs)
        assert tuple([o[0] for o in cb.history] for cb in cbs)==due
        assert learn.recorder.metric_names[4:]==['samples_valid_loss','samples_accuracy','part_valid_loss','part_highest','time']
        seen.append(([cb.history for cb in cbs], [list(o) for o in learn.recorder.values]))
        preds = learn.get_preds(dl=cbs[0].valid_dl, act=noop)[0]/2
        same([F.cross_entropy(preds, torch.stack([y for _,y in cbs[0].valid_dl.dataset])).item()], [seen[-1][0][1][-1][1]])
    for want,got in zip(*[a+[b] for a,b in seen]): same(want, got)

class Half(TimmEMA):
    "timm's averages, after the third batch"
    def after_batch(self):
        if self.training and self.train_iter==3: self.third = deepcopy(self.ema.module).eval()

def test_averages_are_validated_in_the_middle():
    timm,noisy = Half(**warm),every()[1]
    fit(learner(), 1, timm)
    x,y = map(torch.stack, zip(*vectors(30, 5)))
    fit(to_tpu(learner()), 1, [EMACallback(**warm), noisy])
    assert abs(noisy.history[0][1]-F.cross_entropy(timm.third(x), y).item())<1e-4

def on_ranks(make, cbs=lambda: [], n=2, **kwargs):
    learns = [make() for _ in range(2)]
    def f(r): return outcome(fit(learns[r].to_tpu_distributed(**kwargs), n, own := cbs())),[o.history for o in own if isinstance(o, EvalEvery)]
    return run_replicas(f)

def test_on_replicas():
    "Each has its statistics of BatchNorm again after they were averaged; with shards, what one process has"
    def make(): return learner(bs=4, model=dropping)
    (a,_),_ = on_ranks(make)
    (b,seen),(c,others) = on_ranks(make, lambda: every(4))
    near(a[0], b[0], 0, 0)
    near(b, c, 0, 0, equal_nan=True)
    assert seen==others and len(seen[1])==5 and a[1]==[o[:3] for o in b[1]]

def test_cadences_on_replicas():
    "`examples` are those of both ranks, and a function predicts on each"
    one = cadences()
    fit(learner(), 2, one)
    for _,seen in on_ranks(lambda: learner(bs=4), lambda: cadences(4), sync_bn=True):
        for want,got in zip([o.history for o in one], seen): torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-3, atol=1e-4)

# ---- mixtures and splits

def timms_training(n=2):
    "timm's loop on the same batches: its model, loss and step"
    learn = split_learner()
    model,loss = learn.model,JsdCrossEntropy(3)
    opt = torch.optim.SGD(model.parameters(), .05)
    set_seed(7)
    for _ in range(n):
        for x,y in learn.dls.train:
            loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return weights(model)

def steadily(learn, cbs=None):
    set_seed(7)
    with learn.no_bar(),learn.no_logging(): learn.fit(2, .05, cbs=cbs)
    return learn

def test_splits_of_mixed_pictures_as_timm():
    want,stats = timms_training(),XLAStats()
    plain,learn = steadily(split_learner()),steadily(to_tpu(split_learner()), [stats, split_eval()])
    near(want, weights(plain.model))
    near(outcome(plain)[0], weights(learn.model))
    same([o[:3] for o in learn.recorder.values], [list(o) for o in plain.recorder.values])
    assert learn.replay.n_replayed>2 and {o.compiles for o in stats.steps[3:]}=={0}

def test_goes_on():
    "Killed in an epoch after a batch in whose wake a set was validated; to the last bit"
    def run(*cbs):
        other,counts = split_eval(),MixtureCounts()
        return outcome(steadily(to_tpu(split_learner(cbs=cbs)), [other, counts])),other.history,counts.seen
    want = run()
    with pytest.raises(KeyboardInterrupt): run(TPUCheckpoint('run', every=3), Dies(4))
    got = run(resume_from('run', every=3))
    near(want[0], got[0], 0, 0, equal_nan=True)
    assert want[1:]==got[1:] and len(got[1])==2 and sum(got[2])==64

class Drawn(Callback):
    "Counts the samples of batches of a mixture by looking at them, until `most` batches were trained on"
    def __init__(self, low, most=None): self.low,self.most,self.seen = low,most,[0,0]
    def before_batch(self):
        if not self.training: return
        n = len(self.y)//3 # of three views
        n_low = sum(any(torch.equal(o, p) for p in self.low) for o in to_host(self.x[:n]))
        self.seen = [self.seen[0]+n_low, self.seen[1]+n-n_low]
    def after_batch(self):
        if self.training and self.train_iter==self.most: raise CancelFitException

def test_counts_of_a_mixture():
    "Those that were trained on, by what the batches hold; also of an epoch that is left early"
    low = [image2tensor(picture(i)).float()/255 for i in range(16)]
    for to in (noop, to_tpu):
        for most,n in ((None,64), (6,48)):
            counts,looked = MixtureCounts(),Drawn(low, most)
            learn = fit(to(split_learner()), 2, [counts, looked])
            assert counts.seen==looked.seen and sum(counts.seen)==n and counts.seen[0]>counts.seen[1]
            if most is None: assert learn.recorder.metric_names[-3:]==['seen_low','seen_high','time'] and list(learn.recorder.values[-1][-2:])==counts.seen

def test_splits_and_mixtures_on_ranks():
    "BatchNorm by the global batch has the views of all ranks, and timm's what follows it"
    other = split_eval()
    want = outcome(fit(split_learner(), cbs=other))
    for got,seen in on_ranks(lambda: split_learner(4), lambda: [split_eval(4)], sync_bn=True):
        near(want, got, 1e-3, 1e-4, equal_nan=True)
        same(other.history, seen[0])
