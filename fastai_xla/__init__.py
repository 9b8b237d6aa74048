"""Train an unchanged fastai Learner on TPUs, through PyTorch/XLA"""

__version__ = "0.1.0"
