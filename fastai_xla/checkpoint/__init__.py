"Checkpoints from which training resumes."
from .storage import CheckpointError, DamagedCheckpoint, KeepPolicy
from .safe import register_type
from .model import load_state
from .callback import TPUCheckpoint, resume_from

__all__ = ['TPUCheckpoint', 'resume_from', 'KeepPolicy', 'load_state', 'register_type', 'CheckpointError', 'DamagedCheckpoint']
