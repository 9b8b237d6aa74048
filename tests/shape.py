"""The shape of the replicas that the suites run: threads of a process, or with `FASTAI_XLA_PROCESSES=1` (`make test-processes`) processes of their own.

What runs on threads of the test's process by `run_replicas` then runs on a pool, so what it returns is a copy, and it must not use the device before."""
import os, re
from contextlib import contextmanager, redirect_stderr
from functools import partial
from io import StringIO
import pytest

processes = os.environ.get('FASTAI_XLA_PROCESSES')=='1'

def run_on_pool(fn, *args, n=None, **kwargs):
    from fastai_xla.all import rng_state
    from fastai_xla.launch import get_pool
    return get_pool(n or _n[0]).run(_as_here, rng_state(), partial(fn, **kwargs), *args)

def _as_here(rank, state, fn, *args):
    "With the random state of the test's process"
    from fastai_xla.all import set_rng_state
    set_rng_state(state)
    return fn(rank, *args)

@contextmanager
def warns(match):
    "As `pytest.warns`, for what a replica warns of; one in a process of its own has that written to our stderr"
    if not processes:
        with pytest.warns(UserWarning, match=match): yield
        return
    with redirect_stderr(StringIO()) as err: yield
    assert re.search(f'UserWarning: .*{match}', err.getvalue()), err.getvalue()

_n = [8]
def use_processes(n=8, processes=True):
    from fastai_xla.virtual_cores import use
    _n[0] = n
    use.use_virtual_cores(n, processes=True)

def take_shape():
    "Have what a suite imports from now on be of the shape that was asked for"
    if not processes: return
    import fastai_xla.all as everything, fastai_xla.virtual_cores as vc
    for o in (everything, vc): o.use_virtual_cores,o.run_replicas = use_processes,run_on_pool
    use_processes()
