"A Learner trains on TorchTPU as plain fastai trains it on the CPU: what is done while it trains"
import pytest, torch
from torch import nn
from fastai.basics import Callback, set_seed
from parity_models import cnn
from workloads import check_parity, GROUPS, plain_fastai, with_cbs
from fastai_xla.torch_tpu.device import deferred

@pytest.mark.parametrize('name', GROUPS['training'])
def test_parity(name): check_parity(name)

class CPUAutocast(Callback):
    "What `to_bf16` is on CUDA, on the CPU"
    order = 10
    def before_batch(self):
        self.autocast = torch.autocast('cpu', dtype=torch.bfloat16)
        self.autocast.__enter__()
    def after_pred(self): self.learn.pred = self.pred.float()
    def after_loss(self): self.autocast.__exit__(None, None, None)

@pytest.mark.parametrize('how', ['to_fp16','to_bf16'])
def test_mixed_precision(how):
    "Both are bfloat16 autocast without a scaler; bfloat16 has three digits"
    def losses(tpu):
        seen = []
        set_seed(42, reproducible=True)
        learn = with_cbs()
        if tpu: getattr(learn.to_tpu(replay=False), how)()
        else: learn.add_cb(CPUAutocast())
        hook = learn.model[-1].register_forward_hook(lambda m,i,o: seen.append(o.dtype))
        set_seed(7)
        with learn.no_bar(),learn.no_logging(): learn.fit(2, 3e-3)
        hook.remove()
        assert {*seen}=={torch.bfloat16} and {p.dtype for p in learn.model.parameters()}=={torch.float32}
        return torch.stack(learn.recorder.losses)
    with plain_fastai(): want = losses(False)
    got = losses(True)
    assert 0<(got-want).abs().max()<2e-2, (got-want).abs().max()

def test_draws_of_mixup():
    "MixUp draws from a Beta distribution, and what else is drawn on the device is of the right kind"
    for d in (torch.distributions.Beta(.4, .4), torch.distributions.Dirichlet(torch.ones(3))):
        with deferred(): x = type(d)(*[getattr(d, k).to('tpu') for k in d.arg_constraints]).sample((2000,)).cpu()
        want = d.sample((2000,))
        torch.testing.assert_close(x.mean(0), want.mean(0), rtol=0, atol=.05)
        torch.testing.assert_close(x.std(0), want.std(0), rtol=0, atol=.05)

def test_generator_of_the_device():
    "Dropout follows `set_seed`, and differs from step to step"
    def drawn():
        set_seed(3)
        learn = cnn()
        learn.model = nn.Sequential(learn.model, nn.Dropout(.5))
        learn.to_tpu()
        set_seed(5)
        with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-3)
        return torch.stack(learn.recorder.losses)
    a,b = drawn(),drawn()
    assert torch.equal(a, b)
