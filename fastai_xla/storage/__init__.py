"Files that are whole or not there, here or in object storage."
from .files import *
from .lease import *
from .pieces import *
from .parts import *
