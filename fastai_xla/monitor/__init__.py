"What it costs."
from .stats import *
from .plan import *
