"What `runtime` says and does in processes that lack torch_xla, have a wrong pair, or cannot start the device. Each test is a fresh process."
import os
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
try: import tomllib
except ImportError: import tomli as tomllib

from fresh import packages_without, repo, run, run_ok
from fastai_xla.runtime.device import _pairs, tpu_line

minor = '.'.join(version('torch').split('.')[:2])
def front(path): return f'{path}{os.pathsep}{repo}'

def test_import_is_quiet():
    "torch_xla's warning about the default device is not shown; other log lines still are"
    res = run('-c', 'from fastai_xla.runtime import *; import logging; logging.warning("mine"); print(device_kind())', PJRT_DEVICE=None, cold=True)
    assert res.returncode == 0 and 'PJRT_DEVICE' not in res.stderr and 'mine' in res.stderr

def test_supported_pairs_are_those_of_the_metadata():
    project = tomllib.loads((repo/'pyproject.toml').read_text(encoding='utf-8'))['project']
    reqs = {r.name: r.specifier for r in map(Requirement, project['optional-dependencies']['xla'])}
    minors = [f'2.{o}' for o in range(20)]
    assert [o for o in minors if f'{o}.0' in reqs['torch']] == [o for o in minors if f'{o}.0' in reqs['torch_xla']] == list(_pairs)

# ---- torch_xla cannot be used

def test_without_torch_xla(tmp_path):
    "A plain fastai user loses nothing by the import, and what needs torch_xla says what to install"
    out = run_ok('''
        import importlib.util
        assert importlib.util.find_spec('torch_xla') is None
        from fastai.basics import *
        from fastai_xla.all import *
        from fastai_xla.runtime.device import met, require_xla, runtime_started, torch_xla, xm, xr
        from fastai_xla.runtime.ranks import rank
        print(xla_available(), torch_xla, xm, xr, met, device_kind(), n_cores(), rank(), world_size(), runtime_started())
        x = torch.randn(32, 2)
        dls = DataLoaders.from_dsets(list(zip(x, x.sum(1))), list(zip(x, x.sum(1))), bs=8, device='cpu')
        learn = Learner(dls, nn.Linear(2, 1), loss_func=MSELossFlat())
        for f in (require_xla, xla_device, learn.to_tpu):
            try: f()
            except XLANotInstalled as e: print(type(e).__name__, isinstance(e, ImportError), e)
        d = doctor()
        print(d.ok, [(o.seen, o.remedy) for o in d if not o.ok])
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        print(len(learn.recorder.values))''', '-S', PYTHONPATH=packages_without(tmp_path, 'torch_xla', '_xlac', 'libtpu')).splitlines()
    msg = f"torch_xla is not installed: {tpu_line(minor)} 'torch_xla~={minor}.0' on a TPU machine, or pip install 'torch_xla~={minor}.0' elsewhere"
    assert out == ['False None None None None None 0 0 1 False', *[f'XLANotInstalled True {msg}']*3, f"False {[('missing', msg)]}", '1']

def test_wrong_pair(tmp_path):
    "The pair is refused by its metadata: the torch_xla that would die is never imported"
    d = tmp_path/'torch_xla-2.99.0.dist-info'
    d.mkdir()
    (d/'METADATA').write_text('Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.99.0\n')
    out = run_ok('''
        from fastai_xla.runtime import *
        import sys
        print(xla_available(), 'torch_xla' in sys.modules)
        try: xla_device()
        except XLAVersionMismatch as e: print(isinstance(e, XLANotInstalled), e)
        print([(o.seen, o.remedy) for o in doctor() if not o.ok])''', PYTHONPATH=front(tmp_path), cold=True).splitlines()
    line = f"pip install 'torch_xla~={minor}.0' elsewhere"
    assert out[0] == 'False False'
    assert out[1].startswith(f"True torch {version('torch')} and torch_xla 2.99.0 do not fit") and line in out[1]
    assert line in out[2] and "'2.99.0'" in out[2]

@pytest.mark.slow
def test_torch_xla_that_fails_on_import(tmp_path):
    (tmp_path/'torch_xla').mkdir()
    (tmp_path/'torch_xla'/'__init__.py').write_text('raise ImportError("_XLAC.so: undefined symbol: _ZN5torch4lazy")')
    out = run_ok('''
        from fastai_xla.runtime.device import require_xla, XLANotInstalled
        for _ in range(2):
            try: require_xla()
            except XLANotInstalled as e: print(type(e.__cause__).__name__, e)''', PYTHONPATH=front(tmp_path), cold=True).splitlines()
    assert len(out) == 2 and out[0] == out[1] and out[0].startswith('ImportError') and 'undefined symbol: _ZN5torch4lazy' in out[0]
    assert f"pip install --force-reinstall --no-deps torch_xla=={version('torch_xla')}" in out[0]

# ---- the device cannot be used

@pytest.mark.parametrize('kind,remedy', [('BOGUS', 'PJRT_DEVICE=BOGUS is not a device here: set it to TPU or CPU'),
    ('TPU', 'On this machine no TPU chip was found: set PJRT_DEVICE=CPU for virtual cores, and restart Python')])
def test_runtime_does_not_start(kind, remedy):
    """Both calls raise the same error: a second start in one process would abort it. libtpu without a chip is an error at once:
    it does not ask for minutes for the metadata of a machine that is none of Google's"""
    out = run_ok('''
        from fastai_xla.runtime import *
        from fastai_xla.runtime.device import runtime_started
        for _ in range(2):
            try: xla_device()
            except RuntimeError as e: print(e)
        print(runtime_started(), doctor().ok)''', PJRT_DEVICE=kind, timeout=100).splitlines()
    assert out[0] == out[1] and out[0].startswith(f'The XLA runtime did not start (PJRT_DEVICE={kind}). ') and remedy in out[0]
    assert out[2] == 'False False'

# ---- a backward on the CPU first

def test_backward_on_cpu_first():
    "Bare torch_xla fails after a backward on the CPU; `xla_device` cures it for the thread that asks, and nothing is left behind by its probe"
    out = run_ok('''
        import torch
        from concurrent.futures import ThreadPoolExecutor
        torch.ones(2, requires_grad=True).sum().backward()
        from fastai_xla.runtime import *
        from fastai_xla.runtime.device import torch_xla
        def grad(dev=None):
            x = torch.ones(2, device=dev or xla_device(), requires_grad=True)
            (3*x).sum().backward()
            return x.grad.tolist()
        try: grad(torch_xla.device())
        except RuntimeError as e: print('device_ready_queues_' in str(e))
        with torch.no_grad(): dev = xla_device()
        with ThreadPoolExecutor(2) as ex: print(grad(dev), grad(), grad('cpu'), *ex.map(grad, [None]*2), torch.is_grad_enabled())''').splitlines()
    assert out == ['True', ' '.join(['[3.0, 3.0]']*5)+' True']

def test_device_first_leaves_autograd_alone():
    "The probe compiles and runs nothing"
    out = run_ok('''
        import torch
        from fastai_xla.runtime import *
        from fastai_xla.runtime.device import met
        with torch.inference_mode(): dev = xla_device()
        print(met.metric_data('CompileTime'), met.metric_data('ExecuteTime'), torch._C._is_multithreading_enabled())''')
    assert out == 'None None True'

# ---- what images and tutorials set

def test_environment_is_mended():
    """At import, and what is set later before the device starts. What Kaggle's image sets hides chips; with the flags for bfloat16 of well-known tutorials
    a training died: they go with a sentence"""
    out = run_ok('''
        import os, warnings
        with warnings.catch_warnings(record=True) as said:
            from fastai_xla.all import *
        from fastai.test_utils import synth_learner
        names = 'TPU_PROCESS_ADDRESSES','CLOUD_TPU_TASK_ID','XLA_USE_BF16'
        def left(): return [k in os.environ for k in names]
        print(left(), [(o.ok, o.seen) for o in doctor() if o.check in names])
        os.environ['TPU_PROCESS_ADDRESSES'] = 'local'
        learn = synth_learner().to_tpu()
        print(left(), learn.model.a.dtype)
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        print(*[o.message for o in said if 'BF16' in str(o.message)])''',
        TPU_PROCESS_ADDRESSES='local', CLOUD_TPU_TASK_ID='0', XLA_USE_BF16='1', cold=False).splitlines()
    seen = [(True, '1, removed: `learn.to_bf16()` is for bfloat16'), (True, 'local, removed before the TPU is used')]
    assert out[0] == f'[False, False, False] {seen}' and out[1] == '[False, False, False] torch.float32'
    assert 'XLA_USE_BF16 removed from the environment' in out[2] and 'call `learn.to_bf16()`' in out[2]
