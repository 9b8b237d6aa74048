"Real collectives on XLA:CPU."
from .barrier import *
from .collectives import *
from .hosts import *
from .replicas import *
from .processes import *
from .use import *
