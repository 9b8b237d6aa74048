from .runtime import *
from .patches import *
from .placement import *
from .augment import *
from .data import *
from .metrics import *
from .callback import *
from .monitor import *
