"Tiny data, Learners and comparisons that the tests share."
import os
os.environ.setdefault('PJRT_DEVICE', 'CPU')
import matplotlib; matplotlib.use('Agg')
import gc, multiprocessing, threading, zipfile
from collections.abc import Mapping
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.patches.registry import Loan
from fastai_xla.train.meters import DeviceMetric
from fastai_xla.runtime import xla_device
from all_cores import all_cores, take_form

for _nm in [o for o in dir() if o.startswith('test')]: del globals()[_nm]   # fastcore's own would be collected as tests

take_form()
DEVICE = xla_device()   # a CPU backward before the device is first used would break the XLA backward of this process

# ---- data and Learners

def vectors(n, n_in=8, n_cls=3, seed=0):
    "`n` pairs of a vector and the class that it determines"
    x = torch.randn(n, n_in, generator=torch.Generator().manual_seed(seed))
    return list(zip(x, x[:, :n_cls].argmax(1)))

def dls_of(train, valid, bs=8, num_workers=0, dl_type=TfmdDL, **kwargs):
    "`DataLoaders` over two lists of samples"
    return DataLoaders(dl_type(train, bs=bs, shuffle=True, drop_last=True, num_workers=num_workers, **kwargs),
                       dl_type(valid, bs=bs, num_workers=num_workers, **kwargs))

def mlp(n_in=8, n_out=3):
    "A small model with a BatchNorm; no bias before it, whose gradient would be rounding noise"
    return nn.Sequential(nn.Linear(n_in, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, n_out))

def two_groups(m): return L(m[:2], m[2:]).map(params)

def mlp_learner(n_trn=48, n_val=20, bs=8, num_workers=0, n_cls=3, path='.', **kwargs):
    "Six batches of 8 to train, two batches and a half to validate, two parameter groups"
    dls = dls_of(vectors(n_trn, n_cls=n_cls), vectors(n_val, n_cls=n_cls, seed=1), bs=bs, num_workers=num_workers)
    defaults = dict(loss_func=CrossEntropyLossFlat(), splitter=two_groups, metrics=accuracy)
    return Learner(dls, mlp(n_out=n_cls), path=path, **{**defaults, **kwargs})

def images(n, sz=8, seed=0):
    "`n` pairs of a noisy picture and its label: the colour that is brightest"
    rng = np.random.RandomState(seed)
    def one(i):
        a = rng.randint(0, 160, (sz,sz,3))
        a[..., i%3] += 80
        return a.astype(np.uint8), 'rgb'[i%3]
    return [one(i) for i in range(n)]

def cnn(): return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))

def image_dls(n_trn=24, n_val=11, bs=6, num_workers=0, tfms=None, item_tfms=None, **kwargs):
    block = DataBlock((ImageBlock, CategoryBlock), get_x=ItemGetter(0), get_y=ItemGetter(1), item_tfms=item_tfms,
                      splitter=IndexSplitter(range(n_trn, n_trn+n_val)), batch_tfms=tfms)
    return block.dataloaders(images(n_trn+n_val), bs=bs, num_workers=num_workers, **kwargs)

def image_learner(path='.', metrics=accuracy, opt_func=Adam, cbs=None, **kwargs):
    "Four batches of 6 pictures to train, 11 pictures to validate; needs fastai alone to be unpickled"
    return Learner(image_dls(**kwargs), cnn(), loss_func=CrossEntropyLossFlat(), metrics=metrics, opt_func=opt_func, cbs=cbs, path=path)

class Tied(nn.Module):
    "Embedding and decoder share one weight"
    def __init__(self, n=11, d=8):
        super().__init__()
        self.emb,self.dec = nn.Embedding(n, d),nn.Linear(d, n)
        self.dec.weight = self.emb.weight
    def forward(self, x): return self.dec(self.emb(x).mean(1))

def tied_learner(path='.', **kwargs):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 11, (60,4), generator=g)
    samples = list(zip(x, x[:,0]))
    return Learner(dls_of(samples[:40], samples[40:]), Tied(), loss_func=CrossEntropyLossFlat(), path=path, **kwargs)

# ---- DataLoaders of every kind

def _vision_dls(target, *get_y):
    "Pictures, with targets that are made of their first byte and the picture itself"
    ims = [o[0] for o in images(19, 16)]
    block = DataBlock((ImageBlock, *target), getters=[lambda i: PILImage.create(ims[i]), *[partial(lambda i, f: f(ims[i], int(ims[i][0,0,0])), f=f) for f in get_y]],
                      n_inp=1, splitter=IndexSplitter(range(12, 19)))
    return block.dataloaders(range(19), bs=4, num_workers=0)

def _table_dls():
    from fastai.tabular.all import TabularPandas, Categorify, CategoryBlock
    df = pd.DataFrame(dict(a=list('xyz'*7), b=np.arange(21.), y=list('pqq'*7)))
    return TabularPandas(df, procs=[Categorify], cat_names=['a'], cont_names=['b'], y_names='y', y_block=CategoryBlock(),
                         splits=(L(range(14)), L(range(14, 21)))).dataloaders(bs=4, num_workers=0)

def _collab_dls():
    from fastai.collab import CollabDataLoaders
    return CollabDataLoaders.from_df(pd.DataFrame(dict(u=np.arange(30)%7, i=np.arange(30)%5, r=np.arange(30)/6.)), seed=1, bs=4, num_workers=0)

def _lm_dls():
    from fastai.text.all import LMDataLoader
    texts = [torch.arange(n)+n for n in (13,22,9,31,18,25)]
    return DataLoaders(*[LMDataLoader(texts, bs=4, seq_len=5, num_workers=0) for _ in range(2)])

def _sorted_dls():
    from fastai.text.all import SortedDL, TensorText, pad_input
    samples = [(TensorText(torch.arange(2+i*5%9)+1), i%3) for i in range(19)]
    return DataLoaders(*[SortedDL(samples, bs=4, shuffle=s, num_workers=0, before_batch=partial(pad_input, pad_idx=0)) for s in (True,False)])

KINDS = dict(image=lambda: image_dls(n_trn=12, n_val=7, bs=4),
    segmentation=lambda: _vision_dls([MaskBlock(codes=['a','b'])], lambda im,k: PILMask.create((im[...,0]>110).astype(np.uint8))),
    points=lambda: _vision_dls([PointBlock], lambda im,k: [[3.,4.],[k%16,9.]]),
    boxes=lambda: _vision_dls([BBoxBlock, BBoxLblBlock], lambda im,k: [[2,3,9,12],[1,1,k%8+4,8]][:1+k%2], lambda im,k: ['p','q'][:1+k%2]),
    table=_table_dls, collab=_collab_dls, lm=_lm_dls, sorted=_sorted_dls)

# ---- a plain Learner and its twin

def twin(mk=mlp_learner, tpu=False, batch_tfms='auto', **kwargs):
    "A Learner with the seeds that all twins have, with `to_tpu` or without"
    set_seed(42)
    learn = mk(**kwargs)
    if tpu: learn.to_tpu(batch_tfms=batch_tfms)
    set_seed(7)
    return learn

def both(f, mk=mlp_learner, batch_tfms='auto', **kwargs):
    "Run `f` on a plain Learner and then on its twin on the device: `plain, tpu, f(plain), f(tpu)`"
    plain = twin(mk, **kwargs)
    r_plain = f(plain)
    tpu = twin(mk, tpu=True, batch_tfms=batch_tfms, **kwargs)
    return plain, tpu, r_plain, f(tpu)

# ---- comparisons

def tensors(o):
    "Every tensor in a nest of containers"
    if isinstance(o, Tensor): return [o]
    if isinstance(o, Mapping): o = list(o.values())
    return [t for x in o for t in tensors(x)] if is_listy(o) else []

def devices(o): return {t.device.type for t in tensors(o)}

def close(want, got, rtol=1e-4, atol=1e-5, at=''):
    "Assert that two nests have the same types and structure, and values within tolerance"
    if isinstance(want, Tensor):
        assert type(got) is type(want), f'{at}: {type(got)} is not {type(want)}'
        want,got = (o.detach().cpu().as_subclass(Tensor) for o in (want,got))
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f'at {at or "top"}: {m}')
    elif isinstance(want, Mapping):
        assert set(want)==set(got), f'{at}: {set(got)} are not {set(want)}'
        for k in want: close(want[k], got[k], rtol, atol, f'{at}.{k}')
    elif is_listy(want):
        assert len(want)==len(got), f'{at}: {len(got)} values are not {len(want)}'
        for i,(a,b) in enumerate(zip(want, got)): close(a, b, rtol, atol, f'{at}[{i}]')
    elif isinstance(want, float):
        assert isinstance(got, float), f'{at}: {type(got)} is no float'
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=at)
    else: assert got==want, f'{at}: {got!r} is not {want!r}'

def as_numbers(o):
    "A nest with its 0-d tensors as numbers: what an optimizer keeps as a number on one side may be a tensor on the other"
    if isinstance(o, Tensor): return o if o.ndim else o.item()
    if isinstance(o, Mapping): return {k: as_numbers(v) for k,v in o.items()}
    return [as_numbers(v) for v in o] if is_listy(o) else o

def state(learn):
    "Weights, buffers, optimizer state and hyper-parameters"
    m,opt = learn.model,learn.opt
    return dict(model=dict(m.state_dict()), opt=as_numbers(opt.state_dict()), hypers=[dict(h) for h in opt.hypers], frozen_idx=opt.frozen_idx,
                grad={n:p.requires_grad for n,p in m.named_parameters()}, training=m.training)

def snapshot(learn):
    "Copies of the model's and the optimizer's tensors, on the host"
    s = state(learn)
    return {k: [t.detach().cpu().clone() for t in tensors(s[k])] for k in ('model','opt')}

def record(learn):
    "What the Recorder knows of the last fit"
    r = learn.recorder
    return dict(values=list(r.values), losses=list(r.losses), lrs=list(r.lrs), iters=list(r.iters), names=list(r.metric_names))

def same(plain, tpu, **tol):
    "Assert that two Learners have equal state and history"
    close(record(plain), record(tpu), at='recorder', **tol)
    close(state(plain), state(tpu), at='learner', **tol)

def opt_tensors(opt):
    "Every tensor of an optimizer's state, a wrapped optimizer's and slow weights included"
    inner = getattr(opt, 'opt', opt)
    return tensors([list(opt.state.values()), list(inner.state.values()), getattr(opt, 'slow_weights', None) or []])

def opt_params(opt): return [p for pg in opt.param_lists for p in pg]

def on_device(learn):
    "Assert that model and optimizer are on the device, and are one"
    _placed(learn, 'xla')
    assert sum(isinstance(cb, TPUTrainer) for cb in learn.cbs)==1 and learn.tpu_trainer in learn.cbs

def on_host(learn):
    "Assert that `learn` is a plain Learner on the CPU"
    _placed(learn, 'cpu')
    assert not any(isinstance(cb, TPUTrainer) for cb in learn.cbs) and not hasattr(learn, 'tpu_trainer')
    left = [(type(o).__name__,k) for o in (learn, *learn.cbs) for k,v in vars(o).items() if 'xla' in devices(v)]
    assert not left, f'on the device still: {left}'

def _placed(learn, kind):
    m,opt = learn.model,learn.opt
    assert devices(list(m.parameters())+list(m.buffers()))=={kind}
    if opt is None: return
    assert {id(p) for p in opt_params(opt)} <= {id(p) for p in m.parameters()}
    assert devices([t for t in opt_tensors(opt) if t.ndim]) <= {kind}          # torch keeps its 0-d step counts on the CPU

def assert_no_xla(fname):
    "Assert that a file of `torch.save` does not mention XLA, neither a device nor this package"
    with zipfile.ZipFile(fname) as z: names = {n: z.read(n) for n in z.namelist() if n.endswith('data.pkl')}
    assert names and not any(b'xla' in v.lower() for v in names.values())

def lent(learn):
    "What is lent to the callbacks, the optimizer and the modules of `learn`, and which meters and device are not its own"
    own = [*learn.cbs, *[o for o in (learn.opt, getattr(learn.opt, 'opt', None)) if o], *learn.model.modules()]
    rec = getattr(learn, 'recorder', None)
    meters = [*learn.metrics, *([rec.loss, rec.smooth_loss] if rec else [])]
    res = [f'{type(o).__name__}.{k}' for o in own for k,v in vars(o).items() if isinstance(v, Loan)]
    res += [type(m).__name__ for m in meters if isinstance(m, DeviceMetric)]
    return sorted(res + [str(o) for o in L(vars(learn.dls).get('_device', None)) if torch.device(o).type=='xla'])

@contextmanager
def nothing_left():
    "Assert that no thread and no worker process outlives the block"
    gc.collect()
    before,children = set(threading.enumerate()),set(multiprocessing.active_children())
    yield
    left = [t for t in threading.enumerate() if t not in before]
    for t in left: t.join(.5)                                                  # a thread that is about to end may end
    assert not [t for t in left if t.is_alive()], f'threads left: {left}'
    left = set(multiprocessing.active_children())-children
    assert not left, f'processes left: {left}'

class Stop(Callback):
    "Raise `exc` in event `name` of batch `at` of training, or of validation"
    def __init__(self, exc, name='after_pred', at=2, train=True):
        self.exc,self.at,self.train = exc,at,train
        setattr(self, name, self._stop)
    def _stop(self):
        if self.iter==self.at and self.training==self.train: raise self.exc
