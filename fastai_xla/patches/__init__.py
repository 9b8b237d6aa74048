"What is replaced for the whole process, and what is lent."
from .registry import *
from .grads import *
from .travel import *
from .learner import *
from .ops import *
from .builder import *
from .tiles import *
from .augment import *
from .mix import *
from .recompute import *
from .spmd import *
from .spawn import *
from .text import *
from .as_torch import *
from .by_parts import *
from .recurrent import *
