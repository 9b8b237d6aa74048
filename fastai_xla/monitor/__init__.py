"What a training costs, and what goes wrong in it."
from . import throughput
from .stats import XLAStats
from .throughput import TPU_KINDS, TPUMeter
from .profile import StepProfiler
from .nan_guard import NaNGuard, NotFinite
from .norms import NormMeter

__all__ = ['XLAStats', 'TPUMeter', 'StepProfiler', 'NaNGuard', 'NotFinite', 'NormMeter', 'TPU_KINDS']
