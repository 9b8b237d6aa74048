"Recipes of timm's trainings, as callbacks and splitters of fastai."
from .ema import EMACallback
from .optim import GradientClipValue, AdaptiveGradientClip, LayerDecay, scaled_lr
from .eval_every import EvalEvery, validate_beside
from .mixture import mixture, MixtureCounts, AugSplits, JSDLoss

__all__ = ['EMACallback', 'GradientClipValue', 'AdaptiveGradientClip', 'LayerDecay', 'scaled_lr', 'EvalEvery', 'validate_beside',
    'mixture', 'MixtureCounts', 'AugSplits', 'JSDLoss']
