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
from fresh import run
from test_distributed import learner, same_state, close, B

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

def test_large_tensors_go_in_pieces(pool):
    n = 2**20+5
    def f(r, put): return (xm.all_reduce('sum', torch.arange(n).to(xla_device())+r).cpu()==3*torch.arange(n)+S).all().item()
    assert each(pool, f)==[True]*N

def test_all_gather(pool):
    def f(r, put):
        x,outs = put([[r,10*r]]),[put([[0,0]]*N) for _ in range(3)]
        xm.all_gather(x, output=outs[0])
        xm.all_gather([x,2*x], output=outs[1:], pin_layout=False)
        return [o.tolist() for o in (xm.all_gather(x), xm.all_gather(x, dim=-1), xm.all_gather(x, pin_layout=False), *xm.all_gather([x,2*x], pin_layout=False), *outs)]
    rows = [[r,10*r] for r in ALL]
    twice = [[2*a,2*b] for a,b in rows]
    assert each(pool, f)==[[rows, [sum(rows, [])], rows, rows, twice, rows, rows, twice]]*N

def test_reduce_scatter(pool):
    def f(r, put):
        x,outs = put([1.*i+r for i in ALL]),[put([0.]) for _ in range(3)]
        xm.reduce_scatter('sum', x, 1., 0, N, output=outs[0])
        xm.reduce_scatter('sum', [x,2*x], 1., 0, N, output=outs[1:], pin_layout=False)
        return [o.item() for o in (xm.reduce_scatter('sum', x, 1., 0, N), xm.reduce_scatter('sum', x, .5, 0, N), xm.reduce_scatter('max', x, 1., 0, N),
                                   *xm.reduce_scatter('sum', [x,2*x], 1., 0, N, pin_layout=False), *outs)]
    for r,res in enumerate(each(pool, f)):
        full = N*r+S
        assert res==[full, full/2, r+2, full, 2*full, full, full, 2*full]

def test_exchanges(pool):
    def f(r, put):
        m,xs = nn.BatchNorm1d(2).to(xla_device()),[put([1.*r]),put([2*r])]
        with torch.no_grad(): m.weight.fill_(r+1), m.running_mean.fill_(r+2)
        xm.collective_broadcast(xs, root_ordinal=2)
        xm.broadcast_master_param(m)
        return (xm.all_to_all(put([[100*r+i for i in ALL]]), 1, 0, N).tolist(), xm.collective_permute(put([r]), [[i,(i+1)%N] for i in ALL]).item(),
                xm.collective_permute(put([r+5]), [[0,1]]).item(), [o.item() for o in xs], m.weight.tolist(), m.running_mean.tolist())
    assert each(pool, f)==[([[100*i+r] for i in ALL], (r-1)%N, 5 if r==1 else 0, [2.,4], [1,1], [2,2]) for r in ALL]

def test_groups(pool):
    "of which each rank is a member, or which it leaves to the others"
    pairs = [[0,2],[1]]
    def f(r, put):
        res = [xm.all_reduce('sum', put(r+1), groups=pairs).item()]
        if r!=1: res += [xm.all_gather(put([r]), groups=[[0,2]], pin_layout=False).tolist(), xm.reduce_scatter('sum', put([r,5]), 1., 0, 2, groups=[[2,0]]).item()]
        return res + [xm.all_reduce('max', put(r)).item()]
    assert each(pool, f)==[[4,[0,2],10,2], [2,2], [4,[0,2],2,2]]

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

def trained(o, n=2):
    with o.no_bar(), o.no_logging(): o.fit_one_cycle(n, 1e-2)
    return o

def numbers(o): return [*map(float, o.recorder.losses)],o.recorder.values,[p.clone() for p in o.model.parameters()]

def test_learner_is_as_in_plain_fastai(pool):
    "losses, metrics, weights, the optimizer's state, predictions in order, and what loss each sample has; a ragged last batch"
    a,b = trained(learner(bs=N*B)),trained(learner().to_tpu_distributed(processes=True))
    assert get_pool() is pool
    for x,y in zip(numbers(a), numbers(b)): close(torch.cat([tensor(o).flatten() for o in x]), torch.cat([tensor(o).flatten() for o in y]))
    same_state(a, b)
    with a.no_bar(), b.no_bar():
        for x,y in zip(a.get_preds(with_loss=True), b.get_preds(with_loss=True)): close(x, y)
        close(a.validate(), b.validate())

class Noise(ItemTransform):
    def encodes(self, o): return o[0]+torch.randn(4), o[1]

def test_workers_share_the_processors(shape):
    "and draw what follows from the notebook's seed, whatever their ranks have drawn before"
    class Counts(Callback):
        def before_batch(self): assert len(psutil.Process().children())<=max(1, num_cpus()//N), psutil.Process().children()
    res = []
    for seed in range(2):
        get_pool().run(lambda rank: seed_all(seed))
        b = learner(cbs=Counts())
        b.dls.add_tfms([Noise()], 'after_item')
        for dl in b.dls.loaders: dl.fake_l.num_workers = 8
        res.append(numbers(trained(b.to_tpu_distributed(processes=True), 1))[2])
    assert all(torch.equal(p, q) for p,q in zip(*res))

# ---- what goes wrong

def fails(pool, f, text, kind=LaunchError, rank=None):
    each(pool, lambda r, put: 0) # starts them
    start = time.time()
    with pytest.raises(kind, match=text) as e: each(pool, f)
    assert time.time()-start<10 and (rank is None or e.value.rank==rank)
    return e.value

def boom(r, put):
    if r==1: raise ValueError('boom')
    xm.rendezvous('x')

def test_error_of_one(pool):
    "its own; the peers know whom they waited for"
    fails(pool, boom, '(?s)Rank 1 failed.*ValueError: boom', ValueError, 1)
    assert not pool.is_open
    def told(r, put):
        try: boom(r, put)
        except RankError as e:
            post(str(e))
            raise
    got = {}
    with pytest.raises(ValueError):
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
    fails(pool, f, 'The process of rank 1 was killed by SIGKILL', rank=1)
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
