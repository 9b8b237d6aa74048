"Models fit for XLA."
from .deferred import *
from .repeats import *
from .norms import *
from .text import *
from .timm import *
from .scan import *
from .blocks import *
