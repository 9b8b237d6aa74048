"What replayed steps are compared with"
from functools import partial
import torch

def _equal(a, b): return torch.equal(a, b) if isinstance(a, torch.Tensor) else a==b

def _close(a, b): return a is b is None or torch.allclose(*(torch.as_tensor(o, dtype=torch.double) for o in (a,b)), 1e-4, 1e-6)

def is_same(a, b, equal=_equal):
    "Are `a` and `b`, and all that they hold, `equal`?"
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(is_same(x, y, equal) for x,y in zip(a, b))
    if isinstance(a, dict): return a.keys()==b.keys() and all(is_same(a[k], b[k], equal) for k in a)
    return equal(a, b)

is_close = partial(is_same, equal=_close) # but for the last digits of a training of a few steps

def trace_all(learn):
    """Have `learn` trace each step and run it by the program that could be replayed.
    With `replay=False` a batch that waits for a step keeps what is between the gradients and what they are views of, too, so XLA may compute a last digit otherwise, on some machines"""
    learn.replay.confirm = learn.replay.valid.confirm = 10**6
    return learn
