"""What cannot be done on TorchTPU is an error that names the remedy, before training begins where that can be.

As a script it prints a table of the errors: python tests/torch_tpu/test_errors.py"""
import conftest # before torch
import inspect, os, re, subprocess, sys, warnings
import pytest
import torch
from torch import nn
from fastai.callback.hook import ActivationStats
from parity_models import cnn
from fastai_xla.all import *
from fastai_xla.runtime.device import backend
from fastai_xla.runtime.device import xla_device
from fastai_xla.train.meters import DeviceMetric
from workloads import vectors_learner

seen = [] # name of the test, error, message

def fails(f, error, *said):
    with pytest.raises(error) as e: f()
    seen.append((inspect.stack()[1].function, type(e.value).__name__, str(e.value)))
    for o in said: assert o in str(e.value), f'{o!r} is not in {str(e.value)!r}'
    assert 'torch~=2.9' not in str(e.value)

@pytest.mark.parametrize('kwargs,said', [(dict(strict=True), '`strict` has no counterpart on TorchTPU'), (dict(cache='graphs'), '`cache` has no counterpart on TorchTPU'),
    (dict(batch_tfms='cloud'), "`batch_tfms` can be one of"), (dict(fetch_every=-1), '`fetch_every`')])
def test_arguments(kwargs, said):
    learn = cnn()
    fails(lambda: learn.to_tpu(**kwargs), ValueError, said)
    fails(lambda: learn.to_tpu(replay='no'), TypeError, '`replay` must be True or False')
    assert {p.device.type for p in learn.model.parameters()}=={'cpu'} and not hasattr(learn, 'torch_tpu_trainer')

def test_what_is_for_torch_xla_alone():
    said = 'this needs PyTorch/XLA, and the stack of this environment is TorchTPU (torch_tpu 0.2.0)'
    for f in (lambda: use_virtual_cores(2), lambda: tpu_launch(print), xla_device, xla_counts): fails(f, XLANotInstalled, said)

def test_backend(monkeypatch):
    assert backend()=='torch_tpu'
    monkeypatch.setenv('FASTAI_XLA_BACKEND', 'cuda')
    fails(lambda: cnn().to_tpu(), ValueError, "FASTAI_XLA_BACKEND is 'torch_xla', 'torch_tpu' or not set. Got 'cuda'")

def test_class_out_of_bounds():
    x = torch.randn(60, 4)
    learn = vectors_learner(nn.Linear(4, 3), x, torch.arange(60)%4)
    with learn.no_bar(): fails(lambda: learn.to_tpu().fit(1), IndexError, 'Target 3 is out of bounds')

def test_target_of_another_type():
    x = torch.randn(60, 4)
    learn = vectors_learner(nn.Linear(4, 3), x, torch.rand(60))
    with learn.no_bar(): fails(lambda: learn.to_tpu().fit(1), RuntimeError, 'expected scalar type Long but found Float')

def test_model_that_cannot_be_compiled():
    "It runs operation by operation, and says so once; that the results are plain fastai's is in the parity tests"
    learn = cnn(cbs=ActivationStats(with_hist=False)).to_tpu()
    with learn.no_bar(),learn.no_logging(),warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        learn.fit(2, 1e-2)
    said = [str(o.message) for o in w if 'operation by operation' in str(o.message)]
    assert len(said)==1 and said[0].startswith('Sequential runs operation by operation, which is slower than compiled: ') and learn.torch_tpu_trainer.call.why_not

def test_error_of_the_model():
    "It is the user's own, and the Learner is fit to go on"
    class Odd(nn.Linear):
        def forward(self, x):
            if getattr(self, 'odd', False): raise KeyError('odd')
            return super().forward(x)
    learn = vectors_learner(Odd(4, 3), torch.randn(60, 4), torch.arange(60)%3).to_tpu()
    learn.model.odd = True
    with learn.no_bar():
        fails(lambda: learn.fit(1), KeyError, 'odd')
        assert learn.model._compiled_call_impl is None and not isinstance(learn.recorder.loss, DeviceMetric)
        learn.model.odd = False
        learn.fit(1)
    assert torch.isfinite(learn.recorder.losses[-1])

def without_tpu(code, **env):
    "Run `code` where torch_tpu finds no TPU"
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], env={**os.environ, 'TORCH_TPU_ON_CPU': '0', **env}, capture_output=True, text=True)
    return res.stdout+res.stderr

def test_no_tpu():
    code = 'from parity_models import *; import fastai_xla.all; cnn().to_tpu()'
    out = without_tpu(code, PYTHONPATH=os.pathsep.join(sys.path))
    assert re.search(r"TorchTPUMissing: torch_tpu 0.2.0 finds no TPU on this machine.*pip install 'fastai_xla\[xla\]' in another environment", out), out
    seen.append(('test_no_tpu', *re.search(r'(TorchTPUMissing): (.*)', out).groups()))

def test_several_tpus():
    for kwargs,said in ((dict(processes=False), '`processes=False` has no counterpart on TorchTPU'),
        (dict(sync_bn=True), "`sync_bn` must be 'stats' or False"), (dict(n_cores=4), 'n_cores=4 in a rank of 1'), (dict(watchdog=1.), '`watchdog` has no counterpart')):
        fails(lambda: cnn().to_tpu_distributed(**kwargs), ValueError, said)
    learn = cnn()
    fails(learn.to_tpu_sharded, NotImplementedError, 'Use `to_tpu_distributed()`')
    assert learn.detach_tpu_sharded() is learn and {p.device.type for p in learn.model.parameters()}=={'cpu'}

if __name__=='__main__':
    code = pytest.main([__file__, '-q', '--no-header', '--no-summary', '-p', 'no:cacheprovider', f'--confcutdir={os.path.dirname(__file__)}'])
    print('| what | error |\n|---|---|')
    for name,error,said in dict.fromkeys(sys.modules['test_errors'].seen): print(f"| {name[5:].replace('_', ' ')} | {error}: {' '.join(said.split()).replace('|', '/')} |")
    sys.exit(code)
