"What a training costs, and what goes wrong in it."
from . import throughput
from .throughput import TPU_KINDS, TPUMeter
from .profile import StepProfiler, XLAStats
from .gradients import NaNGuard, NormMeter, NotFinite

__all__ = ['XLAStats', 'TPUMeter', 'StepProfiler', 'NaNGuard', 'NotFinite', 'NormMeter', 'TPU_KINDS']
