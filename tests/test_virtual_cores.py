"""Collectives between replicas on virtual cores. The cases of a group run in one fresh process: `python test_virtual_cores.py <group>`."""
import os, sys, threading, time, traceback
from functools import lru_cache, partial

import pytest
from cases import Groups
from fresh import free_port, repo, run

groups = Groups(__file__, lambda: dict(PJRT_DEVICE='CPU', MASTER_PORT=str(free_port()), CPU_NUM_DEVICES=None))
case = groups.case

# In the processes

def use_virtual_cores(n):
    from fastai_xla.virtual_cores import use_virtual_cores
    use_virtual_cores(n)

def lib():
    "The modules that a case needs, with 8 virtual cores"
    from fastai_xla.virtual_cores import replicas as vc
    use_virtual_cores(8)
    return vc,vc.xm,vc.xr,vc.torch_xla

def each(f):
    "What `f(rank, put)` returns on each of 8 replicas, where `put` makes a tensor on the device"
    import torch
    vc,*_,torch_xla = lib()
    return vc.run_replicas(lambda rank: f(rank, lambda x,**kw: torch.tensor(x, **kw).to(torch_xla.device())))

N,S,halves,evens = 8,28,[[0,1,2,3],[4,5,6,7]],[[0,2,4,6],[1,3,5,7]]

# State

@case('eight')
def nothing_but_while_replicas_run():
    "every function of torch and torch_xla that replicas replace is the same object before and after; patches are not touched"
    import torch, torch_xla
    from fastai_xla.virtual_cores import replicas as vc
    from fastai_xla.patches import patches_in_force
    import torch_xla._internal.pjrt as pjrt, torch_xla.core.xla_model as xm, torch_xla.utils.checkpoint as ck
    import torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel as fsdp
    def seen():
        own = {(o.__name__, k): v for o in (torch_xla._XLAC, xm, torch.Tensor, pjrt, ck, fsdp) for k,v in vars(o).items()}
        return {**own, 'fork': os.fork, 'world': torch.distributed.distributed_c10d._world, 'reduce': torch.ops._c10d_functional.all_reduce}
    def changed(a, b): return [k for k in {**a, **b} if a.get(k) is not b.get(k)]
    before,patches = seen(),list(patches_in_force())
    use_virtual_cores(8)
    spawn = 'torch_xla._internal.pjrt','_SpawnFn'
    assert changed(before, seen())==[spawn] and isinstance(pjrt._SpawnFn(print), vc._SpawnFn)
    during = vc.run_replicas(lambda r: changed(before, seen()))[0]
    stand_ins = [(getattr(o(), '__name__', ''), k) for o,k,_ in collectives_table() if o() is not torch.ops._c10d_functional]
    wanted = {spawn, 'fork', 'world', 'reduce', (ck.__name__, 'chkpt_status'), (fsdp.__name__, 'chkpt_status'), *stand_ins}
    assert {*during}==wanted and len(wanted)==33, {*during}^wanted
    after = seen()
    assert before.keys()==after.keys() and changed(before, after)==[spawn]
    ours = [o for o in patches_in_force() if o not in patches]
    assert [(o.owner.__name__, o.name) for o in ours]==[spawn]
    for o in ours: o.undo()
    assert changed(before, seen())==[] and list(patches_in_force())==patches
    for o in ours: o.apply()

def collectives_table():
    from fastai_xla.virtual_cores.collectives import _recording, _running
    return [*_recording, *_running]

@case('eight')
def world_size_and_rank():
    vc,xm,xr,torch_xla = lib()
    assert xr.world_size()==1
    assert each(lambda r, put: (r, xr.global_ordinal(), xr.world_size(), str(torch_xla.device()), put([1]).device.index))==[(r,r,N,f'xla:{r}',r) for r in range(N)]
    assert (xr.world_size(), str(torch_xla.device()))==(1, 'xla:0')

@case('eight')
def results_can_be_read_outside():
    "a result whose collective was recorded and not run"
    import torch
    vc,xm,*_ = lib()
    assert [o.tolist() for o in each(lambda r, put: xm.all_reduce('sum', put([r])))]==[[S]]*N

@case('eight')
def tensors_from_outside_stay():
    import torch
    vc,xm,*_ = lib()
    x = torch.ones(3).to('xla')*2
    with pytest.raises(ValueError): each(lambda r, put: boom(put))
    assert (x+1).tolist()==[3.]*3

@case('eight')
def arguments_are_passed():
    vc,*_ = lib()
    assert vc.run_replicas(lambda rank, a, b=0: (rank, a, b), 1, b=2, n=8)==[(r,1,2) for r in range(N)]

@case('eight')
def asked_for_other_number():
    vc,*_ = lib()
    vc.xla_device()
    with pytest.raises(RuntimeError, match='already started with 8 devices, not 2.*Restart Python.*use_virtual_cores\\(2\\)'): vc.run_replicas(print, n=2)

@case('eight')
def started_without_the_settings():
    vc,*_ = lib()
    vc.xla_device()
    del os.environ['PJRT_CPU_ASYNC_CLIENT']
    for f in (lambda: use_virtual_cores(8), lambda: vc.run_replicas(print)):
        with pytest.raises(RuntimeError, match='already started with 8 devices without the settings that let them wait for each other'): f()
    os.environ['PJRT_CPU_ASYNC_CLIENT'] = '0'

# Values

@case('eight')
def all_reduce_ops():
    vc,xm,*_ = lib()
    def f(r, put): return [xm.all_reduce(op, put([r+1.])).tolist() for op in ('sum','min','max')] + [xm.all_reduce('mul', put([2])).tolist()]
    assert each(f)==[[[S+8.],[1.],[8.],[256]]]*N

@case('eight')
def all_reduce_logic():
    vc,xm,*_ = lib()
    def f(r, put): return xm.all_reduce('and', put([True,r>0])).tolist(),xm.all_reduce('or', put([False,r>0])).tolist()
    assert each(f)==[([True,False],[False,True])]*N

@case('eight')
def all_reduce_scale_and_groups():
    vc,xm,*_ = lib()
    def f(r, put): return xm.all_reduce('sum', put(1.*r), scale=.5).item(),xm.all_reduce('sum', put(r), groups=halves).item()
    assert each(f)==[(S/2, 6 if r<4 else 22) for r in range(N)]

@case('eight')
def all_reduce_in_place():
    "a list of several dtypes and shapes, and an empty one"
    import torch
    vc,xm,*_ = lib()
    def f(r, put):
        a,b,c = put([1.*r]),put([[r,1]]),put([1.*r,2], dtype=torch.bfloat16)
        assert xm.all_reduce('sum', [])==[]
        res = xm.all_reduce('sum', [a,b,c])
        return res[0] is a,a.tolist(),b.tolist(),c.tolist(),str(c.dtype)
    assert each(f)==[(True,[S],[[S,N]],[S,2*N],'torch.bfloat16')]*N

@case('eight')
def all_gather():
    import torch
    vc,xm,*_ = lib()
    def f(r, put):
        x,outs = put([[r,10*r]]),[put([[0,0]]*N) for _ in range(3)]
        xm.all_gather(x, output=outs[0])
        xm.all_gather([x,2*x], output=outs[1:], pin_layout=False)
        return [o.tolist() for o in (xm.all_gather(x), xm.all_gather(x, dim=-1), xm.all_gather(x, groups=evens), xm.all_gather(x, pin_layout=False),
                                     *xm.all_gather([x,2*x], pin_layout=False), *outs)]
    rows = [[r,10*r] for r in range(N)]
    twice = [[2*a,2*b] for a,b in rows]
    for r,res in enumerate(each(f)): assert res==[rows, [sum(rows, [])], [rows[i] for i in evens[r%2]], rows, rows, twice, rows, rows, twice]

@case('eight')
def all_gather_keeps_argument_checks():
    vc,xm,*_ = lib()
    def f(r, put):
        try: xm.all_gather([put([1])])
        except RuntimeError as e: return str(e)
    assert all('pin_layout=True is not yet supported' in o for o in each(f))

@case('eight')
def reduce_scatter():
    import torch
    vc,xm,*_ = lib()
    def f(r, put):
        x,outs = put([1.*i+r for i in range(N)]),[put([0.]) for _ in range(3)]
        xm.reduce_scatter('sum', x, 1., 0, N, output=outs[0])
        xm.reduce_scatter('sum', [x,2*x], 1., 0, N, output=outs[1:], pin_layout=False)
        return [o.item() for o in (xm.reduce_scatter('sum', x, 1., 0, N), xm.reduce_scatter('sum', x, .5, 0, N), xm.reduce_scatter('max', x, 1., 0, N),
                xm.reduce_scatter('sum', x[:4], 1., 0, 4, groups=evens), *xm.reduce_scatter('sum', [x,2*x], 1., 0, N, pin_layout=False), *outs)]
    for r,res in enumerate(each(f)):
        full = N*r+S
        assert res==[full, full/2, r+7, 4*(r//2)+sum(evens[r%2]), full, 2*full, full, full, 2*full]

@case('eight')
def all_to_all():
    vc,xm,*_ = lib()
    def f(r, put):
        x = put([[100*r+i for i in range(N)]])
        return xm.all_to_all(x, 1, 0, N).tolist(),xm.all_to_all(x[:,:4], 1, 0, 4, groups=evens).tolist()
    assert each(f)==[([[100*i+r] for i in range(N)], [[100*i+r//2] for i in evens[r%2]]) for r in range(N)]

@case('eight')
def collective_permute():
    vc,xm,*_ = lib()
    def f(r, put): return xm.collective_permute(put([r]), [[i,(i+1)%N] for i in range(N)]).item(),xm.collective_permute(put([r+5]), [[0,1]]).item()
    assert each(f)==[((r-1)%N, 5 if r==1 else 0) for r in range(N)]

@case('eight')
def broadcast():
    import torch
    vc,xm,*_,torch_xla = lib()
    def f(r, put):
        xs,m = [put([1.*r]),put([2*r])],torch.nn.BatchNorm1d(2).to(torch_xla.device())
        with torch.no_grad(): m.weight.fill_(r+1), m.running_mean.fill_(r+2)
        xm.collective_broadcast(xs, root_ordinal=3)
        xm.broadcast_master_param(m)
        return *[o.item() for o in xs],m.weight.tolist(),m.running_mean.tolist()
    assert each(f)==[(3.,6,[1,1],[2,2])]*N

@case('eight')
def rendezvous():
    vc,xm,*_ = lib()
    assert each(lambda r, put: xm.rendezvous('a', b'x'*r))==[[b'x'*i for i in range(N)]]*N
    assert each(lambda r, put: xm.rendezvous('a'))==[[b'']*N]*N

@case('eight')
def mesh_reduce():
    vc,xm,*_ = lib()
    assert each(lambda r, put: xm.mesh_reduce('a', dict(x=put([r])), lambda os: [o['x'].item() for o in os]))==[list(range(N))]*N

@case('eight')
def save_on_every_rank():
    import torch, tempfile
    vc,xm,*_ = lib()
    with tempfile.TemporaryDirectory() as d:
        def f(r, put):
            x = xm.all_reduce('sum', put([1.*r]))
            xm.save(dict(x=x), f'{d}/main')
            xm.save(dict(x=x+r), f'{d}/{r}', master_only=False)
            xm.rendezvous('saved')
            return torch.load(f'{d}/main')['x'].item(),torch.load(f'{d}/{(r+1)%N}')['x'].item()
        assert each(f)==[(S, S+(r+1)%N) for r in range(N)]

@case('eight')
def groups_without_this_rank():
    vc,xm,*_ = lib()
    def f(r, put):
        if r>3: return 'out'
        return xm.all_reduce('sum', put(r), groups=[[0,1,2,3]]).item()
    assert each(f)==[6]*4+['out']*4
    fails(lambda r, put: xm.all_reduce('sum', put(r), groups=[[0,1,2,3]]), 'of which it is no member')

@case('eight')
def many_dispatches_without_waiting():
    "each rank at its own pace, two graphs"
    import torch
    vc,xm,*_,torch_xla = lib()
    def f(r, put):
        x = put([1.*r]*3)
        for i in range(60):
            if i%8==r: time.sleep(.01)
            x = xm.all_reduce('sum', x if i%2 else torch.cat([x,x])[:3], scale=1/N)
            torch_xla.sync()
        return x.tolist()
    assert each(f)==[[S/N]*3]*N

@case('eight')
def in_a_thread_of_a_replica():
    vc,xm,*_ = lib()
    def f(r, put):
        x,res = put([r]),[]
        t = threading.Thread(target=lambda: res.append(xm.all_reduce('sum', x)))
        t.start()
        t.join()
        return res[0].item()
    assert each(f)==[S]*N

# Training

def digits():
    import torch
    g = torch.Generator().manual_seed(1)
    return torch.randn(10, 2, 6, 16, generator=g),torch.randint(0, 4, (10, 2, 6), generator=g)

@lru_cache(None)
def weights():
    import torch
    g = torch.Generator().manual_seed(0)
    return {k: torch.randn(v.shape, generator=g)*.2 for k,v in net(False).state_dict().items()}

def net(init=True):
    "The same weights on each rank: torch's own generator is shared by the threads"
    from torch import nn
    m = nn.Sequential(nn.Linear(16,64), nn.ReLU(), nn.Linear(64,4))
    if init: m.load_state_dict(weights())
    return m

def fit(model, xs, ys, opt_func, after=lambda: None):
    "Losses and weights after a few steps; `after` is called between backward and step"
    import torch
    opt,losses = opt_func(model.parameters()),[]
    for x,y in zip(xs, ys):
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        after()
        opt.step()
        losses.append(loss.detach())
        if x.device.type=='xla': lib2()[-1].sync()
    return [o.item() for o in losses]

def lib2():
    from fastai_xla.virtual_cores import replicas as vc
    use_virtual_cores(2)
    return vc,vc.xm,vc.xr,vc.torch_xla

def one_process(opt_func):
    "The same training at the global batch, on the CPU; the XLA device must be touched before the first backward"
    lib2()[0].xla_device()
    (xs,ys),m = digits(),net()
    return fit(m, xs.flatten(1,2), ys.flatten(1,2), opt_func),m.state_dict()

def close(a, b, tol=1e-6):
    assert max((a[k]-b[k]).abs().max().item() for k in b)<tol

@case('training')
def gradients_reduced():
    import torch
    from torch.optim import Adam
    vc,xm,xr,torch_xla = lib2()
    opt_func = partial(Adam, lr=1e-2)
    (xs,ys),(losses,ref) = digits(),one_process(opt_func)
    def f(r):
        dev,m = torch_xla.device(),net().to(torch_xla.device())
        res = fit(m, xs[:,r].to(dev), ys[:,r].to(dev), opt_func, lambda: xm.all_reduce('sum', [p.grad for p in m.parameters()], scale=1/2))
        return res,{k:v.cpu() for k,v in m.state_dict().items()}
    res = vc.run_replicas(f)
    for _,sd in res: close(sd, ref)
    assert max(abs(sum(o)/2-l) for o,l in zip(zip(*[ls for ls,_ in res]), losses))<1e-5

@case('training')
def ddp():
    import torch, torch.distributed as dist, torch_xla.distributed.xla_backend
    from torch.optim import SGD
    vc,xm,xr,torch_xla = lib2()
    opt_func = partial(SGD, lr=.1, momentum=.9)
    (xs,ys),(_,ref) = digits(),one_process(opt_func)
    def f(r):
        dist.init_process_group('xla', init_method='xla://')
        dev,m = torch_xla.device(),net().to(torch_xla.device())
        fit(torch.nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True), xs[:,r].to(dev), ys[:,r].to(dev), opt_func)
        x = torch.tensor([r]).to(dev)
        dist.all_reduce(x)
        res = dist.get_rank(),dist.get_world_size(),x.item(),{k:v.cpu() for k,v in m.state_dict().items()}
        dist.destroy_process_group()
        return res
    for _ in range(2):
        res = vc.run_replicas(f)
        assert [o[:3] for o in res]==[(0,2,1), (1,2,1)]
        for o in res: close(o[3], ref)
    assert not dist.is_initialized()

def fsdp(nested, **kwargs):
    import torch
    from torch.optim import Adam
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP, checkpoint_module
    vc,xm,xr,torch_xla = lib2()
    opt_func = partial(Adam, lr=1e-2)
    (xs,ys),(losses,ref) = digits(),one_process(opt_func)
    def f(r):
        dev,m = torch_xla.device(),net()
        if nested: m[0],m[2] = [FSDP(checkpoint_module(o), **kwargs) for o in (m[0],m[2])]
        m = FSDP(m, **kwargs)
        return fit(m, xs[:,r].to(dev), ys[:,r].to(dev), opt_func),sum(p.numel() for p in m.parameters())
    res,full = vc.run_replicas(f),sum(o.numel() for o in ref.values())
    assert max(abs(sum(o)/2-l) for o,l in zip(zip(*[ls for ls,_ in res]), losses))<1e-6
    assert all(full/2<=n<full*.75 for _,n in res)

@case('training')
def fsdp_outer(): fsdp(False)

@case('training')
def fsdp_nested_checkpointed(): fsdp(True)

@case('training')
def fsdp_flattened_unpinned(): fsdp(True, flatten_parameters=True, pin_layout_in_collective_ops=False)

@case('training')
def fsdp_buckets(): fsdp(True, shard_param_on_dim_0=True, coalesce_all_gather_ops=True, reduce_scatter_bucket_size_mb=1, pin_layout_in_collective_ops=False)

@case('training')
def checkpoint_status_is_each_threads_own():
    import torch_xla.utils.checkpoint as ck
    vc,xm,*_ = lib2()
    before = ck.chkpt_status
    def f(r):
        ck.chkpt_status.in_chkpt_bwd = r==0
        xm.rendezvous('set')
        return ck.chkpt_status.in_chkpt_bwd
    assert vc.run_replicas(f)==[True,False]
    assert ck.chkpt_status is before

@case('training')
def learner_in_replicas():
    "a fastai Learner with DataLoader workers on each replica"
    import fastai.callback.progress
    import torch
    from fastai.basics import Learner, DataLoader, DataLoaders, Callback, CrossEntropyLossFlat, SGD
    vc,xm,xr,torch_xla = lib2()
    xs,ys = digits()
    class Reduce(Callback):
        def before_step(self): xm.all_reduce('sum', [p.grad for p in self.model.parameters()], scale=1/2)
        def after_batch(self): torch_xla.sync()
    def f(r):
        data = list(zip(xs[:,r].flatten(0,1), ys[:,r].flatten()))
        dls = DataLoaders(*[DataLoader(data, bs=6, num_workers=1, device=torch_xla.device()) for _ in range(2)])
        learn = Learner(dls, net().to(torch_xla.device()), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=Reduce())
        with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
        return {k:v.cpu() for k,v in learn.model.state_dict().items()}
    res = vc.run_replicas(f)
    _,ref = one_process(partial(torch.optim.SGD, lr=.1))
    for o in res: close(o, ref)

# Compiles

@case('eight')
def one_compile_for_all():
    import torch
    vc,xm,*_,torch_xla = lib()
    import torch_xla.debug.metrics as met
    def count(): return (met.metric_data('CompileTime') or [0])[0]
    def by_sync(r, put): return xm.all_reduce('sum', put([1.*r]*5)*3).sum(),torch_xla.sync()
    def by_read(r, put): return (put([1.*r]*6)*3).sum().item()
    def by_read_of_collective(r, put): return xm.all_reduce('sum', put([1.*r]*7)*3).sum().item()
    def by_bool(r, put): return bool((put([1.*r]*8)*3).sum()>=0)
    def by_gather(r, put): return xm.all_gather(put([1.*r]*9)*3).tolist()
    each(by_sync)
    for f in (by_read, by_read_of_collective, by_bool, by_gather):
        before = count()
        each(f)
        assert count()-before==1, f'{f.__name__}: {count()-before} compiles'
        each(f)
        assert count()-before==1, f'{f.__name__}: compiled again'

@case('eight')
def fifty_steps_again_and_again():
    import torch
    vc,xm,*_,torch_xla = lib()
    import torch_xla.debug.metrics as met
    def f(r, put):
        m = net().to(torch_xla.device())
        opt = torch.optim.SGD(m.parameters(), lr=.1)
        for _ in range(50):
            opt.zero_grad()
            m(put([[1.*r]*16])).sum().backward()
            xm.optimizer_step(opt)
            torch_xla.sync()
    each(f)
    before,start = met.metric_data('CompileTime')[0],time.time()
    for _ in range(3): each(f)
    assert met.metric_data('CompileTime')[0]==before
    assert time.time()-start<30

@case('eight')
def stress():
    "a short form of the benchmark"
    sys.path.append(str(repo/'benchmarks'))
    from stress_collectives import train
    for seed in (0,1): assert len(set(lib()[0].run_replicas(train, 60, seed)))==1

# Failures

def fails(f, *texts, kind=None, rank=None, seconds=10):
    "`f` ends soon, with an error that holds `texts`; and the next run is clean"
    vc,xm,*_ = lib()
    vc.xla_device()
    start = time.time()
    with pytest.raises(kind or vc.ReplicaError) as e: each(f)
    assert time.time()-start<seconds, f'took {time.time()-start:.1f} s'
    for t in texts: assert t in str(e.value), str(e.value)
    if rank is not None: assert e.value.rank==rank
    assert each(lambda r, put: xm.all_reduce('sum', put([r])).item())==[S]*N
    assert not [o for o in threading.enumerate() if o.name.startswith('replica')]
    return e.value

def steps(at, what, run=None):
    "Replica 2 does `what(put)` at step `at` of 6; the collectives are run by `run`, by default a sync"
    vc,xm,*_,torch_xla = lib()
    def f(r, put):
        for s in range(6):
            if (s,r)==(at,2) and what(put): return
            x = xm.all_reduce('sum', put([1.*r]*3))
            if run: run(x)
            else: torch_xla.sync()
    return f

def boom(put): raise ValueError('boom')

@case('eight')
def raises():
    e = fails(steps(3, boom), 'boom', kind=ValueError, rank=2)
    text = ''.join(traceback.format_exception(type(e), e, e.__traceback__))
    assert 'in boom' in text
    assert e.__notes__==['(raised on rank 2)']
    if sys.version_info>=(3,11): assert '(raised on rank 2)' in text

@case('eight')
def peers_say_why():
    vc,xm,*_ = lib()
    seen = {}
    def f(r, put):
        try: steps(3, boom)(r, put)
        except vc.ReplicaError as e: seen[r] = str(e),e.rank
    with pytest.raises(ValueError): each(f)
    assert sorted(seen)==[0,1,3,4,5,6,7]
    assert all(o==(f'Replica {r} waits in all_reduce sum of float32[3] for replica 2, which raised ValueError: boom', 2) for r,o in seen.items())

@case('eight')
def returns_early(): fails(steps(3, lambda put: True), 'for replica 2, which has returned: it issued fewer collectives or had fewer batches', rank=2)

@case('eight')
def one_more_collective():
    vc,xm,*_ = lib()
    def more(put): xm.all_reduce('sum', put([1.]*3))
    fails(steps(5, more), 'The replicas do not do the same', 'replica 2: all_reduce sum of float32[3]', 'the run of 1 collectives')

@case('eight')
def other_shape():
    vc,xm,*_ = lib()
    fails(lambda r, put: xm.all_reduce('sum', put([1.]*(4 if r==2 else 3))), 'replica 2: all_reduce sum of float32[4]',
          'replicas 0, 1, 3, 4, 5, 6, 7: all_reduce sum of float32[3]')

@case('eight')
def other_collective():
    vc,xm,*_ = lib()
    fails(lambda r, put: (xm.all_gather if r==2 else partial(xm.all_reduce, 'sum'))(put([1.])), 'replica 2: all_gather on dim 0 of float32[1]')

@case('eight')
def raises_after_recording():
    "the others run a graph with a collective that replica 2 recorded and will not run"
    vc,xm,*_,torch_xla = lib()
    for run in (lambda x: torch_xla.sync(), lambda x: x.tolist(), lambda x: x.cpu(), lambda x: float(x.sum()), lambda x: x.to('cpu'), lambda x: str(x),
                lambda x: xm.save(x, os.devnull, master_only=False)):
        def f(r, put):
            x = xm.all_reduce('sum', put([1.*r]*3))
            if r==2: raise ValueError('boom')
            run(x)
        fails(f, 'boom', kind=ValueError, rank=2)

@case('eight')
def error_through_a_guard_of_torch():
    "printing holds a guard that must end in its own thread: kept by the error, it broke the process within some dozen failures"
    vc,xm,*_ = lib()
    def f(r, put):
        x = xm.all_reduce('sum', put([1.*r]*3))
        if r==2: raise ValueError('boom')
        str(x)
    for _ in range(60): fails(f, 'boom', kind=ValueError, rank=2)

@case('eight')
def pending_tensors_kept_outside():
    "a collective that can no longer run is dropped, or the next run would wait for it"
    vc,xm,*_ = lib()
    kept = []
    def f(r, put):
        kept.append(xm.all_reduce('sum', put([1.*r])))
        if r==2: raise ValueError('boom')
        xm.rendezvous('x')
    fails(f, 'boom', kind=ValueError, rank=2)
    assert len(kept)==8

@case('eight')
def raises_in_backward():
    import torch
    vc,xm,*_,torch_xla = lib()
    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g):
            return xm.all_reduce('sum', g)
    def f(r, put):
        if r==2: boom(put)
        Reduced.apply(put([1.]).requires_grad_()).sum().backward()
    fails(f, 'boom', kind=ValueError, rank=2)

@case('eight')
def raises_in_rendezvous():
    vc,xm,*_ = lib()
    fails(lambda r, put: boom(put) if r==2 else xm.mesh_reduce('x', r, sum), 'boom', kind=ValueError, rank=2)

@case('eight')
def exits(): fails(steps(3, lambda put: sys.exit(4)), 'Replica 2 was ended by SystemExit: 4', rank=2)

@case('eight')
def error_without_text():
    class Bad(Exception):
        def __str__(self): raise KeyError
    def bad(put): raise Bad
    fails(steps(3, bad), kind=Bad, rank=2)

@case('eight')
def several_fail():
    "the first one is told"
    def f(r, put):
        time.sleep(.1*abs(r-5))
        raise KeyError(f'rank {r}')
    fails(f, 'rank 5', kind=KeyError, rank=5)

@case('eight')
def groups_that_wait_for_each_other():
    vc,xm,*_ = lib()
    def f(r, put): xm.all_reduce('sum', put([1.]), groups=[[0,1,2,3,4,5,6,7]] if r%2 else [[0,1],[2,3],[4,5],[6,7]])
    fails(f, 'wait for each other')

@case('eight')
def nested():
    vc,*_ = lib()
    fails(lambda r, put: vc.run_replicas(lambda rank: 0), 'not from a replica', kind=RuntimeError)

@case('eight')
def interrupted():
    import signal
    vc,xm,*_ = lib()
    def f(r, put):
        while True: xm.rendezvous('again')
    threading.Timer(1., os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.time()
    with pytest.raises(KeyboardInterrupt): each(f)
    assert time.time()-start<6
    assert not [o for o in threading.enumerate() if o.name.startswith('replica')]
    assert each(lambda r, put: xm.all_reduce('sum', put([r])).item())==[S]*N

# Other processes

@case('plain')
def import_changes_nothing():
    import fastai.basics, torch_xla
    before,env = dict(vars(torch_xla._XLAC)),dict(os.environ)
    from fastai_xla import virtual_cores
    assert not torch_xla._XLAC._xla_runtime_is_initialized()
    assert dict(os.environ)==env and dict(vars(torch_xla._XLAC))==before

@case('plain')
def a_tpu_is_left_alone():
    from torch_xla._internal import pjrt
    from fastai_xla.virtual_cores import use_virtual_cores
    os.environ['PJRT_DEVICE'] = 'TPU'
    env,spawn = dict(os.environ),pjrt._SpawnFn
    use_virtual_cores(8)
    assert dict(os.environ)==env and pjrt._SpawnFn is spawn
    os.environ['PJRT_DEVICE'] = 'CPU'

@case('plain')
def use_does_not_start_the_runtime():
    from fastai_xla.virtual_cores import use_virtual_cores
    from fastai_xla.runtime import runtime_started, n_cores
    use_virtual_cores(4)
    assert n_cores()==4 and not runtime_started()
    assert [os.environ.pop(o) for o in ('CPU_NUM_DEVICES','PJRT_CPU_ASYNC_CLIENT','XLA_THREAD_POOL_SIZE')]==['4','0','32']

@case('plain')
def one_device_changes_nothing():
    import torch, torch_xla
    from torch_xla._internal import pjrt
    from fastai_xla.runtime.device import xr
    from fastai_xla.virtual_cores import use_virtual_cores, run_replicas
    def seen(): return dict(vars(torch_xla._XLAC)),dict(vars(torch.Tensor)),os.fork,torch.distributed.distributed_c10d._world,pjrt._SpawnFn
    before = seen()
    use_virtual_cores(1)
    assert run_replicas(lambda r: (r, torch.ones(2).to('xla').sum().item(), xr.world_size(), seen()==before))==[(0,2.,1,True)]
    assert 'XLA_THREAD_POOL_SIZE' not in os.environ

@case('spmd')
def spmd_process_is_refused():
    from fastai_xla.launch import tpu_launch
    from fastai_xla.runtime.device import xr
    from fastai_xla.virtual_cores import run_replicas
    xr.use_spmd()
    with pytest.raises(RuntimeError, match='This process uses SPMD.*restart Python'): run_replicas(print, n=2)
    with pytest.raises(RuntimeError, match='This process uses SPMD.*restart Python'): tpu_launch(print, n_cores=2)

@case('late')
def late_is_waited_for():
    "with as many devices as the environment asks for, whose settings are made good"
    import torch
    from fastai_xla.runtime.device import xm
    from fastai_xla.virtual_cores import run_replicas
    os.environ['CPU_NUM_DEVICES'] = '2'
    def f(r):
        x = xm.all_reduce('sum', torch.tensor([r+1.]).to('xla'))
        if r==1: time.sleep(18)   # XLA:CPU ends the process after 15 s in a collective
        return x.item()
    assert run_replicas(f)==[3.,3.]
    assert os.environ['PJRT_CPU_ASYNC_CLIENT']=='0'

@pytest.mark.parametrize('group,name', groups.names)
def test_case(group, name):
    error,seconds = groups.outcome(group)[name]
    assert error is None, error

launched = '''
import torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.distributed.xla_multiprocessing as xmp
from fastai_xla.virtual_cores import *
def f(rank, fail):
    xm.rendezvous('start')
    if fail and rank==1: raise ValueError('boom')
    print(f"{rank} {xm.all_reduce('sum', torch.tensor([rank]).to('xla')).item()}\\n", end='', flush=True)
if __name__=='__main__':
    use_virtual_cores(2)
    xmp.spawn(f, args=(False,))
    torch_xla.launch(f, args=(True,))
'''

def test_launchers_of_torch_xla(tmp_path):
    (tmp_path/'train.py').write_text(launched)
    res = run(tmp_path/'train.py', CPU_NUM_DEVICES=None)
    assert sorted(res.stdout.splitlines())==['0 1', '1 1'], res.stderr
    assert res.returncode==1
    assert 'which raised ValueError: boom' in res.stderr

def test_where_a_replica_is_travels_between_processes():
    import pickle
    from fastai_xla.virtual_cores.barrier import _Again
    step = pickle.loads(pickle.dumps(_Again('all-reduce; all-reduce', 'all-reduce')))
    assert (step, step.next)==('all-reduce; all-reduce','all-reduce') and isinstance(step, _Again)

if __name__=='__main__': groups.main(*sys.argv[1:])
