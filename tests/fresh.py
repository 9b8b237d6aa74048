"Run Python in a process of its own, where what it imports and starts cannot disturb other tests."
import os, subprocess, sys, sysconfig
from pathlib import Path
from textwrap import dedent

repo = Path(__file__).parent.parent

def run(*args, timeout=900, cwd=None, **env):
    "Run `python *args` with `env` added to the environment (None removes a variable); returns the CompletedProcess, output as text"
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PJRT_DEVICE': 'CPU', **env}
    return subprocess.run([sys.executable, *map(str, args)], env={k:v for k,v in env.items() if v is not None},
                          capture_output=True, text=True, timeout=timeout, cwd=cwd)

def run_ok(code, *args, **kwargs):
    "Run `code` (and `args` before -c); returns what it printed, and fails with its stderr when it fails"
    res = run(*args, '-c', dedent(code), **kwargs)
    assert res.returncode==0, f'exit {res.returncode}\n{res.stdout}\n{res.stderr}'
    return res.stdout.strip()

def packages_without(dest, *names):
    "Link every installed file and package into `dest` but those whose names start with `names`: use with `python -S` and PYTHONPATH"
    for lib in {sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}:
        for o in Path(lib).iterdir():
            if not o.name.lower().startswith(tuple(names)): (dest/o.name).symlink_to(o)
    return f'{dest}{os.pathsep}{repo}'
