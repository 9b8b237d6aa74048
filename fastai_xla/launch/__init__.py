"Processes, one for each chip."
from .carry import *
from .wire import *
from .settle import *
from .replica import *
from .crew import *
from .pool import *
from .watchdog import *
from .slice import *
