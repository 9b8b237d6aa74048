"A text classifier trains on XLA as it does on the CPU"
import pytest
from parity_models import LRS, MODELS, OPTS, TOLS, assert_same, leaves, moved, outcome, start_again

@pytest.fixture(autouse=True, scope='module')
def started(): start_again()

@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('model', ['text'])
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

def test_sentences_shorter_than_seq_len():
    "fastai takes the last `seq_len` positions also of a shorter batch, which torch allows and torch_xla does not"
    def run(learn):
        with learn.no_bar(),learn.no_logging(): learn.fit(1, LRS['SGD'])
        return {'batch loss':leaves(learn.recorder.losses), 'weights':leaves(learn.model.state_dict())}
    f = MODELS['text']
    ref = run(f(OPTS['SGD'], seq_len=72))
    assert_same(run(f(OPTS['SGD'], seq_len=72).to_tpu()), ref, TOLS['text'])
