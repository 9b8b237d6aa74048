"Each repair of TorchTPU: the fault without it, and the CPU's results with it"
import pytest, torch, torch.nn.functional as F
from contextlib import contextmanager
from torch import nn
from fastai_xla.all import *
from fastai_xla.patches.ops import Kernels
from fastai_xla.torch_tpu.device import compile_settings

@contextmanager
def unrepaired():
    undo_patches()
    try: yield
    finally: apply_patches()

def values(f, *ts, device='tpu', compiled=False):
    "What `f` makes of `ts`, and their gradients, on the host"
    torch._dynamo.reset()
    ts = [t.clone().to(device).detach().requires_grad_() for t in ts]
    with compile_settings():
        out = (torch.compile(f, backend='tpu', dynamic=False) if compiled else f)(*ts)
        out.pow(2).sum().backward()
    return [o.detach().cpu() for o in (out, *[t.grad for t in ts])]

def assert_as_on_cpu(f, *ts, tol=1e-5, **kwargs):
    for a,b in zip(values(f, *ts, device='cpu'), values(f, *ts, **kwargs)): torch.testing.assert_close(b, a, rtol=tol, atol=tol)

both = pytest.mark.parametrize('compiled', [False, True], ids=['eager','compiled'])
def rand(*shape): return torch.randn(*shape, generator=torch.Generator().manual_seed(0))

# ---- running statistics

def statistics(device, compiled=False):
    torch._dynamo.reset()
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(device)
    f = torch.compile(m, backend='tpu', dynamic=False) if compiled else m
    for i in range(3): f((rand(8, 3, 6, 6)*2+i).to(device))
    m.eval()
    return [t.cpu() for t in (m[1].running_mean, m[1].running_var)]

@both
def test_running_statistics(compiled):
    for a,b in zip(statistics('cpu'), statistics('tpu', compiled)): torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    with unrepaired():
        mean,var = statistics('tpu', compiled)
        assert mean.abs().max()==0 and (var==1).all(), 'torch_tpu updates running statistics now: the patch can go'

# ---- poolings

@both
@pytest.mark.parametrize('n,shape,size', [(1,(2,3,8),2), (2,(2,3,8,6),(None,2)), (3,(2,3,4,4,4),1)])
def test_adaptive_max_pool(n, shape, size, compiled):
    assert_as_on_cpu(lambda x: getattr(F, f'adaptive_max_pool{n}d')(x, size), rand(*shape), compiled=compiled)

def test_adaptive_max_pool_was_missing():
    with unrepaired(), pytest.raises(RuntimeError, match='adaptive_max_pool2d_backward.*not implemented'): values(lambda x: F.adaptive_max_pool2d(x, 1), rand(2, 3, 4, 4))

@both
@pytest.mark.parametrize('kwargs', [dict(ceil_mode=True), dict(padding=1, count_include_pad=False)])
def test_avg_pool1d(kwargs, compiled): assert_as_on_cpu(lambda x: F.avg_pool1d(x, 3, **kwargs), rand(2, 3, 10), compiled=compiled)

def test_avg_pool1d_had_no_gradient():
    with unrepaired(): assert not F.avg_pool1d(rand(2, 3, 10).to('tpu').requires_grad_(), 2).requires_grad

# ---- recurrent layers

@both
@pytest.mark.parametrize('kind', [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent(kind, compiled):
    torch.manual_seed(0)
    m = kind(4, 5, 2, batch_first=True, bidirectional=True)
    assert_as_on_cpu(lambda x: m.to(x.device)(x)[0], rand(3, 6, 4), compiled=compiled)

@pytest.mark.parametrize('kind', [nn.LSTM, nn.GRU])
def test_recurrent_had_no_gradient(kind):
    with unrepaired():
        torch._dynamo.reset()
        m = torch.compile(kind(4, 5).to('tpu'), backend='tpu', dynamic=False)
        assert not m(rand(3, 6, 4).to('tpu').requires_grad_())[0].requires_grad

# ---- kernels

functions = dict(mish=F.mish, smooth_l1=lambda x: F.smooth_l1_loss(x, x.detach()*2+1), huber=lambda x: F.huber_loss(x, x.detach()*2+1),
    logaddexp=lambda x: torch.logaddexp(x, x.detach()*2), logaddexp2=lambda x: torch.logaddexp2(x, x.detach()*2), std_mean=lambda x: torch.std_mean(x, 1)[0],
    xlogy=lambda x: torch.xlogy(x, x.detach().abs()+1), sinc=torch.sinc, copysign=lambda x: torch.copysign(x, -x.detach()), nansum=lambda x: torch.nansum(x, 1),
    trace=torch.trace, renorm=lambda x: torch.renorm(x, 2, 0, 1.), cross=lambda x: torch.linalg.cross(x[:,:3], x.detach()[:,3:6]))

@pytest.mark.parametrize('name', functions)
def test_kernel(name): assert_as_on_cpu(functions[name], rand(4, 6))

def test_kernels_were_missing():
    with unrepaired():
        for name in ('mish','smooth_l1','sinc'):
            with pytest.raises(RuntimeError, match='not implemented for TPU'): values(functions[name], rand(4, 6))

def test_all_are_listed_and_undone():
    def ours(): return [o for o in patches_in_force() if 'torch_tpu' in o.versions or 'torch 2.13' in o.versions]
    n = len(ours())
    assert n>=8 and any(isinstance(o, Kernels) for o in ours()) and all(o.why for o in ours())
    with unrepaired(): assert not ours() and torch.Tensor.as_subclass.__module__=='fastai.torch_core'
    assert len(ours())==n
