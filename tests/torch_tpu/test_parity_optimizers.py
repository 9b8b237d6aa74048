"A Learner trains on TorchTPU as plain fastai trains it on the CPU: optimizers"
import pytest
from workloads import check_parity, GROUPS

@pytest.mark.parametrize('name', GROUPS['optimizers'])
def test_parity(name): check_parity(name)
