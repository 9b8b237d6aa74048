"Run Python in a process of its own, where what it imports and starts cannot disturb other tests."
import os, re, socket, subprocess, sys, sysconfig
from pathlib import Path
from textwrap import dedent

from forks import Forked

repo = Path(__file__).parent.parent
late = {'XLA_FLAGS','CPU_NUM_DEVICES','CPU_NUM_PROCESSES','PJRT_DEVICE','MASTER_PORT','MPLBACKEND','PYTHONPATH'} # what a fork can still be given

where_line = r"No TPU found: \d+ virtual cores? on this machine's CPU\n" # the first call says so

def free_port():
    "A port that nobody listens at now"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def run(*args, timeout=900, cwd=None, cold=None, **env):
    """Run `python *args` with `env` added to the environment (None removes a variable); returns the CompletedProcess, output as text.
    A fork of a process that has imported torch_xla and fastai, unless the imports themselves are shown (`cold`, or settings that they read)"""
    if cold is None: cold = not late.issuperset(env) or env.get('PJRT_DEVICE', 'CPU') is None or str(args[0]).startswith('-') and args[0] not in ('-c','-m')
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PJRT_DEVICE': 'CPU', **env}
    args = [*map(str, args)]
    env,kw = {k:v for k,v in env.items() if v is not None},dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd)
    with subprocess.Popen([sys.executable, *args], env=env, **kw) if cold else Forked(args, env=env, **kw) as p:
        try: out,err = p.communicate(timeout=timeout)
        except BaseException:
            p.kill()
            raise
    return subprocess.CompletedProcess(args, p.returncode, out, err)

def run_ok(code, *args, **kwargs):
    "Run `code` (and `args` before -c); returns what it printed, but for what Learners train on, and fails with its stderr when it fails"
    res = run(*args, '-c', dedent(code), **kwargs)
    assert res.returncode==0, f'exit {res.returncode}\n{res.stdout}\n{res.stderr}'
    return re.sub(where_line, '', res.stdout).strip()

def packages_without(dest, *names):
    "Link every installed file and package into `dest` but those whose names start with `names`: use with `python -S` and PYTHONPATH"
    for lib in {sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}:
        for o in Path(lib).iterdir():
            if not o.name.lower().startswith(tuple(names)): (dest/o.name).symlink_to(o)
    return f'{dest}{os.pathsep}{repo}'
