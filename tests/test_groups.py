"Layer-wise rates: each group moves as timm's would, on the device in one operation; and the exported Learner needs nothing of this package for them."
from synth import *
from recipes import *
import timm
from timm.optim import param_groups_layer_decay

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
