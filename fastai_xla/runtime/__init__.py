"This machine, its ranks, and tensors on the way."
from .device import *
from .hosts import *
from .ranks import *
from .counts import *
from .transfer import *
from .table import *
from .doctor import *
from .signals import *
from .args import *
from .users import *
from .values import *
