"What the TPU's compiler says of a training, without a TPU."
from . import compile
from .plan import plan_training, smallest_slices
from .libtpu import CompileError

__all__ = ['plan_training', 'smallest_slices', 'CompileError']
