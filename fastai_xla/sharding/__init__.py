"One program on all cores."
from .mesh import make_mesh, ShardRule, ShardingTable, infer_sharding
from .trainer import TPUDataParallelTrainer, TPUShardedTrainer

__all__ = ['make_mesh', 'ShardRule', 'ShardingTable', 'infer_sharding', 'TPUDataParallelTrainer', 'TPUShardedTrainer']
