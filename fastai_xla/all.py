from .runtime import *
from .patches import *
from .virtual_cores import *
from .placement import *
from .data import *
from .metrics import *
from .callback import *
from .monitor import *
