"Files that were saved with the other stack, TorchTPU, open here; the way back is in tests/torch_tpu"
import torch
from fastai_xla.runtime.device import xla_device
device = xla_device()
import saved
from fastai_xla.all import *

def test_saved_by_torch_tpu():
    again = saved.check('torch_tpu', saved.learner().to_tpu())
    torch.testing.assert_close(saved.predictions(again.to_tpu()), torch.load(saved.folder/'torch_tpu'/'predictions.pt'), rtol=1e-5, atol=1e-6)

def test_by_plain_fastai():
    for by in ('torch_tpu','torch_xla'): saved.check(by, saved.learner())
