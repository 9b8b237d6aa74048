"`tpu_launch` and `TPUPool` in scripts and tests: what travels, what fails and how, and that nothing is left behind."
import os, signal, sys, time

import psutil, pytest, torch

from fastai_xla.launch import *
from fastai_xla.launch.messages import Failed
from fastai_xla.runtime import world_size
from forks import of_pools
from fresh import repo, run

@pytest.fixture(scope='module')
def pool():
    "In a process that has trained on the CPU"
    (torch.ones(2, requires_grad=True)*2).sum().backward()
    with TPUPool(2) as p: yield p

# ---- what travels

script = '''
import os, sys, traceback
from fastai_xla.launch import *
class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, o): return isinstance(o, Point) and self.x==o.x
scale = 10
def times(p): return Point(p.x*scale)
def add(rank, p): return Point(times(p).x + rank)
k = 5
def boom(rank):
    if rank==1: raise ValueError('boom')
try: tpu_launch(boom, n_cores=2)
except LaunchError: traceback.print_exc()
pool = TPUPool(2)
res = pool.run(add, Point(2))
print(res == [Point(20), Point(21)], type(res[0]) is Point)
print(pool.run(lambda rank, *a: (rank, a, k, sys.argv[1:]), 1, 'b'))
print(pool.run(lambda rank: os.getpid())[0])'''

def test_script_without_a_guard(tmp_path):
    "it fails, goes on, and ends with a pool that is open"
    (tmp_path/'script.py').write_text(script)
    res = run(tmp_path/'script.py', '--flag', PYTHONPATH=str(repo))
    *out,pid = res.stdout.splitlines()
    assert out == ['True True', "[(0, (1, 'b'), 5, ['--flag']), (1, (1, 'b'), 5, ['--flag'])]"], res.stderr
    assert 'Rank 1 failed' in res.stderr and "if rank==1: raise ValueError('boom')" in res.stderr and res.stderr.strip().endswith('ValueError: boom')
    assert not psutil.pid_exists(int(pid))

def grad(rank):
    x = torch.ones(2, device='xla', requires_grad=True)
    (3*x).sum().backward()
    return x.grad.tolist()

def test_after_cpu_training(pool): assert pool.run(grad) == [[3.,3.]]*2

def test_modules_of_the_users_path(pool, tmp_path, monkeypatch):
    pool.run(grad)
    (tmp_path/'mine.py').write_text('def f(rank): return __file__, rank')
    monkeypatch.syspath_prepend(tmp_path)
    from mine import f
    assert pool.run(f) == [(f'{tmp_path}/mine.py', r) for r in range(2)]

def test_cores_of_the_environment(monkeypatch):
    monkeypatch.delenv('CPU_NUM_PROCESSES', raising=False)
    monkeypatch.setenv('CPU_NUM_DEVICES', '3')
    assert TPUPool().n_cores == 3
    monkeypatch.delenv('CPU_NUM_DEVICES')
    assert TPUPool().n_cores == 8
    monkeypatch.setenv('CPU_NUM_PROCESSES', '4')
    assert TPUPool().n_cores == 4

# ---- what is refused

def test_errors_before_anything_starts():
    before = of_pools()
    for n in (0, -1):
        with pytest.raises(ValueError, match='`n_cores` must be a whole number, at least 1, or None. Got '): tpu_launch(print, n_cores=n)
    with pytest.raises(TypeError, match=r"args\[1\]\['file'\] cannot be sent to or from a rank"): tpu_launch(print, 1, dict(a=1, file=(o for o in ())), n_cores=2)
    assert of_pools() == before

@pytest.mark.parametrize('kind', ['TPU','NEURON'])
def test_kinds_of_device(kind, monkeypatch):
    monkeypatch.setenv('PJRT_DEVICE', kind)
    with pytest.raises(ValueError, match=f'PJRT_DEVICE={kind}, but no TPU chip was found: set PJRT_DEVICE=CPU for virtual cores, and restart Python'): tpu_launch(print)

@pytest.fixture
def tpu(monkeypatch):
    "What `layout` sees on TPU machines; the number of processes is torch_xla's own arithmetic"
    import fastai_xla.launch.launcher as l, fastai_xla.runtime.device as device
    from torch_xla._internal import tpu
    def _set(chips, cores):
        for o in (l, device): monkeypatch.setattr(o, 'device_kind', lambda: 'TPU')
        monkeypatch.setattr(l, 'n_cores', lambda: cores)
        monkeypatch.setattr(tpu, 'num_available_chips', lambda: chips)
        return l.layout
    return _set

@pytest.mark.parametrize('chips,cores', [(1,1), (4,4), (8,8)])
def test_layout_of_tpus(tpu, chips, cores):
    layout = tpu(chips, cores)
    assert layout() == layout(cores) == (cores, {}) and layout(1) == (1, {})
    with pytest.raises(ValueError, match=f'16 cores were asked for, and this TPU has {cores}'): layout(16)
    with pytest.raises(ValueError, match='`n_cores` must be a whole number, at least 1'): layout(0)

def test_two_cores_a_process(tpu):
    "as on a TPU v2 or v3, whose cores one process drives together"
    with pytest.raises(ValueError, match='8 cores in 4 processes.*without `processes=True`'): tpu(4, 8)()

def test_subset_of_a_tpu(tpu):
    with pytest.raises(ValueError, match='2 cores were asked for, and this TPU has 4: use n_cores=4, or None'): tpu(4, 4)(2)

# ---- what fails

class Odd(Exception):
    def __init__(self, a, b): super().__init__(a)

def error(f):
    try: f()
    except BaseException as e: return e

def odd(): raise Odd(1, 2)
def local():
    class Mine(Exception): items = (o for o in ())
    raise Mine('locked')

@pytest.mark.parametrize('f,text,cause', [(odd, 'test_launch.Odd: 1', type(None)), (local, 'Mine: locked', type(None)), (lambda: sys.exit(4), 'SystemExit: 4', SystemExit),
                                          (lambda: 1/0, 'in <lambda>.*1/0.*ZeroDivisionError', ZeroDivisionError)], ids='odd local exit zero'.split())
def test_errors_that_travel(f, text, cause):
    "with the exception, where it can be pickled both ways"
    with pytest.raises(LaunchError, match='(?s)Rank 3 failed.*'+text) as e: raise Failed.of(3, error(f)).error()
    assert e.value.rank == 3 and isinstance(e.value.__cause__, cause)

def folder_of_pool(rank): return os.environ['FASTAI_XLA_POOL_FOLDER']

def fail(rank, how):
    if rank==1: how()
    time.sleep(100)

def launch_with_a_child():
    "the child is like the worker of a DataLoader"
    if os.fork()==0: time.sleep(100)
    tpu_launch(print, n_cores=2)

@pytest.mark.parametrize('how,text,cause,rank', [
    (launch_with_a_child, '(?s)Rank 1 failed.*in launch_with_a_child.*RuntimeError: This is a rank already', RuntimeError, 1),
    (lambda: sys.exit(0), 'SystemExit: 0', SystemExit, 1),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), 'The process of rank 1 was killed by SIGKILL', type(None), 1),
    (os.abort, r'The process of rank 1 was killed by SIGABRT: C\+\+ code gave up.*Fewer cores', type(None), 1)], ids='launch exit kill abort'.split())
def test_failures(pool, how, text, cause, rank):
    folder = pool.run(folder_of_pool)[0]
    assert of_pools() and os.path.exists(folder)
    start = time.time()
    with pytest.raises(LaunchError, match=text) as e: pool.run(fail, how)
    assert time.time()-start < 10 and not pool.is_open and not os.path.exists(folder)
    assert e.value.rank == rank and isinstance(e.value.__cause__, cause)
    time.sleep(.2)
    assert not of_pools()

def test_one_core_and_a_result_that_cannot_be_sent():
    def f(r, x):
        if r!=0 or world_size()!=1: return 'more'
        return [x, (o for o in ())] if x else x
    with TPUPool(1) as p:
        assert p.run(f, 0) == [0]
        with pytest.raises(LaunchError, match=r"(?s)result\[1\] cannot be sent to or from a rank.*generator"): p.run(f, 1)
    assert not of_pools()
