"Four replicas, each with batch B, train and measure as plain fastai does in one process with batch 4*B. Replicas are threads of this process"
from functools import lru_cache, wraps
import pytest
from threads import run_replicas, use_virtual_cores
use_virtual_cores(4)
from synth import *
from metric_cases import CASES, USER_CASES, Confusion, Scale, metric_learner, metric_values
import fastai.metrics
from fastai.tabular.all import TabDataLoader, TabularPandas, Categorify, FillMissing, Normalize, CategoryBlock, tabular_learner
from fastai.text.all import LMDataLoader, SortedDL, ModelResetter
from fastai_xla.distributed.loader import ShardedDL
from fastai_xla.runtime.device import xm
from fastai_xla.runtime.ranks import rank

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

def parity(f=fitted, mk=net, attach={}, tol={}, **kwargs):
    "`f` leaves the same on one process and on every rank"
    want,got = on_one(f, mk, bs=N*B, **kwargs),on_ranks(f, mk, attach, bs=B, **kwargs)
    assert_alike(want, got, **tol)
    return want,got

# ---- training

OPTS = dict(SGD=(partial(SGD, mom=.9), .1), Adam=(Adam, 1e-2), AdamW=(partial(OptimWrapper, opt=torch.optim.AdamW, eps=1e-5), 1e-2))

@pytest.mark.parametrize('opt', OPTS)
def test_gradients(opt):
    "Full steps: losses, weights and optimizer state are those of one process with the batches of all ranks"
    opt_func,lr = OPTS[opt]
    start = seeded(net, bs=B).model.state_dict()
    want,_ = parity(partial(fitted, lr=lr), opt_func=opt_func)
    assert len(want['losses'])==6
    assert all((want['model'][k]-v).abs().max()>1e-2 for k,v in start.items())

def ragged(learn):
    learn.recorder.train_metrics = True
    return fitted(learn)

@pytest.mark.parametrize('n', [53, 50, 3])
@pytest.mark.parametrize('loss', [CrossEntropyLossFlat(), CrossEntropyLossFlat(reduction='sum')], ids=['mean','sum'])
def test_last_step(n, loss):
    "53 leaves a last step of 5 samples, 50 one of 2 (ranks without any), 3 are fewer than ranks"
    is_sum = loss.func.reduction=='sum'
    want = on_one(ragged, net, bs=N*B, n=n, loss_func=loss, val_bs=N*B if is_sum else B) # a sum is that of a batch of all ranks in validation too
    assert_alike(want, on_ranks(ragged, net, bs=B, n=n, loss_func=loss), **dict(rtol=5e-4) if is_sum else {})

def test_drop_last():
    want,_ = parity(ragged, n=53, drop_last=True)
    assert len(want['losses'])==6

def test_drop_last_leaves_what_one_step_holds():
    "fastai would have no batch at all"
    assert_alike(on_one(ragged, net, bs=N*B, n=5), on_ranks(ragged, net, bs=B, n=5, drop_last=True))

def test_scale_lr():
    want = on_one(partial(fitted, lr=.1*N), net, bs=N*B)
    got = on_ranks(fitted, net, dict(scale_lr=True), bs=B)
    for o in got:
        close(want['model'], o['model'])
        close([.1]*6, o['lrs'])

class Grads(Callback):
    "Gradients as they are when the weights are changed, and after each batch"
    order = 1000
    run_valid = False
    def before_fit(self): self.stepped,self.left = [],[]
    def _grads(self): return torch.cat([p.grad.flatten() for p in self.model.parameters()]).cpu()
    def before_step(self): self.stepped.append(self._grads())
    def after_cancel_batch(self): self.left.append(self._grads())

@quiet
def with_grads(learn, cb=None, n=2):
    grads = Grads()
    learn.fit(n, .1, cbs=[grads, *([cb()] if cb else [])])
    return dict(outcome(learn), stepped=grads.stepped, left=grads.left)

def test_gradient_accumulation():
    "Every third batch makes a step, by a number of samples that is one core's, as the batch size is; gradients are reduced then, and not before"
    want,got = [f(partial(with_grads, cb=partial(GradientAccumulation, 3*bs)), net, bs=bs, n=9*N*B) for f,bs in ((on_one, N*B), (on_ranks, B))]
    lefts = [o.pop('left') for o in got]
    assert (len(want['stepped']),len(want.pop('left')))==(6,12)
    assert_alike(want, got)
    for o in lefts[1:]: assert all((a-b).abs().max()>1e-3 for a,b in zip(o, lefts[0]))

def test_gradient_accumulation_of_a_last_step():
    "Samples are counted as in one process where the last step is smaller"
    want,got = [f(partial(fitted, n=3, cb=partial(GradientAccumulation, 2*bs)), net, bs=bs, n=50, drop_last=False) for f,bs in ((on_one, N*B), (on_ranks, B))]
    assert_alike(want, got)

def test_gradient_clip():
    "The norm is that of the reduced gradient"
    want,got = [f(partial(with_grads, cb=partial(GradientClip, .05)), net, bs=bs) for f,bs in ((on_one, N*B), (on_ranks, B))]
    assert_alike(want, got)
    assert all(abs(o.norm()-.05)<1e-4 for o in want['stepped'])

# ---- BatchNorm

def bn_net(bs, n=48, model=mlp, **kwargs): return net(bs, n=n, model=model, splitter=params, **kwargs)

def various_norms():
    "Without momentum, without weights, without running statistics, and over two dimensions"
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12, momentum=None), nn.Tanh(), nn.Unflatten(1, (3,2,2)), nn.BatchNorm2d(3, affine=False), nn.Flatten(),
                         nn.BatchNorm1d(12, track_running_stats=False), nn.Linear(12, 3))

@pytest.mark.parametrize('model', [mlp, various_norms])
def test_batchnorm_of_the_global_batch(model):
    "sync_bn=True: gradients, running statistics and so all else are those of one process"
    want,got = on_one(with_grads, bn_net, bs=N*B, n_val=20, model=model),on_ranks(with_grads, bn_net, dict(sync_bn=True), bs=B, n_val=20, model=model)
    assert_alike(want, got, rtol=5e-4, atol=5e-5)
    assert (want['model']['1.running_mean']).abs().max()>1e-2

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

def test_batchnorm_means_of_the_ranks():
    "sync_bn='stats': each rank normalizes its own batch; at the end of an epoch the running statistics are the mean over ranks"
    got = on_ranks(with_stats, bn_net, bs=B)
    seen = [o.pop('seen') for o in got]
    assert_alike(got[0], got, rtol=0, atol=0)
    for k in RUNNING:
        each = torch.stack([o[k] for o in seen])
        assert (each-each[0]).abs().max()>1e-3
        close(each.mean(0), got[0]['model'][k])

def test_batchnorm_of_the_main_rank():
    "sync_bn=False: the running statistics are the main rank's"
    got = on_ranks(with_stats, bn_net, dict(sync_bn=False), bs=B)
    seen = [o.pop('seen') for o in got]
    assert_alike(got[0], got, rtol=0, atol=0)
    for k in RUNNING:
        assert (seen[1][k]-seen[0][k]).abs().max()>1e-3
        close(seen[0][k], got[0]['model'][k], rtol=0, atol=0)

@pytest.mark.parametrize('n', [53, 50])
@pytest.mark.parametrize('sync_bn', ['stats', False])
def test_batchnorm_in_a_last_step(n, sync_bn):
    "A rank with one sample or none, which BatchNorm cannot normalize, in a step that one process can make"
    got = on_ranks(fitted, bn_net, dict(sync_bn=sync_bn), bs=B, n=n, drop_last=False)
    assert len(got[0]['losses'])==8
    assert_alike(got[0], got, rtol=0, atol=0)

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

def mix_net(bs):
    ds = [(x.view(1,2,4),y) for x,y in vectors(96)]
    dls = DataLoaders(TfmdDL(ds, bs=bs, shuffle=True, num_workers=0), TfmdDL(ds[:8], bs=B, num_workers=0))
    return Learner(dls, nn.Sequential(nn.Flatten(), plain_net()), loss_func=CrossEntropyLossFlat(), path='.', opt_func=SGD)

def test_mixing_follows_the_seed():
    "Each replica draws from a random state of its own, although all are threads of one process"
    def once():
        lams = [[] for _ in range(N)]
        class Lams(Callback):
            order,run_valid = 100,False
            def after_batch(self): lams[rank()].append(self.xb[0].detach().cpu())
        return on_ranks(partial(fitted, cb=lambda: [MixUp(), Lams()]), mix_net, bs=B),lams
    (got,lams),(again,same_lams) = once(),once()
    close(lams, same_lams, rtol=0, atol=0)
    close(got, again, rtol=0, atol=0)

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

def own_net(bs, mk_dl, n=53, n_val=9, **kwargs):
    "With a training loader of another kind"
    return Learner(DataLoaders(mk_dl(numbered(n), bs=bs), TfmdDL(numbered(n_val, seed=1), bs=B, num_workers=0)), plain_net(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, path='.')

def fastai_dl(ds, bs, **kwargs): return TfmdDL(ds, bs=bs, shuffle=True, num_workers=0, **kwargs)
def torch_dl(ds, bs, **kwargs): return torch.utils.data.DataLoader(ds, batch_size=bs, **kwargs)
def weighted_dl(ds, bs): return WeightedDL(ds, bs=bs, shuffle=True, wgts=np.arange(len(ds))+1., num_workers=0)

@pytest.mark.parametrize('n', [48, 53, 3])
def test_epochs_are_permutations(n):
    "Disjoint over ranks, as many batches on each, and together the steps of one process"
    want,got = on_one(seen, own_net, bs=N*B, mk_dl=fastai_dl, n=n),steps(on_ranks(seen, own_net, bs=B, mk_dl=fastai_dl, n=n))
    assert [[sorted(o) for o in e] for e in got]==[[sorted(o) for o in e] for e in want]
    for epoch in got: assert sorted(sum(epoch, []))==list(range(n))
    assert got[0]!=got[1]

def test_order_follows_the_seed():
    a,b = [on_ranks(seen, own_net, bs=B, mk_dl=fastai_dl) for _ in range(2)]
    assert a==b

@pytest.mark.parametrize('drop_last', [False, True])
def test_torch_loader(drop_last):
    kwargs = dict(mk_dl=partial(torch_dl, drop_last=drop_last))
    want,got = on_one(seen, own_net, bs=N*B, **kwargs),steps(on_ranks(seen, own_net, bs=B, **kwargs))
    assert [[sorted(o) for o in e] for e in got]==[[sorted(o) for o in e] for e in want]

def test_torch_loader_shuffles():
    got = steps(on_ranks(seen, own_net, bs=B, mk_dl=partial(torch_dl, shuffle=True)))
    for epoch in got: assert sorted(sum(epoch, []))==list(range(53))
    assert got[0]!=got[1]

def test_torch_loader_trains():
    assert_alike(on_one(fitted, own_net, bs=N*B, mk_dl=torch_dl), on_ranks(fitted, own_net, bs=B, mk_dl=torch_dl))

def test_weighted_loader():
    want,got = on_one(partial(seen, n=1), own_net, bs=N*B, mk_dl=weighted_dl),steps(on_ranks(partial(seen, n=1), own_net, bs=B, mk_dl=weighted_dl))
    assert [[sorted(o) for o in e] for e in got]==[[sorted(o) for o in e] for e in want]
    assert len(set(sum(got[0], [])))<53

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

def test_table(): assert_alike(on_one(fitted, table_net, bs=N*B), on_ranks(fitted, table_net, bs=B))

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

# ---- language models

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

@pytest.mark.parametrize('shuffle', [False, True])
def test_language_model(shuffle):
    "The streams are those of one process with the rows of all ranks; shuffled, they go on from epoch to epoch and from fit to fit"
    parity(fitted_twice, lm_net, shuffle=shuffle)

def test_language_model_predictions():
    preds = quiet(lambda o: host(o.get_preds(act=noop)))
    want,got = on_one(preds, lm_net, bs=B),on_ranks(preds, lm_net, bs=B)
    assert_alike(want, got)

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

def test_skipped_samples_in_validation():
    "Are left out, as on one process"
    def mk(bs): return Learner(DataLoaders(fastai_dl(numbered(32), bs), TfmdDL(Skipping(numbered(23)), bs=bs, num_workers=0)), Scale(),
                               loss_func=CrossEntropyLossFlat(), metrics=[accuracy, Confusion(8)], path='.')
    f = partial(metric_values, names=['accuracy','confusion'])
    assert_alike(on_one(f, mk, bs=B), on_ranks(f, mk, bs=B))

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

@pytest.mark.parametrize('n_val', [48, 37, 3, 1])
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
    for _ in range(5):
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

def picture_net(bs=6): return image_learner(tfms=[Flip(p=1.)], bs=bs)

def test_tta():
    f = quiet(lambda o: host([*o.tta(n=2, beta=.25), *o.tta(n=1, use_max=True)]))
    want = on_one(f, picture_net)
    assert len(want[0])==11
    assert_alike(want, on_ranks(f, picture_net))

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

@pytest.mark.parametrize('n_valid', [5, 3])
@pytest.mark.parametrize('kind', ['classes', 'segments', 'words'])
def test_metrics_of_few_samples(kind, n_valid):
    "Ranks that have no batch at all"
    want,got = compared(kind, {k: f for k,(o,f) in CASES.items() if o==kind and k not in GLOBAL and k!='RocAuc'}, n_valid)
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

# ---- callbacks that decide

def decides(*cbs): return partial(fitted, n=6, lr=2., cb=lambda: [o() for o in cbs])

def test_early_stopping():
    want,_ = parity(decides(partial(EarlyStoppingCallback, patience=1)), tol=dict(rtol=5e-3, atol=5e-3))
    assert 1<len(want['values'])<6

def test_reduce_lr():
    want,_ = parity(decides(partial(ReduceLROnPlateau, patience=1)), tol=dict(rtol=5e-3, atol=5e-3))
    assert len(set(want['lrs']))>1

def test_save_model():
    "The best weights come back, and one file is written"
    want,_ = parity(decides(SaveModelCallback), tol=dict(rtol=5e-3, atol=5e-3))
    best = min(o[1] for o in want['values'])
    assert want['values'][-1][1]>best
    assert [o.name for o in Path('models').ls()]==['model.pth']

@quiet
def finds(learn):
    before = host(dict(learn.model.state_dict()))
    found = learn.lr_find(num_it=20, show_plot=False)
    close(before, host(dict(learn.model.state_dict())), rtol=0, atol=0)
    return dict(found=float(found.valley), losses=[float(o) for o in learn.recorder.losses], lrs=list(map(float, learn.recorder.lrs)))

def test_lr_find(): parity(finds, tol=dict(rtol=1e-2, atol=1e-4))

@quiet
def saves(learn):
    learn.fit(1, .1)
    then = outcome(learn)
    learn.save('m')
    learn.fit(1, .1)
    assert (outcome(learn)['model']['0.weight']-then['model']['0.weight']).abs().max()>1e-4
    learn.load('m')
    for k in ('model','opt'): close(then[k], outcome(learn)[k], rtol=0, atol=0)
    return then

def test_save_and_load():
    got = on_ranks(saves, net, bs=B)
    assert_alike(got[0], got, rtol=0, atol=0)
    assert [o.name for o in Path('models').ls()]==['m.pth']

def test_load_of_a_file_that_was_there():
    "Every rank reads what an earlier run has saved"
    def f(learn):
        learn.load('earlier')
        return host(dict(learn.model.state_dict()))
    set_seed(9)
    learn = net(B)
    learn.save('earlier')
    assert_alike(dict(learn.model.state_dict()), on_ranks(f, net, bs=B), rtol=0, atol=0)

# ---- steady state

class SteadyCounts(Callback):
    "What XLA does on all ranks in each epoch's training batches. A device can be waited for when all ranks have launched what it runs"
    order,run_valid = 200,False
    def __init__(self, wait): self.wait = wait
    def before_fit(self): self.counts = []
    def _now(self):
        self.wait()
        xm.wait_device_ops()
        res = xla_counts()
        self.wait()
        return res
    def before_train(self): self.start = self._now()
    def after_batch(self):
        if self.iter==self.n_iter-1: self.counts.append(self._now()-self.start)

@pytest.mark.parametrize('mk', [net, bn_net])
def test_steady_state(mk):
    "After the first epoch nothing is compiled and nothing is read from the device in a training batch"
    wait = threading.Barrier(N, timeout=60).wait # counts are a process's
    @quiet
    def f(learn):
        cb = SteadyCounts(wait)
        learn.fit(3, 1e-2, cbs=cb)
        return cb.counts,len(learn.recorder.losses)//3
    for counts,n in on_ranks(f, mk, dict(fetch_every=1e9), bs=B, n=80, opt_func=Adam):
        for c in counts[1:]: assert (c.compiles, c.reads, c.fallbacks, c.executions)==(0, 0, {}, n*N), counts
