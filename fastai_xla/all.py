"What a notebook gets by `from fastai_xla.all import *`: the methods of a Learner, and these names"
from .runtime import *
from .patches import *
from .data import *
from .models import *
from .train import *
from .virtual_cores import *
from .launch import *
from .distributed import *
from .sharding import *
from .checkpoint import *
from .recipes import *
from .monitor import *
from .aot import *
from .torch_tpu import *
