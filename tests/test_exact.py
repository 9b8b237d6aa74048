"Four replicas, each with batch B, train and measure as plain fastai does in one process with batch 4*B. Replicas are threads of this process"
from functools import lru_cache, wraps
import pytest
from threads import run_replicas, use_virtual_cores
use_virtual_cores(4)
from synth import *
from metric_cases import CASES, USER_CASES, Scale, metric_learner, metric_values
import fastai.metrics
from fastai.tabular.all import TabDataLoader, TabularPandas, Categorify, FillMissing, Normalize, CategoryBlock
from fastai.text.all import LMDataLoader, SortedDL, ModelResetter
from fastai_xla.distributed.loader import ShardedDL

N,B = 4,4 # replicas, and samples of a batch of one

# ---- the same on one process and on replicas

def seeded(mk, *args, **kwargs):
    set_seed(42)
    return mk(*args, **kwargs)

def on_one(f, mk, **kwargs):
    "What `f` returns for a plain Learner"
    learn = seeded(mk, **kwargs)
    set_seed(7)
    return f(learn)

def on_ranks(f, mk, attach={}, **kwargs):
    "What `f` returns for the Learner of each replica; they are made before, from the same seed"
    learns = [seeded(mk, **kwargs) for _ in range(N)]
    set_seed(7)
    return run_replicas(lambda r: f(learns[r].to_tpu_distributed(**attach)))

def quiet(f):
    @wraps(f)
    def _inner(learn, *args, **kwargs):
        with learn.no_bar(), learn.no_logging(): return f(learn, *args, **kwargs)
    return _inner

def host(o): return apply(lambda t: t.detach().cpu().clone() if isinstance(t, Tensor) else t, o)

def outcome(learn):
    "What training left behind, on the host"
    r = learn.recorder
    vals = [[float('nan') if o is None else float(o) for o in row] for row in r.values]
    return host(dict(values=vals, losses=[float(o) for o in r.losses], lrs=[float(o) for o in r.lrs], model=dict(learn.model.state_dict()), opt=as_numbers(learn.opt.state_dict())))

@quiet
def fitted(learn, n=2, lr=.1, cb=None):
    learn.fit(n, lr, cbs=cb and cb())
    return outcome(learn)

def assert_alike(want, ranks, **tol):
    "Each rank has what one process has"
    for r,got in enumerate(ranks): close(want, got, at=f'rank {r}', **tol)

# ---- Learners

def plain_net(): return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

def numbered(n, seed=0): return [(torch.cat([tensor([float(i)]), x[1:]]), y) for i,(x,y) in enumerate(vectors(n, seed=seed))]

def net(bs, n=48, n_val=21, val_bs=B, drop_last=False, model=plain_net, loss_func=None, shuffle=True, **kwargs):
    "Without BatchNorm, so that it does not matter how a batch is divided"
    dls = DataLoaders(TfmdDL(vectors(n), bs=bs, shuffle=shuffle, drop_last=drop_last, num_workers=0), TfmdDL(vectors(n_val, seed=1), bs=val_bs, num_workers=0))
    return Learner(dls, model(), loss_func=loss_func or CrossEntropyLossFlat(), path='.', **{**dict(metrics=accuracy, splitter=two_halves, opt_func=partial(SGD, mom=.9)), **kwargs})

def two_halves(m): return L(m[:1], m[1:]).map(params)

def parity(f=fitted, mk=net, attach={}, tol={}, plain={}, **kwargs):
    "`f` leaves the same on one process and on every rank; `plain` is for the one process alone"
    want,got = on_one(f, mk, bs=N*B, **{**kwargs, **plain}),on_ranks(f, mk, attach, bs=B, **kwargs)
    assert_alike(want, got, **tol)
    return want,got

# ---- training

class Grads(Callback):
    "Gradients as they are when the weights are changed, and after each batch"
    order,run_valid = 1000,False
    def before_fit(self): self.stepped,self.left = [],[]
    def _grads(self): return torch.cat([p.grad.flatten() for p in self.model.parameters()]).cpu()
    def before_step(self): self.stepped.append(self._grads())
    def after_cancel_batch(self): self.left.append(self._grads())

@quiet
def with_grads(learn, cb=None, n=2):
    grads = Grads()
    learn.fit(n, .1, cbs=[grads, *(cb(learn.dls.train.bs) if cb else [])])
    return dict(outcome(learn), stepped=grads.stepped, left=grads.left)

def ragged(learn):
    learn.recorder.train_metrics = True
    return fitted(learn)

def accumulated(learn): return fitted(learn, n=3, cb=partial(GradientAccumulation, 2*learn.dls.train.bs))

def bn_net(bs, n=48, model=mlp, **kwargs): return net(bs, n=n, model=model, splitter=params, **kwargs)

def various_norms():
    "Without momentum, without weights, without running statistics, and over two dimensions"
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12, momentum=None), nn.Tanh(), nn.Unflatten(1, (3,2,2)), nn.BatchNorm2d(3, affine=False), nn.Flatten(),
                         nn.BatchNorm1d(12, track_running_stats=False), nn.Linear(12, 3))

def own_net(bs, mk_dl, n=53, n_val=9, **kwargs):
    "With a training loader of another kind"
    return Learner(DataLoaders(mk_dl(numbered(n), bs=bs), TfmdDL(numbered(n_val, seed=1), bs=B, num_workers=0)), plain_net(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, path='.')

def torch_dl(ds, bs, **kwargs): return torch.utils.data.DataLoader(ds, batch_size=bs, **kwargs)

class Table(nn.Module):
    def __init__(self, n_cats):
        super().__init__()
        self.embs,self.lin = nn.ModuleList([nn.Embedding(o, 3) for o in n_cats]),nn.Linear(3*len(n_cats)+2, 2)
    def forward(self, cats, conts): return self.lin(torch.cat([*[e(cats[:,i]) for i,e in enumerate(self.embs)], conts], 1))

def table_net(bs):
    rng = np.random.RandomState(0)
    df = pd.DataFrame(dict(a=rng.choice(['u','v','w'], 70), b=rng.choice(['x','y'], 70), c=rng.randn(70), d=rng.randn(70), y=rng.choice(['no','yes'], 70)))
    to = TabularPandas(df, [Categorify, FillMissing, Normalize], ['a','b'], ['c','d'], 'y', CategoryBlock(), splits=(list(range(53)), list(range(53, 70))))
    dls = DataLoaders(TabDataLoader(to.train, bs=bs, shuffle=True, num_workers=0), TabDataLoader(to.valid, bs=B, num_workers=0))
    return Learner(dls, Table([len(to.classes[o]) for o in 'ab']), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=SGD, path='.')

class Memory(nn.Module):
    "Keeps a state for each row of the batch, until it is reset"
    def __init__(self):
        super().__init__()
        self.emb,self.lin = nn.Embedding(9, 6),nn.Linear(6, 9)
        self.reset()
    def reset(self): self.h = None
    def forward(self, x):
        e = self.emb(x)
        h = e.mean(1, keepdim=True) + (0 if self.h is None else self.h/2)
        self.h = h.detach()
        return self.lin(e+h)

def lm_net(bs, shuffle=False):
    rng = np.random.RandomState(0)
    texts = [torch.tensor(rng.randint(0, 9, rng.randint(20, 60))) for _ in range(24)]
    dls = DataLoaders(LMDataLoader(texts[:16], bs=bs, seq_len=8, shuffle=shuffle, num_workers=0), LMDataLoader(texts[16:], bs=B, seq_len=8, num_workers=0))
    return Learner(dls, Memory(), loss_func=CrossEntropyLossFlat(), metrics=[accuracy, Perplexity()], opt_func=partial(SGD, mom=.9), cbs=ModelResetter(), path='.')

@quiet
def fitted_twice(learn):
    learn.fit(2, .1)
    return fitted(learn, 1)

summed = CrossEntropyLossFlat(reduction='sum')
bn_tol = dict(rtol=5e-4, atol=5e-5)

TRAINED = dict(
    sgd           = {},
    adam          = dict(f=partial(fitted, lr=1e-2), opt_func=Adam),
    adamw         = dict(f=partial(fitted, lr=1e-2), opt_func=partial(OptimWrapper, opt=torch.optim.AdamW, eps=1e-5)),
    last_step_5   = dict(f=ragged, n=53),
    last_step_2   = dict(f=ragged, n=50), # ranks without any sample
    less_than_ranks = dict(f=ragged, n=3),
    last_step_sum = dict(f=ragged, n=53, loss_func=summed, plain=dict(val_bs=N*B), tol=dict(rtol=5e-4)), # of a batch of all ranks in validation too
    drop_last     = dict(f=ragged, n=53, drop_last=True),
    drop_no_step  = dict(f=ragged, n=5, drop_last=True, plain=dict(drop_last=False)), # fastai would have no batch at all
    accumulated_last_step = dict(f=accumulated, n=50),
    sync_bn       = dict(f=with_grads, mk=bn_net, attach=dict(sync_bn=True), n_val=20, tol=bn_tol),
    various_norms = dict(f=with_grads, mk=bn_net, attach=dict(sync_bn=True), n_val=20, model=various_norms, tol=bn_tol),
    torch_loader  = dict(mk=own_net, mk_dl=torch_dl),
    table         = dict(mk=table_net),
    text          = dict(f=fitted_twice, mk=lm_net), # the streams are those of one process with the rows of all ranks
    text_shuffled = dict(f=fitted_twice, mk=lm_net, shuffle=True), # and go on from epoch to epoch and from fit to fit
    early_stopping = dict(f=partial(fitted, n=6, lr=2., cb=partial(EarlyStoppingCallback, patience=1)), tol=dict(rtol=5e-3, atol=5e-3)),
    reduce_lr     = dict(f=partial(fitted, n=6, lr=2., cb=partial(ReduceLROnPlateau, patience=1)), tol=dict(rtol=5e-3, atol=5e-3)))

@pytest.mark.parametrize('kwargs', TRAINED.values(), ids=TRAINED)
def test_training(kwargs):
    "Losses, metrics, weights, optimizer state and running statistics are those of one process with the batches of all ranks"
    mk = kwargs.get('mk', net)
    start = seeded(mk, bs=B, **{k: v for k,v in kwargs.items() if k in ('model','mk_dl')}).model.state_dict()
    want,_ = parity(**kwargs)
    assert any((want['model'][k]-v).abs().max()>1e-2 for k,v in start.items())

def test_scale_lr():
    want = on_one(partial(fitted, lr=.1*N), net, bs=N*B)
    got = on_ranks(fitted, net, dict(scale_lr=True), bs=B)
    for o in got:
        close(want['model'], o['model'])
        close([.1]*6, o['lrs'])

def test_gradient_accumulation_and_clip():
    "Every third batch makes a step, by a number of samples that is one core's, as the batch size is; gradients are reduced then, and not before; the norm is that of the reduced ones"
    def cbs(bs): return L(GradientAccumulation(3*bs), GradientClip(.05))
    want,got = [f(partial(with_grads, cb=cbs), net, bs=bs, n=9*N*B) for f,bs in ((on_one, N*B), (on_ranks, B))]
    lefts = [o.pop('left') for o in got]
    assert (len(want['stepped']),len(want.pop('left')))==(6,12)
    assert_alike(want, got)
    for o in lefts[1:]: assert all((a-b).abs().max()>1e-3 for a,b in zip(o, lefts[0]))
    assert all(abs(o.norm()-.05)<1e-4 for o in want['stepped'])

# ---- BatchNorm

def test_batchnorm_of_the_global_batch_evens_out():
    "sync_bn=True: of 54 samples 52 make full or equal steps, and that is said"
    with pytest.warns(UserWarning, match='2 samples of each epoch are left out: with `sync_bn=True`'):
        got = on_ranks(fitted, bn_net, dict(sync_bn=True), bs=B, n=54, drop_last=False)
    assert len(got[0]['losses'])==8
    assert_alike(got[0], got)

class Stats(Callback):
    "Running statistics and weights as the last batch left them"
    order,run_valid = 1000,False
    def after_batch(self): self.seen = host(dict(self.model.state_dict()))

@quiet
def with_stats(learn):
    cb = Stats()
    learn.fit(2, .1, cbs=cb)
    return dict(outcome(learn), seen=cb.seen)

RUNNING = '1.running_mean','1.running_var'

@pytest.mark.parametrize('sync_bn', ['stats', False])
def test_batchnorm_of_each_rank(sync_bn):
    """Each rank normalizes its own batch; at the end of an epoch the running statistics are the mean over ranks ('stats') or the main rank's.
    In a last step of 2 samples ranks have one or none, which BatchNorm cannot normalize"""
    for n in (48,50):
        got = on_ranks(with_stats, bn_net, dict(sync_bn=sync_bn), bs=B, n=n, drop_last=False)
        seen = [o.pop('seen') for o in got]
        assert len(got[0]['losses'])==2*-(-n//(N*B))
        assert_alike(got[0], got, rtol=0, atol=0)
        for k in RUNNING if n==48 else ():
            each = torch.stack([o[k] for o in seen])
            assert (each-each[0]).abs().max()>1e-3
            close(each.mean(0) if sync_bn else each[0], got[0]['model'][k])

# ---- what differs from rank to rank, and what follows the seed

def drop_net(): return nn.Sequential(nn.Linear(8, 64), nn.Dropout(.5), nn.Linear(64, 3))

class Masks(Callback):
    "Which outputs of the Dropout are zero"
    run_valid = False
    def before_fit(self):
        self.seen = []
        self.hook = self.model[1].register_forward_hook(lambda m, i, o: self.seen.append((o==0).sum(0).detach()))
    def after_fit(self): self.hook.remove()

@quiet
def with_masks(learn):
    cb = Masks()
    learn.fit(1, .1, cbs=cb)
    return dict(outcome(learn), masks=[o.cpu() for o in cb.seen])

def test_dropout_and_weights():
    "Replicas that each make their own model start from the main rank's, drop other units, and do the same again after the same seed"
    def once(seed):
        set_seed(seed)
        learns = [net(B, model=drop_net) for _ in range(N)]
        starts = [host(dict(o.model.state_dict())) for o in learns]
        return starts,run_replicas(lambda r: with_masks(learns[r].to_tpu_distributed()))
    starts,got = once(3)
    assert (starts[0]['0.weight']-starts[1]['0.weight']).abs().max()>1e-2
    _,again = once(3)
    _,other = once(4)
    close(got, again, rtol=0, atol=0)
    masks = [o.pop('masks') for o in got]
    assert_alike(got[0], got, rtol=0, atol=0)
    for i,a in enumerate(masks):
        assert not any(torch.equal(a[0], b[0]) for b in masks[i+1:])
        assert not torch.equal(a[0], a[1])
    assert (got[0]['model']['0.weight']-other[0]['model']['0.weight']).abs().max()>1e-2

def test_weights_start_from_those_of_the_main_rank():
    "With learning rate 0; also buffers of other types"
    class WithBuffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 3)
            for k,v in dict(mask=torch.rand(3)>.5, count=torch.randint(0, 9, (2,)), inf=torch.tensor([-float('inf'),1.]), small=torch.randn(2).half()).items(): self.register_buffer(k, v)
        def forward(self, x): return self.lin(x)
    set_seed(5)
    learns = [net(B, model=WithBuffers, splitter=params) for _ in range(N)]
    start = host(dict(learns[0].model.state_dict()))
    got = run_replicas(lambda r: fitted(learns[r].to_tpu_distributed(), n=1, lr=0.)['model'])
    assert_alike(start, got, rtol=0, atol=0)

# ---- samples in training

class Seen(Callback):
    "The number of each sample of a training batch, which is its first feature; without those that fill up an empty share"
    order,run_valid = 1000,False
    def before_fit(self): self.epochs = []
    def before_train(self): self.epochs.append([])
    def before_batch(self):
        nums = self.xb[0][...,0].int().tolist()
        self.epochs[-1].append(nums[:self.dl.step_sizes(self.iter)[0]] if isinstance(self.dl, ShardedDL) else nums)

@quiet
def seen(learn, n=2):
    cb = Seen()
    learn.fit(n, 1e-4, cbs=cb)
    return cb.epochs

def steps(ranks):
    "The numbers of each step of each epoch, from those of each rank"
    for o in ranks: assert [len(e) for e in o]==[len(e) for e in ranks[0]]
    return [[sum(step, []) for step in zip(*epoch)] for epoch in zip(*ranks)]

def fastai_dl(ds, bs, **kwargs): return TfmdDL(ds, bs=bs, shuffle=True, num_workers=0, **kwargs)
def weighted_dl(ds, bs): return WeightedDL(ds, bs=bs, shuffle=True, wgts=np.arange(len(ds))+1., num_workers=0)

@pytest.mark.parametrize('mk_dl,n', [(fastai_dl,48), (fastai_dl,53), (fastai_dl,3), (torch_dl,53), (partial(torch_dl, drop_last=True),53), (weighted_dl,53)])
def test_samples_of_steps(mk_dl, n):
    "Disjoint over ranks, as many batches on each, and together the steps of one process; the same for the same seed"
    kwargs = dict(mk_dl=mk_dl, n=n)
    want,got,again = on_one(seen, own_net, bs=N*B, **kwargs),*[steps(on_ranks(seen, own_net, bs=B, **kwargs)) for _ in range(2)]
    assert [[sorted(o) for o in e] for e in got]==[[sorted(o) for o in e] for e in want] and got==again
    if mk_dl is fastai_dl:
        for epoch in got: assert sorted(sum(epoch, []))==list(range(n))
        assert got[0]!=got[1]

def test_torch_loader_shuffles():
    got = steps(on_ranks(seen, own_net, bs=B, mk_dl=partial(torch_dl, shuffle=True)))
    for epoch in got: assert sorted(sum(epoch, []))==list(range(53))
    assert got[0]!=got[1]

# ---- samples whose length differs

def pad(samples):
    n = max(len(o[0]) for o in samples)
    return [(F.pad(x, (0, n-len(x)), value=-1.), *y) for x,*y in samples]

class Longest(nn.Module):
    "The number of a sample is in each of its places"
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
    def forward(self, x): return x.max(1).values[:,None]*self.weight

def sorted_net(bs, n=39, shuffle=True):
    rng = np.random.RandomState(0)
    def dl(n, **kwargs): return SortedDL([(torch.full((rng.randint(2, 9),), float(i)), tensor(i%3)) for i in range(n)], bs=bs, num_workers=0, before_batch=pad, **kwargs)
    return Learner(DataLoaders(dl(n, shuffle=True), dl(37)), Longest(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, path='.')

def test_sorted_loader():
    "In training each sample once in an epoch; predictions in the order of the dataset"
    got = steps(on_ranks(seen, sorted_net, bs=B))
    for epoch in got: assert sorted(sum(epoch, []))==list(range(39))
    preds = quiet(lambda o: host(o.get_preds(act=noop)))
    want = on_one(preds, sorted_net, bs=B)
    assert want[0][:,0].tolist()==list(range(37))
    assert_alike(want, on_ranks(preds, sorted_net, bs=B), rtol=0, atol=0)

# ---- what cannot be shared

class Skipping:
    def __init__(self, o): self.o = o
    def __len__(self): return len(self.o)
    def __getitem__(self, i):
        if i==5: raise SkipItemException
        return self.o[i]

@pytest.mark.parametrize('kind', [o for o in KINDS if o!='lm'])
def test_shares_of_every_loader(kind):
    "The validation batches of the ranks, in turn, are those of one process; in training all get as many"
    all_dls = [seeded(KINDS[kind]) for _ in range(N)]
    def f(r):
        val = ShardedDL(all_dls[r].valid, xla_device(), train=False, pad=True)
        return [host(val.trim(b)) for b in val], [len(first(tensors(b))) for b in ShardedDL(all_dls[r].train, xla_device())]
    ranks = run_replicas(f)
    want = list(seeded(KINDS[kind]).valid)
    got = [ranks[i%N][0][i//N] for i in range(len(want))]
    close(want, got, rtol=0, atol=1e-6)
    assert sum(len(val) for val,_ in ranks)==len(want) and len({len(trn) for _,trn in ranks})==1

def test_skipped_samples_are_an_error_in_training():
    with pytest.raises(RuntimeError, match='skips samples .SkipItemException. cannot be shared by ranks'):
        on_ranks(fitted, own_net, bs=B, mk_dl=lambda ds, bs: fastai_dl(Skipping(ds), bs))

# ---- predictions

def scale_net(bs, n_val=37, n=53, loss_func=None):
    dls = DataLoaders(TfmdDL(numbered(n), bs=bs, shuffle=True, drop_last=True, num_workers=0), TfmdDL(numbered(n_val, seed=1), bs=bs, num_workers=0))
    return Learner(dls, Scale(), loss_func=loss_func or CrossEntropyLossFlat(), metrics=accuracy, path='.')

@quiet
def predictions(learn): return host(dict(
    valid=learn.get_preds(act=noop, with_input=True, with_decoded=True), train=learn.get_preds(ds_idx=0, act=noop, with_input=True),
    other=learn.get_preds(dl=learn.dls.test_dl(numbered(5)), act=noop), preds_alone=learn.get_preds(act=noop, with_targs=False)))

@quiet
def with_losses(learn): return host(dict(losses=learn.get_preds(with_loss=True), inner=learn.get_preds(inner=False), validate=list(learn.validate())))

@pytest.mark.parametrize('n_val', [37, 3, 1])
def test_predictions(n_val):
    "Each sample once, in the order of the dataset, to the last bit"
    want,got = on_one(predictions, scale_net, bs=B, n_val=n_val),on_ranks(predictions, scale_net, bs=B, n_val=n_val)
    assert want['valid'][0][:,0].tolist()==list(range(n_val))
    assert_alike(want, got, rtol=0, atol=0)
    assert_alike(on_one(with_losses, scale_net, bs=B, n_val=n_val), on_ranks(with_losses, scale_net, bs=B, n_val=n_val))

def test_loss_function_that_learners_share():
    "As `Categorize.loss_func`, which is that of all Learners of a process; `with_loss` changes its `reduction` for a while"
    shared = CrossEntropyLossFlat()
    want = on_one(with_losses, scale_net, bs=B)
    assert_alike(want, on_ranks(with_losses, scale_net, bs=B, loss_func=shared))
    assert shared.func.reduction=='mean'

def test_predictions_in_files():
    "`save_preds` gets one file for each batch, as on one process"
    def f(learn, to):
        to.mkdir(exist_ok=True)
        with learn.no_bar(), learn.no_logging(): learn.get_preds(act=noop, save_preds=to)
        return None
    on_one(partial(f, to=Path('one')), scale_net, bs=B)
    on_ranks(partial(f, to=Path('ranks')), scale_net, bs=B)
    names = sorted(int(o.name) for o in Path('one').ls())
    assert names==sorted(int(o.name) for o in Path('ranks').ls())==list(range(10))
    for o in names: close(torch.load(f'one/{o}'), torch.load(f'ranks/{o}'), rtol=0, atol=0)

# ---- metrics

def compared(kind, cases, n_valid=53):
    "Values of the metrics that `cases` make, on one process and on each rank"
    f,mk = partial(metric_values, names=cases),lambda: metric_learner(kind, [o() for o in cases.values()], bs=B, n_valid=n_valid)
    return on_one(f, mk),on_ranks(f, mk)

@lru_cache(None)
def compared_kind(kind): return compared(kind, {k: f for k,(o,f) in CASES.items() if o==kind and k not in GLOBAL})

GLOBAL = 'rmse','exp_rmspe','perplexity' # fastai has one object of each, which Learners share

def test_cases_are_all_metrics(): assert {*fastai.metrics.__all__, 'AvgMetric', 'ValueMetric'}==CASES.keys()

@pytest.mark.parametrize('name', [o for o in CASES if o not in GLOBAL])
def test_metric(name):
    want,got = compared_kind(CASES[name][0])
    assert_alike({k: want[k] for k in (name,'valid_loss')}, [{k: o[k] for k in (name,'valid_loss')} for o in got], rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize('name', [*GLOBAL, *USER_CASES])
def test_own_metric(name):
    kind,f = {**CASES, **USER_CASES}[name]
    want,got = compared(kind, {name: f})
    assert_alike(want, got, rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize('kind', ['classes', 'segments', 'words'])
def test_metrics_of_few_samples(kind):
    "Ranks that have no batch at all"
    want,got = compared(kind, {k: f for k,(o,f) in CASES.items() if o==kind and k not in GLOBAL and k!='RocAuc'}, 3)
    assert_alike(want, got, rtol=1e-5, atol=1e-6)

def test_metrics_of_training():
    "Metrics that sum and those that keep predictions, over whole steps"
    def mk(bs): return metric_learner('classes', [accuracy, F1Score(average='macro')], bs=bs, n_train=48)
    @quiet
    def f(learn):
        learn.recorder.train_metrics = True
        learn.fit(1, 0.)
        return list(map(float, learn.recorder.values[-1]))
    assert_alike(on_one(f, partial(mk, N*B)), on_ranks(f, partial(mk, B)))

# ---- files

def test_load_of_a_file_that_was_there():
    "Every rank reads what an earlier run has saved"
    def f(learn):
        learn.load('earlier')
        return host(dict(learn.model.state_dict()))
    set_seed(9)
    learn = net(B)
    learn.save('earlier')
    assert_alike(dict(learn.model.state_dict()), on_ranks(f, net, bs=B), rtol=0, atol=0)
