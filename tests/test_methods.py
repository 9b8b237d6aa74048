"Every method of a Learner does through `to_tpu` what it does in plain fastai on the CPU. Tolerance: 1e-4 relative, 1e-5 absolute, unless said."
import pickle, signal, subprocess, sys
import pytest
from fastai.text.data import SortedDL
from synth import *

@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close('all')

# ---- attach and detach

def test_to_tpu_moves_model_and_optimizer():
    learn = twin()
    model = learn.model
    learn.create_opt()
    assert learn.to_tpu() is learn and learn.model is model
    on_device(learn)
    assert len(opt_params(learn.opt))==len(list(model.parameters()))

@pytest.mark.parametrize('prepare', [noop, lambda l: l.create_opt(), lambda l: l.freeze(), lambda l: (l.freeze(), l.unfreeze()), lambda l: l.fit(1)],
                         ids='nothing create_opt freeze unfreeze fit'.split())
def test_to_tpu_at_any_time(prepare):
    def f(learn, attach=noop):
        prepare(learn)
        attach(learn)
        learn.fit(2, 1e-2)
        return learn
    plain,tpu = f(twin()),f(twin(), Learner.to_tpu)
    on_device(tpu)
    same(plain, tpu)
    on_host(tpu.detach_tpu())
    same(plain, tpu)

def test_twice_in_a_row():
    plain,tpu = twin(),twin().to_tpu().to_tpu()
    for learn in (plain,tpu): learn.fit(1)
    tpu.to_tpu()
    for learn in (plain,tpu): learn.fit(1)
    on_device(tpu)
    same(plain, tpu)
    on_host(tpu.detach_tpu())

def test_attach_and_detach_many_times():
    plain,tpu = twin(),twin()
    for _ in range(3):
        plain.fit(1)
        tpu.to_tpu().fit(1)
        same(plain, tpu)
        on_host(tpu.detach_tpu())
        close(state(plain), state(tpu))

def test_detach_gives_a_plain_learner_that_trains_on():
    plain,tpu = twin(),twin()
    cbs = [type(cb) for cb in tpu.cbs]
    for learn in (plain,tpu.to_tpu()): learn.fit_one_cycle(2, 1e-2)
    n = len(opt_tensors(tpu.opt))
    assert tpu.detach_tpu() is tpu
    on_host(tpu)
    assert n>0 and len(opt_tensors(tpu.opt))==n and [type(cb) for cb in tpu.cbs]==cbs
    for learn in (plain,tpu): learn.fit(2, 1e-2)
    same(plain, tpu)
    on_host(tpu)

def test_detach_before_any_fit():
    plain,tpu = twin(),twin().to_tpu().detach_tpu()
    on_host(tpu)
    for learn in (plain,tpu): learn.fit(1)
    same(plain, tpu)

def test_the_dataloaders_stay_what_they_are():
    learn = twin(tpu=True)
    device,train,valid = learn.dls.device,learn.dls.train,learn.dls.valid
    learn.fit(1)
    assert learn.dls.train is train and learn.dls.valid is valid and learn.dls.device==device
    assert devices(learn.dls.one_batch())=={'xla'} and devices(learn.dls.valid.one_batch())=={'xla'}
    assert len(learn.dls.train)==6 and len(learn.dls.valid)==3

def test_tpu_ctx():
    plain,tpu = twin(),twin()
    with tpu.tpu_ctx():
        on_device(tpu)
        for learn in (plain,tpu): learn.fit(1)
    on_host(tpu)
    for learn in (plain,tpu): learn.fit(1)
    same(plain, tpu)

def test_tpu_ctx_detaches_after_an_exception():
    learn = twin()
    with pytest.raises(ValueError, match='in mid-fit'):
        with learn.tpu_ctx(): learn.fit(1, cbs=Stop(ValueError('in mid-fit')))
    on_host(learn)

# ---- training

FITS = dict(
    fit           = lambda l: (l.fit(2, 1e-2), l.fit(1)),
    fit_wd        = lambda l: l.fit(2, 1e-2, wd=.3),
    reset_opt     = lambda l: (l.fit(1, 1e-2), l.fit(1, 1e-2, reset_opt=True)),
    start_epoch   = lambda l: l.fit(3, 1e-2, start_epoch=1),
    fit_one_cycle = lambda l: (l.fit_one_cycle(2, 1e-2), l.fit_one_cycle(1, slice(1e-4,1e-2))),
    fine_tune     = lambda l: l.fine_tune(1, 1e-2, freeze_epochs=1),
    fit_flat_cos  = lambda l: l.fit_flat_cos(2, 1e-2),
    fit_sgdr      = lambda l: l.fit_sgdr(2, 1, lr_max=1e-2),
    freeze        = lambda l: (l.freeze(), l.fit(1, 1e-2), l.unfreeze(), l.fit(1, 1e-2)),
    freeze_to     = lambda l: (l.freeze_to(1), l.fit(1, 1e-2)))

@pytest.mark.parametrize('fit', FITS.values(), ids=FITS)
def test_fits(fit):
    plain,tpu,*_ = both(fit)
    on_device(tpu)
    same(plain, tpu)

def test_fit_changes_the_weights():
    learn = twin(tpu=True)
    before = [p.detach().cpu().clone() for p in learn.model.parameters()]
    learn.fit(1, 1e-2)
    assert not any(torch.equal(a, b.detach().cpu()) for a,b in zip(before, learn.model.parameters()))

def test_frozen_weights_do_not_move():
    learn = twin(tpu=True)
    frozen = learn.model[0].weight.detach().cpu().clone()
    learn.freeze()
    learn.fit(1, 1e-2)
    assert torch.equal(learn.model[0].weight.detach().cpu(), frozen) and not learn.model[0].weight.requires_grad

def test_added_cbs():
    class Count(Callback):
        def before_fit(self): self.n = self.seen = 0
        def after_batch(self):
            self.n += 1
            self.seen += find_bs(self.yb)
    learn,cb = twin(tpu=True),Count()
    with learn.added_cbs(cb):
        assert cb in learn.cbs and learn.count is cb
        learn.fit(1)
    assert cb not in learn.cbs and not hasattr(learn, 'count')
    assert (cb.n,cb.seen)==(9, 48+20)
    learn.fit(1, cbs=cb)
    assert (cb.n,cb.seen)==(9, 48+20) and cb not in learn.cbs

@pytest.mark.parametrize('before', [noop, lambda l: l.fit(1, 1e-2)], ids=['fresh', 'fitted'])
def test_lr_find(before):
    funcs = (valley, slide, minimum, steep)
    def f(learn):
        before(learn)
        if learn.opt is None: learn.create_opt()
        start = snapshot(learn)
        res = learn.lr_find(start_lr=1e-4, end_lr=1., num_it=30, stop_div=False, suggest_funcs=funcs)
        close(start, snapshot(learn), rtol=0, atol=0)
        return dict(zip(res._fields, res))
    plain,tpu,want,got = both(f)
    assert len(tpu.recorder.losses)==len(plain.recorder.losses)==30
    close(record(plain)['lrs'], record(tpu)['lrs'])
    close(record(plain)['losses'], record(tpu)['losses'], rtol=1e-3)
    close({k: float(v) for k,v in want.items()}, {k: float(v) for k,v in got.items()})
    assert len(plt.gcf().axes[0].lines)==1+len(funcs)
    on_device(tpu)
    for learn in (plain,tpu): learn.fit(1, 1e-2)
    same(plain, tpu)

def test_lr_find_stops_when_the_loss_diverges():
    def f(learn): return learn.lr_find(start_lr=1e-3, end_lr=1e6, num_it=40, show_plot=False)
    plain,tpu,want,got = both(f, opt_func=SGD)
    assert 8 < len(tpu.recorder.losses)==len(plain.recorder.losses) < 40
    close(float(want.valley), float(got.valley))
    close(record(plain)['losses'], record(tpu)['losses'], rtol=1e-3)
    assert not list((tpu.path/tpu.model_dir).glob('tmp*'))

# ---- validation and predictions

VALIDATES = dict(valid=lambda l: l.validate(), train=lambda l: l.validate(ds_idx=0), dl=lambda l: l.validate(dl=l.dls.test_dl(images(7, seed=3), with_labels=True)))

@pytest.mark.parametrize('f', VALIDATES.values(), ids=VALIDATES)
def test_validate(f):
    plain,tpu,want,got = both(lambda l: (f(l), l.fit(1), f(l)), image_learner)
    close(want[0], got[0])
    close(want[2], got[2])
    assert all(isinstance(v, float) for v in got[0])
    on_device(tpu)

PREDS = dict(plain={}, with_input=dict(with_input=True), with_loss=dict(with_loss=True), with_decoded=dict(with_decoded=True), train=dict(ds_idx=0),
    everything=dict(with_input=True, with_loss=True, with_decoded=True), act=dict(act=noop), no_reorder=dict(reorder=False),
    no_targs=dict(with_targs=False), only_losses=dict(with_preds=False, with_targs=False, with_loss=True))

@pytest.fixture(scope='module')
def fitted():
    "A Learner fitted in plain fastai and one fitted on the device"
    return both(lambda l: l.fit(2, 1e-2), image_learner)[:2]

@pytest.mark.parametrize('kwargs', PREDS.values(), ids=PREDS)
def test_get_preds(fitted, kwargs):
    want,got = [learn.get_preds(**kwargs) for learn in fitted]
    close(want, got)
    assert type(got) is type(want) and devices([o for o in got if o is not None])=={'cpu'}
    on_device(fitted[1])

def test_get_preds_keeps_the_order_of_the_dataset(fitted):
    learn = fitted[1]
    dl = learn.dls.test_dl(images(13, seed=5), with_labels=True)
    preds,targs = learn.get_preds(dl=dl)
    shuffled = learn.get_preds(dl=dl.new(shuffle=True))
    close([preds,targs], shuffled)
    assert [learn.dls.vocab[t] for t in targs]==[y for _,y in images(13, seed=5)]

@pytest.mark.parametrize('kwargs', [{}, dict(with_input=True, with_decoded=True)], ids=['plain', 'with_input'])
def test_get_preds_without_labels(fitted, kwargs):
    items = [x for x,_ in images(7, seed=3)]
    want,got = [learn.get_preds(dl=learn.dls.test_dl(items), **kwargs) for learn in fitted]
    close(want[:-1], got[:-1])
    close(want, got)
    assert len(got[0])==7

def test_get_preds_saves_to_files(fitted, tmp_path):
    def f(learn, name):
        d = tmp_path/name
        d.mkdir()
        learn.get_preds(save_preds=d, save_targs=d)
        for o in d.ls(): assert_no_xla(o)
        return {o.name: torch.load(o, weights_only=False) for o in d.ls()}
    close(f(fitted[0], 'plain'), f(fitted[1], 'tpu'))

@pytest.mark.parametrize('reorder', [True, False])
def test_get_preds_with_a_sorted_loader(reorder):
    def mk():
        dls = dls_of(vectors(48), vectors(20, seed=1), dl_type=partial(SortedDL, sort_func=_sum))
        return Learner(dls, mlp(), loss_func=CrossEntropyLossFlat())
    plain,tpu,want,got = both(lambda l: (l.fit(1), l.get_preds(reorder=reorder, with_loss=True)), mk)
    close(want[1], got[1])
    targs = tensor([y for _,y in vectors(20, seed=1)])
    assert torch.equal(got[1][1].as_subclass(Tensor), targs)==reorder
def _sum(o): return float(o[0].sum())

def test_predict(fitted):
    for item in (images(1, seed=9)[0][0], PILImage.create(images(1, seed=8)[0][0])):
        want,got = [learn.predict(item) for learn in fitted]
        assert want[0]==got[0] and type(want[0]) is type(got[0])
        close(want[1:], got[1:])
    want,got = [learn.predict(item, with_input=True) for learn in fitted]
    close(want[0], got[0])
    assert devices(got[0])=={'cpu'}

TTAS = dict(plain={}, use_max=dict(use_max=True), beta=dict(beta=None, n=2), train=dict(ds_idx=0, n=2), batch_tfms=dict(n=2, item_tfms=[ToTensor()], batch_tfms=[IntToFloatTensor(), Dihedral()]))

@pytest.fixture(scope='module')
def flipped(): return both(lambda l: l.fit(1), image_learner, tfms=[Flip(p=.5)])[:2]

@pytest.mark.parametrize('kwargs', TTAS.values(), ids=TTAS)
def test_tta(flipped, kwargs):
    def f(learn):
        set_seed(3)
        return learn.tta(**kwargs)
    want,got = map(f, flipped)
    close(want, got)
    assert devices(got)=={'cpu'}
    on_device(flipped[1])

def test_show_results(fitted):
    def f(learn):
        set_seed(3)
        plt.close('all')
        learn.show_results(shuffle=False, max_n=4)
        return [(ax.get_title(), ax.images[0].get_array().data.tolist()) for ax in plt.gcf().axes if ax.images]
    want,got = map(f, fitted)
    assert len(got)==4 and got==want
    fitted[1].show_results()
    assert len(plt.get_fignums())==2
    on_device(fitted[1])

def test_classification_interpretation(fitted, capsys):
    want,got = map(ClassificationInterpretation.from_learner, fitted)
    assert got.confusion_matrix().sum()==11 and (got.confusion_matrix()==want.confusion_matrix()).all()
    assert got.most_confused()==want.most_confused()
    close(want.losses, got.losses)
    close(want.top_losses(5), got.top_losses(5))
    close(want[[1,4]], got[[1,4]])
    assert devices(got.losses)=={'cpu'}
    got.plot_top_losses(3)
    assert len([ax for ax in plt.gcf().axes if ax.images])==3
    got.plot_confusion_matrix()
    assert plt.gcf().axes[0].get_title()=='Confusion matrix'
    reports = []
    for o in (want,got):
        capsys.readouterr()
        o.print_classification_report()
        reports.append(capsys.readouterr().out.splitlines()[-1])
    assert reports[0]==reports[1]

def test_summary(fitted):
    want,got = [str(learn.summary()).split('Callbacks:') for learn in fitted]
    assert got[0]==want[0] and 'Conv2d' in got[0] and 'TPUTrainer' in got[1]
    on_device(fitted[1])
    fresh = [str(twin(image_learner, tpu=t).summary()).split('Callbacks:')[0] for t in (False,True)]
    assert fresh[0]==fresh[1]

def test_show_training_loop_and_show_batch(fitted, capsys):
    fitted[1].show_training_loop()
    assert 'TPUTrainer' in capsys.readouterr().out
    fitted[1].dls.show_batch(max_n=2)
    assert len([ax for ax in plt.gcf().axes if ax.images])==2

# ---- files

@pytest.mark.parametrize('with_opt', [True, False])
def test_save_is_plain_and_load_goes_on(tmp_path, with_opt):
    "A file of the device is a file of the CPU: each is loaded by the other side, which goes on as if nothing had happened"
    def start(tpu): 
        learn = twin(tpu=tpu, path=tmp_path)
        learn.fit(2, 1e-2)
        return learn, learn.save(f'tpu{tpu}', with_opt=with_opt)
    def resume(tpu, file):
        learn = twin(tpu=tpu, path=tmp_path)
        if not with_opt: learn.create_opt()
        assert learn.load(file, with_opt=with_opt) is learn
        loaded = snapshot(learn)
        learn.fit(1, 1e-2)
        return learn, loaded
    (plain,f_plain),(tpu,f_tpu) = start(False),start(True)
    on_device(tpu)
    assert_no_xla(f_tpu)
    raw = [torch.load(f, weights_only=False) for f in (f_plain,f_tpu)]
    assert devices(raw[1])=={'cpu'}
    close(raw[0], raw[1])
    want,want_loaded = resume(False, f'tpu{False}')
    for on_tpu,file in [(True,'tpuTrue'), (True,'tpuFalse'), (False,'tpuTrue')]:
        got,loaded = resume(on_tpu, file)
        (on_device if on_tpu else on_host)(got)
        close(want_loaded, loaded)
        same(want, got)

def test_load_into_a_fitted_learner(tmp_path):
    def f(learn):
        learn.fit(1, 1e-2)
        learn.save('one')
        learn.fit(2, 1e-2)
        learn.load('one')
        learn.fit(1, 1e-2)
    plain,tpu,*_ = both(f, path=tmp_path)
    on_device(tpu)
    same(plain, tpu)

def test_load_an_optimizer_that_is_not_in_the_file(tmp_path):
    learn = twin(tpu=True, path=tmp_path)
    learn.fit(1)
    learn.save('weights', with_opt=False)
    with pytest.warns(UserWarning, match="doesn't contain an optimizer state"): learn.load('weights')
    on_device(learn)

FRESH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch_xla','fastai_xla'): raise ImportError(f'{name} must not be needed')
sys.meta_path.insert(0, Refuse())
from fastai.vision.all import *
learn = load_learner(sys.argv[1])
items = pickle.load(open(sys.argv[2], 'rb'))
res = dict(preds=learn.get_preds(dl=learn.dls.test_dl(items))[0], predict=learn.predict(items[0]), cbs=[type(cb).__name__ for cb in learn.cbs])
pickle.dump(res, open(sys.argv[3], 'wb'))
assert 'torch_xla' not in sys.modules
"""

def test_export_loads_where_there_is_no_xla(fitted, tmp_path):
    items = [x for x,_ in images(7, seed=4)]
    (tmp_path/'items.pkl').write_bytes(pickle.dumps(items))
    results,before = [],fitted[1].get_preds(dl=fitted[1].dls.test_dl(items))[0]
    for learn,name in zip(fitted, ('plain','tpu')):
        learn.path,old = tmp_path,learn.path
        learn.export(f'{name}.pkl')
        learn.path = old
        args = [tmp_path/f'{name}.pkl', tmp_path/'items.pkl', tmp_path/f'{name}.out']
        run = subprocess.run([sys.executable, '-W', 'ignore', '-c', FRESH, *map(str,args)], capture_output=True, text=True, cwd=tmp_path)
        assert run.returncode==0, run.stderr[-3000:]
        results.append(pickle.loads(args[2].read_bytes()))
    assert_no_xla(tmp_path/'tpu.pkl')
    assert results[0]['cbs']==results[1]['cbs']
    close(results[0], results[1])
    close(before, results[1]['preds'])
    on_device(fitted[1])
    close(before, fitted[1].get_preds(dl=fitted[1].dls.test_dl(items))[0])

def test_training_goes_on_after_export(tmp_path):
    plain,tpu,*_ = both(lambda l: (l.fit(1, 1e-2), l.export('e.pkl'), l.fit(1, 1e-2)), image_learner, path=tmp_path)
    on_device(tpu)
    same(plain, tpu)

class Predicts(Callback):
    order,run_valid = 200,False
    def after_batch(self): self.learn.predict(images(1)[0][0])

def test_predict_in_a_batch_says_what_to_do(tmp_path):
    "In plain fastai the rest of the epoch would be no training"
    learn = twin(image_learner, tpu=True, path=tmp_path)
    with pytest.raises(RuntimeError, match='Call `learn.predict` in `before_epoch` or `after_epoch`'): learn.fit(1, 1e-2, cbs=Predicts())
    on_device(learn)
    assert lent(learn)==[]
    learn.fit(1, 1e-2)

class Exports(Callback):
    order,run_valid = 200,False
    def after_batch(self):
        if self.train_iter==2: self.learn.export('within.pkl')

def test_training_goes_on_after_export_in_a_batch(tmp_path):
    def f(learn):
        learn.add_cb(Exports())
        learn.fit(2, 1e-2)
        learn.remove_cb(Exports)
        return dict(load_learner(tmp_path/'within.pkl').model.state_dict())
    plain,tpu,want,got = both(f, image_learner, path=tmp_path)
    assert_no_xla(tmp_path/'within.pkl')
    close(want, got)
    on_device(tpu)
    same(plain, tpu)

def test_a_loaded_learner_goes_to_the_device_again(fitted, tmp_path):
    learn = fitted[1]
    learn.path,old = tmp_path,learn.path
    learn.export()
    learn.path = old
    again = load_learner(tmp_path/'export.pkl')
    on_host(again)
    dl = partial(again.dls.test_dl, images(5, seed=2), with_labels=True)
    want = again.get_preds(dl=dl())
    again.to_tpu()
    close(want, again.get_preds(dl=dl()))
    on_device(again)

# ---- what goes wrong in mid-fit

STOPS = dict(training=Stop(ValueError('stop')), validation=Stop(ValueError('stop'), at=1, train=False), ctrl_c=Stop(KeyboardInterrupt()),
    before_batch=Stop(RuntimeError('stop'), 'before_batch'), before_step=Stop(RuntimeError('stop'), 'before_step'), ctrl_c_after_batch=Stop(KeyboardInterrupt(), 'after_batch'))

@pytest.mark.parametrize('cb', STOPS.values(), ids=STOPS)
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
    close(plain.validate(), tpu.validate())

@pytest.mark.parametrize('event', 'before_fit before_epoch before_train before_validate after_train after_epoch after_fit'.split())
def test_nothing_stays_lent_when_an_event_raises(event):
    def stop(self): raise ValueError('stop')
    learn = twin(tpu=True, cbs=[GradientAccumulation(16), GradientClip(.1)], opt_func=ranger)
    with pytest.raises(ValueError): learn.fit(1, cbs=type('Stops', (Callback,), {event: stop})())
    assert lent(learn)==[]

def test_what_is_lent_in_a_batch():
    class See(Callback):
        order = 90
        def after_batch(self): self.learn.seen = lent(self.learn)
    learn = twin(tpu=True, cbs=GradientClip(.1), opt_func=ranger)
    learn.fit(1, cbs=See())
    assert {'DeviceSmoothLoss','Optimizer.step','xla:0'} <= set(learn.seen)
    assert lent(learn)==[]

def test_detach_right_after_an_exception():
    learn = twin(tpu=True)
    with pytest.raises(ValueError): learn.fit(1, cbs=Stop(ValueError('stop')))
    with nothing_left(): on_host(learn.detach_tpu())
    learn.fit(1)
    on_host(learn)

class Slow:
    "A dataset that takes 50 ms a sample"
    def __init__(self, items): self.items = items
    def __len__(self): return len(self.items)
    def __getitem__(self, i):
        time.sleep(.05)
        return self.items[i]

@pytest.mark.parametrize('num_workers', [0, 2])
def test_ctrl_c_while_waiting_for_data(num_workers):
    learn = Learner(dls_of(Slow(vectors(80)), vectors(20), num_workers=num_workers), mlp(), loss_func=CrossEntropyLossFlat()).to_tpu()
    timer = threading.Timer(1., os.kill, (os.getpid(), signal.SIGINT))
    with nothing_left():
        start = time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt) as e: learn.fit(5)
        assert time.monotonic()-start < 8                                      # five epochs take ten seconds at least
    learn.dls = dls_of(vectors(48), vectors(20))
    learn.fit(1)
    assert len(learn.recorder.values)==1 and learn.recorder.values[0][1]==pytest.approx(learn.validate()[0], rel=1e-4)

@pytest.mark.parametrize('exc', [CancelFitException, CancelEpochException, CancelTrainException, CancelBatchException], ids=lambda o: o.__name__)
def test_cancel_exceptions_mean_what_they_mean(exc):
    def f(learn):
        with nothing_left(): learn.fit(2, 1e-2, cbs=Stop(exc()))
        assert lent(learn)==[]
        learn.fit(1, 1e-2)
    plain,tpu,*_ = both(f)
    on_device(tpu)
    same(plain, tpu)

def test_cancel_validation():
    def f(learn):
        with nothing_left(): learn.fit(2, 1e-2, cbs=Stop(CancelValidException(), at=1, train=False))
    plain,tpu,*_ = both(f)
    same(plain, tpu)

# ---- tied weights

def test_tied_weights_stay_tied(tmp_path):
    def tied(learn): return learn.model.dec.weight is learn.model.emb.weight and len(opt_params(learn.opt))==len(list(learn.model.parameters()))==2
    def f(learn):
        learn.create_opt()
        assert tied(learn)
        learn.fit(2, 1e-2)
        assert tied(learn)
        learn.save('tied')
        learn.fit(1, 1e-2)
        learn.load('tied')
        assert tied(learn)
        learn.fit(1, 1e-2)
        return learn.get_preds()
    plain,tpu,want,got = both(f, tied_learner, path=tmp_path)
    assert tied(tpu)
    on_device(tpu)
    same(plain, tpu)
    close(want, got)
    assert tied(tpu.detach_tpu())
    on_host(tpu)
    for learn in (plain,tpu): learn.fit(1, 1e-2)
    assert tied(tpu)
    same(plain, tpu)

def test_tied_weights_change_together():
    learn = twin(tied_learner, tpu=True)
    learn.fit(1, 1e-2)
    assert torch.equal(learn.model.dec.weight.detach().cpu(), learn.model.emb.weight.detach().cpu())

# ---- copies

COPIES = dict(deepcopy=deepcopy, pickle=lambda l: pickle.loads(pickle.dumps(l)))

@pytest.mark.parametrize('dup', COPIES.values(), ids=COPIES)
@pytest.mark.parametrize('n', [0, 1], ids=['fresh', 'fitted'])
def test_copies_of_a_learner(dup, n):
    def f(learn):
        if n: learn.fit(n, 1e-2)
        other = dup(learn)
        if n: close(snapshot(learn), snapshot(other), rtol=0, atol=0)
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

# ---- losses with weights of their own

@pytest.mark.parametrize('loss', [lambda: CrossEntropyLossFlat(weight=tensor([1.,2.,3.])), lambda: nn.CrossEntropyLoss(weight=tensor([1.,2.,3.]))],
                         ids=['fastai', 'torch'])
def test_loss_function_with_weights(loss):
    def mk(): return mlp_learner(loss_func=loss())
    plain,tpu,*_ = both(lambda l: (l.fit(2, 1e-2), l.validate()), mk)
    same(plain, tpu)
    tpu.detach_tpu()
    for learn in (plain,tpu): learn.fit(1, 1e-2)
    same(plain, tpu)
    assert devices(list(getattr(tpu.loss_func, 'func', tpu.loss_func).buffers()))=={'cpu'}
