"Vision Learners train on XLA as they do on the CPU: the same losses, weights, optimizer state, metrics and predictions"
import pytest
from parity_models import LRS, MODELS, OPTS, TOLS, assert_same, leaves, moved, outcome, start_again

@pytest.fixture(autouse=True, scope='module')
def started(): start_again()

@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('model', ['cnn', 'vit'])
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

def checkpointed(opt_func):
    learn = MODELS['vit'](opt_func)
    vits = [m for m in learn.model.modules() if hasattr(m, 'set_grad_checkpointing')]
    for o in vits: o.set_grad_checkpointing()
    assert len(vits)==1
    return learn

@pytest.mark.parametrize('reentrant', [True, False])
def test_timms_checkpointing(reentrant, monkeypatch):
    "Of both forms that torch has"
    monkeypatch.setattr('timm.layers.config._USE_REENTRANT_CKPT', reentrant, raising=False)
    ref = outcome(checkpointed(OPTS['Adam']), LRS['Adam'])
    learn = checkpointed(OPTS['Adam']).to_tpu()
    assert_same(outcome(learn, LRS['Adam']), ref, TOLS['vit'])
    assert learn.replay.n_replayed>0
