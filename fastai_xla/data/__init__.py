"Batches."
from .rng import *
from .placement import *
from .shapes import *
from .prefetch import *
from .source import *
from .loader import *
from .share import *
from .shards import *
from .records import *
from .stream import *
from ..runtime.transfer import upload
