"Processes, one for each chip."
from .worker import LaunchError, LaunchInterrupt
from .launcher import tpu_launch, TPUPool, get_pool, pool_setup

__all__ = ['tpu_launch', 'TPUPool', 'get_pool', 'pool_setup', 'LaunchError', 'LaunchInterrupt']
