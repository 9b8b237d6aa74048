"One program on all cores."
from . import data_parallel, trainer
from .data_parallel import TPUDataParallelTrainer
from .rules import make_mesh, ShardRule, ShardingTable, infer_sharding
from .trainer import TPUShardedTrainer

__all__ = ['make_mesh', 'ShardRule', 'ShardingTable', 'infer_sharding', 'TPUDataParallelTrainer', 'TPUShardedTrainer']
