"A fork is what a process of its own would be (see forks.py), and ends with who asked for it."
import os, signal, subprocess, sys, time
from pathlib import Path

from forks import of_pools
from fresh import repo, run

import pytest

pytestmark = pytest.mark.slow

LOOK = '''import json, os, sys, threading
print(json.dumps([sys.argv, sys.path, __name__, globals().get('__file__'), os.getcwd(), os.getpid()==os.getsid(0), threading.active_count(),
    'fastai_xla' in sys.modules, sys.modules['__main__'].__dict__ is globals(), os.environ.get('MASTER_PORT')]))'''

def test_is_started_as_any_other(tmp_path):
    (tmp_path/'look.py').write_text(LOOK)
    for args in (['-c', LOOK, 'a', '--b'], [tmp_path/'look.py', 'a']):
        cold,warm = (run(*args, cwd=tmp_path, MASTER_PORT='3', cold=o) for o in (True,False))
        assert warm.returncode==0 and warm.stdout.replace('true', 'false')==cold.stdout.replace('true', 'false'), (warm, cold)

def test_nobody_is_left(tmp_path):
    "A process ends when who has asked for it is killed, and what it has started with it"
    asks = f'''import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from forks import Forked
print(Forked(['-c', 'import time; time.sleep(99)']).pid, flush=True)
import time; time.sleep(99)'''
    p = subprocess.Popen([sys.executable, '-c', asks], stdout=subprocess.PIPE, text=True)
    pid = int(p.stdout.readline())
    os.kill(pid, 0)
    p.send_signal(signal.SIGKILL)
    p.wait()
    until = time.time()+60
    while Path(f'/proc/{pid}').exists() and time.time()<until: time.sleep(.05)
    assert not Path(f'/proc/{pid}').exists()

POOL = '''from fastai_xla.launch import TPUPool
import os, sys
def look(rank): return rank, os.getppid()==parent, os.getpid()==os.getsid(0), os.environ['CPU_NUM_DEVICES']
parent = os.getpid()
pool = TPUPool(2)
print(pool.run(look), flush=True)
sys.stdin.read()'''

def test_processes_of_pools():
    "Forks, or cold where nothing forks: the same process, which sees itself that who has started it is gone"
    for env,n_names in (dict(os.environ), 1), ({k: v for k,v in os.environ.items() if k!='FORKS'}, 0):
        p = subprocess.Popen([sys.executable, '-c', f'import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport forks; forks.warm_pools()\n{POOL}'],
            env=env | {'PYTHONPATH': str(repo)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert p.stdout.readline()=="[(0, True, True, '1'), (1, True, True, '1')]\n"
        procs = of_pools(p.pid)
        assert len(procs)==2 and sum(o.name()==f'pool of {p.pid}' for o in procs)==2*n_names
        p.kill()
        p.wait()
        until = time.time()+60
        while of_pools(p.pid) and time.time()<until: time.sleep(.05)
        assert not of_pools(p.pid)
