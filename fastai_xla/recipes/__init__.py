"Recipes of timm's trainings, as callbacks and splitters of fastai."
from .ema import *
from .clip import *
from .groups import *
from .eval_every import *
from .mixture import *
from .splits import *
