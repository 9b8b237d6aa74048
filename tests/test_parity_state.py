"What leaves XLA: saved models, and Learners that go on training on the CPU, equal to those that never were there"
import pickle
import pytest
import numpy as np, torch
from fastai.basics import Adam, Path
from fresh import run
from parity_models import LRS, MODELS, OPTS, TOL, assert_same, final, leaves, moved, outcome, start_again
from fastai_xla.all import patches_in_force

@pytest.fixture(autouse=True, scope='module')
def started(): start_again()

def quiet_fit(learn, n, lr):
    with learn.no_bar(),learn.no_logging(): learn.fit(n, lr)
    return learn

def preds(learn):
    with learn.no_bar(): return leaves(learn.get_preds(with_loss=True))

def assert_near(got, ref, tol):
    assert got.keys()==ref.keys()
    assert moved(ref, got)<=tol

def history(learn): return leaves([learn.recorder.losses, learn.recorder.lrs, learn.recorder.values])

@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('model', ['cnn', 'tabular'])
def test_saved_on_xla_loads_on_cpu(model, opt, tmp_path):
    "A file saved while attached loads in a plain Learner: the same weights to the last bit, the same predictions, and the same training from there"
    f,of,lr = MODELS[model],OPTS[opt],LRS[opt]
    learn = quiet_fit(f(of, path=tmp_path).to_tpu(), 1, lr)
    learn.save('m')
    plain = f(of, path=tmp_path)
    plain.load('m')
    assert_near(leaves(plain.model.state_dict()), leaves(learn.model.state_dict()), 0)
    assert_near(leaves(plain.opt.state_dict()), leaves(learn.opt.state_dict()), 0)
    assert_near(preds(plain), preds(learn), TOL['preds'])
    never = quiet_fit(f(of), 1, lr)
    for l in (plain,never):
        l.dls = f(of).dls
        quiet_fit(l, 1, lr)
    assert_near(history(plain), history(never), TOL['batch loss'])
    assert_near(leaves(plain.model.state_dict()), leaves(never.model.state_dict()), TOL['weights'])

@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('model', ['cnn', 'tabular'])
def test_detached_goes_on_as_if_never_attached(model, opt):
    f,of,lr = MODELS[model],OPTS[opt],LRS[opt]
    never = quiet_fit(quiet_fit(f(of), 1, lr), 1, lr)
    learn = quiet_fit(f(of).to_tpu(), 1, lr).detach_tpu()
    assert {v.device.type for p,*_ in learn.opt.all_params() for v in [p, *learn.opt.state[p].values()] if isinstance(v, torch.Tensor)} == {'cpu'}
    quiet_fit(learn, 1, lr)
    assert_near(history(learn), history(never), TOL['batch loss'])
    got,ref = final(learn),final(never)
    assert_same(got, ref)
    assert learn.cbs.map(type)==never.cbs.map(type)

def test_attached_late_goes_on_as_the_cpu_would():
    "The other way round: the optimizer state of a CPU fit is used on XLA"
    f,of,lr = MODELS['cnn'],OPTS['Adam'],LRS['Adam']
    never,learn = quiet_fit(quiet_fit(f(of), 1, lr), 1, lr),quiet_fit(f(of), 1, lr)
    quiet_fit(learn.to_tpu(), 1, lr)
    assert_near(history(learn), history(never), TOL['batch loss'])
    assert_same(final(learn), final(never))

def test_import_changes_nothing_on_cpu(tmp_path):
    "The CPU's side of the parity tests is fastai's own: with fastai_xla imported, and all that it replaces in force, it is equal to the last bit"
    code = "import pickle,sys; from parity_models import *; assert not any(m.startswith('fastai_xla') for m in sys.modules)\n" \
           "pickle.dump({n: outcome(f(Adam), LRS['Adam']) for n,f in MODELS.items()}, open(sys.argv[1], 'wb'))"
    res = run('-c', code, tmp_path/'plain.pkl', cwd=Path(__file__).parent)
    assert res.returncode==0, res.stderr
    for n,ref in pickle.loads((tmp_path/'plain.pkl').read_bytes()).items():
        assert patches_in_force()
        assert_same(outcome(MODELS[n](Adam), LRS['Adam']), ref, dict.fromkeys(TOL, 0))

def test_comparison_sees_small_differences():
    "One weight off by 1e-4, a key lost, another shape: each is noticed"
    f,lr = MODELS['collab_dot'],LRS['Adam']
    ref = outcome(f(Adam), lr)
    key = 'weights','.u_bias.weight'
    def changed(v): return {**ref, key[0]: {**ref[key[0]], key[1]: v}}
    w = ref[key[0]][key[1]]
    with pytest.raises(AssertionError, match="'weights': '1.0e-04"): assert_same(changed(w+1e-4), ref)
    with pytest.raises(AssertionError, match='shapes'): assert_same(changed(w[:1]), ref)
    with pytest.raises(AssertionError, match='only in one'): assert_same({**ref, 'opt state': {}}, ref)
    with pytest.raises(AssertionError, match='not finite'): assert_same(changed(w*np.nan), ref)
