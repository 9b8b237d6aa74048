"One replica a core."
from .loader import *
from .metrics import *
from .units import *
from .fsdp import *
from .trainer import *
from .fsdp_trainer import *
from .home import *
from .events import *
from .learner import *
from ..runtime.ranks import barrier, main_first
from ..patches.learner import whole_model
