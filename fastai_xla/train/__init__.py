"Training on one core."
from . import replay, trainer
from .replay import StepReplay
from .strict import NotSteady
from .trainer import TPUTrainer

__all__ = ['TPUTrainer', 'StepReplay', 'NotSteady']
