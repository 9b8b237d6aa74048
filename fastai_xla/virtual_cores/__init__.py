"Real collectives on XLA:CPU."
from .processes import use_virtual_cores

__all__ = ['use_virtual_cores']
