"Checkpoints from which training resumes."
from .storage import DamagedCheckpoint
from .safe import register_type
from .model import load_state
from .manager import CheckpointError, KeepPolicy
from .callback import TPUCheckpoint, resume_from

__all__ = ['TPUCheckpoint', 'resume_from', 'KeepPolicy', 'load_state', 'register_type', 'CheckpointError', 'DamagedCheckpoint']
