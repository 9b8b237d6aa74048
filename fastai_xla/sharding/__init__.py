"One program on all cores."
from .rules import *
from .place import *
from .trainer import *
