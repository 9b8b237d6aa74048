"Batches arrive on the device as fastai made them, exact to the last sample, and nothing outlives a fit. Tolerance: 1e-4 relative, 1e-5 absolute, unless said."
import sys, traceback
from contextlib import nullcontext
import pytest
from torch.utils.data import DataLoader as TorchDL, IterableDataset
from fastai.callback.data import PartialDL, WeightedDL
from fastai.callback.training import ShortEpochCallback
from synth import *

def sent(dl, **kwargs): return XLADL(dl, DEVICE, **kwargs)

# ---- what arrives

class Point(TensorBase): pass

def samples():
    "Nested containers, dicts, every common dtype, a subclass with metadata, and text beside the tensors"
    def one(i): return ((torch.full((2,), float(i)), [torch.tensor(i), torch.tensor(i, dtype=torch.int32)]),
        dict(a=torch.full((3,), i%2==0), b=torch.full((1,), i, dtype=torch.uint8), h=torch.full((2,), i, dtype=torch.float16)), Point(torch.ones(2)*i, size=(4,5)), f'name{i}', i)
    return [one(i) for i in range(8)]

def test_structure_dtypes_and_metadata_are_kept():
    def structure(o):
        if isinstance(o, Tensor): return type(o),o.dtype,tuple(o.shape),dict(o.__dict__)
        if isinstance(o, Mapping): return {k: structure(v) for k,v in o.items()}
        return [type(o), *map(structure, o)] if is_listy(o) else o
    dl = TorchDL(samples(), batch_size=4)
    want,got = list(dl),list(sent(dl))
    assert structure(got)==structure(want) and devices(got)=={'xla'}
    close(want, got, rtol=0, atol=0)

def test_batches_of_workers_are_sent_ahead(monkeypatch):
    "While the training thread has the first batch, the third is sent; without workers a batch is made when it is asked for, as in fastai"
    for num_workers,n in ((1,3), (0,1)):
        ns,enough = [],threading.Event()
        def note(self, b, stock=XLADL._send):
            ns.append(threading.current_thread().name)
            if len(ns)==n: enough.set()
            return stock(self, b)
        monkeypatch.setattr(XLADL, '_send', note)
        it = iter(sent(dls_of(vectors(80), vectors(20), num_workers=num_workers).train))
        next(it)
        assert enough.wait(60)
        it.close()
        monkeypatch.undo()
        assert {*ns}=={'XLADL'} if num_workers else ns==['MainThread']

# ---- exact to the last sample

@pytest.mark.parametrize('n', [1, 8, 20])
def test_validation_of_any_size_is_exact(n):
    def f(learn):
        learn.fit(1, 1e-2)
        return learn.validate(), learn.get_preds(with_loss=True, with_input=True)
    plain,tpu,want,got = both(f, n_val=n, metrics=[accuracy, F1Score(average='macro'), Perplexity()])
    close(want, got)
    assert len(got[1][1])==n
    same(plain, tpu)

class Shapes(Callback):
    "Shapes that the model saw, and those that callbacks and metrics see"
    order = 95
    def before_fit(self): self.model_saw,self.seen,self.hook = set(),[],self.model[0].register_forward_pre_hook(lambda m,i: self.model_saw.add(tuple(i[0].shape)))
    def after_batch(self): self.seen.append((len(self.xb[0]), len(self.yb[0]), len(self.pred)))
    def after_fit(self): self.hook.remove()

def test_the_model_sees_one_shape_and_callbacks_the_real_samples():
    learn = twin(tpu=True)
    learn.validate(cbs=(cb := Shapes()))
    assert cb.model_saw=={(8,8)} and cb.seen==[(8,8,8), (8,8,8), (4,4,4)]

class Sum(nn.Module):
    "Of two layers, which take what a dict has, or two inputs; names of samples are for nobody"
    def __init__(self, two=False):
        super().__init__()
        self.a,self.b,self.two = nn.Linear(4, 3),nn.Linear(4, 3),two
    def forward(self, x, *more):
        a,b = (x['a'],x['b']) if isinstance(x, dict) else (x,more[0]) if self.two else (x[:,:4],x[:,4:])
        if more and not self.two: assert len(more[0])==len(x) and more[0][0].startswith('n')
        return (self.a(a),self.b(b)) if self.two else self.a(a)+self.b(b)

def of_samples(f, n_inp=1, loss=None, two=False, n_val=20):
    dls = dls_of(*[[f(x, y) for x,y in vectors(n, seed=s)] for n,s in ((48,0), (n_val,1))])
    dls.n_inp = n_inp
    return Learner(dls, Sum(two), loss_func=loss or CrossEntropyLossFlat())

def loss_of_two(pred, y1, y2): return F.cross_entropy(pred[0], y1) + F.mse_loss(pred[1], y2)

def odd():
    learn = mlp_learner(n_trn=44)
    learn.dls.train = learn.dls.train.new(drop_last=False)
    return learn

MADE_OF = dict(odd_last_batch=odd, dict=lambda: of_samples(lambda x,y: (dict(a=x[:4], b=x[4:]), y)), text_beside=lambda: of_samples(lambda x,y: (x, f'n{y}', y), 2, n_val=16),
    two_of_each=lambda: of_samples(lambda x,y: (x[:4], x[4:], y, x[:3]), 2, loss_of_two, True))

@pytest.mark.parametrize('mk', MADE_OF.values(), ids=MADE_OF)
def test_samples_of_any_structure(mk):
    plain,tpu,want,got = both(lambda l: (l.fit(2, 1e-2), l.get_preds(act=noop)), mk)
    same(plain, tpu)
    close(want, got)

# ---- kinds of loaders

class Stream(IterableDataset):
    n_inp = 1                                              # or plain fastai would take a sample away to find out
    def __init__(self, items): self.items = items
    def __iter__(self): return iter(self.items)

LOADERS = dict(
    workers  = lambda: dls_of(vectors(48), vectors(20, seed=1), num_workers=2),
    partial  = lambda: DataLoaders(PartialDL(vectors(80), bs=8, partial_n=32, num_workers=0), TfmdDL(vectors(20, seed=1), bs=8, num_workers=0)),
    weighted = lambda: DataLoaders(WeightedDL(vectors(48), bs=8, wgts=np.arange(48.)+1, shuffle=True, num_workers=0), TfmdDL(vectors(20, seed=1), bs=8, num_workers=0)),
    stream   = lambda: DataLoaders(TfmdDL(Stream(vectors(48)), bs=8, n=48, num_workers=0), TfmdDL(Stream(vectors(20, seed=1)), bs=8, n=20, num_workers=0)),
    torch    = lambda: DataLoaders(TorchDL(vectors(48), batch_size=8, shuffle=True), TorchDL(vectors(20, seed=1), batch_size=8)),
    torch_workers = lambda: DataLoaders(TorchDL(vectors(48), batch_size=8), TorchDL(vectors(20, seed=1), batch_size=8, num_workers=2)),
    no_valid = lambda: DataLoaders(TfmdDL(vectors(48), bs=8, num_workers=0), TfmdDL([], bs=8, num_workers=0)))

@pytest.mark.parametrize('mk', LOADERS.values(), ids=LOADERS)
def test_kinds_of_loaders(mk):
    with nothing_left():
        plain,tpu,want,got = both(lambda l: (l.fit(2, 1e-2), l.fit(1, 1e-2), l.validate()), lambda: Learner(mk(), mlp(), loss_func=CrossEntropyLossFlat(), metrics=accuracy))
    on_device(tpu)
    same(plain, tpu)
    close(want, got)

def test_preds_of_a_torch_loader_and_of_a_list():
    learn = twin()
    learn.fit(1)
    batches = list(learn.dls.valid)
    torch_dl = TorchDL(vectors(20, seed=1), batch_size=8)
    def f(): return [learn.get_preds(dl=batches, with_loss=True), learn.get_preds(dl=torch_dl, with_loss=True), learn.get_preds(dl=[batches[0][:1]])]
    want = f()
    learn.to_tpu()
    got = f()
    close(want, got)
    assert len(got[0][0])==20 and devices(batches)=={'cpu'}
    close(learn.validate(dl=batches), learn.validate())

# ---- batch transforms

def tfms(): return [Normalize.from_stats(*imagenet_stats)]
def random_tfms(): return [*aug_transforms(size=8, min_scale=.8, max_lighting=.3), Normalize.from_stats(*imagenet_stats)]

@pytest.mark.parametrize('mode,mk', [('host',random_tfms), ('device',tfms), ('auto',tfms)])
def test_transforms(mode, mk):
    "Random ones of the host are those of plain fastai"
    def f(learn):
        learn.fit(2, 1e-2)
        return learn.get_preds(ds_idx=0, with_input=True)
    plain,tpu,want,got = both(f, image_learner, batch_tfms=mode, tfms=mk())
    close(want, got)
    same(plain, tpu)
    assert {row[1] for row in tpu.tfm_placement.rows}=={'host' if mode=='host' else 'device'}
    norm = [t for t in tpu.dls.train.after_batch.fs if isinstance(t, Normalize)][0]
    assert devices([norm.mean,norm.std])=={'cpu'} and devices(tpu.dls.one_batch())=={'xla'}

def drawn(num_workers, prefetch=2, plain=False, stop=None, batch_tfms='host', **kwargs):
    "Pictures of two epochs, and a draw after them; the first epoch ends before batch `stop`"
    dl = twin(image_dls, num_workers=num_workers, **kwargs).train
    if not plain: dl = sent(dl, batch_tfms=batch_tfms, prefetch=prefetch)
    return [[b[0].cpu() for b,_ in zip(dl, range(n or len(dl)))] for n in (stop,None)], random.random()

@pytest.mark.parametrize('stop', [None, 2])
def test_draws(stop):
    "Of item and batch transforms, which take turns at one sequence, also where an epoch was left early: with workers they do not depend on their number, without them they are plain fastai's"
    f = partial(drawn, item_tfms=RandomResizedCrop(8), tfms=random_tfms(), stop=stop)
    want = f(1)
    for nw,prefetch in ((2,4), (3,1)): close(want, f(nw, prefetch), rtol=0, atol=0)
    want,then = f(0, plain=True)
    for mode,prefetch,tol in (('host',1,0), ('device',4,1e-4)):
        got,then1 = f(0, prefetch, batch_tfms=mode)
        close(want, got, rtol=0, atol=tol)
        assert then==then1

# ---- what goes wrong

class Broken:
    "A dataset that breaks at sample `at`"
    def __init__(self, items, at): self.items,self.at = items,at
    def __len__(self): return len(self.items)
    def __getitem__(self, i):
        if i==self.at: raise LookupError(f'sample {i} is broken')
        return self.items[i]

@pytest.mark.parametrize('where,num_workers', [('train',0), ('valid',2), ('preds',0)])
def test_an_exception_of_the_dataset_reaches_the_user(num_workers, where):
    trn,val = (Broken(vectors(48), 30 if where=='train' else -1),Broken(vectors(20, seed=1), -1 if where=='train' else 15))
    def f(learn):
        run = (lambda: learn.get_preds()) if where=='preds' else (lambda: learn.fit(2))
        with nothing_left() if hasattr(learn, 'tpu_trainer') else nullcontext():
            with pytest.raises(LookupError, match='sample (30|15) is broken') as e: run()
            text = ''.join(traceback.format_exception(e.type, e.value, e.tb))
            assert "__getitem__" in text and 'raise LookupError' in text
        return sorted(e.value.args)[0].splitlines()[0]
    plain,tpu,want,got = both(f, lambda: Learner(dls_of(trn, val, num_workers=num_workers), mlp(), loss_func=CrossEntropyLossFlat()))
    assert got.split('worker')[0]==want.split('worker')[0]
    on_device(tpu)
    tpu.dls = dls_of(vectors(48), vectors(20))
    tpu.fit(1)
    on_device(tpu)

ENDS = dict(fit=dict(), short=dict(cbs=ShortEpochCallback(.3)), cancel=dict(cbs=Stop(CancelFitException())), cancel_valid=dict(cbs=Stop(CancelValidException(), at=0, train=False)),
    error=dict(cbs=Stop(ValueError('stop'), at=1)), ctrl_c=dict(cbs=Stop(KeyboardInterrupt(), at=1, train=False)))

@pytest.mark.parametrize('num_workers', [0, 2])
def test_nothing_outlives_a_fit(num_workers):
    "However it ends"
    learn = twin(tpu=True, num_workers=num_workers)
    for name,kwargs in ENDS.items():
        with nothing_left():
            with pytest.raises((ValueError, KeyboardInterrupt)) if name in ('error','ctrl_c') else nullcontext() as e: learn.fit(2, **kwargs)
            assert not [t for t in threading.enumerate() if t.name=='XLADL']
    with nothing_left(): learn.get_preds()
    with nothing_left(): learn.lr_find(num_it=10, show_plot=False, stop_div=False)
    learn.fit(1)
    assert len(learn.recorder.values)==1

@pytest.mark.parametrize('item', [RandomResizedCrop(8), None], ids=['items_draw','batches_draw'])
def test_what_follows_lr_find_is_that_of_plain_fastai(item):
    "That the training diverged is learnt some batches late: what was drawn and shuffled for them does not count"
    def f(learn):
        with learn.no_bar(),learn.no_logging(): found = learn.lr_find(start_lr=1e-2, end_lr=1e6, num_it=60, show_plot=False)
        losses,draws = list(learn.recorder.losses),(random.random(),torch.rand(1).item(),np.random.rand())
        learn.fit(1, 1e-2)
        return losses,found.valley,draws
    plain,tpu,(want,*rest),(got,*others) = both(f, image_learner, item_tfms=item, tfms=random_tfms(), opt_func=SGD)
    assert rest==others and len(want)<50
    close(want, got, rtol=1e-3)
    same(plain, tpu)

# ---- every fastai loader

def _all(dl): return [apply(lambda t: t.cpu() if isinstance(t, Tensor) else t, b) for b in dl]

def _both_seeds(mk, f):
    set_seed(42)
    dls = mk()
    set_seed(7)
    return f(dls)

@pytest.mark.parametrize('mk', KINDS.values(), ids=KINDS)
def test_every_loader_gives_what_it_gave(mk):
    "Types, values and order, for training, validation, `new`, and a loader of other samples"
    def batches(dls, f=noop):
        vals = dls.valid.new(bs=3) if not hasattr(dls.valid, 'make_chunks') else dls.valid
        return [_all(f(dl)) for dl in (dls.train, dls.valid, vals)]
    want,got = _both_seeds(mk, batches),_both_seeds(mk, partial(batches, f=sent))
    assert all(len(o)>1 for o in want)
    close(want, got, rtol=0, atol=1e-6)

# ---- values that plain fastai refuses

def _bad(samples, f, at=37): return [f(*s) if i==at else s for i,s in enumerate(samples)]

def class_learner(y=7, n_val=8, loss_func=None, at=37):
    return Learner(DataLoaders(TfmdDL(_bad(vectors(48), lambda x,_: (x,tensor(y)), at), bs=8, num_workers=0), TfmdDL(vectors(n_val, seed=1), bs=8, num_workers=0)),
                   mlp(), loss_func=loss_func or CrossEntropyLossFlat())

def float_learner(): return Learner(dls_of([(x,y.float()) for x,y in vectors(16)], vectors(8)), mlp(), loss_func=CrossEntropyLossFlat())

def own_loss(pred, y): return F.cross_entropy(pred, y)

class TwoEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.us,self.vs,self.lin = nn.Embedding(5, 4),nn.Embedding(9, 4),nn.Linear(4, 3)
    def forward(self, x):
        u,v = x[:,0],x[:,1]
        return self.lin(self.us(u)*self.vs(v))

def embedding_learner(u=5):
    def ds(n, u): return _bad([(tensor([i%5, i%9]), tensor(i%3)) for i in range(n)], lambda x,y: (tensor([u,1]),y))
    return Learner(DataLoaders(TfmdDL(ds(48, u), bs=8, num_workers=0), TfmdDL(ds(8, 0), bs=8, num_workers=0)), TwoEmbeddings(), loss_func=CrossEntropyLossFlat())

def mask_learner(v=5):
    def im(i): return np.full((8,8,3), i%250, dtype=np.uint8)
    def mask(i): return PILMask.create(np.full((8,8), v if i==13 else i%2, dtype=np.uint8))
    block = DataBlock((ImageBlock, MaskBlock(codes=['a','b'])), getters=[im, mask], splitter=IndexSplitter(range(16, 20)), batch_tfms=[Flip(), Rotate()])
    dls = block.dataloaders(range(20), bs=4, num_workers=0, shuffle=False)
    return Learner(dls, nn.Conv2d(3, 2, 1), loss_func=CrossEntropyLossFlat(axis=1))

REFUSED = dict(class_7=class_learner, first_batch=partial(class_learner, at=1), below_zero=partial(class_learner, y=-1), own_loss=partial(class_learner, loss_func=own_loss),
    floats=float_learner, index=embedding_learner, mask=mask_learner)

@pytest.mark.parametrize('mk', REFUSED.values(), ids=REFUSED)
def test_what_plain_fastai_refuses_is_refused(mk):
    "The same kind of error, with fastai's words and the place"
    def f(learn):
        with pytest.raises(Exception) as e, learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
        return type(e.value),str(e.value)
    with nothing_left(): _,tpu,(want,text),(got,said) = both(f, mk)
    assert got is want and text.split(', but')[0].rstrip('.') in said
    assert want is RuntimeError or re.search(r'sample \d of batch \d has the', said)

def test_values_in_range_are_left_alone():
    "Also one that the loss ignores, an index of the last row, and a target that a transform makes a class number"
    class Less(Transform):
        def encodes(self, o:TensorCategory): return o-4
    def shifted(): return Learner(dls_of(*[[(x,TensorCategory(y+4)) for x,y in vectors(n)] for n in (16,8)], after_batch=Less()), mlp(), loss_func=CrossEntropyLossFlat())
    ignores = CrossEntropyLossFlat(ignore_index=7)
    for mk in (partial(class_learner, loss_func=ignores), partial(embedding_learner, u=4), partial(mask_learner, v=1), shifted):
        plain,tpu,*_ = both(lambda l: l.fit(1, 1e-2), mk)
        close(plain.recorder.values, tpu.recorder.values)
