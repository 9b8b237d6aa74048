"One replica a core."
from .loader import *
from .metrics import *
from .units import *
from .fsdp import *
from .trainer import *
from .home import *
from .learner import *
