"One program on all cores."
from .hosts import *
from .rules import *
from .place import *
from .loader import *
from .trainer import *
