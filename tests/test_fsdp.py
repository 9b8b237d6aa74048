"`to_tpu_distributed(fsdp=...)`: torch_xla's XlaFullyShardedDataParallel trains as one process does, and the Learner has its own model again afterwards."
import pytest
from fastai.basics import *
from fastai.callback.all import *
from fastai_xla.all import *
from parity_models import leaves
for o in [o for o in globals() if o.startswith('test')]: del globals()[o]  # fastai's, which pytest would collect

N,B = 2,4

def samples():
    xs = torch.randn(41, 6, generator=torch.Generator().manual_seed(0))
    return list(zip(xs, (xs[:,0]>0).long()+(xs[:,1]>0).long()))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.n = nn.Linear(8,8),nn.LayerNorm(8)
    def forward(self, x): return x+self.n(self.a(x).relu())

def net():
    g = torch.Generator().manual_seed(1)
    m = nn.Sequential(nn.Linear(6,8,bias=False), nn.BatchNorm1d(8), nn.Sequential(Block(), Block()), nn.Linear(8,3))
    for p in m.parameters():
        if p.ndim>1: nn.init.normal_(p, std=.3, generator=g)
        else: p.data = torch.linspace(.5, 1., len(p))
    return m

def thirds(m): return L(m[:2], m[2], m[3]).map(params)

def learner(bs=B, n=28, n_valid=13, model=net, **kwargs):
    s = samples()
    dls = DataLoaders(DataLoader(s[:n], bs=bs), DataLoader(s[28:28+n_valid], bs=B))
    return Learner(dls, model(), loss_func=CrossEntropyLossFlat(), path=Path('.'), **{'metrics': accuracy, 'splitter': thirds, **kwargs})

def quiet(learn, f):
    with learn.no_bar(), learn.no_logging(): return f(learn)

def outcome(learn):
    return to_host([dict(learn.model.state_dict()), learn.opt.state_dict()['state'], list(learn.recorder.losses), list(learn.recorder.values),
                    [p.requires_grad for p in learn.model.parameters()]])

def near(want, got, tol=2e-6):
    want,got = leaves(want),leaves(got)
    assert want.keys()==got.keys()
    far = {k: abs(want[k]-got[k]).max(initial=0) for k in want if not abs(want[k]-got[k]).max(initial=0)<=tol}
    assert not far, far

def on_ranks(f, fsdp=True, sync_bn=True, **kwargs):
    "`f` of the Learner on each rank: what became of it there, and what `f` returned"
    def _one(rank):
        learn = learner(**kwargs).to_tpu_distributed(fsdp=fsdp, sync_bn=sync_bn)
        model,ps = learn.model,list(learn.model.parameters())
        res = quiet(learn, f)
        assert learn.model is model and all(p is q and p.device.type=='cpu' for p,q in zip(ps, model.parameters()))
        assert not [k for m in model.modules() for k in vars(m) if 'forward' in k and not k.startswith('_')]
        return (outcome(learn) if learn.opt else None), to_host(res)
    return run_replicas(_one, n=N)

def equal(f, fsdp=True, **kwargs):
    "Assert that `f` does the same on `N` ranks and in one process with the batches of all"
    plain = learner(**{**kwargs, 'bs': N*B})
    res = quiet(plain, f)
    for got,r in on_ranks(f, fsdp, **kwargs):
        near(outcome(plain), got)
        if res is not None: near(res, r)

def fit(learn): learn.fit(2, 1e-2)

torch_adamw = partial(OptimWrapper, opt=torch.optim.AdamW, eps=1e-5)

@pytest.mark.parametrize('options', [True, dict(wrap=()), dict(wrap=Block, grad_ckpt=True), dict(wrap=[Block,nn.Linear], reshard_after_forward=False),
    dict(shard_param_on_dim_0=True, coalesce_all_gather_ops=True, pin_layout_in_collective_ops=False),
    dict(reduce_scatter_bucket_size_mb=1, pin_layout_in_collective_ops=False, optimization_barrier_in_forward=False),
    dict(sync_on_finalization=True, disable_reshard_on_root=False, execute_sharding_on_init=False),
    dict(auto_wrap_policy=lambda module, recurse, unwrapped_params: recurse or isinstance(module, Block))], ids=lambda o: '+'.join(o) if isinstance(o, dict) else 'default')
def test_options(options): equal(lambda o: o.fit(1, 1e-2), options)

def test_flattened(): equal(fit, dict(flatten_parameters=True), splitter=trainable_params, wd_bn_bias=True)

@pytest.mark.parametrize('opt_func', [torch_adamw, ranger, partial(SGD, mom=.9)], ids=['AdamW','ranger','SGD'])
def test_optimizers(opt_func): equal(fit, opt_func=opt_func)

def test_groups_and_frozen_layers():
    def f(learn):
        learn.fit(1, 1e-2)
        learn.freeze()
        learn.fit_one_cycle(1, 1e-2)
        learn.unfreeze()
        learn.fit(1, slice(1e-4, 1e-2))
        return learn.validate(), learn.get_preds()
    equal(f)

class Thaw(Callback):
    def before_epoch(self):
        if self.epoch==1: self.learn.unfreeze()

def test_layers_that_are_unfrozen_in_a_fit():
    def f(learn):
        learn.freeze()
        learn.fit(2, 1e-2, cbs=Thaw())
    equal(f)

def test_clip_and_accumulation():
    "`n_acc` is that of one core, as `bs` is"
    equal(lambda o: o.fit(1, 1e-2, cbs=[GradientClip(.05), GradientAccumulation(2*N*B//world_size())]))

def test_save_load_and_lr_find():
    "files are written within a fit, and are those of plain fastai"
    def f(learn):
        learn.fit(2, 1e-2, cbs=SaveModelCallback(fname='best', with_opt=True))
        learn.lr_find(num_it=4, show_plot=False)
        file = learn.save('m')
        learn.fit(1, 1e-2)
        learn.load('m')
        learn.save_sharded('s')
        learn.fit(1, 1e-2)
        learn.load_sharded('s')
    equal(f)
    plain = learner().load('m')
    near(plain.model.state_dict(), learner().load_sharded('s').model.state_dict())
    near(plain.opt.state_dict()['state'], learner().load_sharded('s').opt.state_dict()['state'])
    assert b'xla' not in Path('models/best.pth').read_bytes()

def test_ranks_without_a_batch():
    "of the validation set, which are three batches, and one"
    equal(lambda o: (o.fit(1, 1e-2), o.validate(), o.get_preds(ds_idx=1))[1:], n_valid=11)
    equal(lambda o: (o.fit(1, 1e-2), o.get_preds())[1:], n_valid=3)

def test_a_last_step_that_does_not_divide():
    "is cut to as many samples on each rank"
    a,b = on_ranks(fit, n=27)
    near(a[0], b[0])
    near(a[0], on_ranks(fit, n=26)[0][0])

def test_bf16():
    "computes in bfloat16, with parameters and running statistics in float32"
    for sync_bn in (True,'stats'):
        for got,_ in on_ranks(fit, dict(compute_dtype=torch.bfloat16), sync_bn=sync_bn):
            assert got[2][-1]<got[2][0] and {v.dtype for v in got[0].values()}=={torch.float32, torch.long}

def test_ranks_start_from_the_weights_of_the_main_rank():
    def f(learn):
        if rank():
            for p in learn.model.parameters(): p.data += 1
        learn.fit(1, 1e-2)
    a,b = on_ranks(f)
    near(a[0], b[0])

class Bytes(Callback):
    order = 100
    def after_train(self):
        ps = list(self.learn.model.parameters())
        self.n,self.shapes = sum(p.numel() for p in ps),{v.shape==p.shape for p in ps for v in self.opt.state[p].values() if isinstance(v, torch.Tensor)}

def test_each_rank_has_its_part():
    wide = lambda: nn.Sequential(nn.Linear(6,512), nn.Sequential(nn.Sequential(nn.Linear(512,512), nn.ReLU())), nn.Linear(512,3))
    def f(learn):
        learn.fit(1, 1e-2, cbs=(cb := Bytes()))
        return cb.n,cb.shapes=={True}
    whole = sum(p.numel() for p in wide().parameters())
    for _,(n,alike) in on_ranks(f, model=wide, splitter=trainable_params): assert n<=whole/N*1.05 and alike

def test_refused():
    def tied():
        m = net()
        m[2][1].a.weight = m[2][0].a.weight
        return m
    def raises(err, fsdp=True, **kwargs):
        with pytest.raises(Exception, match=err): on_ranks(fit, fsdp, **kwargs)
    raises('2.0.a.weight and 2.1.a.weight are one parameter in two blocks.*wrap=\\(\\)', model=tied)
    equal(fit, dict(wrap=()), model=tied)
    raises('larc_layer_lr needs the norm of whole layers', opt_func=Larc)
    raises('lamb_step needs the norm of whole layers', opt_func=Lamb)
    raises('in several parameter groups', dict(flatten_parameters=True))
    raises('weight decay is for some of them alone.*wd_bn_bias=True', dict(flatten_parameters=True), splitter=trainable_params)
    with pytest.raises(ValueError, match="`fsdp` has the option 'wrapp'.*reshard_after_forward"): learner().to_tpu_distributed(fsdp=dict(wrapp=Block))
