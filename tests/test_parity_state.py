"What leaves XLA: saved models, and Learners that go on training on the CPU, equal to those that never were there"
import pickle
import pytest
from fastai.basics import Adam, Path
from fresh import run
from parity_models import LRS, MODELS, OPTS, TOL, assert_same, final, leaves, moved, outcome, start_again
from fastai_xla.all import patches_in_force

@pytest.fixture(autouse=True, scope='module')
def started(): start_again()

def quiet_fit(learn, n, lr):
    with learn.no_bar(),learn.no_logging(): learn.fit(n, lr)
    return learn

def history(learn): return leaves([learn.recorder.losses, learn.recorder.lrs, learn.recorder.values])

@pytest.mark.parametrize('opt', OPTS)
def test_attached_and_detached_goes_on_as_if_never_attached(opt):
    f,of,lr = MODELS['cnn'],OPTS[opt],LRS[opt]
    never,learn = [quiet_fit(f(of), 1, lr) for _ in range(2)]
    for move in (lambda l: l.to_tpu(), lambda l: l.detach_tpu()):
        for l in (never, move(learn)): quiet_fit(l, 1, lr)
        assert moved(history(never), history(learn))<=TOL['batch loss']
    assert_same(final(learn), final(never))
    assert learn.cbs.map(type)==never.cbs.map(type)

def test_import_changes_nothing_on_cpu(tmp_path):
    "The CPU's side of the parity tests is fastai's own: with fastai_xla imported, and all that it replaces in force, it is equal to the last bit"
    code = "import pickle,sys; from parity_models import *; assert not any(m.startswith('fastai_xla') for m in sys.modules)\n" \
           "pickle.dump({n: outcome(f(Adam), LRS['Adam']) for n,f in MODELS.items()}, open(sys.argv[1], 'wb'))"
    res = run('-c', code, tmp_path/'plain.pkl', cwd=Path(__file__).parent)
    assert res.returncode==0, res.stderr
    for n,ref in pickle.loads((tmp_path/'plain.pkl').read_bytes()).items():
        assert patches_in_force()
        assert_same(outcome(MODELS[n](Adam), LRS['Adam']), ref, dict.fromkeys(TOL, 0))
