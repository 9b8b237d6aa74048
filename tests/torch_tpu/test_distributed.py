"Two ranks, processes with a real TorchTPU device each, train as plain fastai does with the whole batch; their collectives go through gloo (see gloo_tpu.py)"
import pytest
from ranks import compared, RANKS, TOL

@pytest.fixture(scope='module')
def results(tmp_path_factory): return compared(list(RANKS), tmp_path_factory.mktemp('ranks'))

@pytest.mark.parametrize('name', RANKS)
def test_parity(name, results):
    d,apart = results[name]
    far = {k: f'{v:.1e} > {TOL[k]:.0e}' for k,v in d.items() if v>TOL[k]}
    assert not far and apart==0, f'largest difference and tolerance: {far}; between the ranks {apart}'
