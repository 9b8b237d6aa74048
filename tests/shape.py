"""The shape of the replicas that the suites run: threads of a process, or with `FASTAI_XLA_PROCESSES=1` (`make test-processes`) processes of their own.

What runs on threads of the test's process by `run_replicas` then runs on a pool, so what it returns is a copy, and it must not use the device before."""
import os
from functools import partial

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
