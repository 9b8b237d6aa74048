"timm's families on XLA: the rows of benchmarks/timm_families.py"
import sys
import pytest
from fresh import repo, run_ok

sys.path.insert(0, str(repo/'benchmarks'))

@pytest.fixture(scope='module')
def rows():
    import timm_families
    return {o: timm_families.row(o) for o in ('vit','nfnet','resnet','swin','eva02','mixer')}

def test_they_learn(rows):
    for o,r in rows.items(): assert r['losses'][-1]<r['losses'][0], (o, r['losses'])

def test_they_compile_in_two_steps_at_most_and_stay_on_the_device(rows):
    for o,r in rows.items(): assert (r['step1'],r['later'],r['reads'],r['fallbacks'])==(1,0,0,'none') and r['step2']<=1, (o, r)

def test_without_the_patch_weights_are_standardized_by_batch_norm():
    code = """
    import torch, torch_xla
    from timm.layers import ScaledStdConv2d
    from fastai_xla.all import *
    f,x = ScaledStdConv2d(4, 6, 3).to('xla'),torch.ones(1, 4, 8, 8, device='xla')
    def hlo(): return torch_xla._XLAC._get_xla_tensors_hlo([f(x)]).count('batch-norm-training')
    patches = [p for p in patches_in_force() if p.owner is ScaledStdConv2d]
    n = hlo()
    for p in patches: p.undo()
    print(len(patches), n, hlo())
    """
    assert run_ok(code)=='1 0 1'
