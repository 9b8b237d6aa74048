"""TorchTPU's `tpu` device on a machine without a TPU, in every process of an environment.

Python imports this module when it starts (`install.sh` writes the .pth file), since torch_tpu opens the driver as it is imported;
`import torch` then calls `load`, as it calls torch_tpu's own. Everything is the real torch_tpu but two facts of the machine: the library that it takes for the TPU's driver is a PJRT plugin for the CPU
(PyPI's lammps-jax-pjrt-cpu has XLA's own), and the number of TPUs, which torch_tpu counts on the PCI bus, is one.
"""
import ctypes, os
from importlib.util import find_spec
from pathlib import Path

def _folder(package): return Path(find_spec(package).origin).parent

plugin = _folder('lammps_jax_pjrt_cpu')/'pjrt_c_api_cpu_plugin.so'
os.environ.update(TPU_LIBRARY_PATH=str(plugin), TPU_MIN_LOG_LEVEL='3', TF_CPP_MIN_LOG_LEVEL='3')

def _drop_client_options():
    "Have `PJRT_Client_Create` of the plugin be called without options: those of a TPU's driver are an error to others"
    lib = ctypes.CDLL(str(plugin))
    lib.GetPjrtApi.restype = ctypes.c_void_p
    create = ctypes.c_void_p.from_address(lib.GetPjrtApi() + 40 + 8*10) # struct PJRT_Api of pjrt_c_api.h: 40 bytes, then functions, of which it is number 10
    func = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    stock = func(create.value)
    @func
    def without_options(args):
        n = ctypes.c_size_t.from_address(args + 24) # PJRT_Client_Create_Args: size, extensions, options, number of options
        was,n.value = n.value,0
        try: return stock(args)
        finally: n.value = was
    create.value = ctypes.cast(without_options, ctypes.c_void_p).value
    _kept.append((lib, stock, without_options))

_kept = []
_tv_ops = ('qnms roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d _roi_align_backward _roi_pool_backward _ps_roi_align_backward '
    '_ps_roi_pool_backward _deform_conv2d_backward').split()

def _name_torchvision_ops(torch):
    "PyPI's torchvision is built for CUDA, and beside torch for the CPU its operators cannot be loaded: give them names, without which it cannot be imported"
    try: torch.ops.load_library(str(_folder('torchvision')/'_C.so'))
    except OSError:
        ops = torch.library.Library('torchvision', 'DEF')
        ops.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
        for o in _tv_ops: ops.define(f'{o}(Tensor a) -> Tensor')
        _kept.append(ops)

def load():
    "Called by `import torch`; `TORCH_TPU_ON_CPU=0` in the environment leaves the machine without a TPU"
    import torch
    if os.environ.get('TORCH_TPU_ON_CPU')=='0': return _name_torchvision_ops(torch)
    _drop_client_options()
    from torch_tpu import _loader
    from torch_tpu._internal.utils import hardware
    hardware.get_tpu_device_count = lambda: 1
    _loader.load()
    _name_torchvision_ops(torch)
