"Tabular and collaborative filtering Learners train on XLA as they do on the CPU"
import pytest
from parity_models import LRS, MODELS, OPTS, TOLS, assert_same, leaves, moved, outcome, start_again

@pytest.fixture(autouse=True, scope='module')
def started(): start_again()

@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('model', ['tabular', 'collab_dot', 'collab_nn'])
def test_parity(model, opt):
    f,of,lr = MODELS[model],OPTS[opt],LRS[opt]
    ref = outcome(f(of), lr)
    learn = f(of)
    learn.create_opt()
    learn.to_tpu()
    start = leaves(learn.model.state_dict())
    got = outcome(learn, lr)
    assert {p.device.type for p in learn.model.parameters()} == {'xla'}
    assert moved(start, got['weights'])>100*TOLS[model]['weights']
    assert_same(got, ref, TOLS[model])
