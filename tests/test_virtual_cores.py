"`use_virtual_cores` in fresh processes: `python test_virtual_cores.py <group>`; what ranks do on them is in test_processes.py."
import os, sys

import pytest
from cases import Groups

groups = Groups(__file__, lambda: dict(PJRT_DEVICE='CPU', CPU_NUM_DEVICES=None))
case = groups.case

@case('plain')
def import_changes_nothing():
    import fastai.basics, torch_xla
    before,env = dict(vars(torch_xla._XLAC)),dict(os.environ)
    from fastai_xla import virtual_cores
    assert not torch_xla._XLAC._xla_runtime_is_initialized()
    quiet = {'TF_CPP_MIN_LOG_LEVEL': os.environ['TF_CPP_MIN_LOG_LEVEL']} # lines of C++ that say nothing to a user
    assert dict(os.environ)=={**env, **quiet} and dict(vars(torch_xla._XLAC))==before

@case('plain')
def a_tpu_is_left_alone():
    from torch_xla._internal import pjrt
    from fastai_xla.virtual_cores import use_virtual_cores
    os.environ['PJRT_DEVICE'] = 'TPU'
    env,run = dict(os.environ),pjrt.run_multiprocess
    use_virtual_cores(8)
    assert dict(os.environ)==env and pjrt.run_multiprocess is run
    os.environ['PJRT_DEVICE'] = 'CPU'

@case('plain')
def use_does_not_start_the_runtime():
    from fastai_xla.virtual_cores import use_virtual_cores
    from fastai_xla.runtime import n_cores
    from fastai_xla.runtime.device import runtime_started
    use_virtual_cores(4)
    assert n_cores()==4 and not runtime_started()
    assert [os.environ.pop(o) for o in ('CPU_NUM_DEVICES','CPU_NUM_PROCESSES')]==['4','1']

@case('spmd')
def spmd_process_is_refused():
    from fastai_xla.launch import tpu_launch
    from fastai_xla.runtime.device import xr
    xr.use_spmd()
    with pytest.raises(RuntimeError, match='This process uses SPMD.*restart Python'): tpu_launch(print, n_cores=2)

@pytest.mark.parametrize('group,name', groups.names)
def test_case(group, name):
    error,seconds = groups.outcome(group)[name]
    assert error is None, error

if __name__=='__main__': groups.main(*sys.argv[1:])
