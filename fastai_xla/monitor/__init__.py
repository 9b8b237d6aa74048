"What it costs."
from .stats import *
from .slices import *
from .plan import *
from .scopes import *
from .hlo import *
from .libtpu import *
from .report import *
from .runs import *
from .trace import *
from .compile import *
from .nan_guard import *
from .rates import *
from .meter import *
from .speed import *
from .profile import *
from .norm_meter import *
