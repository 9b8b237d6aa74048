"Validation sets of their own cadence, mixtures of datasets, and timm's augmented splits: on one core and on replicas, beside plain fastai and timm."
import pytest
from fastai_xla.virtual_cores import ReplicaError, run_replicas, use_virtual_cores
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

class Half(TimmEMA):
    "timm's averages, after the third batch"
    def after_batch(self):
        if self.training and self.train_iter==3: self.third = deepcopy(self.ema.module).eval()

def test_averages_are_validated_in_the_middle():
    timm = Half(**warm)
    fit(learner(), 1, timm)
    x,y = map(torch.stack, zip(*vectors(30, 5)))
    for to in (noop, to_tpu):
        noisy = every()[1]
        fit(to(learner()), 1, [EMACallback(**warm), noisy])
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
        other = split_eval()
        return outcome(steadily(to_tpu(split_learner(cbs=cbs)), other)),other.history
    want = run()
    with pytest.raises(KeyboardInterrupt): run(TPUCheckpoint('run', every=3), Dies(4))
    got = run(resume_from('run', every=3))
    near(want[0], got[0], 0, 0, equal_nan=True)
    assert want[1]==got[1] and len(got[1])==2

def test_splits_and_mixtures_in_shards():
    "BatchNorm by the global batch has the views of all ranks, and timm's what follows it"
    other = split_eval()
    want = outcome(fit(split_learner(), cbs=other))
    for got,seen in on_ranks(lambda: split_learner(4), lambda: [split_eval(4)], fsdp=True, sync_bn=True):
        near(want, got, 1e-3, 1e-4, equal_nan=True)
        same(other.history, seen[0])
