"""What a step costs with each optimizer of fastai, torch.optim and timm's factory on one core: programs run, device reads, steps replayed.

    python benchmarks/optimizers.py                # the table of nbs/benchmarks.ipynb
    python benchmarks/optimizers.py --names 'lamb torch.NAdam'

A convolution and a linear layer train for 14 steps, each of another learning rate, in plain fastai and by `to_tpu`, with the same data and weights. Counts are means of
the last 8 steps but one; `difference` is the largest one of a weight, over the largest weight.
"""
import os
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0') # compiles quicker
from functools import partial
import timm, timm.optim, torch
from fastai.basics import *
from fastai.callback.schedule import ParamScheduler, SchedCos
from fastai.optimizer import Lamb, Larc, QHAdam, ranger, RMSProp
from fastai_xla.all import *
from fastai_xla.monitor.profile import usual_step
from fastai_xla.runtime.transfer import to_host
from fastcore.script import call_parse

n_steps,warm = 14,6

def data():
    x = torch.randn(8*n_steps, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return DataLoaders(*[DataLoader(list(zip(x, x[:,0,0].argmax(-1)%4)), bs=8, num_workers=0) for _ in range(2)])

class NoValidation(Callback):
    order = -100
    def before_validate(self): raise CancelValidException

def net(): return nn.Sequential(nn.Conv2d(3, 8, 3, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
def matrices(): return nn.Sequential(nn.Flatten(), nn.Linear(192, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
models = {'torch.Muon': matrices} # which takes nothing else

def learner(opt_func, model=net):
    set_seed(1)
    return Learner(data(), model(), CrossEntropyLossFlat(), opt_func=opt_func, cbs=NoValidation())

def torchs(cls, **kwargs): return partial(OptimWrapper, opt=partial(cls, **kwargs))

def optimizers():
    "Optimizer functions by name"
    fastais = {o.__name__: o for o in (SGD, RMSProp, Adam, RAdam, QHAdam, Larc, Lamb, ranger)}
    of_torch = {f'torch.{k}': torchs(v) for k,v in vars(torch.optim).items() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer) and v is not torch.optim.Optimizer}
    on_device = {f'torch.{k}(capturable=True)': torchs(getattr(torch.optim, k), capturable=True) for k in 'Adamax ASGD NAdam RAdam Rprop'.split()}
    return {**fastais, **of_torch, **on_device, **{k: torchs(partial(timm.optim.create_optimizer_v2, opt=k)) for k in timm.optim.list_optimizers()}}

elsewhere = { # what is not trained here, and why
    'bnb': 'needs bitsandbytes and CUDA: the optimizer of the same name without `bnb`',
    'fused': "needs NVIDIA's apex and CUDA: the optimizer of the same name without `fused`",
    'torch.LBFGS': 'calls the model again and again in a step (a closure), which no fastai Learner does',
    'torch.SparseAdam': 'takes sparse gradients alone, which torch_xla has not: `torch.optim.Adam`',
    'adahessian': 'needs a second backward pass, which no fastai Learner does',
}

instead = { # of what reads the device
    'torch.Adafactor': '`adafactorbv`, with timm',
    'torch.ASGD': '`capturable=True`',
    'torch.Rprop': '`capturable=True`',
    **dict.fromkeys(['adamp','cadamp'], '`adamw`'),
    **dict.fromkeys(['sgdp','csgdp'], '`sgdw`'),
    **dict.fromkeys(['kron','kronc','kronw'], '`muon` or `adamw`: a triangular system is solved on the host'),
    **dict.fromkeys(['novograd','novogradc','novogradw'], '`lamb` or `adamw`'),
}

def train(opt_func, model, to=noop, cbs=None):
    learn = to(learner(opt_func, model))
    set_seed(2)
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-3, cbs=L(cbs)+ParamScheduler({'lr': SchedCos(1e-3, 1e-4)}))
    return learn

def weights(learn): return torch.cat([to_host(p.detach()).flatten() for p in learn.model.parameters()])

def row(name, opt_func):
    "Programs, reads and compiles of a step, steps replayed, difference, and what is to be said"
    if (k := next((k for k in elsewhere if name==k or k in ('bnb','fused') and name.startswith(k)), None)): return ['']*5+[elsewhere[k]]
    plain,_,on_device = name.partition('(')
    args = opt_func,models.get(name, net)
    try: want = weights(train(optimizers()[plain] if on_device else opt_func, args[1]))
    except Exception as e: return ['']*5+[f'fails in plain fastai: {type(e).__name__}: {str(e).splitlines()[0][:80]}']
    learn = train(*args, Learner.to_tpu, stats := XLAStats(warm))
    u,apart = usual_step(stats.steps[:-1], warm),((weights(learn)-want).abs().max()/want.abs().max()).item()
    return [f"{u['executions']:.3g}", f"{u['reads']:.3g}", f"{u['compiles']:.3g}", f'{learn.replay.n_replayed} of {n_steps}', f'{apart:.0e}',
        '; instead: '.join(filter(None, (learn.replay.why, instead.get(name))))]

columns = 'optimizer','programs','reads','compiles','replayed','difference',''

@call_parse
def main(
    names:str='', # Optimizers, with blanks between, those of torch.optim as `torch.NAdam`; all if none is named
):
    "Print the table"
    opts = optimizers()
    print('|'.join(['',*columns,'']), '|'.join(['',*['---']*len(columns),'']), sep='\n')
    for k in names.split() or opts: print('|'.join(['',k,*row(k, opts[k]),'']), flush=True)
