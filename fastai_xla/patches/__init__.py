"What is replaced for the whole process, and what is replaced on one object for a while."
from . import registry, grads, travel, learner, ops, sampling, augment, lstm, torch_tpu
from .registry import apply_patches, undo_patches, patches_in_force
from .learner import XLACallback

__all__ = ['apply_patches', 'undo_patches', 'patches_in_force', 'XLACallback']
