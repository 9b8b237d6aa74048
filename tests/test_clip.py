"Gradients clipped by value and by units: torch's and timm's, with nothing read, on one core and on replicas."
import pytest
from fastai_xla.virtual_cores import ReplicaError, run_replicas, use_virtual_cores
use_virtual_cores(2)
from synth import * # starts the device
from recipes import *
from fastai.callback.fp16 import MixedPrecision
from timm.utils import adaptive_clip_grad

class ByHand(Callback):
    "What timm's training script calls between the backward pass and the step"
    def __init__(self, f): self.f = f
    def before_step(self): self.f(self.model)

def net(): return nn.Sequential(nn.Unflatten(1, (2,2,2)), nn.Conv2d(2, 6, 2), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, 5), nn.Linear(5, 3))

kinds = dict(value=(lambda: GradientClipValue(.02), lambda m: nn.utils.clip_grad_value_(m.parameters(), .02)),
    agc=(lambda: AdaptiveGradientClip(.02), lambda m: adaptive_clip_grad([*m.parameters()][:-2], .02)),
    whole=(lambda: AdaptiveGradientClip(.1, eps=.2, norm_type=1., exclude_head=False), lambda m: adaptive_clip_grad(m.parameters(), .1, .2, 1.)))

def fitted(cb, to=noop, cbs=(), **kwargs): return fit(to(learner(model=net, splitter=trainable_params, opt_func=SGD, **kwargs)), cbs=[cb, *cbs])

@pytest.mark.parametrize('kind', kinds)
def test_as_torch_and_timm(kind):
    ours,theirs = kinds[kind]
    want,plain = outcome(fitted(ByHand(theirs))),outcome(fitted(ByHand(noop)))
    assert max((want[0][k]-plain[0][k]).abs().max() for k in want[0])>1e-3 # clipping matters
    stats = XLAStats()
    learn = fitted(ours(), lambda o: o.to_tpu(fetch_every=1e9, replay=False), cbs=[stats])
    near(want, outcome(learn))
    assert {(o.reads,o.compiles) for o in stats.steps[2:]}=={(0,0)}
    near(want, outcome(fitted(ours())))
    again = fitted(ours(), lambda o: o.to_tpu(), cbs=[MixedPrecision()] if kind=='value' else [])
    assert again.replay.n_replayed>5, again.replay

def test_on_replicas():
    def on(cb, **kwargs):
        learns = [learner(model=net, splitter=trainable_params, opt_func=SGD, bs=4) for _ in range(2)]
        def f(r): return outcome(fit(learns[r].to_tpu_distributed(sync_bn=True, **kwargs), cbs=cb()))
        return run_replicas(f)
    for kind,kwargs in (('agc',{}), ('value',{}), ('value',dict(fsdp=True))):
        ours,theirs = kinds[kind]
        for got in on(ours, **kwargs): near(outcome(fitted(ByHand(theirs))), got, 1e-3, 1e-4)
    with pytest.raises(ValueError, match='`AdaptiveGradientClip` needs the norms of whole units'): on(kinds['agc'][0], fsdp=True)
