"Gradients clipped by value and by units, and layer-wise rates: torch's and timm's, with nothing read, on one core and on replicas."
import pytest
from threads import ReplicaError
from threads import run_replicas, use_virtual_cores
use_virtual_cores(2)
from synth import * # starts the device
from recipes import *
from fastai.callback.fp16 import MixedPrecision
from timm.utils import adaptive_clip_grad
import timm
from timm.optim import param_groups_layer_decay
from fastai_xla.recipes.optim import timm_layers

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
    def on(cb):
        learns = [learner(model=net, splitter=trainable_params, opt_func=SGD, bs=4) for _ in range(2)]
        def f(r): return outcome(fit(learns[r].to_tpu_distributed(sync_bn=True), cbs=cb()))
        return run_replicas(f)
    for ours,theirs in (kinds['agc'], kinds['value']):
        for got in on(ours): near(outcome(fitted(ByHand(theirs))), got, 1e-3, 1e-4)

# ---- rates by layer

def pictures(**kwargs):
    set_seed(3)
    x = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    items = [(o, torch.tensor(i%2)) for i,o in enumerate(x)]
    model = timm.create_model('test_vit', img_size=32, num_classes=2)
    return Learner(DataLoaders(*[TfmdDL(items, bs=8, num_workers=0) for _ in range(2)]), model, loss_func=CrossEntropyLossFlat(), **kwargs)

torch_adamw = partial(OptimWrapper, opt=torch.optim.AdamW)

def test_as_timms_groups():
    learn = pictures()
    groups = param_groups_layer_decay(learn.model, .05, learn.model.no_weight_decay(), layer_decay=.7)
    learn.opt = OptimWrapper(opt=torch.optim.AdamW([dict(params=o['params'], weight_decay=o['weight_decay']) for o in groups]))
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(2, [1e-3*o['lr_scale'] for o in groups])
    want = weights(learn.model)
    for to in (noop, lambda o: o.to_tpu()):
        decay = LayerDecay(.7, by_wd=True)
        learn = to(pictures(splitter=decay, opt_func=torch_adamw))
        with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(2, decay.lr(learn.model, 1e-3), wd=decay.wd(learn.model, .05))
        near(want, weights(learn.model), 1e-3, 1e-4)

def test_in_vision_learner_and_exported():
    dls = image_dls(item_tfms=Resize(32))
    learn = vision_learner(dls, 'test_vit', pretrained=False, splitter=LayerDecay(.75), metrics=accuracy)
    learn.create_opt()
    rates = learn.splitter.lr(learn.model, 1e-2)
    assert len(rates)==len(learn.opt.hypers)==8 and rates[-1]==1e-2
    assert timm_layers(learn.model)[learn.model[1][-1].weight]==7
    learn.export('m.pkl')
    assert isinstance(learn.splitter, LayerDecay)
    again = load_learner('m.pkl')
    again.create_opt()
    assert len(again.opt.hypers)==8 and type(again.splitter).__module__=='builtins'
