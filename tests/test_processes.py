"Ranks on the CPU: the collectives of three processes against values by hand, and what goes wrong between them."
import os, signal, subprocess, time
import psutil, pytest
from fastai.vision.all import *
from fastai.callback.all import *
from fastai_xla.all import *
from fastai_xla.data.rng import seed_all
from fastai_xla.launch.worker import post
from fastai_xla.runtime.device import xm, xr
from fastai_xla.runtime.ranks import barrier, broadcast, from_main, gather_objects, rank
from fastai_xla.virtual_cores.processes import RankError
for o in [o for o in globals() if o.startswith('test')]: del globals()[o]  # fastai's, which pytest would collect
from fastai_xla.launch import get_pool, LaunchError
from torch_xla._internal import pjrt
from forks import Forked
from fresh import run, run_ok
from test_distributed import learner

N,ALL,S = 3,[0,1,2],3

@pytest.fixture(scope='module')
def shape():
    "A pool of processes; the environment is as before, afterwards"
    env = dict(os.environ)
    use_virtual_cores(N)
    yield
    get_pool(N).close()
    for p in patches_in_force().filter(lambda p: p.owner is pjrt): p.undo()
    os.environ.clear()
    os.environ.update(env)

@pytest.fixture
def pool(shape): return get_pool(N)

def each(pool, f):
    "What `f(rank, put)` returns on each rank, where `put` makes a tensor on the device"
    return pool.run(lambda rank: f(rank, lambda x,**kw: torch.tensor(x, **kw).to(xla_device())))

# ---- who is who

def test_each_is_one_of_three(pool):
    def f(r, put):
        return (xr.global_ordinal(), xr.world_size(), xr.local_ordinal(), xr.process_index(), xr.process_count(), xr.local_process_count(), xr.host_index(),
                xr.global_device_count(), xr.addressable_device_count(), xr.local_device_count(), str(xla_device()), rank(), is_main(), os.getpid())
    *res,pids = zip(*each(pool, f))
    same = (3,)*3,(1,)*3
    assert res==[(0,1,2), same[0], (0,1,2), (0,1,2), same[0], same[0], (0,)*3, same[0], same[1], same[0], ('xla:0',)*3, (0,1,2), (True,False,False)]
    assert {*pids}=={p.pid for p in pool._procs.procs} and len({*pids})==3
    assert TPUPool().n_cores==n_cores()==N

# ---- collectives, by hand

def test_all_reduce(pool):
    def f(r, put):
        a,b,c,d = put([1.*r]),put([[r,1]]),put([1.*r,2], dtype=torch.bfloat16),put([r>0,False])
        ops = [xm.all_reduce(op, put([r+1.])).item() for op in ('sum','mul','min','max')]
        logic = [xm.all_reduce(op, put([True,r>0])).tolist() for op in ('and','or')]
        res = xm.all_reduce('sum', [a,b,c])
        return ops,logic,xm.all_reduce('sum', put(2.*r), scale=.5).item(),res[0] is a,a.tolist(),b.tolist(),c.tolist(),str(c.dtype),str(a.device)
    assert each(pool, f)==[([6.,6.,1.,3.], [[True,False],[True,True]], S, True, [S], [[S,N]], [S,2*N], 'torch.bfloat16', 'xla:0')]*N

def test_all_gather(pool):
    def f(r, put):
        x = put([[r,10*r]])
        return [o.tolist() for o in (xm.all_gather(x), xm.all_gather(x, dim=-1), xm.all_gather(x, pin_layout=False))]
    rows = [[r,10*r] for r in ALL]
    assert each(pool, f)==[[rows, [sum(rows, [])], rows]]*N

def test_broadcast_and_what_is_refused(pool):
    def f(r, put):
        m,xs = nn.BatchNorm1d(2).to(xla_device()),[put([1.*r]),put([2*r])]
        with torch.no_grad(): m.weight.fill_(r+1), m.running_mean.fill_(r+2)
        xm.collective_broadcast(xs, root_ordinal=2)
        xm.broadcast_master_param(m)
        with pytest.raises(NotImplementedError, match='On a TPU the others work'): xm.reduce_scatter('sum', put([1.]*N), 1., 0, N)
        return [o.item() for o in xs], m.weight.tolist(), m.running_mean.tolist()
    assert each(pool, f)==[([2.,4], [1,1], [2,2])]*N

def test_groups(pool):
    "of which each rank is a member, or which it leaves to the others"
    pairs = [[0,2],[1]]
    def f(r, put):
        res = [xm.all_reduce('sum', put(r+1), groups=pairs).item()]
        if r!=1: res.append(xm.all_gather(put([r]), groups=[[0,2]], pin_layout=False).tolist())
        return res + [xm.all_reduce('max', put(r)).item()]
    assert each(pool, f)==[[4,[0,2],2], [2,2], [4,[0,2],2]]

def test_on_the_host(pool, tmp_path):
    def f(r, put):
        barrier()
        with main_first(): first = (tmp_path/'made').exists()==(r!=0) and not (tmp_path/'made').touch()
        x = put([1.*r])
        broadcast([x])
        xm.save(dict(x=xm.all_reduce('sum', put([1.*r]))), tmp_path/'saved')
        return (gather_objects('x'*5000*r), from_main(lambda: 'main'), first, xm.rendezvous('a', b'x'*r), xm.mesh_reduce('a', r, sum), x.item(),
                torch.load(tmp_path/'saved')['x'].item())
    assert each(pool, f)==[(['x'*5000*r for r in ALL], 'main', True, [b'x'*r for r in ALL], S, 0., S)]*N

# ---- training

class Noise(ItemTransform):
    def encodes(self, o): return o[0]+torch.randn(4), o[1]

def test_workers_draw_by_the_notebooks_seed(shape):
    "whatever their ranks have drawn before"
    res = []
    for seed in range(2):
        get_pool().run(lambda rank: seed_all(seed))
        b = learner()
        b.dls.add_tfms([Noise()], 'after_item')
        for dl in b.dls.loaders: dl.fake_l.num_workers = 1
        b.to_tpu_distributed(processes=True)
        with b.no_bar(), b.no_logging(): b.fit_one_cycle(1, 1e-2)
        res.append([p.clone() for p in b.model.parameters()])
    assert all(torch.equal(p, q) for p,q in zip(*res))

# ---- before there is one

def test_use_virtual_cores():
    "starts nothing, and leaves a TPU alone"
    out = run_ok("""
        import os, torch_xla
        from torch_xla._internal import pjrt
        before,run = dict(vars(torch_xla._XLAC)),pjrt.run_multiprocess
        from fastai_xla.virtual_cores import use_virtual_cores
        from fastai_xla.runtime.device import n_cores, runtime_started
        os.environ['PJRT_DEVICE'] = 'TPU'
        use_virtual_cores(8)
        assert 'CPU_NUM_DEVICES' not in os.environ and pjrt.run_multiprocess is run and dict(vars(torch_xla._XLAC))==before
        os.environ['PJRT_DEVICE'] = 'CPU'
        use_virtual_cores(4)
        print(n_cores(), runtime_started())""", CPU_NUM_DEVICES=None)
    assert out=='4 False'

# ---- what goes wrong

def fails(pool, f, text, rank=None):
    each(pool, lambda r, put: 0) # starts them
    start = time.time()
    with pytest.raises(LaunchError, match=text) as e: each(pool, f)
    assert time.time()-start<10 and (rank is None or e.value.rank==rank)
    return e.value

def boom(r, put):
    if r==1: raise ValueError('boom')
    xm.rendezvous('x')

def test_error_of_one(pool):
    "is the cause of what is raised; the peers know whom they waited for"
    assert isinstance(fails(pool, boom, '(?s)Rank 1 failed.*ValueError: boom', 1).__cause__, ValueError)
    assert not pool.is_open
    def told(r, put):
        try: boom(r, put)
        except RankError as e:
            post(str(e))
            raise
    got = {}
    with pytest.raises(LaunchError, match='ValueError: boom'):
        pool.run(lambda r: told(r, None), on_message=lambda r, msg: got.update({r: msg}))
    assert got.keys()=={0,2}
    for r,o in got.items(): assert o.startswith(f'Rank {r} waits in all_gather on dim 0 of') and o.endswith('rank 1, which raised ValueError: boom')

@pytest.mark.parametrize('f,text', [
    (lambda r, put: r==1 or xm.rendezvous('x'), 'for rank 1, which has returned: it issued fewer collectives or had fewer batches'),
    (lambda r, put: xm.all_reduce('sum', put([1.]*(4 if r==2 else 3))), r'ranks 0, 1: all_reduce sum of float32\[3\]; rank 2: all_reduce sum of float32\[4\]'),
    (lambda r, put: xm.all_gather(put([1.])) if r==1 else xm.all_reduce('sum', put([1.])), r'The ranks issued different collectives.*rank 1: all_gather on dim 0 of float32\[1\]'),
    (lambda r, put: xm.all_reduce('sum', put([1.]), groups=[[0,1]]), r'Rank 2 called all_reduce sum of float32\[1\] for the groups \[\[0, 1\]\], which do not include it'),
    (lambda r, put: xm.all_reduce('sum', put([1.]), groups=[[0,1],[2]] if r else [[0,2],[1]]), 'which raised|which has returned')], ids='early shape other member circle'.split())
@pytest.mark.slow
def test_ranks_that_part(pool, f, text): fails(pool, f, text)

def test_killed(pool):
    each(pool, lambda r, put: 0)
    pids = [p.pid for p in pool._procs.procs]
    def f(r, put): os.kill(os.getpid(), signal.SIGKILL) if r==1 else xm.rendezvous('x')
    fails(pool, f, 'The process of rank 1 was killed by SIGKILL', 1)
    assert not pool.is_open and not any(map(psutil.pid_exists, pids))

script = '''
import os, sys, time, torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr
from fastai_xla.virtual_cores import *
def f(rank):
    print(f"{rank} {xr.world_size()} {xm.all_reduce('sum', torch.tensor([rank]).to('xla')).item()}\\n", end='', flush=True) # in one write
    if sys.argv[1]=='fork':
        print(f'{os.getpid()}\\n', end='', flush=True)
        if rank==0: time.sleep(600)
        return
    if rank==1: raise ValueError('boom')
    xm.rendezvous('x')
if __name__=='__main__':
    use_virtual_cores(2)
    torch_xla.launch(f, start_method=sys.argv[1])
'''

def test_launcher_of_torch_xla(tmp_path):
    (tmp_path/'train.py').write_text(script)
    res = run(tmp_path/'train.py', 'spawn', CPU_NUM_DEVICES=None)
    assert sorted(res.stdout.splitlines())==['0 2 1', '1 2 1'], res.stderr
    assert res.returncode==1 and 'which raised ValueError: boom' in res.stderr

@pytest.mark.slow
def test_launcher_of_torch_xla_is_killed(tmp_path):
    "its processes end, one at work and one idle, though nobody tells them"
    (tmp_path/'train.py').write_text(script)
    env = {k: v for k,v in os.environ.items() if k!='CPU_NUM_DEVICES'}
    with Forked([tmp_path/'train.py', 'fork'], env=env, stdout=subprocess.PIPE, text=True) as p:
        pids = [int(o) for o in (p.stdout.readline() for _ in range(4)) if len(o.split())==1]
        assert len(pids)==2 and all(map(psutil.pid_exists, pids))
        p.kill()
    until = time.time()+20
    while any(map(psutil.pid_exists, pids)) and time.time()<until: time.sleep(.05)
    assert not any(map(psutil.pid_exists, pids))
