"This machine, its ranks, and tensors on the way."
from .device import xla_available, XLANotInstalled, XLAVersionMismatch, xla_device, device_kind, n_cores, use_compile_cache
from .ranks import barrier, is_main, main_first, rank, world_size
from .counts import xla_counts
from .transfer import to_host
from .doctor import doctor

__all__ = ['xla_available', 'XLANotInstalled', 'XLAVersionMismatch', 'xla_device', 'device_kind', 'n_cores', 'use_compile_cache',
    'world_size', 'is_main', 'main_first', 'xla_counts', 'to_host', 'doctor']
