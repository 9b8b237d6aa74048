"Every method of a Learner does through `to_tpu` what it does in plain fastai on the CPU. Tolerance: 1e-4 relative, 1e-5 absolute, unless said."
import pickle, signal, subprocess, sys
import pytest
from fastai.text.data import SortedDL
from synth import *

@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close('all')

def cases(table, names='name'):
    "One test for each row"
    return pytest.mark.parametrize(names, table.values(), ids=table)

# ---- attach and detach

@cases(dict(nothing=noop, create_opt=lambda l: l.create_opt(), freeze=lambda l: l.freeze(), fit=lambda l: l.fit(1)), 'prepare')
def test_to_tpu_at_any_time(prepare):
    plain,tpu = twin(),twin()
    for learn in (plain,tpu): prepare(learn)
    model = tpu.model
    assert tpu.to_tpu() is tpu and tpu.to_tpu().model is model # twice in a row
    on_device(tpu)
    for learn in (plain,tpu): learn.fit(2, 1e-2)
    same(plain, tpu)
    on_host(tpu.detach_tpu())
    same(plain, tpu)

def test_detach_gives_a_plain_learner_that_trains_on():
    "Also before any fit, and many times"
    plain,tpu = twin(),twin()
    cbs = [type(cb) for cb in tpu.cbs]
    on_host(tpu.to_tpu().detach_tpu())
    for _ in range(2):
        for learn in (plain,tpu.to_tpu()): learn.fit_one_cycle(2, 1e-2)
        n = len(opt_tensors(tpu.opt))
        assert tpu.detach_tpu() is tpu
        on_host(tpu)
        assert n>0 and len(opt_tensors(tpu.opt))==n and [type(cb) for cb in tpu.cbs]==cbs
        for learn in (plain,tpu): learn.fit(1, 1e-2)
        same(plain, tpu)

def test_the_dataloaders_stay_what_they_are():
    learn = twin(tpu=True)
    device,train,valid = learn.dls.device,learn.dls.train,learn.dls.valid
    learn.fit(1)
    assert learn.dls.train is train and learn.dls.valid is valid and learn.dls.device==device
    assert devices(learn.dls.one_batch())=={'xla'} and devices(learn.dls.valid.one_batch())=={'xla'}
    assert len(learn.dls.train)==6 and len(learn.dls.valid)==3

def test_tpu_ctx_detaches_after_an_exception():
    learn = twin()
    with pytest.raises(ValueError, match='in mid-fit'):
        with learn.tpu_ctx():
            on_device(learn)
            learn.fit(1, cbs=Stop(ValueError('in mid-fit')))
    on_host(learn)

# ---- training, validation and predictions

@cases(dict(
    fit           = lambda l: (l.fit(2, 1e-2), l.fit(1)),
    fit_wd        = lambda l: l.fit(2, 1e-2, wd=.3),
    reset_opt     = lambda l: (l.fit(1, 1e-2), l.fit(1, 1e-2, reset_opt=True)),
    start_epoch   = lambda l: l.fit(3, 1e-2, start_epoch=1),
    fit_one_cycle = lambda l: (l.fit_one_cycle(2, 1e-2), l.fit_one_cycle(1, slice(1e-4,1e-2))),
    fine_tune     = lambda l: l.fine_tune(1, 1e-2, freeze_epochs=1),
    fit_flat_cos  = lambda l: l.fit_flat_cos(2, 1e-2),
    fit_sgdr      = lambda l: l.fit_sgdr(2, 1, lr_max=1e-2),
    freeze        = lambda l: (l.freeze(), l.fit(1, 1e-2), l.unfreeze(), l.fit(1, 1e-2)),
    freeze_to     = lambda l: (l.freeze_to(1), l.fit(1, 1e-2))), 'fit')
def test_fits(fit):
    plain,tpu,*_ = both(fit)
    on_device(tpu)
    same(plain, tpu)

def test_lr_find():
    funcs = (valley, slide, minimum, steep)
    def f(learn):
        learn.fit(1, 1e-2)
        start = snapshot(learn)
        res = learn.lr_find(start_lr=1e-4, end_lr=1., num_it=30, stop_div=False, suggest_funcs=funcs)
        close(start, snapshot(learn), rtol=0, atol=0)
        return dict(zip(res._fields, map(float, res)))
    plain,tpu,want,got = both(f)
    assert len(tpu.recorder.losses)==len(plain.recorder.losses)==30
    close(record(plain)['lrs'], record(tpu)['lrs'])
    close(record(plain)['losses'], record(tpu)['losses'], rtol=1e-3)
    close(want, got)
    assert len(plt.gcf().axes[0].lines)==1+len(funcs) and not list((tpu.path/tpu.model_dir).glob('tmp*'))
    for learn in (plain,tpu): learn.fit(1, 1e-2)
    same(plain, tpu)

@pytest.fixture(scope='module')
def fitted():
    "A Learner fitted in plain fastai and one fitted on the device"
    return both(lambda l: l.fit(2, 1e-2), image_learner, tfms=[Flip(p=.5)])[:2]

def other(l, n=7, **kwargs): return l.dls.test_dl(images(n, seed=3), **kwargs)

def shown(l):
    plt.close('all')
    l.show_results(shuffle=False, max_n=4)
    l.dls.show_batch(max_n=2)
    return [(ax.get_title(), ax.images[0].get_array().data.tolist()) for ax in plt.figure(1).axes if ax.images]

def interpreted(l):
    o = ClassificationInterpretation.from_learner(l)
    o.plot_top_losses(3)
    o.plot_confusion_matrix()
    return o.confusion_matrix().tolist(),o.most_confused(),o.losses,o.top_losses(5),o[[1,4]]

@cases(dict(
    validate     = lambda l: [*l.validate(), *l.validate(ds_idx=0), *l.validate(dl=other(l, with_labels=True))],
    plain        = lambda l: l.get_preds(),
    train        = lambda l: l.get_preds(ds_idx=0),
    everything   = lambda l: l.get_preds(with_input=True, with_loss=True, with_decoded=True),
    act          = lambda l: l.get_preds(act=noop),
    no_reorder   = lambda l: l.get_preds(reorder=False),
    no_targs     = lambda l: l.get_preds(with_targs=False),
    only_losses  = lambda l: l.get_preds(with_preds=False, with_targs=False, with_loss=True),
    no_labels    = lambda l: l.get_preds(dl=l.dls.test_dl([x for x,_ in images(7, seed=3)]), with_input=True, with_decoded=True),
    shuffled     = lambda l: [l.get_preds(dl=dl) for dl in (other(l, 13, with_labels=True), other(l, 13, with_labels=True).new(shuffle=True))],
    predict      = lambda l: [l.predict(o, with_input=w) for o in (images(1, seed=9)[0][0], PILImage.create(images(1, seed=8)[0][0])) for w in (False, True)],
    tta          = lambda l: l.tta(),
    tta_max      = lambda l: l.tta(use_max=True),
    tta_both     = lambda l: l.tta(beta=None, n=2),
    tta_train    = lambda l: l.tta(ds_idx=0, n=2),
    tta_tfms     = lambda l: l.tta(n=2, item_tfms=[ToTensor()], batch_tfms=[IntToFloatTensor(), Dihedral()]),
    show_results = shown,
    interpret    = interpreted,
    summary      = lambda l: str(l.summary()).split('Callbacks:')[0]), 'f')
def test_get_preds(fitted, f):
    "And everything else that only looks"
    def run(learn):
        set_seed(3)
        return f(learn)
    want,got = map(run, fitted)
    close(want, got)
    assert devices(got) <= {'cpu'}
    on_device(fitted[1])

@pytest.mark.parametrize('reorder', [True, False])
def test_get_preds_with_a_sorted_loader(reorder):
    def mk(): return Learner(dls_of(vectors(48), vectors(20, seed=1), dl_type=partial(SortedDL, sort_func=_sum)), mlp(), loss_func=CrossEntropyLossFlat())
    plain,tpu,want,got = both(lambda l: (l.fit(1), l.get_preds(reorder=reorder, with_loss=True)), mk)
    close(want[1], got[1])
    assert torch.equal(got[1][1].as_subclass(Tensor), tensor([y for _,y in vectors(20, seed=1)]))==reorder
def _sum(o): return float(o[0].sum())

# ---- files

@cases(dict(Adam=(Adam, True), weights=(Adam, False), AdamW=(partial(OptimWrapper, opt=torch.optim.AdamW), True)), 'opt_func,with_opt')
def test_save_is_plain_and_load_goes_on(tmp_path, opt_func, with_opt):
    "A file of the device is a file of the CPU: each is loaded by the other side, which goes on as if nothing had happened"
    def start(tpu):
        learn = twin(tpu=tpu, path=tmp_path, opt_func=opt_func)
        learn.fit(2, 1e-2)
        return learn.save(f'tpu{tpu}', with_opt=with_opt)
    def resume(tpu, file):
        learn = twin(tpu=tpu, path=tmp_path, opt_func=opt_func)
        if not with_opt: learn.create_opt()
        assert learn.load(file, with_opt=with_opt) is learn
        loaded = snapshot(learn)
        learn.fit(1, 1e-2)
        return learn, loaded
    files = [start(o) for o in (False,True)]
    assert_no_xla(files[1])
    raw = [torch.load(f, weights_only=False) for f in files]
    assert devices(raw[1])=={'cpu'}
    close(*raw)
    want,want_loaded = resume(False, 'tpuFalse')
    for on_tpu,file in [(True,'tpuTrue'), (True,'tpuFalse'), (False,'tpuTrue')]:
        got,loaded = resume(on_tpu, file)
        (on_device if on_tpu else on_host)(got)
        close(want_loaded, loaded)
        same(want, got)

FRESH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch_xla','fastai_xla'): raise ImportError(f'{name} must not be needed')
sys.meta_path.insert(0, Refuse())
from fastai.vision.all import *
items,res = pickle.load(open('items.pkl', 'rb')),[]
for f in sys.argv[1:]:
    learn = load_learner(f)
    res.append(dict(preds=learn.get_preds(dl=learn.dls.test_dl(items))[0], predict=learn.predict(items[0]), cbs=[type(cb).__name__ for cb in learn.cbs]))
pickle.dump(res, open('res.pkl', 'wb'))
assert 'torch_xla' not in sys.modules
"""

def test_export_loads_where_there_is_no_xla(fitted, tmp_path):
    "And goes to the device again"
    items = [x for x,_ in images(7, seed=4)]
    def preds(learn): return learn.get_preds(dl=learn.dls.test_dl(items))[0]
    (tmp_path/'items.pkl').write_bytes(pickle.dumps(items))
    before = preds(fitted[1])
    for learn,name in zip(fitted, ('plain.pkl','tpu.pkl')):
        learn.path,old = tmp_path,learn.path
        learn.export(name)
        learn.path = old
    run = subprocess.run([sys.executable, '-W', 'ignore', '-c', FRESH, 'plain.pkl', 'tpu.pkl'], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode==0, run.stderr[-3000:]
    want,got = pickle.loads((tmp_path/'res.pkl').read_bytes())
    close(want, got)
    assert_no_xla(tmp_path/'tpu.pkl')
    again = load_learner(tmp_path/'tpu.pkl')
    on_host(again)
    for o in (got['preds'], preds(fitted[1]), preds(again.to_tpu())): close(before, o)
    on_device(again)

class InBatch(Callback):
    order,run_valid = 200,False
    def __init__(self, f): self.f = f
    def after_batch(self):
        if self.train_iter==2: self.f(self.learn)

def test_training_goes_on_after_export_in_a_batch(tmp_path):
    def f(learn):
        learn.fit(2, 1e-2, cbs=InBatch(_export))
        return dict(load_learner(tmp_path/'within.pkl').model.state_dict())
    plain,tpu,want,got = both(f, image_learner, path=tmp_path)
    assert_no_xla(tmp_path/'within.pkl')
    close(want, got)
    on_device(tpu)
    same(plain, tpu)
def _export(learn): learn.export('within.pkl')

def test_predict_in_a_batch_says_what_to_do(tmp_path):
    "In plain fastai the rest of the epoch would be no training"
    learn = twin(image_learner, tpu=True, path=tmp_path)
    with pytest.raises(RuntimeError, match='Call `learn.predict` in `before_epoch` or `after_epoch`'):
        learn.fit(1, 1e-2, cbs=InBatch(lambda l: l.predict(images(1)[0][0])))
    on_device(learn)
    assert lent(learn)==[]
    learn.fit(1, 1e-2)

# ---- what goes wrong in mid-fit

@cases(dict(training=Stop(ValueError('stop')), validation=Stop(ValueError('stop'), at=1, train=False), ctrl_c=Stop(KeyboardInterrupt(), 'after_batch'),
    before_step=Stop(RuntimeError('stop'), 'before_step')), 'cb')
def test_learner_is_usable_after_an_exception(cb):
    def f(learn):
        learn.fit(1, 1e-2)
        with nothing_left():
            with pytest.raises(type(cb.exc)) as e: learn.fit(2, 1e-2, cbs=cb)   # `e` holds the frames, as a notebook does
            assert lent(learn)==[]
        assert devices(learn.dls.one_batch())=={next(learn.model.parameters()).device.type}
        return snapshot(learn), learn.validate(), learn.fit(1, 1e-2), learn.get_preds()
    plain,tpu,want,got = both(f)
    close(want, got)
    on_device(tpu)
    same(plain, tpu)
    on_host(tpu.detach_tpu())

def test_nothing_stays_lent():
    "Whichever event raises"
    class See(Callback):
        order = 90
        def after_batch(self): self.learn.seen = lent(self.learn)
    learn = twin(tpu=True, cbs=[GradientAccumulation(16), GradientClip(.1)], opt_func=ranger)
    learn.fit(1, cbs=See())
    assert {'DeviceSmoothLoss','Optimizer.step','xla:0'} <= set(learn.seen)
    assert lent(learn)==[]
    def stop(self): raise ValueError('stop')
    for event in 'before_fit before_epoch before_train before_validate after_train after_epoch after_fit'.split():
        with pytest.raises(ValueError): learn.fit(1, cbs=type('Stops', (Callback,), {event: stop})())
        assert lent(learn)==[], event

class Slow:
    "A dataset that takes 50 ms a sample"
    def __init__(self, items): self.items = items
    def __len__(self): return len(self.items)
    def __getitem__(self, i):
        time.sleep(.05)
        return self.items[i]

def test_ctrl_c_while_waiting_for_data():
    learn = Learner(dls_of(Slow(vectors(80)), vectors(20), num_workers=2), mlp(), loss_func=CrossEntropyLossFlat()).to_tpu()
    timer = threading.Timer(1., os.kill, (os.getpid(), signal.SIGINT))
    with nothing_left():
        start = time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt) as e: learn.fit(5)
        assert time.monotonic()-start < 8                                      # five epochs take ten seconds at least
    learn.dls = dls_of(vectors(48), vectors(20))
    learn.fit(1)
    assert len(learn.recorder.values)==1 and learn.recorder.values[0][1]==pytest.approx(learn.validate()[0], rel=1e-4)

@pytest.mark.parametrize('cb', [*[Stop(o()) for o in (CancelFitException, CancelEpochException, CancelTrainException, CancelBatchException)],
    Stop(CancelValidException(), at=1, train=False)], ids=lambda o: type(o.exc).__name__)
def test_cancel_exceptions_mean_what_they_mean(cb):
    def f(learn):
        with nothing_left(): learn.fit(2, 1e-2, cbs=cb)
        assert lent(learn)==[]
        learn.fit(1, 1e-2)
    plain,tpu,*_ = both(f)
    on_device(tpu)
    same(plain, tpu)

# ---- tied weights, and copies

def test_tied_weights_stay_tied(tmp_path):
    def tied(learn): return learn.model.dec.weight is learn.model.emb.weight and len(opt_params(learn.opt))==len(list(learn.model.parameters()))==2
    def f(learn):
        learn.create_opt()
        for g in (noop, lambda l: l.save('tied'), lambda l: l.load('tied')):
            g(learn)
            assert tied(learn)
            learn.fit(1, 1e-2)
        return learn.get_preds()
    plain,tpu,want,got = both(f, tied_learner, path=tmp_path)
    on_device(tpu)
    same(plain, tpu)
    close(want, got)
    assert tied(tpu.detach_tpu())
    for learn in (plain,tpu): learn.fit(1, 1e-2)
    assert tied(tpu)
    same(plain, tpu)

@cases(dict(deepcopy=deepcopy, pickle=lambda l: pickle.loads(pickle.dumps(l))), 'dup')
def test_copies_of_a_learner(dup):
    def f(learn):
        learn.fit(1, 1e-2)
        other = dup(learn)
        close(snapshot(learn), snapshot(other), rtol=0, atol=0)
        weights = [p.detach().cpu().clone() for p in learn.model.parameters()]
        set_seed(5)
        other.fit(1, 1e-2)
        for w,p,q in zip(weights, learn.model.parameters(), other.model.parameters()): assert torch.equal(w, p.detach().cpu()) and not torch.equal(w, q.detach().cpu())
        set_seed(6)
        learn.fit(1, 1e-2)
        return other
    plain,tpu,want,got = both(f)
    on_device(tpu)
    same(plain, tpu)
    same(want, got)
    on_host(got.to_tpu().detach_tpu())
