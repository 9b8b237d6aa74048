"Models fit for XLA."
from .deferred import deferred_init, materialize, xla_friendly, mean_vit, vit_10m, vit_100m, vit_1b, vit_3b, vit_10b
from .blocks import checkpointed

__all__ = ['deferred_init', 'materialize', 'xla_friendly', 'mean_vit', 'vit_10m', 'vit_100m', 'vit_1b', 'vit_3b', 'vit_10b', 'checkpointed']
