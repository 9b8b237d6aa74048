"Small Learners whose training can be repeated to the last bit on the CPU, and what a training run leaves behind, for tests and examples that compare CPU with XLA"
from functools import wraps
import numpy as np, pandas as pd, timm, torch
from fastai.vision.all import *
from fastai.tabular.all import *
from fastai.collab import *
from fastai.text.all import *

OPTS = dict(Adam=Adam, SGD=partial(SGD, mom=0.9), AdamW=partial(OptimWrapper, opt=torch.optim.AdamW, eps=1e-5))
"AdamW has fastai's eps: with torch's 1e-8 a gradient that is zero but for rounding (an attention key's bias) makes a step of pure rounding"
LRS = dict(Adam=3e-3, SGD=1e-2, AdamW=3e-3)

def start_again():
    "The device, after every replacement was undone and made again: `undo_patches` and `apply_patches` leave training as it was"
    from fastai_xla.all import apply_patches, patches_in_force, undo_patches, xla_device
    before = patches_in_force()
    undo_patches()
    assert len(before)>30 and not patches_in_force()
    apply_patches()
    assert patches_in_force()==before
    xla_device()

# ---- data

def images(n=53, sz=40, seed=0):
    "`n` noisy pictures of four kinds of stripes, as (height, width, channel) arrays, with their labels"
    rng,g = np.random.RandomState(seed),np.arange(sz)
    waves = [np.sin(g[:,None]/2)+0*g, np.sin(g/2)+0*g[:,None], np.sin((g+g[:,None])/3), np.sin(g[:,None]/6)*np.sin(g/6)]
    ys = rng.permutation(np.arange(n)%4)
    xs = [np.clip(128+70*waves[y][...,None]+rng.randn(sz, sz, 3)*25, 0, 255).astype(np.uint8) for y in ys]
    return xs,[f'stripes{y}' for y in ys]

def image_dls(sz=24, bs=8, n=53, n_valid=13, batch_tfms=None, src_sz=40):
    "`DataLoaders` of `images`, by default through host transforms that draw nothing random"
    xs,ys = images(n, src_sz)
    if batch_tfms is None: batch_tfms = [Normalize.from_stats(*imagenet_stats)]
    db = DataBlock((ImageBlock, CategoryBlock), get_x=lambda i: xs[i], get_y=lambda i: ys[i], splitter=IndexSplitter(range(n-n_valid, n)),
                   item_tfms=Resize(sz, ResizeMethod.Squish), batch_tfms=batch_tfms)
    return db.dataloaders(range(n), bs=bs, num_workers=0)

def people(n=149, seed=0):
    "A census-like table: categories, numbers on very different scales, holes in both, and a target that depends on them"
    rng = np.random.RandomState(seed)
    df = pd.DataFrame(dict(job=rng.choice(['clerk','farmer','nurse','cook'], n), town=rng.choice(['north','south','east'], n),
                           age=rng.randint(18, 70, n).astype(float), income=rng.lognormal(10, 0.5, n), hours=rng.normal(38, 6, n)))
    score = (df.age-44)/15+(df.job=='nurse')*1.5-(df.town=='east')+(df.income-25000)/12000+rng.normal(0, 0.4, n)
    df['rich'] = np.where(score>0.3, 'yes', 'no')
    for col in ('age','income'): df.loc[rng.choice(n-29, 12, replace=False), col] = np.nan
    df.loc[rng.choice(n, 8, replace=False), 'town'] = None
    return df

def ratings(n=181, seed=0):
    "`n` ratings from 0.5 to 5 by 14 users of 11 films"
    rng = np.random.RandomState(seed)
    u,i,n_f = rng.randint(0, 14, n),rng.randint(0, 11, n),3
    r = (rng.randn(14, n_f)[u]*rng.randn(11, n_f)[i]).sum(1)+3
    return pd.DataFrame(dict(user=[f'u{o}' for o in u], film=[f'film {o}' for o in i], rating=np.clip(np.round(r*2)/2, 0.5, 5)))

def texts(n=53, n_words=8, seed=0):
    "`n` sentences of `n_words` words whose label depends on the words in them"
    rng = np.random.RandomState(seed)
    words = np.array('good fine great bad poor awful film book play story plot the a this that'.split())
    idxs = rng.randint(0, len(words), (n, n_words))
    mood = (idxs<3).sum(1)-((idxs>2)&(idxs<6)).sum(1)
    return pd.DataFrame(dict(text=[' '.join(words[o]) for o in idxs], label=np.where(mood>0, 'pos', 'neg')))

# ---- learners: dropout is 0 everywhere, since the CPU and XLA draw from different generators

def seeded(f):
    "`f` with every random number generator of the host seeded first"
    @wraps(f)
    def _inner(*args, **kwargs):
        set_seed(42, reproducible=True)
        return f(*args, **kwargs)
    return _inner

def halves(model):
    "Two parameter groups: the last child of `model` and what comes before it"
    ms = list(model.children())
    return [params(nn.Sequential(*ms[:-1])), params(ms[-1])]

@seeded
def cnn(opt_func=Adam, **kwargs):
    "Convolutions with BatchNorm on images"
    body = nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 16, stride=2), nn.AdaptiveAvgPool2d(1), Flatten())
    return Learner(image_dls(), nn.Sequential(body, nn.Linear(16, 4)), opt_func=opt_func, splitter=halves, metrics=[accuracy, F1Score(average='macro')], **kwargs)

@seeded
def vit(opt_func=Adam, **kwargs):
    "A timm ViT through `vision_learner`"
    return vision_learner(image_dls(32), 'vit_tiny_patch16_224', pretrained=False, opt_func=opt_func, metrics=[accuracy, Perplexity()],
                          custom_head=nn.Linear(24, 4), img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, **kwargs)

@seeded
def tabular(opt_func=Adam, **kwargs):
    "`tabular_learner` on categories and numbers with missing values"
    df = people()
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, FillMissing, Normalize], cat_names=['job','town'], cont_names=['age','income','hours'],
                                     y_names='rich', y_block=CategoryBlock(), valid_idx=list(range(len(df)-29, len(df))), bs=16)
    return tabular_learner(dls, layers=[20,10], opt_func=opt_func, metrics=[accuracy, RocAucBinary()], splitter=halves, **kwargs)

def _collab(opt_func, use_nn, splitter, **kwargs):
    dls = CollabDataLoaders.from_df(ratings(), seed=3, bs=16)
    return collab_learner(dls, n_factors=6, use_nn=use_nn, y_range=(0,5.5), layers=[12] if use_nn else None, opt_func=opt_func, metrics=[rmse, mae],
                          splitter=splitter, **kwargs)

@seeded
def collab_dot(opt_func=Adam, **kwargs):
    "`collab_learner` with a dot product and biases"
    return _collab(opt_func, False, lambda m: [params(m.u_weight)+params(m.i_weight), params(m.u_bias)+params(m.i_bias)], **kwargs)

@seeded
def collab_nn(opt_func=Adam, **kwargs):
    "`collab_learner` with a neural net"
    return _collab(opt_func, True, halves, **kwargs)

@seeded
def text(opt_func=Adam, seq_len=8, **kwargs):
    """`text_classifier_learner` on sentences of one length. Weights are dropped with a chance of 1e-12, so never: fastai's `WeightDropout` fails with 0.
    No leading BOS and embeddings as large as trained ones: else rows are so alike in some features that BatchNorm makes their rounding a hundred times larger"""
    df = texts()
    db = DataBlock((TextBlock.from_df('text', tok=BaseTokenizer(), seq_len=seq_len, min_freq=1, n_workers=0, rules=[]), CategoryBlock), get_x=ColReader('text'),
                   get_y=ColReader('label'), splitter=IndexSplitter(range(40, len(df))))
    no_drop = dict(output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=1e-12)
    cfg = {**awd_lstm_clas_config, **dict(emb_sz=6, n_hid=8, n_layers=1), **no_drop}
    learn = text_classifier_learner(db.dataloaders(df, bs=8, num_workers=0), AWD_LSTM, config=cfg, pretrained=False, seq_len=seq_len, drop_mult=1., ps=[0.],
                                    lin_ftrs=[10], opt_func=opt_func, metrics=accuracy, **kwargs)
    learn.model[0].module.encoder.weight.data.mul_(10)
    return learn

MODELS = {f.__name__:f for f in (cnn, vit, tabular, collab_dot, collab_nn, text)}

# ---- what a run leaves behind, and how far two runs are apart

def leaves(o, key=''):
    "Numbers and arrays inside nested `o`, by the path that leads to each"
    if isinstance(o, dict): return merge(*[leaves(v, f'{key}.{k}') for k,v in o.items()]) if o else {key+'{}':np.zeros(0)}
    if isinstance(o, (list,tuple,L)): return merge(*[leaves(v, f'{key}.{i}') for i,v in enumerate(o)]) if len(o) else {key+'[]':np.zeros(0)}
    if isinstance(o, torch.Tensor): o = o.detach().cpu().numpy()
    return {key:np.asarray(o, dtype=np.float64)} if o is not None else {key+'=None':np.zeros(0)}

def opt_leaves(opt):
    "What the optimizer saves, and what fastai keeps beside it for each parameter"
    return leaves(dict(saved=opt.state_dict(), kept=[opt.state[p] for p,*_ in opt.all_params()]))

def fits(learn, lr):
    "Two fits in a row, one frozen, one thawed; the history of each"
    res = []
    def fit(f, *args):
        f(*args)
        r = learn.recorder
        vals = list(zip(*r.values))
        res.append({'batch loss':list(r.losses), 'lr':list(r.lrs), 'train loss':vals[0], 'valid loss':vals[1], 'metrics':vals[2:]})
    with learn.no_bar(),learn.no_logging():
        fit(learn.fit_one_cycle, 2, lr)
        fit(learn.fit, 1, lr)
        learn.freeze()
        fit(learn.fit, 1, lr)
        learn.unfreeze()
        fit(learn.fit, 1, slice(lr/10, lr))
    return res

def final(learn):
    "Weights with buffers, optimizer state and predictions"
    with learn.no_bar(): preds,targs,losses = learn.get_preds(with_loss=True)
    return {'weights':leaves(learn.model.state_dict()), 'opt state':opt_leaves(learn.opt), 'preds':leaves(preds), 'targs':leaves(targs), 'pred loss':leaves(losses)}

def outcome(learn, lr):
    "All that two equal runs must agree on: {group: {path: array}}"
    hist = fits(learn, lr)
    return merge({k:leaves([h[k] for h in hist]) for k in hist[0]}, final(learn))

def _scale(group, key, ref):
    "Losses, predictions and weights are compared as they are, optimizer state relative to the largest value of its kind"
    if group!='opt state': return 1.
    kind = key.rpartition('.')[2]
    return max([np.abs(v).max(initial=0) for k,v in ref.items() if k.rpartition('.')[2]==kind]+[1e-30])

def distance(got, ref):
    "The largest difference in each group, after asserting that both hold the same paths and shapes"
    res = {}
    for group,a in ref.items():
        b = got[group]
        assert a.keys()==b.keys(), f'{group}: only in one of them: {sorted(a.keys()^b.keys())}'
        for k in a: assert a[k].shape==b[k].shape, f'{group}{k}: shapes {b[k].shape} and {a[k].shape}'
        assert all(np.isfinite(v).all() for o in (a,b) for v in o.values()), f'{group}: not finite'
        res[group] = max(np.abs(a[k]-b[k]).max(initial=0)/_scale(group, k, a) for k in a)
    return res

TOL = {'lr':0, 'targs':0, 'batch loss':5e-6, 'train loss':5e-6, 'valid loss':5e-6, 'metrics':1e-5, 'weights':2e-5, 'opt state':2e-5, 'preds':5e-6, 'pred loss':1e-5}
"""Largest difference allowed in a group. float32 keeps 6e-8 of a number near 1, and a run makes 25 to 45 steps: losses are off by 1 to 8 units of that.
Metrics such as perplexity are several times larger than the loss; weights gather the rounding of all steps; optimizer state is relative to the largest of its kind"""
TOLS = {**dict.fromkeys(MODELS, TOL), 'text': {**TOL, 'weights':1e-4, 'opt state':2e-4}}
"The text classifier's gradients come through a BatchNorm over features that differ by a fiftieth of their size within a batch: two digits fewer"

def assert_same(got, ref, tol=TOL):
    "Two outcomes agree to `tol`; names the groups that do not"
    far = {k: f'{v:.1e} > {tol[k]:.0e}' for k,v in distance(got, ref).items() if v>tol[k]}
    assert not far, f'largest difference and tolerance: {far}'

def moved(before, after):
    "The largest change of any weight or buffer"
    return max(np.abs(after[k]-before[k]).max(initial=0) for k in before)
