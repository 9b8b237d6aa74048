"Averages of the weights: timm's in plain fastai, on one core and on replicas; validated, saved, resumed, and no read or program more."
import os
import pytest
from threads import ReplicaError
from threads import run_replicas, use_virtual_cores
use_virtual_cores(2)
from synth import * # starts the device
from recipes import *
from fastai.callback.training import GradientAccumulation

def to_tpu(learn): return learn.to_tpu()

def ours(to=noop, every=1, ema=warm, cbs=(), n=2, **kwargs): return ends(fit(to(learner(**kwargs)), n, [EMACallback(every=every, **ema), *cbs]))

torch_adamw = partial(OptimWrapper, opt=torch.optim.AdamW)
cases = dict(warm=dict(), flat=dict(ema=dict(decay=.9)), every=dict(every=3),
    torch=dict(opt_func=torch_adamw), lookahead=dict(opt_func=ranger), waits=dict(cbs=[GradientAccumulation(16)]))

@pytest.mark.parametrize('case', cases)
def test_as_timm(case):
    want = timms(**cases[case])
    for to in (to_tpu, noop): near(want, ours(to, **cases[case]))

def test_no_read_no_program_and_steps_are_run_again():
    def trained(cbs, **kwargs):
        stats,learn,before = XLAStats(),learner(n=160).to_tpu(fetch_every=1e9, **kwargs),xla_counts().reads
        return fit(learn, 3, [*cbs, stats]),stats.steps,xla_counts().reads-before
    plain,*_ = trained([])
    again,steps,_ = trained([EMACallback(**warm)])
    assert plain.recorder.losses==again.recorder.losses # training is what it is without
    traced,traced_steps,reads = trained([EMACallback(**warm)], replay=False)
    assert reads==trained([], replay=False)[2] # when the model takes the averages nothing goes through the host
    assert {o.compiles for o in steps[1:]}=={0} and {(o.compiles,o.reads) for o in traced_steps[2:]}=={(0,0)}
    assert again.replay.n_replayed>50 and plain.replay.n_replayed>50
    near(ends(traced), ends(again), 0, 0)

def test_saves_what_was_validated():
    for to in (noop, to_tpu):
        learn = fit(to(learner()), 3, [EMACallback(**warm), SaveModelCallback(fname='best')])
        best = min(o[1] for o in learn.recorder.values)
        for load in (noop, learn.load):
            load('best')
            assert abs(learn.validate()[0]-best)<1e-5

def test_validates_with_the_weights_that_are_trained():
    averages,raw = timms()[0],outcome(fit(learner()))[1]
    for to in (noop, to_tpu): near((averages, raw), ours(to, ema=dict(warm, validate=False)))

class Begins(Callback):
    "The weights before the first step"
    def before_train(self): self.weights = weights(self.model)

def test_an_error_and_lr_find_leave_nothing_behind():
    class Fails(Callback):
        def after_step(self):
            if self.train_iter==5: raise KeyError('on purpose')
    learn = learner().to_tpu()
    with pytest.raises(KeyError): fit(learn, cbs=[EMACallback(**warm), Fails()])
    ends(fit(learn, 1, EMACallback(**warm)))
    with learn.no_bar(),learn.no_logging(),learn.added_cbs(EMACallback()): learn.lr_find(num_it=5, show_plot=False)
    ends(learn)

def test_an_epoch_without_training():
    class LeaveOut(Callback):
        def before_train(self):
            if self.epoch==1: raise CancelTrainException
    learn = fit(to_tpu(learner()), 2, [EMACallback(**warm), LeaveOut()])
    assert learn.recorder.values[0][-2:]==learn.recorder.values[1][-2:]
    ends(learn)

def trained(*cbs, to=to_tpu, fits=2, **kwargs):
    "What comes out of fits of 11 batches an epoch, with those to validate"
    learn = to(learner(cbs=cbs, **kwargs))
    for _ in range(fits): fit(learn, cbs=EMACallback(**warm))
    return ends(learn)

@pytest.mark.parametrize('opt_func,deaths', [(Adam, ((21,3), (13,None))), (torch_adamw, [(15,3)])], ids=['Adam','AdamW'])
def test_goes_on_to_the_last_bit(opt_func, deaths):
    "Killed in validation, after an epoch, and in an epoch"
    want = trained(opt_func=opt_func)
    for at,every in deaths:
        shutil.rmtree('run', ignore_errors=True)
        with pytest.raises(KeyboardInterrupt): trained(TPUCheckpoint('run', every=every), Dies(at), opt_func=opt_func)
        near(want, trained(resume_from('run', every=every), opt_func=opt_func), 0, 0)

def test_the_next_fit_begins_with_the_averages():
    learn,seen = fit(learner().to_tpu(), cbs=EMACallback(**warm)),Begins()
    start = weights(learn.model)
    fit(learn, 1, [EMACallback(**warm), seen])
    near(start, seen.weights, 0, 0)

def test_a_fit_that_had_ended_goes_on():
    def one(*cbs, n=1): return fit(to_tpu(learner(cbs=[resume_from('run'), *cbs])), n, EMACallback(**warm))
    start,seen = weights(one().model),Begins()
    ends(one(seen, n=2))
    near(start, seen.weights, 0, 0)

def on_ranks(cbs=lambda r: [], **kwargs):
    "The outcome of each replica; BatchNorm by the global batch, so that it is what one process does"
    learns = [learner(bs=4) for _ in range(2)]
    def f(r):
        learn = learns[r].to_tpu_distributed(**{'sync_bn': True, **kwargs})
        learn.add_cbs(cbs(r))
        return ends(fit(learn, cbs=EMACallback(**warm)))
    return run_replicas(f)

def test_on_replicas():
    want = timms()
    for got in on_ranks(): near(want, got, 1e-3, 1e-4)
    a,b = on_ranks(sync_bn='stats')
    near(a, b, 0, 0) # each has its own batches, and after training the mean of all
