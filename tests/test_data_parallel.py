"""`to_tpu_distributed` in one process (SPMD): what a user computes on n cores equals plain fastai with a batch n times as large.

A process cannot change its number of devices, so cases run in groups, each in a fresh process: `python test_data_parallel.py <group> [case ...]`."""
import io, os, re, sys, threading
from contextlib import redirect_stdout
from functools import lru_cache, partial
from textwrap import dedent

import pytest
from cases import Groups, near, pieces, same
from fresh import repo, run

N = 4
groups = Groups(__file__, lambda: dict(CPU_NUM_DEVICES=None, MPLBACKEND='Agg'))
case = groups.case

# In the processes

@lru_cache(None)
def lib():
    "The names that a case needs, as an object; this process has `N` cores from now on"
    from types import SimpleNamespace
    import fastai.callback.all, fastai.text.all, recipes, parity_models, count_models, fastai_xla.all
    l = SimpleNamespace(**{k: v for m in (fastai.text.all, fastai.callback.all, parity_models, count_models, recipes, fastai_xla.all)
        for k,v in vars(m).items() if not k.startswith('_')})
    l.learner(bs=8).to_tpu_distributed(n_cores=N)
    return l

def twins(f, mk=None, tol=2e-5, bs=4, n=N, **kwargs):
    "Run `f` on a plain Learner with batches for all cores and on its twin on the cores: `lib, plain, learn`, after asserting that they are equal"
    l,mk = lib(),mk or lib().learner
    plain,learn = mk(bs=bs*n),mk(bs=bs)
    for o in (plain, learn.to_tpu_distributed(n_cores=n, **kwargs)):
        l.set_seed(7, reproducible=True)
        with o.no_bar(),o.no_logging(): f(o)
    same(plain, learn, tol)
    return l,plain,learn

def quietly(o, f, *args, seed=7, **kwargs):
    lib().set_seed(seed)
    with o.no_bar(),o.no_logging(): return f(*args, **kwargs)

def batches_of(learn, n_epoch=2):
    "The inputs of all batches of a fit, on the host, without padding"
    l,seen = lib(),[]
    class See(l.Callback):
        order = -100
        def before_batch(self): seen.append([t.cpu().clone()[:getattr(self.dl, 'n_real', None)] for t in (*self.xb, *self.yb)])
    quietly(learn, learn.fit, n_epoch, 1e-3, cbs=See())
    return seen

def same_batches(mk, bs=4):
    "Assert that the cores see the batches that one process with the larger batch size sees, in their order"
    l = lib()
    a,b = batches_of(mk(bs*N)),batches_of(mk(bs).to_tpu_distributed(n_cores=N))
    assert len(a)==len(b), (len(a), len(b))
    for x,y in zip(a, b):
        for p,q in zip(x, y): assert p.shape==q.shape and l.torch.equal(p.float(), q.float())

# ---- a step is that of one process with n*bs samples, in its order

@case('loaders')
def shuffled_and_dropped(): same_batches(lambda bs: lib().learner(n=70, bs=bs))

def of_samples(bs, dl_type=None, n=70, valid=None, **kwargs):
    l = lib()
    l.set_seed(3)
    train = (dl_type or l.TfmdDL)(l.vectors(n), bs=bs, num_workers=0, **kwargs)
    return l.Learner(l.DataLoaders(train, valid or l.TfmdDL(l.vectors(20, 1), bs=bs, num_workers=0)), l.mlp(), loss_func=l.CrossEntropyLossFlat(), metrics=l.accuracy)

@case('loaders')
def ragged_and_weighted_and_sampled():
    l = lib()
    same_batches(lambda bs: of_samples(bs, shuffle=True, drop_last=True))
    same_batches(lambda bs: of_samples(bs, shuffle=True))
    same_batches(lambda bs: of_samples(bs, l.WeightedDL, wgts=range(1,71), shuffle=True, drop_last=True))
    class Backwards(l.TfmdDL):
        def get_idxs(self): return super().get_idxs()[::-1]
    same_batches(lambda bs: of_samples(bs, Backwards))
    same_batches(lambda bs: of_samples(bs, partial(l.PartialDL, partial_n=40), shuffle=True))

@case('loaders')
def a_set_smaller_than_a_step():
    "is one step, also with `drop_last`; plain fastai would have no batch"
    l = lib()
    b = batches_of(of_samples(8, n=20, drop_last=True).to_tpu_distributed(n_cores=N), 1)
    assert [len(o[0]) for o in b]==[20, 20]

@case('loaders')
def torchs_own():
    l,D = lib(),lib().torch.utils.data
    def mk(bs, **kwargs):
        l.set_seed(3)
        train = D.DataLoader(l.vectors(70), **({'batch_size': bs, 'shuffle': True, **kwargs}))
        return l.Learner(l.DataLoaders(train, D.DataLoader(l.vectors(20, 1), batch_size=bs)), l.mlp(), loss_func=l.CrossEntropyLossFlat())
    same_batches(mk)
    same_batches(partial(mk, drop_last=True))
    class Stream(D.IterableDataset):
        def __len__(self): return 70
        def __iter__(self): return iter(l.vectors(70))
    def streamed(bs):
        learn = mk(bs)
        learn.dls.train = D.DataLoader(Stream(), batch_size=bs)
        return learn
    same_batches(streamed)
    class Pairs: # two batches of the sampler are one
        def __init__(self, bs): self.bs = bs
        def __len__(self): return 70//self.bs
        def __iter__(self): return iter([list(range(i*self.bs, (i+1)*self.bs)) for i in range(len(self))])
    def sampled(bs):
        learn = mk(4)
        learn.dls.train = D.DataLoader(l.vectors(68), batch_sampler=Pairs(bs))
        return learn
    a,b = batches_of(sampled(4*N)),batches_of(sampled(4).to_tpu_distributed(n_cores=N))
    assert l.torch.equal(a[0][0], b[0][0]) and [len(o[0]) for o in b[:6]]==[16,16,16,16,4,16]

@case('loaders')
def streams():
    l = lib()
    class Stream(l.IterableDataset):
        def __len__(self): return 70
        def __iter__(self): return iter(l.vectors(70))
    def mk(bs):
        learn = of_samples(bs)
        learn.dls.train = l.TfmdDL(Stream(), bs=bs, num_workers=0)
        learn.dls.train._n_inp = 1 # plain fastai takes a sample of the first epoch to learn this
        return learn
    same_batches(mk)

@case('loaders')
def ready_batches_are_taken_as_they_are():
    l = lib()
    def mk(bs):
        xs = [(l.torch.randn(16, 8), l.torch.arange(16)%3) for _ in range(3)]
        return l.Learner(l.DataLoaders(xs, xs), l.mlp(), loss_func=l.CrossEntropyLossFlat())
    b = batches_of(mk(0).to_tpu_distributed(n_cores=N), 1)
    assert [len(o[0]) for o in b]==[16]*6

@case('loaders')
def texts():
    "sorted by length, shuffled in chunks of the batch size; and one long text cut into rows"
    l = lib()
    def sorted_(bs, shuffle=True):
        l.set_seed(3)
        ds = [(l.TensorText(l.torch.arange(2+i*5%9)+1), i%3) for i in range(70)]
        dls = [l.SortedDL(ds, bs=bs, shuffle=s, num_workers=0, before_batch=partial(l.pad_input, pad_idx=0)) for s in (shuffle, False)]
        class Mean(l.nn.Module):
            def __init__(self): super().__init__(); self.emb,self.lin = l.nn.Embedding(80, 4),l.nn.Linear(4, 3)
            def forward(self, x): return self.lin(self.emb(x).mean(1))
        return l.Learner(l.DataLoaders(*dls), Mean(), loss_func=l.CrossEntropyLossFlat())
    same_batches(sorted_)
    def long(bs):
        l.set_seed(3)
        ts = [l.torch.arange(n)%30 for n in (213,122,219,311,118,125)]
        dls = [l.LMDataLoader(ts, bs=bs, seq_len=6, shuffle=s, num_workers=0) for s in (True, False)]
        class LM(l.nn.Module):
            def __init__(self): super().__init__(); self.emb,self.lin = l.nn.Embedding(30, 4),l.nn.Linear(4, 30)
            def forward(self, x): return self.lin(self.emb(x))
        return l.Learner(l.DataLoaders(*dls), LM(), loss_func=l.CrossEntropyLossFlat())
    same_batches(long)

@case('loaders')
def only_parts_are_sent():
    "of a batch each core gets its part, and nothing else of it goes to or from the device"
    l,seen = lib(),[]
    from fastai_xla.runtime.device import met
    class Sent(l.Callback):
        order = 1000
        def after_batch(self):
            if self.training: seen.append([(met.metric_data(o) or [0,0])[1] for o in ('OutboundData','InboundData')])
    xs = [(l.torch.randn(1000), i%3) for i in range(128)]
    dls = l.DataLoaders(*[l.TfmdDL(xs, bs=4, num_workers=0) for _ in range(2)])
    learn = l.Learner(dls, l.nn.Linear(1000, 3), loss_func=l.CrossEntropyLossFlat()).to_tpu_distributed(n_cores=N, fetch_every=60)
    quietly(learn, learn.fit, 2, cbs=Sent())
    sent,read = [b-a for a,b in zip(seen[-6], seen[-2])]
    batch = 16*(1000*4+8)
    assert read==0 and 4*batch<=sent<=4*(batch+N*100)+2*batch, (sent, read, batch) # one or two more may be on their way

@case('loaders')
def what_callbacks_see_of_the_loaders():
    "in a phase the batch size of a step, outside the user's, and in what is made of them the user's"
    l,seen = lib(),[]
    class See(l.Callback):
        def before_fit(self): seen.append((self.dls.train.bs, len(self.dls.train), self.dls.valid.new().bs))
    learn = of_samples(4).to_tpu_distributed(n_cores=N)
    quietly(learn, learn.fit, 1, cbs=See())
    assert seen==[(16, 5, 4)] and (learn.dls.train.bs, len(learn.dls.train))==(4, 18)
    sizes = []
    class Sizes(l.Callback):
        def before_batch(self): sizes.append((self.dl.bs, self.n_iter, pieces(self.x)[0]))
    quietly(learn, learn.validate, cbs=Sizes())
    quietly(learn, learn.get_preds, dl=learn.dls.valid, cbs=Sizes())
    assert sizes==4*[(16, 2, (4,8))], sizes
    class Fails(l.Callback):
        def after_batch(self): raise ValueError('no')
    with pytest.raises(ValueError): quietly(learn, learn.fit, 1, cbs=Fails())
    assert (learn.dls.train.bs, learn.dls.valid.bs)==(4, 4) and 'core_bs' not in vars(learn.dls.train)

# ---- the numbers are those of plain fastai

@case('numbers')
def fits():
    def f(learn):
        learn.fit_one_cycle(1, 1e-2)
        learn.freeze()
        learn.fit_flat_cos(1, 1e-2)
        learn.fine_tune(1, 1e-2)
    l,plain,learn = twins(f)
    assert learn.model[0].weight.device.type=='xla' and pieces(learn.model[0].weight)==[(16,8)]*N

@case('numbers')
def predictions():
    l,plain,learn = twins(lambda o: o.fit(1, 1e-2))
    for f in ('validate','get_preds'): near(quietly(plain, getattr(plain, f)), quietly(learn, getattr(learn, f)))
    for kw in (dict(with_input=True, with_loss=True), dict(ds_idx=0)):
        near(quietly(plain, plain.get_preds, **kw), quietly(learn, learn.get_preds, **kw))

@case('numbers')
def lr_find():
    l,plain,learn = twins(lambda o: o.fit(1, 1e-2))
    for o in (plain, learn): quietly(o, o.lr_find, num_it=20, show_plot=False)
    near(list(plain.recorder.losses), list(learn.recorder.losses))
    near(plain.model.state_dict(), learn.model.state_dict())

@case('numbers')
def fewer_cores_than_there_are():
    "compute the same twice; and none"
    twins(lambda o: o.fit(1, 1e-2), n=2)
    l,_,learn = twins(lambda o: o.fit(1, 1e-2), n=1)
    assert learn.tpu_data_parallel_trainer.mesh==dict(replica=1, fsdp=1, copy=N)
    with pytest.raises(ValueError, match='n_cores=3 does not divide the 4 cores of this process'): l.learner().to_tpu_distributed(n_cores=3)

@case('numbers')
def callbacks():
    l = lib()
    for cbs in ([l.MixUp(.4)], [l.EMACallback(decay=.9, use_warmup=True)], [l.NaNGuard(action='skip')],
            [l.ShortEpochCallback(.5)], [l.EarlyStoppingCallback(patience=1), l.SaveModelCallback(fname='best')]):
        twins(lambda o: o.fit(2, 1e-2, cbs=cbs), tol=1e-4)

@case('numbers')
def accumulated_gradients():
    "over as many batches as on one core: `n_acc` counts one core's samples, as `bs` does"
    l,acc = lib(),lib().GradientAccumulation(8)
    plain,learn = l.learner(bs=16, cbs=[l.GradientAccumulation(32), l.GradientClip(.1)]),l.learner(bs=4, cbs=[acc, l.GradientClip(.1)]).to_tpu_distributed(n_cores=N)
    for o in (plain, learn): quietly(o, o.fit, 2, 1e-2)
    same(plain, learn)
    assert acc.n_acc==8

@case('numbers')
def batchnorm_of_each_core():
    "`sync_bn=False`: a step is that of a model whose norms see a core's part; its running statistics are the means of those of the cores"
    l,n = lib(),N
    class Parts(l.nn.BatchNorm1d):
        def forward(self, x):
            if not self.training: return super().forward(x)
            before,res,after = (self.running_mean,self.running_var),[],[]
            for o in x.split(len(x)//n):
                self.running_mean,self.running_var = (b.clone() for b in before)
                res.append(super().forward(o))
                after.append((self.running_mean,self.running_var))
            self.running_mean,self.running_var = (sum(o)/n for o in zip(*after))
            return l.torch.cat(res)
    def mk(bs, n_samples=64):
        learn = l.learner(bs=bs, n=n_samples)
        if bs>8: learn.model[1].__class__ = Parts
        return learn
    plain,learn = mk(16),mk(4).to_tpu_distributed(n_cores=N, sync_bn=False)
    for o in (plain, learn): quietly(o, o.fit, 1, 1e-2)
    def host(o): return {k: v for k,v in o.model.state_dict().items() if 'tracked' not in k}
    near([host(plain), list(plain.recorder.values)], [host(learn), list(learn.recorder.values)])
    with pytest.raises(AssertionError): # all cores' statistics are another training
        whole = mk(4).to_tpu_distributed(n_cores=N)
        quietly(whole, whole.fit, 1, 1e-2)
        near(host(plain), host(whole))

@case('numbers')
def scaled_learning_rate():
    l = lib()
    plain,learn = l.learner(bs=16),l.learner(bs=4).to_tpu_distributed(n_cores=N, scale_lr=True)
    quietly(plain, plain.fit, 1, 4e-2)
    quietly(learn, learn.fit, 1, 1e-2)
    near(plain.model.state_dict(), learn.model.state_dict())
    assert [h['lr'] for h in learn.opt.hypers]==[1e-2]*2

# ---- indices of a user's, into a batch whose last one does not divide by the cores

def index_losses():
    "Losses of 70 samples' predictions and targets, by operators that look up, scatter, count or sort"
    l = lib()
    t,F = l.torch,l.F
    def rows(p): return t.arange(len(p), device=p.device)
    def nll(p, y): return -p.log_softmax(1)[rows(p), y].mean()
    def embedded(p, y):
        e = F.embedding(y, t.eye(3, device=p.device))
        return ((p-e)**2).mean()
    def set_items(p, y):
        z = t.zeros_like(p)
        z[rows(p), y] = 1.
        return ((p-z)**2).mean()
    def class_means(p, y):
        n = t.bincount(y, minlength=3).clamp(min=1)
        return (t.zeros(3, 3, device=p.device).index_add(0, y, p)/n[:,None]-t.eye(3, device=p.device)).pow(2).mean()
    return dict(indexed=nll, embedded=embedded, set_items=set_items, class_means=class_means,
        one_hot=lambda p,y: ((p-F.one_hot(y, 3))**2).mean(),
        gathered=lambda p,y: -p.log_softmax(1).gather(1, y[:,None]).mean(),
        scattered=lambda p,y: ((p-t.zeros_like(p).scatter(1, y[:,None], 1.))**2).mean(),
        added=lambda p,y: (t.zeros(3, device=p.device).scatter_add(0, y, p[:,0])**2).mean(),
        put=lambda p,y: (t.zeros(3, device=p.device).index_put((y,), p[:,1], accumulate=True)**2).mean(),
        selected=lambda p,y: (p*p.detach().index_select(0, y)).mean(),
        filled=lambda p,y: (p.index_fill(0, rows(p)[::2], 0.)**2).mean() + p.mean()*t.zeros(3, device=p.device).index_fill(0, y, 2.).mean(),
        copied=lambda p,y: (t.zeros_like(p).index_copy(0, rows(p).flip(0), p)*p.detach()).mean(),
        placed=lambda p,y: (p.put(rows(p)*3+y, p[:,0])**2).mean() + (p.take(rows(p)*3+y)**2).mean(),
        masked=lambda p,y: (p.masked_scatter((y==0)[:,None], p.flip(0))**2).mean(),
        ordered=lambda p,y: (p[y.argsort(stable=True)]*p.detach()).mean(),
        largest=lambda p,y: p[:,0].topk(4).values.mean()+p.sort(1).values[:,0].mean()+p.max(1).values.mean(),
        summed=lambda p,y: p.cumsum(0).pow(2).mean()*1e-2,
        chosen=lambda p,y: F.cross_entropy(p, y, reduction='none')[(y>0).nonzero()[:,0]].mean())

@case('indices')
def losses_that_index():
    "together: XLA's partitioner ended the process at each"
    fs = [*index_losses().values()]
    def mk(bs):
        learn = of_samples(bs, shuffle=True)
        learn.loss_func = lambda p,y: sum(f(p, y) for f in fs)
        return learn
    twins(lambda o: o.fit(1, 1e-2), mk)

@case('indices')
def models_that_look_up():
    "embeddings of numbers of the batch, one a sample and several, and classes that the model makes itself"
    l = lib()
    class Looks(l.nn.Module):
        def __init__(self): super().__init__(); self.emb,self.lin = l.nn.Embedding(9, 4),l.nn.Linear(8, 3)
        def forward(self, x):
            i = (x[:,:5].abs()*3).long().clamp(max=8)
            return self.lin(l.torch.cat([self.emb(i[:,0]), self.emb(i).mean(1)], 1)) + l.F.one_hot(i[:,1]%3, 3)
    def mk(bs):
        learn = of_samples(bs, shuffle=True)
        l.set_seed(4)
        learn.model = Looks()
        return learn
    twins(lambda o: o.fit(1, 1e-2), mk)

# ---- everything of a notebook stays in its process

@case('notebook')
def what_a_callback_uses():
    "globals, open files, what cannot be pickled, prints; and a traceback ends in the user's line"
    l,seen,text = lib(),[],io.StringIO()
    class Notes(l.Callback):
        def __init__(self): self.lock,self.file,self.gen = threading.Lock(),open('notes.txt', 'w'),(i for i in range(99))
        def after_batch(self):
            with self.lock: self.file.write(f'{next(self.gen)} ')
            seen.append(os.getpid())
            print('batch', end=' ')
    learn = l.learner(bs=4).to_tpu_distributed(n_cores=N)
    with redirect_stdout(text): quietly(learn, learn.fit, 1, cbs=(cb := Notes()))
    cb.file.close()
    n = len(seen)
    assert n==6 and {*seen}=={os.getpid()} and text.getvalue().count('batch')==n and open('notes.txt').read().split()==[*map(str, range(n))]
    class Wrong(l.Callback):
        def after_pred(self): raise KeyError('here')
    with pytest.raises(KeyError) as e: quietly(learn, learn.fit, 1, cbs=Wrong())
    assert e.traceback[-1].name=='after_pred' and "raise KeyError('here')" in str(e.traceback[-1].statement)

@case('notebook')
def what_follows_a_fit():
    "predictions of one sample, files, tables and interpretation"
    l,plain,learn = twins(lambda o: o.fit(1, 1e-2))
    x = l.vectors(1, 5)[0]
    near(plain.predict(x)[2], learn.predict(x)[2])
    near(*[list(quietly(o, l.Interpretation.from_learner, o).top_losses(5)[0]) for o in (plain, learn)])
    assert 'Total params' in str(learn.summary()) and 'xla' not in str(learn.summary()).lower()
    for o,file in ((plain, 'plain'), (learn, 'cores')): o.save(file)
    other = l.learner(bs=4).load('cores')
    near(plain.model.state_dict(), other.model.state_dict())
    learn.load('plain')
    near(plain.model.state_dict(), learn.model.state_dict())
    assert pieces(learn.model[0].weight)==[(16,8)]*N

@case('notebook')
def detached_and_again():
    "by the context, back to the CPU with the optimizer's state; and another Learner beside it"
    l,mk = lib(),lib().learner
    plain,learn,other = mk(bs=16),mk(bs=4),mk(bs=4).to_tpu_distributed(n_cores=N)
    quietly(plain, plain.fit, 1, 1e-2)
    with learn.tpu_distributed_ctx(n_cores=N): quietly(learn, learn.fit, 1, 1e-2)
    assert {p.device.type for p in learn.model.parameters()}=={'cpu'} and not [cb for cb in learn.cbs if 'tpu' in cb.name]
    same(plain, learn)
    quietly(other, other.fit, 1, 1e-2)
    same(plain, other)
    for o in (plain, learn.to_tpu_distributed(n_cores=N)): quietly(o, o.fit, 1, 1e-2, reset_opt=False)
    same(plain, learn)

@case('notebook')
def memory_is_given_back():
    "of a Learner that was detached, or forgotten"
    import gc, weakref
    l = lib()
    def ended(f):
        learn = l.learner(bs=4).to_tpu_distributed(n_cores=N)
        quietly(learn, learn.fit, 1)
        refs = [weakref.ref(t) for t in learn.model.parameters()]
        assert refs[0]().device.type=='xla'
        f(learn)
        return refs
    left = []
    for f in (lambda o: left.append(o.detach_tpu_distributed()), lambda o: None):
        refs = ended(f)
        gc.collect()
        assert refs and not [r for r in refs if r() is not None and r().device.type=='xla']

@case('notebook')
def hooks_that_keep_activations():
    l = lib()
    def layers(o): return [m for m in o.model if isinstance(m, (l.nn.Linear,l.nn.ReLU))]
    class Keeps(l.Callback):
        "The outputs of each layer of the last batch, of which 4 samples are no padding"
        def before_fit(self): self.hooks = l.hook_outputs(layers(self.learn), detach=True)
        def after_fit(self):
            self.kept = [o.float().cpu()[:4] for o in self.hooks.stored]
            self.hooks.remove()
    found = []
    def f(o):
        cbs = [Keeps(), l.ActivationStats(modules=layers(o))]
        o.fit(1, 1e-2, cbs=cbs)
        found.append([cbs[0].kept, [[s['mean'], s['std']] for step in cbs[1].stats for s in step]])
    twins(f)
    assert len(found[0][1])==12
    near(*found)

# ---- what trains beside a Learner: each means what it means on one core

@case('contract')
def mixed_precision():
    "is that of one core with the whole batch, `to_fp16` and `to_bf16` alike; and near full precision"
    l,lost = lib(),[]
    for n,bs,to in ((1,16,'to_bf16'), (N,4,'to_bf16'), (N,4,'to_fp16'), (N,4,'to_fp32')):
        learn = getattr(l.learner(bs=bs), to)().to_tpu_distributed(n_cores=n)
        quietly(learn, learn.fit, 2, 1e-2)
        assert {p.dtype for p in learn.model.parameters()}=={l.torch.float32}
        lost.append([list(learn.recorder.losses), learn.model.state_dict()])
    one,bf16,fp16,full = lost
    near(one, bf16, 5e-3)
    near(bf16, fp16, 0)
    near(bf16[0], full[0], .03)
    with pytest.raises(AssertionError): near(bf16[0], full[0], 1e-5)

@case('contract')
def draws_of_the_host():
    "augmentation on the device, and MixUp, draw what plain fastai draws by the same seed"
    l = lib()
    def mk(bs):
        l.set_seed(3)
        tfms = [*l.aug_transforms(), l.Normalize.from_stats(*l.imagenet_stats, cuda=False)]
        body = l.nn.Sequential(l.nn.Conv2d(3, 4, 3, stride=4), l.nn.ReLU(), l.nn.AdaptiveAvgPool2d(1), l.Flatten(), l.nn.Linear(4, 4))
        return l.Learner(l.image_dls(bs=bs, n=61, batch_tfms=tfms), body, loss_func=l.CrossEntropyLossFlat(), cbs=l.MixUp(.4))
    plain,learn = mk(16),mk(4).to_tpu_distributed(n_cores=N)
    assert learn.tfm_placement.n_host==0, learn.tfm_placement
    near(*[batches_of(o) for o in (plain, learn)], 2e-4)
    same(plain, learn, 1e-4)
    for o in (plain, learn): o.remove_cbs(l.MixUp)
    near(quietly(plain, plain.tta, n=2), quietly(learn, learn.tta, n=2), 1e-4)

@case('contract')
def draws_of_the_device():
    "dropout draws for the whole batch, as on one core"
    l,lost = lib(),[]
    def drops(): return l.nn.Sequential(l.nn.Linear(8, 16), l.nn.ReLU(), l.nn.Dropout(.3), l.nn.Linear(16, 3))
    for n,bs in ((1,16), (N,4)):
        learn = l.learner(bs=bs, n=70, model=drops).to_tpu_distributed(n_cores=n)
        quietly(learn, learn.fit, 2, 1e-2)
        lost.append([list(learn.recorder.losses), learn.model.state_dict()])
    near(*lost)

@case('contract')
def sets_validated_in_between():
    "`EvalEvery`: by epochs, steps, samples and percent, at the steps and with the values of plain fastai"
    l,told = lib(),[]
    for bs,n in ((16,1), (4,N)):
        learn,cbs = l.learner(bs=bs, n=128),[*l.every(bs), *l.cadences(bs)]
        if n>1: learn.to_tpu_distributed(n_cores=n)
        quietly(learn, learn.fit, 2, 1e-2, cbs=[*cbs, l.SaveModelCallback('noisy_accuracy')])
        told.append([learn.model.state_dict(), [[list(h) for h in cb.history] for cb in cbs],
            l.torch.tensor([list(o) for o in learn.recorder.values]).nan_to_num(-1.)])
    assert [o[0] for o in told[0][1][1]]==[3,6,9,12,15], told[0][1]
    near(*told)

@case('contract')
def poisoned_batches():
    "`NaNGuard` leaves a step out as if its batch had not been there, or names it"
    import math, warnings
    l = lib()
    def mk(bs, without=False, **kwargs):
        ds = [(x.clone(), y) for x,y in l.vectors(80)]
        ds[35][0][2] = math.nan
        learn = l.learner(bs=bs, cbs=l.NaNGuard(**kwargs))
        learn.dls.train = l.TfmdDL(ds[:32]+ds[48:] if without else ds, bs=bs, num_workers=0)
        return learn
    plain,learn = mk(16, without=True),mk(4, action='skip').to_tpu_distributed(n_cores=N)
    with warnings.catch_warnings(record=True) as said:
        for o in (plain, learn): quietly(o, o.fit, 2, 1e-2)
    near(list(plain.model.parameters()), list(learn.model.parameters()))
    assert learn.nan_guard.n_skipped==2 and any('skipped 2 steps' in str(o.message) and 'first at batch 3' in str(o.message) for o in said)
    learn = mk(4).to_tpu_distributed(n_cores=N)
    with pytest.raises(l.NotFinite, match=r'Batch 3 of this fit \(epoch 0, batch 2 of it\).*\d of 5 parameters, 0.weight is the first'):
        quietly(learn, learn.fit, 1, 1e-2)

@case('contract')
def a_step_costs_what_it_costs_on_one_core():
    "by `XLAStats`, `StepProfiler` and `TPUMeter`: one execution, nothing compiled or read unless it is fetched, and samples of all cores"
    l,lost = lib(),[]
    for kwargs in (dict(fetch_every=1e9), dict(fetch_every=0.), dict(fetch_every=1e9, replay=False)):
        stats,prof,meter = l.XLAStats(),l.StepProfiler((2,6), trace=False),l.TPUMeter(show=False)
        learn = l.learner(bs=4, n=256).to_tpu_distributed(n_cores=N, **kwargs)
        quietly(learn, learn.fit, 2, 1e-2, cbs=[stats, meter, prof])
        steady = stats.steps[18:-1]
        assert {o.compiles for o in steady}=={0} and not any(o.fallbacks for o in steady)
        assert (sum(o.reads for o in steady)>=len(steady)-1)==(not kwargs['fetch_every'])
        assert (sum(o.reads for o in steady)==0)==(kwargs['fetch_every']>0), stats
        assert sum(o.executions for o in steady)<=len(steady)+1
        assert len(prof.steps)==4 and prof.table[-1][0]=='a step'
        assert (meter.total['steps'],meter.total['samples'])==(32,512) and meter.total['core_seconds']==pytest.approx(N*meter.total['seconds'])
        assert (learn.replay.n_replayed>20)==('replay' not in kwargs)
        lost.append([list(learn.recorder.losses), learn.model.state_dict()])
    near(*lost[:2], 0)
    near(lost[0], lost[2], 1e-6)

@case('contract')
def last_batches_that_do_not_divide():
    "of 6 and of 2 samples: mixed, clipped, guarded, and waiting for a step"
    l = lib()
    for n,cbs in ((70, lambda k: [l.MixUp(.4), l.GradientClip(.05)]),
            (66, lambda k: [l.MixUp(.4), l.NaNGuard(action='skip')]), (70, lambda k: l.GradientAccumulation(8*k))):
        plain,learn = l.learner(bs=16, n=n, cbs=cbs(N)),l.learner(bs=4, n=n, cbs=cbs(1)).to_tpu_distributed(n_cores=N)
        for o in (plain, learn): quietly(o, o.fit, 2, 1e-2)
        same(plain, learn)

@case('contract')
def from_form_to_form():
    "with weights and the optimizer's state: two cores, four, sharded, one, and back to the host"
    l = lib()
    plain,learn = l.learner(bs=16),l.learner()
    for bs,to in ((8, lambda o: o.to_tpu_distributed(n_cores=2)), (4, lambda o: o.to_tpu_distributed(n_cores=4)), (16, lambda o: o.to_tpu_sharded(fsdp=4)),
            (16, l.Learner.to_tpu), (16, l.Learner.detach_tpu_distributed)):
        for dl in learn.dls.loaders: dl.bs = bs
        to(learn)
        for o in (plain, learn): quietly(o, o.fit, 1, 1e-2, reset_opt=False)
        same(plain, learn)

@case('contract')
def interrupted():
    "Ctrl-C in a batch keeps what was reached; the next fit goes on from there"
    l = lib()
    class Presses(l.Callback):
        def after_batch(self):
            if self.training and self.train_iter==6: raise KeyboardInterrupt
    def f(o):
        with pytest.raises(KeyboardInterrupt): o.fit(3, 1e-2, cbs=Presses())
        o.fit(1, 1e-2, reset_opt=False)
    twins(f, partial(l.learner, n=70))

@pytest.mark.parametrize('group,name', groups.names)
def test_case(group, name): groups.check(group, name)

def test_first_minute_in_a_notebook(tmp_path):
    "on eight cores: what its kernel shows is where it trains, fastai's table and what a fit has cost"
    import nbformat
    from kernels import Manager
    from nbclient import NotebookClient
    cells = ['import os, warnings\nwarnings.simplefilter("error")\nfrom recipes import *', 'learn = learner(bs=2).to_tpu_distributed()', 'learn.fit(2, 1e-2)', 'learn.validate()']
    nb = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    env = {**os.environ, 'PYTHONPATH': f'{repo}{os.pathsep}{repo/"tests"}', 'PJRT_DEVICE': 'CPU', 'OMP_NUM_THREADS': '1'}
    for o in ('CPU_NUM_DEVICES','TF_CPP_MIN_LOG_LEVEL'): env.pop(o, None)
    NotebookClient(nb, timeout=300, kernel_manager_class=Manager, resources=dict(metadata=dict(path=str(tmp_path)))).execute(env=env)
    said = {name: ''.join(o.text for c in nb.cells for o in c.outputs if o.output_type=='stream' and o.name==name) for name in ('stdout','stderr')}
    lines = [o.strip() for o in said['stdout'].splitlines() if o.strip()]
    assert len(lines)==3, lines
    for line,start in zip(lines, ("No TPU found: 8 virtual cores on this machine's CPU", r'\d graphs compiled in', r'8x CPU: [\d,.]+ samples/s')): assert re.match(start, line), lines
    assert not [o for o in said['stderr'].splitlines() if o.strip() and 'tqdm' not in o], said['stderr']

def test_no_line_of_cpp_reaches_a_script():
    "of XLA's log, also where torch_xla was imported first, which sets its level; errors do, by their level"
    res = run('-c', dedent("""
        import torch_xla
        from recipes import *
        learn = learner().to_tpu_distributed(n_cores=2)
        with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2)
        print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"""), PYTHONPATH=f'{repo}{os.pathsep}{repo/"tests"}', CPU_NUM_DEVICES=None, TF_CPP_MIN_LOG_LEVEL=None)
    assert res.returncode==0, res.stderr
    assert 'No TPU found: 2 virtual cores' in res.stdout and res.stdout.splitlines()[-1]=='2' and '.cc:' not in res.stdout+res.stderr, res.stderr

if __name__=='__main__': groups.main(*sys.argv[1:])
