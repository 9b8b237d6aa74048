"""Modules:

- `fastai_xla.patches.ops`: The targets that torch's cross entropy divides by, counted over all ranks"""

__version__ = "0.1.0"
