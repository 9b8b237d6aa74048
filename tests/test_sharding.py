"""One program for all cores (SPMD). A process cannot leave SPMD or change its number of devices, so cases run in groups, each in a fresh process: `python test_sharding.py <group>`."""
import math, os, re, sys
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

import pytest
from cases import Groups, near, pieces, same

groups = Groups(__file__, lambda: dict(CPU_NUM_DEVICES=None, MPLBACKEND='Agg'))
case = groups.case

def host_pieces(shape, spec, sizes, host, n_hosts):
    "Start and end in each dim of the pieces that `host` writes of a tensor spread by `spec` over a mesh of `sizes`"
    import numpy as np
    n,res = math.prod(sizes.values()),[]
    spec = [(o,) if isinstance(o, str) else o or () for o in spec or [None]*len(shape)]
    for place in range(n*host//n_hosts, n*(host+1)//n_hosts):
        at = dict(zip(sizes, map(int, np.unravel_index(place, tuple(sizes.values())))))
        if any(v for k,v in at.items() if not any(k in o for o in spec)): continue # a copy
        tiles = [(math.prod(sizes[a] for a in o), int(np.ravel_multi_index([at[a] for a in o], [sizes[a] for a in o])) if o else 0) for o in spec]
        piece = tuple((min(i*c, s), min((i+1)*c, s)) for s,c,i in ((s, -(-s//k), i) for s,(k,i) in zip(shape, tiles)))
        if all(b>a for a,b in piece): res.append(piece)
    return res

# In the processes

@lru_cache(None)
def lib():
    "The names that a case needs, as an object; this process is turned to SPMD"
    from types import SimpleNamespace
    import fastai_xla.all, inside, parity_models, count_models, torch, torch_xla
    from fastai.callback import all as cbs
    lib = SimpleNamespace(**{k: v for m in (cbs, fastai_xla.all, inside, parity_models, count_models) for k,v in vars(m).items() if not k.startswith('_')})
    lib.X = torch_xla._XLAC
    tiny(lib).to_tpu_sharded()
    return lib

def tiny(l, n=40, n_valid=13, bs=16, **kwargs):
    "A Learner on vectors, with a BatchNorm; 40 samples make batches of 16, 16 and 8"
    l.set_seed(1)
    x = l.torch.randn(n+n_valid, 16, generator=l.torch.Generator().manual_seed(0))
    samples = list(zip(x, x[:,:4].argmax(1)))
    dls = l.DataLoaders(l.DataLoader(samples[:n], bs=bs), l.DataLoader(samples[n:], bs=bs))
    model = l.nn.Sequential(l.nn.Sequential(l.nn.Linear(16,64,bias=False), l.nn.BatchNorm1d(64), l.nn.ReLU()), l.nn.Linear(64,4))
    return l.Learner(dls, model, loss_func=l.CrossEntropyLossFlat(), splitter=l.halves, path=l.Path('.'), **{'metrics': l.accuracy, **kwargs})

def quiet(l, learn, f, *args, **kwargs):
    l.set_seed(7)
    with learn.no_bar(),learn.no_logging(): return f(*args, **kwargs)

def both(f, mk=tiny, tol=2e-5, **kwargs):
    "Run `f` on a plain Learner and on its sharded twin: `lib, plain, sharded`, after asserting that they are equal"
    l = lib()
    plain = mk(l)
    quiet(l, plain, f, plain)
    learn = mk(l).to_tpu_sharded(**(kwargs or dict(fsdp=8)))
    quiet(l, learn, f, learn)
    same(plain, learn, tol)
    return l,plain,learn

def share(l, ts):
    "The part of the bytes of `ts` that the fullest core has, from the real pieces"
    ts = [t.detach() for t in ts]
    parts = [sum(col) for col in zip(*([o[0].numel()*o[0].element_size() for o in p] for p in l.X._get_local_shards(ts)))]
    assert len(parts)==8
    return max(parts)/sum(t.numel()*t.element_size() for t in ts)

def state_tensors(l, opt): return [v for s in opt.state.values() for v in s.values() if isinstance(v, l.torch.Tensor) and v.device.type=='xla']

def is_spread(l, learn):
    "Assert that the large parameter and its state are in 8 pieces"
    w = learn.model[0][0].weight
    assert pieces(w)==[(8,16)]*8
    for k,v in learn.opt.state.get(w, {}).items():
        if isinstance(v, l.torch.Tensor): assert pieces(v)==[(8,16)]*8, k

# Equal to one device

everything = [('', 'fsdp', 1)]

@case('parity')
def vit_with_adam_over_8():
    l = lib()
    mk = partial(l.MODELS['vit'], opt_func=l.OPTS['Adam'])
    learn = mk().to_tpu_sharded(fsdp=8, rules=everything)
    l.assert_same(l.outcome(learn, l.LRS['Adam']), l.outcome(mk(), l.LRS['Adam']), l.TOLS['vit'])
    assert share(l, state_tensors(l, learn.opt))<=1.05/8
    assert learn.sharding.device_nbytes/learn.sharding.nbytes==share(l, list(learn.model.parameters()))<=1.05/8

# Methods

@case('methods')
def fit_and_its_relatives():
    def f(learn):
        learn.fit_one_cycle(1, 1e-2)
        learn.freeze()
        learn.fit(1, 1e-2)
        learn.fine_tune(1, 1e-2)
    l,plain,learn = both(f)
    is_spread(l, learn)
    assert not any(isinstance(vars(l.torch)[o], l.Loan) for o in ('layer_norm','group_norm','instance_norm','batch_norm'))
    assert not any(m._forward_hooks for m in learn.model.modules())

@case('methods')
def lr_find():
    l,plain,learn = both(lambda o: o.fit(1, 1e-2))
    ps = list(learn.model.parameters())
    for o in (plain, learn): quiet(l, o, o.lr_find, num_it=5, show_plot=False)
    assert all(p is q for p,q in zip(ps, learn.model.parameters()))
    near(list(plain.recorder.losses), list(learn.recorder.losses))
    near(plain.model.state_dict(), learn.model.state_dict())
    is_spread(l, learn)

@case('methods')
def save_and_load():
    l,plain,learn = both(lambda o: o.fit(1, 1e-2))
    before = l.xla_counts()
    f = learn.save('m')
    n = len(learn.model.state_dict())+len(state_tensors(l, learn.opt))
    d = l.xla_counts()-before
    assert (d.compiles,d.executions)==(0,0) and d.reads<=n, d
    near(l.torch.load(f, weights_only=False)['model'], plain.model.state_dict())
    other = tiny(l).load('m')
    for o in (plain, other, learn):
        quiet(l, o, o.fit, 1, 1e-2)
    same(plain, other)
    same(plain, learn)
    ps = list(learn.model.parameters())
    learn.load('m')
    assert all(p is q for p,q in zip(ps, learn.model.parameters()))
    is_spread(l, learn)
    quiet(l, learn, learn.fit, 1, 1e-2)
    near(plain.model.state_dict(), learn.model.state_dict())
    is_spread(l, learn)

@case('methods')
def frozen_batchnorm():
    "in eval mode, over a layer that learns"
    l = lib()
    class Frozen(l.Callback):
        order = 10
        def before_train(self): self.model[0][1].eval()
    def f(learn):
        learn.fit(1, 1e-2)
        w,stats = (o.clone() for o in (learn.model[0][0].weight, learn.model[0][1].running_mean))
        learn.fit(1, 1e-2, cbs=Frozen())
        assert (learn.model[0][0].weight!=w).any() and (learn.model[0][1].running_mean==stats).all()
    both(f)

@case('methods')
def padding_stays_out_of_a_batchnorm_in_training():
    "As in the validation of a GAN, here of 13 samples"
    l = lib()
    class StaysInTraining(l.Callback):
        def before_validate(self): self.model.train()
    both(lambda o: o.fit(2, 1e-2, cbs=StaysInTraining()))

@case('methods')
def other_norms():
    def mk(l):
        learn = tiny(l)
        learn.model[0] = l.nn.Sequential(l.nn.Linear(16,64,bias=False), l.nn.BatchNorm1d(64), l.nn.LayerNorm(64), l.nn.Unflatten(1, (8,8)), l.nn.GroupNorm(4,8), l.nn.Flatten())
        learn.create_opt()
        return learn
    both(lambda o: o.fit(1, 1e-2), mk)

@case('methods')
def token_ids_and_small_batches():
    def mk(l):
        l.set_seed(1)
        x = l.torch.randint(0, 32, (45,6), generator=l.torch.Generator().manual_seed(0))
        samples = list(zip(x, x[:,0]%4))
        dls = l.DataLoaders(l.DataLoader(samples[:30], bs=12), l.DataLoader(samples[30:], bs=12))
        class Mean(l.nn.Module):
            def forward(self, x): return x.mean(1)
        model = l.nn.Sequential(l.nn.Embedding(32,64), Mean(), l.nn.Linear(64,4))
        return l.Learner(dls, model, loss_func=l.CrossEntropyLossFlat(), metrics=l.accuracy)
    with pytest.warns(UserWarning, match='bs=12 samples does not divide by 8 cores.*choose bs=16'):
        l,plain,learn = both(lambda o: o.fit(2, 1e-2), mk)
    near(quiet(l, plain, plain.get_preds), quiet(l, learn, learn.get_preds))
    seen = []
    class Seen(l.Callback):
        order = -100
        def before_batch(self): seen.append([pieces(t) for t in (self.x, self.y)])
    quiet(l, learn, learn.fit, 1, cbs=Seen())
    assert seen[0]==[[(2,6)]*8, [(2,)]*8]
    assert seen[2]==[[(6,6)]*8, [(6,)]*8], 'fewer samples than cores'

@case('methods')
def detach_and_other_meshes():
    def f(learn): learn.fit(1, 1e-2)
    l,plain,learn = both(f)
    before = l.xla_counts()
    learn.detach_tpu_sharded()
    assert (l.xla_counts()-before).compiles==0
    for mesh,want in ((dict(replica=2, fsdp=4), (16,16)), (dict(fsdp=1), (64,16)), (dict(fsdp=2, model=2, rules=[('0.0.weight', (('model','fsdp'),None))]), (16,16))):
        with learn.tpu_sharded_ctx(**mesh):
            assert pieces(learn.model[0][0].weight)==[want]*8
            for o in (plain, learn): quiet(l, o, f, o)
        assert {p.device.type for p in learn.model.parameters()}=={'cpu'} and not hasattr(learn, 'tpu_sharded_trainer')
        same(plain, learn, 5e-5)
    learn.to_tpu_sharded(fsdp=8).to_tpu_sharded(replica=2)
    assert pieces(learn.model[0][0].weight)==[(16,16)]*8

@case('methods')
def images_predict_tta_export():
    def mk(l): return l.cnn()
    def f(learn): learn.fit(1, 1e-2)
    l,plain,learn = both(f, mk, replica=2, rules=everything)
    near(quiet(l, plain, plain.tta, n=1), quiet(l, learn, learn.tta, n=1))
    item = plain.dls.valid.items[0]
    near(quiet(l, plain, plain.predict, item)[1:], quiet(l, learn, learn.predict, item)[1:])
    learn.export('e.pkl')
    assert b'xla' not in Path('e.pkl').read_bytes()
    near(quiet(l, plain, plain.predict, item)[1:], quiet(l, plain, l.load_learner('e.pkl').predict, item)[1:])
    assert pieces(learn.model[1].weight)==[(4,4)]*8

def augmented(l):
    "A Learner of images with batch transforms"
    learn = l.cnn(opt_func=l.SGD)
    l.set_seed(1)
    learn.dls = l.image_dls(batch_tfms=[*l.aug_transforms(), l.Normalize.from_stats(*l.imagenet_stats)])
    return learn

@case('methods')
def refused_afterwards():
    l = lib()
    learn = tiny(l)
    with pytest.raises(RuntimeError, match='This process uses SPMD.*restart Python'): learn.to_tpu_distributed(processes=True)
    with pytest.raises(RuntimeError, match='already started with 8 devices, not 4'): l.use_virtual_cores(4)
    for kwargs in (dict(fsdp=16), dict(replica=3, fsdp=4), dict(rules=[('0.0.weight', ('fsdp',))])):
        with pytest.raises(ValueError): learn.to_tpu_sharded(**kwargs)
    assert learn.model[0][0].weight.device.type=='cpu' and not learn._grab_cbs(l.TPUShardedTrainer)

# Several hosts, pretended: the numbers of a host's devices do not follow each other, as on a TPU

blocks_of_two = [(0,1,4,5), (2,3,6,7)]

@contextmanager
def pretend_hosts(hosts):
    "One program gives the devices of this process to several hosts in name, of each the ordinals of its own, and does what each would"
    from fastai_xla.patches.registry import Loans
    from fastai_xla.sharding import trainer
    from fastai_xla.sharding.mesh import HostLayout
    with Loans() as loans:
        loans.put(trainer, 'slice_layout', lambda: HostLayout(tuple(hosts), tuple(range(len(hosts)))))
        yield

def on_two_hosts(f, mk=tiny, tol=2e-5, **kwargs):
    "As `both`, with devices that pretend to be of two hosts"
    l = lib()
    with pretend_hosts(blocks_of_two): res = both(f, mk, tol, **kwargs)
    mesh = res[-1].tpu_sharded_trainer.mesh
    assert (mesh.n_hosts, mesh.layout.here, mesh.layout.order)==(2, (0,1), [0,1,4,5,2,3,6,7])
    return res

@case('methods')
def two_hosts_are_as_one():
    "in losses, weights, metrics of all kinds, predictions, lr_find; the last batches are smaller, one has fewer samples than there are cores"
    l = lib()
    mk = partial(tiny, n=21, metrics=[l.accuracy, l.F1Score(average='macro')])
    l,plain,learn = on_two_hosts(lambda o: o.fit(2, 1e-2), mk, replica=2, fsdp=4)
    near(*[quiet(l, o, partial(o.get_preds, with_input=True, with_loss=True)) for o in (plain, learn)])
    for o in (plain, learn): quiet(l, o, o.lr_find, num_it=5, show_plot=False)
    near(list(plain.recorder.losses), list(learn.recorder.losses))
    on_two_hosts(lambda o: o.fit(1, 1e-2), partial(tiny, n=16, n_valid=16), fsdp=2, model=4, rules=[('0.0.weight', (('model','fsdp'),None))])

@case('methods')
def two_hosts_shuffle_and_augment():
    on_two_hosts(lambda o: o.fit(1, 1e-2, cbs=lib().MixUp(.4)), augmented, fsdp=1, tol=2e-4)

@case('methods')
def two_hosts_send_each_sample_once():
    "and nothing of a batch is whole on a core"
    l = lib()
    seen = []
    class Seen(l.Callback):
        order = -100
        def before_batch(self): seen.append(([tuple(o[0].shape) for o in l.X._get_local_shards([self.x])[0]], self.x.cpu()))
    with pretend_hosts(blocks_of_two): learn = tiny(l).to_tpu_sharded(fsdp=8)
    quiet(l, learn, learn.fit, 1, cbs=Seen())
    assert [o for o,_ in seen]==[[(2,16)]*8, [(2,16)]*8, [(1,16)]*8, [(2,16)]*8]
    xs = [l.torch.stack([x for x,_ in ds]) for ds in (learn.dls.train.dataset, learn.dls.valid.dataset)]
    assert l.torch.equal(l.torch.cat([o for _,o in seen[:3]]), xs[0]) and l.torch.equal(seen[3][1][:13], xs[1])

@case('methods')
def a_steady_epoch_on_two_hosts():
    "in which predictions for metrics come to every host in the program of their batch"
    l,spread = lib(),[]
    class Spread(l.Callback):
        order = 60
        def after_batch(self):
            waiting = [] if self.training else [b for _,b in self.tpu_sharded_trainer.queue.waiting]
            spread.extend(l.is_spread(t) for t in l.tensors_of(waiting) if t.ndim)
    with pretend_hosts(blocks_of_two): learn,cb = tiny(l, metrics=[l.accuracy, l.F1Score(average='macro')]).to_tpu_sharded(fsdp=8, fetch_every=1e9),l.BatchCounts()
    quiet(l, learn, learn.fit, 3, 1e-3, cbs=[cb, Spread()])
    c,e = cb.batches[2],cb.epochs[2]
    assert (c.compiles,c.reads,c.fallbacks,c.executions)==(0,0,{},cb.n_batches), c
    assert e.compiles==0 and e.reads<=2, e
    assert spread and not any(spread)

@case('methods')
def what_is_spread_over_hosts_is_read_by_a_program_that_is_kept():
    from fastai_xla.runtime.ranks import gathered
    l = lib()
    with pretend_hosts(blocks_of_two): learn = tiny(l).to_tpu_sharded(fsdp=8)
    w = learn.model[0][0].weight.detach()
    gathered([w])
    before = l.xla_counts()
    assert l.torch.equal(gathered([w])[0], w.cpu()) and (l.xla_counts()-before).compiles==0 and pieces(w)==[(8,16)]*8

@case('methods')
def two_hosts_write_a_checkpoint_by_parts():
    "each the pieces that torch_xla says are on its devices and nobody's copy; together they are read as one"
    import numpy as np
    from fastai_xla.checkpoint.storage import CheckpointDir
    from copy import copy
    from fastai_xla.checkpoint.model import ModelCopy
    l = lib()
    for kwargs in (dict(replica=2, fsdp=4), dict(fsdp=2, model=4, rules=[('0.0.weight', (('model','fsdp'),None))]), dict(fsdp=8)):
        with pretend_hosts(blocks_of_two): learn = tiny(l).to_tpu_sharded(**kwargs)
        mesh,w = learn.tpu_sharded_trainer.mesh,learn.model[0][0].weight
        spec,(places,) = learn.sharding.specs['0.0.weight'],l.X._get_local_shard_replica_and_indices([w.detach()])
        for h,ds in enumerate(blocks_of_two): # `places` are by device
            own = {tuple((i.start, i.stop) for i in idx) for d,(copy,idx) in enumerate(places) if d in ds and copy==0}
            assert own=={*host_pieces(w.shape, spec, mesh, h, 2)}, (kwargs, h)
    quiet(l, learn, learn.fit, 1, 1e-2)
    model,whole = ModelCopy(learn),{}
    for p in (p for g in model.groups for p in g): whole[p.name] = tuple(max(o) for o in zip(whole.get(p.name, p.data.shape), (a+n for a,n in zip(p.offsets, p.data.shape))))
    def of_host(h):
        "The pieces that are this host's: of what is spread those on its devices, and the first host has the rest"
        def is_own(p):
            if tuple(p.data.shape)==whole[p.name]: return h==0
            return tuple((a, a+n) for a,n in zip(p.offsets, p.data.shape)) in host_pieces(whole[p.name], spec, mesh, h, 2)
        res = copy(model)
        res.groups,res.host = [[p for p in g if is_own(p)] for g in model.groups],h
        return res
    place = CheckpointDir('parts')
    with place.replacing('m', token='word', part=1, parts=2) as folder: of_host(1).write(folder)
    with place.replacing('m', token='word', parts=2) as folder: of_host(0).write(folder)
    files = sorted(o.name for o in Path('parts/m').glob('*.safetensors'))
    assert any(o.startswith('host001-') for o in files) and any(o.startswith('shard-') for o in files)
    for to in (lambda o: o.to_tpu_sharded(fsdp=8), lambda o: o):
        other = to(tiny(l)).load_sharded(Path('parts/m').absolute())
        near([learn.model.state_dict(), learn.opt.state_dict()['state']], [other.model.state_dict(), other.opt.state_dict()['state']], 0)

@case('methods')
def two_hosts_go_on_at_a_checkpoint():
    l = lib()
    def mk():
        with pretend_hosts(blocks_of_two): return tiny(l).to_tpu_sharded(fsdp=8)
    class Dies(l.Callback):
        def after_batch(self):
            if self.train_iter==5: raise KeyboardInterrupt
    whole = mk()
    quiet(l, whole, whole.fit, 2, 1e-2)
    learn = mk()
    with pytest.raises(KeyboardInterrupt): quiet(l, learn, learn.fit, 2, 1e-2, cbs=[l.TPUCheckpoint('run', every=4), Dies()])
    learn = mk()
    quiet(l, learn, learn.fit, 2, 1e-2, cbs=l.resume_from('run', every=4))
    same(whole, learn, 0)

@case('methods')
def texts_on_several_hosts():
    l = lib()
    mesh = l.make_mesh(fsdp=8)
    mesh.layout = l.HostLayout(tuple(blocks_of_two), (0,1))
    with pytest.raises(ValueError, match='Texts of a batch.*to_tpu_distributed'): l.TPUShardedTrainer(mesh)._make_loader([], pad_text=print)

# Blocks

def deep(l, depth=3, build=lambda f: f(), **kwargs):
    "A ViT whose blocks repeat, on images of 16 px"
    import timm
    l.set_seed(1)
    x = l.torch.randn(53, 3, 16, 16, generator=l.torch.Generator().manual_seed(0))
    samples = [(l.TensorImage(o), l.TensorCategory(o.mean()>0).long()) for o in x]
    dls = l.DataLoaders(l.DataLoader(samples[:40], bs=16), l.DataLoader(samples[40:], bs=16))
    mk = partial(timm.create_model, 'vit_tiny_patch16_224', img_size=16, patch_size=8, embed_dim=32, num_heads=2, num_classes=2, depth=depth, class_token=False, global_pool='avg')
    return l.Learner(dls, build(partial(mk, **kwargs)), loss_func=l.CrossEntropyLossFlat(), metrics=l.accuracy, splitter=lambda m: [l.params(m.patch_embed), l.params(m.blocks)+l.params(m.fc_norm)+l.params(m.head)], path=l.Path('.'))

def fits(learn):
    learn.fit_one_cycle(1, 1e-2)
    learn.freeze()
    learn.fit(1, 1e-2)

@case('blocks')
def checkpointing_and_scan_equal_plain_training():
    for kwargs in (dict(grad_ckpt=True), dict(scan=True)):
        l,plain,learn = both(fits, deep, fsdp=8, rules=everything, **kwargs)
        near(quiet(l, plain, plain.get_preds), quiet(l, learn, learn.get_preds))
        assert not any('forward' in vars(m) for m in learn.model.modules())
        assert share(l, list(learn.model.parameters()))<=1.05/8
        assert share(l, state_tensors(l, learn.opt))<=1.05/8

@case('blocks')
def scanned_epoch_is_steady_and_bf16_learns():
    l = lib()
    learn,cb = deep(l).to_bf16().to_tpu_sharded(fsdp=8, scan=True, fetch_every=1e9),l.BatchCounts()
    quiet(l, learn, learn.fit, 3, 1e-2, cbs=cb)
    c = cb.batches[2]
    assert (c.compiles,c.reads,c.fallbacks,c.executions)==(0,0,{},cb.n_batches), c
    assert learn.recorder.losses[-1]<learn.recorder.losses[0]

@case('blocks')
def callback_on_a_sharded_learner():
    l,_,learn = both(lambda o: o.fit(1, 1e-2, cbs=lib().BlockRunner(scan=True)), deep, tol=1e-4)
    with pytest.raises(ValueError, match='differ in drop_path1.drop_prob'): deep(l, drop_path_rate=.2).to_tpu_sharded(scan=True)

@case('blocks')
def created_on_the_cores():
    "A model that never exists whole has the values of one that does, and trains like it"
    l = lib()
    def vit(f): return l.mean_vit(32, 2, 3, 8, img_size=16, num_classes=2)
    def made(f):
        l.materialize(model := vit(f))
        return model
    whole,later = deep(l, build=made),deep(l, build=vit)
    for o in (whole, later): o.splitter = l.trainable_params
    later.create_opt()
    assert all(p.is_meta for p in later.model.parameters())
    learn = later.to_tpu_sharded(fsdp=8, rules=everything)
    near(whole.model.state_dict(), learn.model.state_dict(), 0)
    assert share(l, list(learn.model.parameters()))<=1.05/8
    for o in (whole, learn): quiet(l, o, o.fit, 1, 1e-2)
    same(whole, learn)

# Counts

@case('parity')
def steady_epoch():
    l = lib()
    for mk,kwargs in ((l.vit, dict(fsdp=8)), (l.cnn, dict(replica=2, rules=everything))):
        learn,cb = mk().to_tpu_sharded(fetch_every=1e9, **kwargs),l.BatchCounts()
        quiet(l, learn, learn.fit, 2, 1e-3, cbs=cb)
        c,e = cb.batches[1],cb.epochs[1]
        assert (c.compiles,c.reads,c.fallbacks,c.executions)==(0,0,{},cb.n_batches), c
        assert e.compiles==0 and e.reads<=2, e

# The compiled program

def programs(folder):
    "The compiled programs that were dumped, largest last"
    return sorted((o.read_text() for o in Path(folder).glob('*SyncTensorsGraph*after_optimizations.txt')), key=len)

def ops(hlo, name): return [[int(d) for d in dims.split(',') if d] for dims in re.findall(rf'= \(?\w+\[([\d,]*)\][^=]* {name}(?:-start)?\(', hlo)]

@lru_cache(None)
def dumps():
    "The folder to which this process dumps its programs; with virtual cores asked for first"
    d = Path('dumps').absolute()
    os.environ['XLA_FLAGS'] += f' --xla_dump_to={d} --xla_dump_hlo_as_text'
    from fastai_xla.all import use_virtual_cores
    use_virtual_cores(8)
    return d

def step(mk, **kwargs):
    "Shapes of what the training step's convolutions, all-gathers and all-reduces make"
    d,l = dumps(),lib()
    learn = mk(l).to_tpu_sharded(**kwargs)
    for o in d.glob('*.txt'): o.unlink()
    quiet(l, learn, learn.fit, 1)
    hlo = programs(d)[-1]
    return [ops(hlo, o) for o in ('convolution','all-gather','all-reduce')]

def of_activations(shapes): return [o for o in shapes if o[1:3] in ([12,12],[6,6])]

@case('hlo')
def data_parallel_gathers_nothing():
    convs,gathers,reduces = step(lambda l: l.cnn(), fsdp=1)
    assert [o[0] for o in of_activations(convs)]==[1,1,1], 'each core has one of 8 samples'
    assert gathers==[] and reduces

@case('hlo')
def fsdp_gathers_parameters_alone():
    "once for the forward pass and once for the backward; without marks on what blocks return it gathers three times as much, images too"
    import math
    _,gathers,_ = step(lambda l: l.vit(), fsdp=8, rules=everything)
    assert [24,96] in gathers and [8,3,32,32] not in gathers
    assert sum(map(math.prod, gathers))<=2*sum(p.numel() for p in lib().vit().model.parameters())

@case('hlo')
def a_loop_gathers_the_parameters_of_one_block():
    import math
    _,gathers,_ = step(lambda l: deep(l, 6), fsdp=8, scan=True, rules=everything)
    n = sum(p.numel() for p in deep(lib()).model.blocks[0].parameters())
    assert sum(map(math.prod, gathers))<4*n

# On one device

@case('one')
def one_core():
    import torch
    from fastai_xla.all import use_virtual_cores
    use_virtual_cores(1)
    l,plain,learn = both(lambda o: o.fit(2, 1e-2), rules=[])
    assert learn.tpu_sharded_trainer.mesh==dict(replica=1, fsdp=1)
    assert {o.spec for o in learn.sharding}=={()}
    near(quiet(l, plain, plain.get_preds), quiet(l, learn, learn.get_preds))

# In a process that is not turned to SPMD

@case('late')
def refused_while_replicas_hold_the_cores():
    from parity_models import cnn
    from fastai_xla.all import get_pool
    pool,learn = get_pool(2),cnn()
    assert pool.run(int)==[0,1]
    with pytest.raises(RuntimeError, match='ranks of `to_tpu_distributed.processes=True.` hold the cores.*detach_tpu_distributed'): learn.to_tpu_sharded()
    pool.close()

@case('late')
def refused_when_the_device_was_used():
    from parity_models import cnn
    from fastai_xla.all import use_virtual_cores
    import torch_xla
    use_virtual_cores(2)
    learn = cnn().to_tpu()
    with pytest.raises(RuntimeError, match='has used the XLA device.*cannot switch to all cores.*restart Python'): learn.to_tpu_sharded(fsdp=2)
    assert not torch_xla.runtime.is_spmd() and learn.tpu_trainer in learn.cbs
    with learn.no_bar(),learn.no_logging(): learn.fit(1)

@pytest.mark.parametrize('group,name', groups.names)
def test_case(group, name): groups.check(group, name)

if __name__=='__main__': groups.main(*sys.argv[1:])
