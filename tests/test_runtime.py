"What `runtime` says and does in processes that lack torch_xla, have a wrong pair, or cannot start the device. Each test is a fresh process."
import os
from importlib.metadata import requires, version

import pytest
from packaging.requirements import Requirement
try: import tomllib
except ImportError: import tomli as tomllib

from fresh import packages_without, repo, run, run_ok
from fastai_xla.runtime.device import tpu_line

@pytest.fixture(scope='session')
def no_xla(tmp_path_factory):
    "PYTHONPATH of an environment that has everything but torch_xla; for `python -S`"
    return packages_without(tmp_path_factory.mktemp('no_xla'), 'torch_xla', '_xlac', 'libtpu')

def fake_dist(path, name, v):
    "Metadata, and nothing else, of a distribution"
    d = path/f'{name}-{v}.dist-info'
    d.mkdir(parents=True)
    (d/'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {v}\n')

def front(path): return f'{path}{os.pathsep}{repo}'

# ---- pure queries

def test_queries_start_nothing():
    out = run_ok('''
        from fastai_xla.runtime import *
        from fastai_xla.runtime.device import in_notebook, runtime_started
        from fastai_xla.runtime.ranks import rank
        from fastai_xla.runtime.device import torch_xla, xm, xr, met
        print(xla_available(), device_kind(), n_cores(), rank(), world_size(), is_main(), in_notebook(), doctor().ok is not None)
        print(runtime_started(), all([torch_xla, xm, xr, met]))''', CPU_NUM_DEVICES='4')
    assert out.splitlines() == ['True CPU 4 0 1 True False True', 'False True']

def test_import_is_quiet():
    "torch_xla's warning about the default device is not shown; other log lines still are"
    res = run('-c', 'from fastai_xla.runtime import *; import logging; logging.warning("mine"); print(device_kind())', PJRT_DEVICE=None, cold=True)
    assert res.returncode == 0 and 'PJRT_DEVICE' not in res.stderr and 'mine' in res.stderr

def test_supported_pairs_are_those_of_the_metadata():
    from fastai_xla.runtime.device import _pairs
    project = tomllib.loads((repo/'pyproject.toml').read_text(encoding='utf-8'))['project']
    reqs = {r.name: r.specifier for r in map(Requirement, project['optional-dependencies']['xla'])}
    minors = [f'2.{o}' for o in range(20)]
    assert [o for o in minors if f'{o}.0' in reqs['torch']] == [o for o in minors if f'{o}.0' in reqs['torch_xla']] == list(_pairs)

# ---- torch_xla cannot be used

def test_without_torch_xla(no_xla):
    out = run_ok('''
        import importlib.util, fastai_xla
        assert importlib.util.find_spec('torch_xla') is None
        from fastai_xla.runtime import *
        from fastai_xla.runtime.device import met, require_xla, runtime_started, torch_xla, xm, xr
        from fastai_xla.runtime.ranks import rank
        print(xla_available(), torch_xla, xm, xr, met, device_kind(), n_cores(), rank(), world_size(), runtime_started())
        for f in (require_xla, xla_device):
            try: f()
            except XLANotInstalled as e: print(type(e).__name__, isinstance(e, ImportError), e)
        d = doctor()
        print(d.ok, [(o.seen, o.remedy) for o in d if not o.ok])''', '-S', PYTHONPATH=no_xla).splitlines()
    minor = '.'.join(version('torch').split('.')[:2])
    msg = (f"torch_xla is not installed: {tpu_line(minor)} 'torch_xla~={minor}.0' on a TPU machine, "
           f"or pip install 'torch_xla~={minor}.0' elsewhere")
    assert out[0] == 'False None None None None None 0 0 1 False'
    assert out[1] == out[2] == f'XLANotInstalled True {msg}'
    assert out[3] == f"False {[('missing', msg)]}"

def test_all_and_to_tpu_without_torch_xla(no_xla):
    "A plain fastai user loses nothing by the import, and `to_tpu` says what to install"
    out = run_ok('''
        from fastai.basics import *
        from fastai_xla.all import *
        x = torch.randn(32, 2)
        dls = DataLoaders.from_dsets(list(zip(x, x.sum(1))), list(zip(x, x.sum(1))), bs=8, device='cpu')
        learn = Learner(dls, nn.Linear(2, 1), loss_func=MSELossFlat())
        try: learn.to_tpu()
        except XLANotInstalled as e: print(e)
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        print(len(learn.recorder.values))''', '-S', PYTHONPATH=no_xla).splitlines()
    assert "pip install 'fastai_xla[tpu]'" in out[0] and out[1] == '1'

@pytest.mark.parametrize('wrong', [pytest.param('2.6.0', marks=pytest.mark.slow), '2.99.0'])
def test_wrong_pair(tmp_path, wrong):
    "The pair is refused by its metadata: the torch_xla that would die is never imported"
    fake_dist(tmp_path, 'torch_xla', wrong)
    out = run_ok('''
        from fastai_xla.runtime import *
        import sys
        print(xla_available(), 'torch_xla' in sys.modules)
        try: xla_device()
        except XLAVersionMismatch as e: print(isinstance(e, XLANotInstalled), e)
        print([(o.seen, o.remedy) for o in doctor() if not o.ok])''', PYTHONPATH=front(tmp_path), cold=True).splitlines()
    torch_v = version('torch')
    line = f"pip install 'torch_xla~={'.'.join(torch_v.split('.')[:2])}.0' elsewhere"
    assert out[0] == 'False False'
    assert out[1].startswith(f'True torch {torch_v} and torch_xla {wrong} do not fit') and line in out[1]
    assert line in out[2] and f"'{wrong}'" in out[2]

@pytest.mark.slow
def test_torch_xla_that_fails_on_import(tmp_path):
    (tmp_path/'torch_xla').mkdir()
    (tmp_path/'torch_xla'/'__init__.py').write_text('raise ImportError("_XLAC.so: undefined symbol: _ZN5torch4lazy")')
    out = run_ok('''
        from fastai_xla.runtime import *
        from fastai_xla.runtime.device import require_xla
        for _ in range(2):
            try: require_xla()
            except XLANotInstalled as e: print(type(e.__cause__).__name__, e)''', PYTHONPATH=front(tmp_path), cold=True).splitlines()
    assert len(out) == 2 and out[0] == out[1] and out[0].startswith('ImportError') and 'undefined symbol: _ZN5torch4lazy' in out[0]
    assert f"pip install --force-reinstall --no-deps torch_xla=={version('torch_xla')}" in out[0]

def test_doctor_names_old_packages(tmp_path):
    fake_dist(tmp_path, 'fastai', '2.7.0')
    out = run_ok('''
        from fastai_xla.runtime import doctor
        print([(o.check, o.seen, o.remedy) for o in doctor() if not o.ok])''', PYTHONPATH=front(tmp_path))
    spec = next(r.specifier for r in map(Requirement, requires('fastai_xla')) if r.name == 'fastai')
    assert out == str([('fastai', '2.7.0', f"pip install 'fastai{spec}'")])

# ---- the device cannot be used

start_twice = '''
    from fastai_xla.runtime import *
    from fastai_xla.runtime.device import runtime_started
    from fastai_xla.runtime.ranks import rank
    for _ in range(2):
        try: xla_device()
        except RuntimeError as e: print(type(e.__cause__).__name__, e)
    print(runtime_started(), rank())'''

@pytest.mark.parametrize('kind,cause,remedy', [
    ('BOGUS', 'RuntimeError', 'PJRT_DEVICE=BOGUS is not a device here: set it to TPU or CPU'),
    pytest.param('TPU', 'OSError', "pip install 'fastai_xla[tpu]'", marks=pytest.mark.slow)])
def test_runtime_does_not_start(tmp_path, kind, cause, remedy):
    "Both calls raise the same error: a second start in one process would abort it"
    no_libtpu = dict(PYTHONPATH=packages_without(tmp_path, 'libtpu'), TPU_LIBRARY_PATH=None, PTXLA_TPU_LIBRARY_PATH=None)
    out = (run_ok(start_twice, '-S', PJRT_DEVICE=kind, **no_libtpu) if kind=='TPU' else run_ok(start_twice, PJRT_DEVICE=kind)).splitlines()
    assert out[0] == out[1] and out[0].startswith(f'{cause} The XLA runtime did not start (PJRT_DEVICE={kind}). ') and remedy in out[0]
    assert out[2] == 'False 0'

def test_libtpu_without_a_chip():
    "Is an error at once: libtpu does not ask for minutes for the metadata of a machine that is none of Google's"
    out = run_ok(start_twice, PJRT_DEVICE='TPU', timeout=100).splitlines()
    assert out[0] == out[1] and 'On this machine no TPU chip was found: set PJRT_DEVICE=CPU for virtual cores, and restart Python' in out[0]
    assert out[2] == 'False 0'

def test_libtpu_that_cannot_be_loaded(tmp_path):
    lib = tmp_path/'libtpu.so'
    lib.write_text('not a library')
    out = run_ok(start_twice, PJRT_DEVICE='TPU', TPU_LIBRARY_PATH=str(lib), cold=False).splitlines()
    assert out[0] == out[1] and 'fastai-xla doctor' in out[0] and 'libtpu.so' in out[0]

def test_doctor_sees_a_tpu_that_is_not_there():
    out = run_ok('''
        from fastai_xla.runtime import *
        from fastai_xla.runtime.device import runtime_started
        print({o.check: o.ok for o in doctor()}, runtime_started())''', PJRT_DEVICE='BOGUS')
    assert "'device': False" in out and out.endswith('False')

# ---- a backward on the CPU first

def test_backward_on_cpu_first():
    "Bare torch_xla fails after a backward on the CPU; `xla_device` cures it, and nothing is left behind by its probe"
    out = run_ok('''
        import torch
        torch.ones(2, requires_grad=True).sum().backward()
        from fastai_xla.runtime import *
        from fastai_xla.runtime.device import torch_xla
        def grad(dev):
            x = torch.ones(2, device=dev, requires_grad=True)
            (3*x).sum().backward()
            return x.grad.tolist()
        try: grad(torch_xla.device())
        except RuntimeError as e: print('device_ready_queues_' in str(e))
        with torch.no_grad(): dev = xla_device()
        print(grad(dev), grad(xla_device()), grad('cpu'), torch.is_grad_enabled())''').splitlines()
    assert out == ['True', '[3.0, 3.0] [3.0, 3.0] [3.0, 3.0] True']

def test_backward_on_cpu_first_in_a_thread():
    "The cure belongs to a thread, so each thread that trains asks for its device"
    out = run_ok('''
        import torch
        from concurrent.futures import ThreadPoolExecutor
        torch.ones(2, requires_grad=True).sum().backward()
        from fastai_xla.runtime import *
        def grad(_):
            x = torch.ones(2, device=xla_device(), requires_grad=True)
            (3*x).sum().backward()
            return x.grad.tolist()
        with ThreadPoolExecutor(2) as ex: print(list(ex.map(grad, range(2))), grad(0))''')
    assert out == '[[3.0, 3.0], [3.0, 3.0]] [3.0, 3.0]'

def test_device_first_leaves_autograd_alone():
    "The probe compiles and runs nothing"
    out = run_ok('''
        import torch
        from fastai_xla.runtime import *
        from fastai_xla.runtime.device import met
        with torch.inference_mode(): dev = xla_device()
        print(met.metric_data('CompileTime'), met.metric_data('ExecuteTime'), torch._C._is_multithreading_enabled())
        x = torch.ones(2, device=dev, requires_grad=True)
        (3*x).sum().backward()
        print(x.grad.tolist())''').splitlines()
    assert out == ['None None True', '[3.0, 3.0]']

# ---- replicas and one process over all cores

def test_xla_device_inside_replicas():
    out = run_ok('''
        from fastai_xla.runtime import *
        from fastai_xla.runtime.ranks import rank
        import torch_xla
        from torch_xla._internal import pjrt
        def f(): return str(xla_device()), rank(), world_size(), is_main()
        if __name__=='__main__':
            import os
            pjrt.initialize_multiprocess(0, 1)
            print(sorted(pjrt._run_thread_per_device(0, 1, f, lambda *a: None).values()))''', CPU_NUM_DEVICES='2')
    assert out == "[('xla:0', 0, 2, True), ('xla:1', 1, 2, False)]"

def test_xla_device_under_spmd():
    out = run_ok('''
        from fastai_xla.runtime import *
        from fastai_xla.runtime.device import xr
        from fastai_xla.runtime.ranks import rank
        xr.use_spmd()
        print(xla_device(), rank(), world_size(), n_cores())''', CPU_NUM_DEVICES='2')
    assert out == 'xla:0 0 1 2'

def test_kaggle_environment_is_mended():
    "At import; what is set later, before the device starts; doctor has no fault to find"
    out = run_ok('''
        import os
        from fastai_xla.runtime import *
        def left(): return [k in os.environ for k in ('TPU_PROCESS_ADDRESSES', 'CLOUD_TPU_TASK_ID')]
        print(left(), [(o.ok, o.seen) for o in doctor() if o.check=='TPU_PROCESS_ADDRESSES'])
        os.environ['TPU_PROCESS_ADDRESSES'] = 'local'
        print([(o.ok, o.seen) for o in doctor() if o.check=='TPU_PROCESS_ADDRESSES'])
        xla_device()
        print(left())''',
        TPU_PROCESS_ADDRESSES='local', CLOUD_TPU_TASK_ID='0', cold=False).splitlines()
    mended = str([(True, 'local, removed before the TPU is used')])
    assert out == [f'[False, False] {mended}', mended, '[False, False]']

@pytest.mark.parametrize('flag', ['XLA_USE_BF16','XLA_DOWNCAST_BF16'])
def test_flags_for_bfloat16(flag):
    "of well-known tutorials: with them a training died. They are removed, with a sentence; once the runtime has started that is an error"
    out = run_ok(f'''
        import os, warnings
        with warnings.catch_warnings(record=True) as said:
            from fastai_xla.all import *
        from fastai.test_utils import synth_learner
        from fastai.basics import *
        print(*[o.message for o in said if 'BF16' in str(o.message)])
        print([(o.ok, o.seen) for o in doctor() if o.check=='{flag}'])
        losses = []
        for on in (False, True):
            set_seed(1)
            learn = synth_learner()
            if on: learn.to_tpu()
            with learn.no_bar(), learn.no_logging(): learn.fit(2)
            losses.append(float(learn.recorder.losses[-1]))
        print(abs(losses[0]-losses[1])<1e-5, learn.model.a.dtype)
        os.environ['{flag}'] = '1'
        print([(o.ok, o.remedy) for o in doctor() if o.check=='{flag}'])
        try: learn.to_tpu()
        except RuntimeError as e: print(e)''', cold=False, **{flag: '1'}).splitlines()
    assert f'{flag} removed from the environment' in out[0] and 'call `learn.to_bf16()`' in out[0]
    assert out[1] == str([(True, '1, removed: `learn.to_bf16()` is for bfloat16')]) and out[2] == 'True torch.float32'
    assert out[3] == str([(False, f'unset {flag}, restart Python, and call `learn.to_bf16()`')])
    assert out[4].startswith(f'The XLA runtime has started, and {flag} is set: restart Python without it') and 'learn.to_bf16()' in out[4]

@pytest.mark.slow
def test_kaggle_environment_in_a_script_of_spawn(tmp_path):
    "A raw `xmp.spawn` script that imports the package hands a mended environment to its processes"
    (tmp_path/'train.py').write_text('''
import os
import torch_xla.distributed.xla_multiprocessing as xmp
from fastai_xla.all import *
def train(index): print(index, [k in os.environ for k in ('TPU_PROCESS_ADDRESSES', 'CLOUD_TPU_TASK_ID')])
if __name__=='__main__': xmp.spawn(train)
''')
    res = run(tmp_path/'train.py', TPU_PROCESS_ADDRESSES='local', CLOUD_TPU_TASK_ID='0', CPU_NUM_DEVICES='1', PYTHONPATH=str(repo), cold=False)
    assert res.returncode == 0 and res.stdout.strip() == '0 [False, False]', res.stdout + res.stderr
