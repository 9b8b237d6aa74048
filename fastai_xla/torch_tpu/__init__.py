"The same Learner on TorchTPU, which replaces PyTorch/XLA."
from . import device, optimizer, trainer, distributed
from .device import require_torch_tpu, tpu_device
from .trainer import TorchTPUTrainer
from .distributed import TorchTPURankTrainer

__all__ = ['TorchTPUTrainer']
