"Batches."
from .rng import *
from .placement import *
from .shapes import *
from .loader import *
from .shards import *
from .records import *
from .stream import *
