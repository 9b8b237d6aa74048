"""Small Learners of every kind, trained by plain fastai on the CPU and on TorchTPU, and how far apart the results are.

As a script it prints a table: python tests/torch_tpu/workloads.py [NAME ...]. Dropout is off, since a device draws from its own generator."""
import conftest # before torch
import sys, time, warnings
from contextlib import contextmanager
from parity_models import *
from fastai.callback.all import *
import fastai.optimizer as fo
from fastai_xla.all import *

WORK,GROUPS = {},{}
def work(lr=3e-3, loose=1., preds=True, compiles=True, **to_tpu):
    "Decorator: a function that makes a Learner, or that makes one and a function that trains it; `loose` multiplies the tolerances; is its model one that compiles?"
    def _inner(f, name=None):
        name = name or f.__name__
        WORK[name] = SimpleNamespace(f=f, lr=lr, loose=loose, preds=preds, compiles=compiles, to_tpu=to_tpu)
        GROUPS.setdefault(group, []).append(name)
        return f
    return _inner

@contextmanager
def plain_fastai():
    undo_patches()
    try: yield
    finally: apply_patches()

def outcome(make, lr=3e-3, attach=None, preds=True):
    "What the Learner that `make` makes, perhaps with a function that trains it, leaves behind: `{group: {path: array}}`; and the Learner"
    set_seed(42, reproducible=True)
    learn = make()
    learn,fit = learn if isinstance(learn, tuple) else (learn, lambda l: l.fit_one_cycle(2, lr))
    if attach: attach(learn)
    set_seed(7)
    with learn.no_bar(),learn.no_logging(): fit(learn)
    r = learn.recorder
    hist = {'losses':leaves(r.losses), 'metrics':leaves(r.values)}
    with learn.no_bar(): preds,targs = learn.get_preds() if preds else (learn.validate(),None)
    return merge(hist, {'weights':leaves(learn.model.state_dict()), 'opt state':opt_leaves(learn.opt), 'preds':leaves(preds), 'targs':leaves(targs)}), learn

def trained(name, tpu=False):
    w = WORK[name]
    return outcome(w.f, w.lr, (lambda l: l.to_tpu(**w.to_tpu)) if tpu else None, w.preds)

TOL = {'losses':1e-5, 'metrics':2e-5, 'weights':3e-5, 'opt state':5e-5, 'preds':1e-5, 'targs':0}

def compared(name):
    "The largest differences of a workload by group, and the Learner on TorchTPU"
    with plain_fastai(): ref,_ = trained(name)
    got,learn = trained(name, tpu=True)
    assert {p.device.type for p in learn.model.parameters()}=={'tpu'}
    return distance(got, ref),learn

# ---- optimizers

group = 'optimizers'

for _o in (Adam, partial(SGD, mom=.9), partial(SGD, mom=.9, wd=.1, decouple_wd=False), RMSProp, partial(RMSProp, mom=.9), RAdam, QHAdam, Larc, Lamb, ranger,
           partial(OptimWrapper, opt=torch.optim.AdamW, eps=1e-5), partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9)):
    _f = getattr(_o, 'func', _o)
    _nm = _f.__name__ if _f is not OptimWrapper else f"torch's {_o.keywords['opt'].__name__}"
    _nm += ' with l2' if getattr(_o, 'keywords', {}).get('decouple_wd') is False else ' with mom' if _f is RMSProp and _f is not _o else ''
    work()(partial(cnn, _o), f'cnn, {_nm}')

# ---- kinds of model

group = 'models'

@work()
def vit_fine_tuned(): return vit(),lambda l: l.fine_tune(1, 1e-3)

@work()
def resnet18_fine_tuned():
    "With SiLU, and no maxima in its stem: with ReLU and maxima, weights that differ by 1e-7 of themselves change a gradient by half a percent in plain fastai too"
    learn = vision_learner(image_dls(32), 'resnet18', pretrained=False, ps=0., metrics=error_rate, act_layer=nn.SiLU, replace_stem_pool=True)
    return learn,lambda l: l.fine_tune(1, 1e-3)

@work(loose=10)
def timm_convnet():
    return vision_learner(image_dls(32), 'convnext_atto', pretrained=False, ps=0., metrics=accuracy, cut=None)

@work()
def unet():
    xs,_ = images(24, 32)
    ms = [(x[...,0]>128).astype(np.uint8) for x in xs]
    db = DataBlock((ImageBlock, MaskBlock(['a','b'])), get_x=lambda i: xs[i], get_y=lambda i: PILMask.create(ms[i]), splitter=IndexSplitter(range(16, 24)),
        batch_tfms=Normalize.from_stats(*imagenet_stats))
    body = nn.Sequential(*[nn.Sequential(ConvLayer(i, o, stride=2), ConvLayer(o, o)) for i,o in ((3,8),(8,16),(16,16))])
    return Learner(db.dataloaders(range(24), bs=4, num_workers=0), DynamicUnet(body, 2, (32,32), self_attention=True), metrics=[Dice(), foreground_acc])

@work()
def regression_smooth_l1():
    df = people()
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, FillMissing, Normalize], cat_names=['job'], cont_names=['age','income'], y_names='hours',
        y_block=RegressionBlock(), valid_idx=list(range(120, 149)), bs=16)
    return tabular_learner(dls, layers=[20], loss_func=BaseLoss(nn.SmoothL1Loss, floatify=True), y_range=(20, 60), metrics=[mae, R2Score()])

@work()
def table(): return tabular()
@work()
def collab(): return collab_dot()
@work(loose=10)
def text_classifier(): return text()

@work(loose=3, preds=False)
def language_model():
    dls = DataBlock(TextBlock.from_df('text', is_lm=True, tok=BaseTokenizer(), seq_len=6, min_freq=1, n_workers=0, rules=[]), get_x=ColReader('text'),
        splitter=IndexSplitter(range(60, 80))).dataloaders(texts(80), bs=8, seq_len=6, num_workers=0)
    cfg = {**awd_lstm_lm_config, **dict(emb_sz=6, n_hid=8, n_layers=2, output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=1e-12)}
    return language_model_learner(dls, AWD_LSTM, config=cfg, pretrained=False, drop_mult=1., metrics=[accuracy, Perplexity()])

# ---- what is done while it trains

group = 'training'

def small(n=4): return nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 16, stride=2), AdaptiveConcatPool2d(1), Flatten(), nn.Linear(32, n))
def vectors_learner(model, x, y):
    ds = list(zip(x, y))
    dls = DataLoaders(*[TfmdDL(o, bs=8, shuffle=s, num_workers=0) for o,s in ((ds[:40],True), (ds[40:],False))])
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
def with_cbs(*cbs, tfms=None, **kwargs): return Learner(image_dls(batch_tfms=tfms), small(), metrics=[accuracy, F1Score(average='macro')], cbs=list(cbs), **kwargs)

@work()
def augmented(): return with_cbs(tfms=aug_transforms(size=20, xtra_tfms=[])+[Normalize.from_stats(*imagenet_stats)])
@work()
def mixup(): return with_cbs(MixUp())
@work()
def cutmix(): return with_cbs(CutMix())
@work()
def clip_and_accumulate(): return with_cbs(GradientClip(.1), GradientAccumulation(16))
@work(compiles=False)
def nan_guard_and_hooks(): return with_cbs(TerminateOnNaNCallback(), ActivationStats(with_hist=False))
@work()
def lr_found_first():
    def fit(l):
        l.lr_find(num_it=12, show_plot=False)
        l.fit_one_cycle(1, 3e-3)
    return with_cbs(),fit
@work()
def frozen_then_thawed():
    def fit(l):
        l.freeze()
        l.fit(1, 3e-3)
        l.unfreeze()
        l.fit(2, slice(1e-4, 3e-3))
    return cnn(),fit
@work(replay=False)
def operation_by_operation(): return with_cbs()

def main(names):
    warnings.filterwarnings('ignore')
    groups = [k for k in TOL if k!='targs']
    print(f"| workload | {' | '.join(groups)} |\n|---|{'---|'*len(groups)}")
    for name in names or WORK:
        d,_ = compared(name)
        print(f"| {name.replace('_', ' ')} | {' | '.join(f'{d[k]:.0e}' for k in groups)} |", flush=True)

if __name__ == '__main__': main(sys.argv[1:])

def check_parity(name):
    "Assert that `name` trains as in plain fastai, and was compiled unless that was not wanted"
    d,learn = compared(name)
    far = {k: f'{v:.1e} > {TOL[k]*WORK[name].loose:.0e}' for k,v in d.items() if v>TOL[k]*WORK[name].loose}
    assert not far, f'largest difference and tolerance: {far}'
    call = learn.torch_tpu_trainer.call
    assert call is None or (call.why_not is None)==WORK[name].compiles
