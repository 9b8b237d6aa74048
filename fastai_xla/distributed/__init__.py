"One replica a core."
from . import learner
from .trainer import TPUDistributedTrainer

__all__ = ['TPUDistributedTrainer']
