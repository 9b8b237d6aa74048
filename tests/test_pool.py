"`tpu_launch` and `TPUPool`: what travels, messages, shared memory, Ctrl-C, what fails and how, and that no process is left behind."
import os, signal, subprocess, sys, threading, time

import numpy as np, psutil, pytest, torch

from fastai_xla.launch import *
from fastai_xla.launch import launcher
from fastai_xla.runtime import xla_counts
from fastai_xla.runtime import rank, world_size
from fastai_xla.runtime.device import xm
from forks import Forked, of_pools
from fresh import repo, run
from fastai_xla.launch.worker import Failed, post, stop_requested

@pytest.fixture(scope='module')
def pool():
    "In a process that has trained on the CPU. Tests that end it stand below those that do not: the next one has to open it again"
    (torch.ones(2, requires_grad=True)*2).sum().backward()
    with TPUPool(2) as p: yield p

def runs(pid): return psutil.pid_exists(pid) and psutil.Process(pid).status()!='zombie'

def gone(pids, seconds=8):
    "Whether all processes of `pids` have ended within `seconds`"
    until = time.time() + seconds
    while time.time()<until and any(map(runs, pids)): time.sleep(.05)
    return not any(map(runs, pids))

def pids(pool): return [p.pid for p in pool._procs.procs]
def pid(rank): return os.getpid()

# ---- calls

def step(rank, x):
    before = xla_counts()
    y = xm.all_reduce('sum', torch.tensor([x, rank+1.]).to('xla')*3)
    return y.tolist(), (xla_counts()-before).compiles

def test_second_call_compiles_nothing(pool):
    first = pool.run(step, 1.)
    assert [o[0] for o in first] == [[6.,9.]]*2
    a = pool.run(pid)
    assert pool.run(step, 2.) == [([12.,9.],0)]*2
    assert a == pool.run(pid) and {*a} == {*pids(pool)} and os.getpid() not in a and pool.is_open

def grad(rank):
    x = torch.ones(2, device='xla', requires_grad=True)
    (3*x).sum().backward()
    return x.grad

class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): print('in a worker'); return i

def load(rank): return torch.cat([*torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1)]).tolist()

@pytest.mark.parametrize('f,want', [(lambda r: (r, rank(), world_size()), [(0,0,2),(1,1,2)]), (lambda r: os.getcwd()==there, [True]*2), (lambda r: grad(r).tolist(), [[3.,3.]]*2),
    (lambda r: 'fastai.callback.schedule' in sys.modules, [True]*2), (load, [[*range(8)]]*2), (lambda r: torch.nn.Parameter(torch.ones(1).to('xla')*r), [0.,1.]), (post, [None]*2)],
    ids='ranks folder grad imports workers device_tensor unheard_post'.split())
def test_what_a_function_finds(pool, f, want):
    global there
    import fastai.callback.schedule
    there = os.getcwd()
    res = pool.run(f)
    assert res==want and not (isinstance(res[0], torch.Tensor) and res[0].device.type!='cpu')

def test_pool_is_busy(pool):
    said = []
    def again(rank, msg):
        for p in (pool, TPUPool(1)):
            try: p.run(pid)
            except RuntimeError as e: said.append(str(e))
    assert pool.run(lambda r: post(r) or r, on_message=again) == [0,1]
    assert any('This pool is running' in o for o in said) and any('Another pool' in o for o in said)

def test_run_in_a_thread(pool):
    res = []
    t = threading.Thread(target=lambda: res.extend(pool.run(lambda r: r)))
    t.start(); t.join()
    assert res == [0,1]

class Traced: pass
held = {}

def hold(rank, data):
    import weakref, test_pool
    data.x = torch.ones(2, device='xla')
    data.me = data
    test_pool.held[rank] = weakref.ref(data)

def still_held(rank): return __import__('test_pool').held[rank]() is not None

def test_nothing_of_a_call_stays_alive(pool):
    pool.run(hold, Traced())
    assert pool.run(still_held) == [False]*2

# ---- messages and prints

def talk(rank):
    for i in range(3):
        post((i, time.time()))
        time.sleep(.2)

def test_messages_are_live_and_in_order(pool):
    got = []
    pool.run(talk, on_message=lambda rank, msg: got.append((rank, *msg, time.time())))
    assert [o[1] for o in got if o[0]==0] == [o[1] for o in got if o[0]==1] == [0,1,2]
    assert max(t-sent for _,_,sent,t in got) < .2

def test_only_the_main_rank_prints(pool, capsys):
    def say(rank):
        print('rank', rank, end='\r', flush=True)
        print('to stderr', rank, file=__import__('sys').stderr)
    pool.run(say)
    assert capsys.readouterr() == ('rank 0\r', 'to stderr 0\n')

# ---- shared memory

def memory(rank, t, a):
    total = float(t.sum()) + float(a.sum())
    t[0],a[0] = rank,rank
    if world_size()>1: xm.rendezvous('all have summed')
    pss = psutil.Process().memory_full_info().pss>>20
    if world_size()>1: xm.rendezvous('all have looked')
    return total, float(t[0]), pss

def test_large_tensors_and_arrays_are_shared_and_private(pool):
    t,a = torch.ones(15_000_000),np.ones(7_500_000)
    base = pool.run(memory, torch.ones(1), np.ones(1))[0][2]
    res = pool.run(memory, t, a)
    assert [o[0] for o in res] == [22.5e6]*2 and [o[1] for o in res] == [0,1]
    assert t.is_shared() and t[0]==1 and a[0]==1
    assert res[0][2]-base < 190, 'the process maps 114 MB, which two copies would be 229'
    ptr = t.data_ptr()
    pool.run(memory, t, a)
    assert t.data_ptr()==ptr

def test_no_shared_memory_left(monkeypatch, pool):
    import fastai_xla.launch.serialization as l
    def full(s): raise RuntimeError('No space left on device')
    monkeypatch.setattr(l, '_share', full)
    with pytest.warns(UserWarning, match='2 MB are copied to each rank.*No space left'):
        assert pool.run(lambda r, t: float(t.sum()), torch.ones(2**19)) == [2.**19]*2

# ---- Ctrl-C

def interrupt(*_): signal.raise_signal(signal.SIGINT)

def poll(rank):
    for i in range(2000):
        if stop_requested(): return i
        if rank==0 and i==20: post('running')
        time.sleep(.005*(rank+1))

def test_ctrl_c_stops_all_ranks_at_one_step_and_brings_home_what_was_reached(pool):
    with pytest.raises(LaunchInterrupt) as e: pool.run(poll, on_message=interrupt)
    assert len(set(e.value.results))==1 and e.value.results[0]>=20 and pool.is_open
    assert pool.run(lambda r: (r, stop_requested())) == [(0,False),(1,False)]

def test_ctrl_c_at_the_end_of_a_call_leaves_nothing_for_the_next(pool):
    "the replicas' answer, how often they asked, comes after their results"
    with pytest.raises(LaunchInterrupt) as e: pool.run(lambda r: stop_requested() or r or post('done'), on_message=lambda *_: (time.sleep(.3), interrupt()))
    assert e.value.results == [None,1]
    assert pool.run(lambda r: (r, stop_requested())) == [(0,False),(1,False)]

def busy(rank, ask):
    if ask: stop_requested()
    if rank==0: post('busy')
    while True: time.sleep(.1)

@pytest.mark.slow
@pytest.mark.parametrize('ask,times,grace', [(False,1,60), (True,2,60), (True,1,.5)], ids=['does not ask','twice','grace'])
def test_ctrl_c_ends_what_does_not_stop(pool, monkeypatch, ask, times, grace):
    monkeypatch.setattr(pool, 'grace', grace)
    pool.run(pid)
    old,start = pids(pool),time.time()
    with pytest.raises(LaunchInterrupt) as e: pool.run(busy, ask, on_message=lambda *_: [interrupt() for _ in range(times)])
    assert e.value.results is None and not pool.is_open and time.time()-start < 3 and gone(old, 1)

def test_ctrl_c_while_opening(pool, monkeypatch):
    monkeypatch.delenv('FORKS', raising=False) # which would open it at once
    pool.close()
    threading.Timer(.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(LaunchInterrupt): pool.run(pid)
    assert not pool.is_open and gone(pids(pool), 1)

kernel_cell = """
import sys; sys.path.append({tests!r})
from fastai_xla.launch import *
from fastai_xla.launch.worker import stop_requested
import time, traceback
class Point:
    def __init__(self, x): self.x = x
def double(p): return Point(p.x*2)
def main(rank, p):
    try: [1,2][rank+1]
    except IndexError: text = traceback.format_exc()
    else: text = ''
    return double(p), text
pool = TPUPool(2)
res = pool.run(main, Point(3))
print([type(o[0]) is Point and o[0].x for o in res], res[0][1]=='', '    try: [1,2][rank+1]' in res[1][1])
def f(rank):
    i = 0
    while not stop_requested():
        i += 1
        if rank==0 and i==3: print('running')
        time.sleep(.05*(1+rank))
    return i
try: pool.run(f)
except KeyboardInterrupt as e: print(len(e.results), len(set(e.results)), pool.is_open)
print(pool.run(lambda rank: rank))
print(pool._procs.procs[0].pid)"""

def test_notebook():
    "What its cells define travels with their source; Jupyter sends SIGINT to the kernel's process group; prints are live; a killed kernel leaves nothing"
    from jupyter_client.manager import start_new_kernel
    km,kc = start_new_kernel(startup_timeout=120)
    said = []
    def show(msg):
        text = msg['content'].get('text', '') if msg['content'].get('name')=='stdout' else ''
        said.append(text)
        if 'running' in text: km.interrupt_kernel()
    try:
        reply = kc.execute_interactive(kernel_cell.format(tests=str(repo)), output_hook=show, timeout=120)
        assert reply['content']['status']=='ok', reply['content']
    finally:
        kc.stop_channels()
        km.shutdown_kernel(now=True)
    *out,child = ''.join(said).splitlines()
    assert [o for o in out if not o.startswith('Starting 2 processes')] == ['[6, 6] True True', 'running', '2 1 True', '[0, 1]']
    assert gone([int(child)])

# ---- what is refused, what fails, and the end of the parent

@pytest.mark.parametrize('env,n', [(dict(CPU_NUM_DEVICES='3'), 3), ({}, 8), (dict(CPU_NUM_PROCESSES='4'), 4)], ids=str)
def test_cores_of_the_environment(monkeypatch, env, n):
    for k in ('CPU_NUM_DEVICES','CPU_NUM_PROCESSES'): monkeypatch.delenv(k, raising=False)
    for k,v in env.items(): monkeypatch.setenv(k, v)
    assert TPUPool().n_cores==n

def test_errors_before_anything_starts(monkeypatch):
    before = of_pools()
    with pytest.raises(ValueError, match='`n_cores` must be a whole number, at least 1, or None. Got 0'): tpu_launch(print, n_cores=0)
    with pytest.raises(TypeError, match=r"args\[1\]\['file'\] cannot be sent to or from a rank"): tpu_launch(print, 1, dict(a=1, file=(o for o in ())), n_cores=2)
    for kind in ('TPU','NEURON'):
        monkeypatch.setenv('PJRT_DEVICE', kind)
        with pytest.raises(ValueError, match=f'PJRT_DEVICE={kind}, but no TPU chip was found: set PJRT_DEVICE=CPU for virtual cores, and restart Python'): tpu_launch(print)
    assert of_pools() == before

def test_cores_of_a_tpu(monkeypatch):
    "by what `layout` sees on TPU machines; the number of processes is torch_xla's own arithmetic"
    import fastai_xla.runtime.device as device
    from torch_xla._internal import tpu
    for o in (launcher, device): monkeypatch.setattr(o, 'device_kind', lambda: 'TPU')
    def layout(chips, cores, n=None):
        monkeypatch.setattr(launcher, 'n_cores', lambda: cores)
        monkeypatch.setattr(tpu, 'num_available_chips', lambda: chips)
        return launcher.layout(n)
    for n in (1, 4, 8): assert layout(n, n)==layout(n, n, n)==(n, {}) and layout(n, n, 1)==(1, {})
    with pytest.raises(ValueError, match='2 cores were asked for, and this TPU has 4: use n_cores=4, or None'): layout(4, 4, 2)
    with pytest.raises(ValueError, match='8 cores in 4 processes.*without `processes=True`'): layout(4, 8) # a TPU v2 or v3

class Odd(Exception):
    def __init__(self, a, b): super().__init__(a)

def odd(): raise Odd(1, 2)
def local():
    class Mine(Exception): items = (o for o in ())
    raise Mine('locked')

@pytest.mark.parametrize('f,text,cause', [(odd, 'test_pool.Odd: 1', type(None)), (local, 'Mine: locked', type(None)), (lambda: sys.exit(4), 'SystemExit: 4', SystemExit),
    (lambda: 1/0, 'in <lambda>.*1/0.*ZeroDivisionError', ZeroDivisionError)], ids='odd local exit zero'.split())
def test_errors_that_travel(f, text, cause):
    "with the exception, where it can be pickled both ways"
    try: f()
    except BaseException as e: failed = Failed.of(3, e)
    with pytest.raises(LaunchError, match='(?s)Rank 3 failed.*'+text) as e: raise failed.error()
    assert e.value.rank == 3 and isinstance(e.value.__cause__, cause)

def launch_with_a_child():
    "the child is like the worker of a DataLoader"
    if os.fork()==0: time.sleep(100)
    tpu_launch(print, n_cores=2)

def fail(rank, how, path):
    "Rank 1 fails while the parent is busy with a message of rank 0, which has printed more"
    if rank==0:
        post(1)
        for i in range(5): print('epoch', i)
        path.touch()
    while not path.exists(): time.sleep(.01)
    if rank==1: how()
    time.sleep(100)

@pytest.mark.parametrize('how,text,cause', [(launch_with_a_child, '(?s)Rank 1 failed.*in launch_with_a_child.*RuntimeError: This is a rank already', RuntimeError),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), 'The process of rank 1 was killed by SIGKILL', type(None)),
    (os.abort, r'The process of rank 1 was killed by SIGABRT: C\+\+ code gave up.*Fewer cores', type(None))], ids='launch kill abort'.split())
def test_failures(pool, tmp_path, capsys, how, text, cause):
    "end all processes, also those that they have started; what was printed before an exception is shown, and the folder of the pool removed"
    folder,old = pool.run(lambda r: os.environ['FASTAI_XLA_POOL_FOLDER'])[0],pids(pool)
    assert of_pools() and os.path.exists(folder)
    start = time.time()
    with pytest.raises(LaunchError, match=text) as e: pool.run(fail, how, tmp_path/'said', on_message=lambda *_: time.sleep(.5))
    assert time.time()-start < 10 and not pool.is_open and not os.path.exists(folder)
    assert e.value.rank == 1 and isinstance(e.value.__cause__, cause)
    if cause is RuntimeError: assert capsys.readouterr().out.splitlines()[-5:] == [f'epoch {i}' for i in range(5)]
    assert gone(old, 1) and not of_pools()

def test_a_result_that_cannot_be_sent():
    with TPUPool(1) as p:
        assert p.run(lambda r: (r, world_size())) == [(0,1)]
        with pytest.raises(LaunchError, match=r"(?s)result\[1\] cannot be sent to or from a rank.*generator"): p.run(lambda r: [1, (o for o in ())])

script = '''
import os, sys, traceback
from fastai_xla.launch import *
class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, o): return isinstance(o, Point) and self.x==o.x
scale = 10
def add(rank, p): return Point(p.x*scale + rank)
def boom(rank):
    if rank==1: raise ValueError('boom')
try: tpu_launch(boom, n_cores=2)
except LaunchError: traceback.print_exc()
pool = TPUPool(2)
res = pool.run(add, Point(2))
print(res == [Point(20), Point(21)], type(res[0]) is Point)
print(pool.run(lambda rank, *a: (rank, a, sys.argv[1:]), 1, 'b'))
print(pool.run(lambda rank: os.getpid())[0])'''

def test_script_without_a_guard(tmp_path):
    "it fails, goes on, and ends with a pool that is open"
    (tmp_path/'script.py').write_text(script)
    res = run(tmp_path/'script.py', '--flag', PYTHONPATH=str(repo))
    *out,child = res.stdout.splitlines()
    assert out == ['True True', "[(0, (1, 'b'), ['--flag']), (1, (1, 'b'), ['--flag'])]"], res.stderr
    assert 'Rank 1 failed' in res.stderr and "if rank==1: raise ValueError('boom')" in res.stderr and res.stderr.strip().endswith('ValueError: boom')
    assert not psutil.pid_exists(int(child))

def test_idle_pool_that_was_killed_is_replaced(pool):
    old = pool.run(pid)
    os.kill(old[0], signal.SIGKILL)
    pool._procs.procs[0].wait(5)
    assert not pool.is_open and pool.run(pid) != old

def test_error_in_on_message(pool):
    def bad(rank, msg): raise OSError('no screen')
    with pytest.raises(OSError, match='no screen'): pool.run(lambda r: post(1), on_message=bad)
    assert not pool.is_open

def test_close_is_fast_and_runs_exit_handlers(tmp_path):
    def f(rank, path): __import__('atexit').register(lambda: (path/'left').touch())
    with TPUPool(1) as p:
        p.run(f, tmp_path)
        process,start = p._procs.procs[0],time.time()
    assert time.time()-start < 2 and process.returncode==0 and (tmp_path/'left').exists()

def test_one_pool_at_a_time_and_none_that_was_collected(pool):
    old,other = pool.run(pid),TPUPool(1)
    new = other.run(lambda r: (os.getpid(), world_size()))[0]
    assert new[1]==1 and not pool.is_open and gone(old, 1)
    assert runs(new[0])
    del other
    assert gone([new[0]])

orphan = '''
import os, time
from fastai_xla.launch import *
def f(rank):
    if rank==0: print('pid', os.getpid(), flush=True)
    time.sleep(100)
TPUPool(2).run(f)'''

@pytest.mark.slow
def test_parent_is_killed_while_replicas_run():
    p = Forked(['-c', orphan], stdout=subprocess.PIPE, text=True, cwd=repo)
    child = int(p.stdout.readline().split()[1])
    p.kill()
    p.wait()
    assert gone([child])

# ---- several processes of one device each, whose ranks are in another order

class Processes(TPUPool):
    "One process per core; a module that Python imports at its start gives the first one the last rank"
    def __init__(self, n, path, **env):
        super().__init__(n)
        self._env = {**self._env, 'PYTHONPATH': str(path), **env}
        (path/'sitecustomize.py').write_text('import os, torch_xla.runtime as xr\nxr.global_ordinal = lambda: int(os.environ["TEST_RANK"])')
    def _ensure_started(self, signals):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(launcher, 'start_process', lambda i, n, env, start=launcher.start_process: start(i, n, dict(env, TEST_RANK=str(n-1-i))))
            super()._ensure_started(signals)

def test_processes_in_rank_order(tmp_path):
    got = []
    with Processes(2, tmp_path) as procs:
        res = procs.run(lambda r: (r, os.getpid(), post(r)), on_message=lambda *msg: got.append(msg))
        assert [o[0] for o in res] == [0,1] and sorted(got) == [(0,0),(1,1)]
        assert [o[1] for o in procs.run(lambda r: (r, os.getpid()))] == [o[1] for o in res] == pids(procs)[::-1]

@pytest.mark.slow
def test_processes_that_do_not_form_a_group(tmp_path):
    with Processes(2, tmp_path) as p:
        (tmp_path/'sitecustomize.py').write_text('import torch_xla.runtime as xr\nxr.global_ordinal = lambda: 0')
        with pytest.raises(RuntimeError, match='the processes do not form one group'): p.run(pid)
        assert not p.is_open

@pytest.mark.parametrize('env,text', [(dict(PJRT_DEVICE='BOGUS'), '(?s)The XLA runtime did not start .PJRT_DEVICE=BOGUS.. Restart Python'),
                                      (dict(XLA_FLAGS='--bogus'), 'had not started its rank, (was killed by|ended)')])
def test_runtime_that_does_not_start(env, text):
    p = TPUPool(2)
    p._env = {**p._env, **env}
    with pytest.raises(LaunchError, match=text) as e: p.run(pid)
    assert e.value.rank is None and not p.is_open
