"Checkpoints that training goes on from."
from .store import *
from .sharded import *
from .progress import *
from .writer import *
from .resume import *
