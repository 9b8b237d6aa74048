"Vision, tabular, collaborative filtering and text Learners train on XLA as they do on the CPU: the same losses, weights, optimizer state, metrics and predictions"
import pytest
from parity_models import LRS, MODELS, OPTS, TOLS, assert_same, leaves, moved, outcome, start_again

@pytest.fixture(autouse=True, scope='module')
def started(): start_again()

@pytest.mark.parametrize('model,opt', [(m,o) if m=='cnn' or o=='Adam' else pytest.param(m, o, marks=pytest.mark.slow)
    for m in ('cnn','vit','tabular','collab_dot','collab_nn','text') for o in OPTS])
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

def test_timms_checkpointing():
    ref = outcome(checkpointed(OPTS['Adam']), LRS['Adam'])
    learn = checkpointed(OPTS['Adam']).to_tpu()
    assert_same(outcome(learn, LRS['Adam']), ref, TOLS['vit'])
    assert learn.replay.n_replayed>0

def test_sentences_shorter_than_seq_len():
    "fastai takes the last `seq_len` positions also of a shorter batch, which torch allows and torch_xla does not"
    def run(learn):
        with learn.no_bar(),learn.no_logging(): learn.fit(1, LRS['SGD'])
        return {'batch loss':leaves(learn.recorder.losses), 'weights':leaves(learn.model.state_dict())}
    f = MODELS['text']
    ref = run(f(OPTS['SGD'], seq_len=72))
    assert_same(run(f(OPTS['SGD'], seq_len=72).to_tpu()), ref, TOLS['text'])
