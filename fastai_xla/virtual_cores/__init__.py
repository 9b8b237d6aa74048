"Real collectives on XLA:CPU."
from .barrier import *
from .collectives import *
from .replicas import *
from .hosts import *
from .processes import *
from .rehearsal import *
from .use import *
