"Checkpoints that training goes on from."
from .types import *
from .codec import *
from .store import *
from .sharded import *
from .fingerprint import *
from .progress import *
from .writer import *
from .goal import *
from .export import *
from .resume import *
