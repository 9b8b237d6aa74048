"Processes, one for each chip."
from .wire import *
from .replica import *
from .crew import *
from .pool import *
