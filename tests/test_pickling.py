"Learners, optimizers and tensors that were pickled or copied train on as if they had not been: equal to the last bit."
import cloudpickle, pickle, fastai.optimizer
import pytest
from copy import copy
from synth import *
from test_optimizers import OPTS
from fastai.callback.mixup import MixUp
from fastai.callback.rnn import rnn_cbs
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai_xla.patches.grads import grad_of

def pickled(o): return pickle.loads(pickle.dumps(o))
def cloudpickled(o): return pickle.loads(cloudpickle.dumps(o))
def saved(o):
    f = io.BytesIO()
    torch.save(o, f)
    f.seek(0)
    return torch.load(f, weights_only=False)

TRIPS = dict(pickle=pickled, cloudpickle=cloudpickled, deepcopy=deepcopy, torch_save=saved)
IN_BATCH = {k: f for k,f in TRIPS.items() if k!='deepcopy'} # which torch refuses for a loss with its graph
trips = pytest.mark.parametrize('trip', TRIPS.values(), ids=TRIPS)

@pytest.fixture(autouse=True)
def quiet(monkeypatch): monkeypatch.setattr(defaults, 'callbacks', [TrainEvalCallback, Recorder, ProgressCallback])

def equal(a, b): same(a, b, rtol=0, atol=0)

def grads(learn): return [grad_of(p) for p in learn.model.parameters()]

def torch_opts(opt): return [opt.opt] if isinstance(opt, OptimWrapper) else []

def linked(a, b):
    "Assert that `b` is a Learner of its own whose parts belong together as those of `a` do"
    ps,theirs = set(b.model.parameters()),set(a.model.parameters())
    assert not ps & theirs and {*opt_params(b.opt)} <= ps
    for o,p in zip([a.opt, *torch_opts(a.opt)], [b.opt, *torch_opts(b.opt)]): assert len(o.state)==len(p.state) and {*p.state} <= ps
    for o,p in zip(torch_opts(a.opt), torch_opts(b.opt)): assert {q for g in p.param_groups for q in g['params']} <= ps and len(o.param_groups)==len(p.param_groups)
    close([dict(o) for o in a.opt.hypers], [dict(o) for o in b.opt.hypers], rtol=0, atol=0)
    assert a.opt.frozen_idx==b.opt.frozen_idx and [p.requires_grad for p in a.model.parameters()]==[p.requires_grad for p in b.model.parameters()]
    assert [g is None for g in grads(a)]==[g is None for g in grads(b)]
    close([g for g in grads(a) if g is not None], [g for g in grads(b) if g is not None], rtol=0, atol=0)
    assert all(cb.learn is b and getattr(b, cb.name) is cb for cb in b.cbs) and len(a.cbs)==len(b.cbs)

def train_on(learn, f=lambda l: l.fit_one_cycle(1, 1e-2)):
    set_seed(3)
    f(learn)
    return learn

# ---- tensors

CLASSES = [TensorBase, TensorImage, TensorImageBW, TensorMask, TensorFlowField, TensorCategory, TensorMultiCategory, TitledTensorScalar, TensorPoint, TensorBBox]

class TensorOfMine(TensorImage): pass

@trips
@pytest.mark.parametrize('device', ['cpu', 'xla'])
def test_tensors(trip, device):
    "Class, values and metadata arrive, on the host, or with deepcopy where they were"
    for cls in (*CLASSES, TensorOfMine):
        t = cls(torch.arange(6.).view(2,3), img_size=(3,4)).to(device)
        t.codes = ['a','b']
        got,two = trip((t, [t]))
        assert type(got) is cls and two[0] is got and vars(got)==vars(t)=={'img_size': (3,4), 'codes': ['a','b']}
        assert got.device.type==(device if trip is deepcopy else 'cpu')
        close(t, got, rtol=0, atol=0)
        assert torch.equal((got+1).cpu().as_subclass(Tensor), torch.arange(1.,7).view(2,3)) and (got+1).img_size==(3,4)

# ---- fitted Learners

def fitted(mk=mlp_learner, **kwargs):
    learn = twin(mk, **kwargs)
    learn.fit(1, slice(1e-3,1e-2))
    return learn

def built():
    learn = mlp_learner()
    learn.opt_func = OptimWrapper(opt=torch.optim.AdamW(learn.model.parameters(), lr=1e-2))
    return learn

def nameless():
    "A Learner of functions without a name"
    return mlp_learner(splitter=lambda m: two_groups(m), loss_func=lambda p,y: F.cross_entropy(p, y), opt_func=partial(lambda p,lr,mom: SGD(p, lr=lr, mom=mom), mom=.9),
        metrics=[lambda p,y: (p.argmax(1)==y).float().mean(), AvgMetric(lambda p,y: p.mean())],
        cbs=Callback(before_batch=lambda self: setattr(self.learn, 'xb', (self.x*2,))))

def by_name(x): return x*2
local = lambda k: lambda x: x*k

def block_learner(path='.', cbs=None):
    block = DataBlock((TransformBlock, TransformBlock), get_x=lambda o: tensor([float(o), 1.]), get_y=[lambda o: tensor([o*2.])],
                      item_tfms=[lambda o: o*1, partial(torch.add, other=1)], batch_tfms=Transform([by_name, local(3)]))
    return Learner(block.dataloaders(list(range(24)), bs=4, num_workers=0), nn.Linear(2, 1), loss_func=MSELossFlat(), path=path, cbs=cbs)

FITTED = dict(adam=mlp_learner, ranger=partial(mlp_learner, opt_func=ranger), larc=partial(mlp_learner, opt_func=OPTS['Larc']),
    torch_adamw=partial(mlp_learner, opt_func=OPTS['torch_AdamW']), built=built, tied=tied_learner, nameless=nameless, block=block_learner)

@pytest.mark.parametrize('mk', FITTED.values(), ids=FITTED)
def test_fitted(mk):
    "Each copy is like the original, and trains on as it does"
    a = fitted(mk)
    bs = [trip(a) for trip in TRIPS.values()]
    for b in bs:
        linked(a, b)
        equal(a, b)
    train_on(a)
    for b in bs:
        equal(a, train_on(b))
        if mk is built: assert b.opt is b.opt_func and b.opt.opt is not a.opt.opt
        if mk is tied_learner: assert b.model.emb.weight is b.model.dec.weight

@pytest.mark.parametrize('opt,trip', [*zip('Adam ranger torch_AdamW Larc'.split(), TRIPS.values())], ids=TRIPS)
def test_fitted_on_xla(opt, trip):
    "The copy is on the host, a deep copy on the device; it trains on the device either way"
    a = fitted(opt_func=OPTS[opt], tpu=True)
    b = trip(a)
    linked(a, b)
    assert devices([list(b.model.parameters()), *[t for t in opt_tensors(b.opt) if t.ndim]])=={'xla' if trip is deepcopy else 'cpu'}
    on_device(train_on(b))
    equal(train_on(a), b)
    on_host(b.detach_tpu())

@pytest.mark.parametrize('opt', ['SGD_l2','torch_SGD'])
def test_frozen(opt):
    "Frozen weights with a zero gradient decay on, in the copy too"
    a = fitted(opt_func=OPTS[opt])
    a.freeze()
    bs = [trip(a) for trip in TRIPS.values()]
    start,train = a.model[0].weight.detach().clone(),lambda l: l.fit(1, 1e-2, wd=.1)
    train_on(a, train)
    for b in bs:
        equal(a, train_on(b, train))
        assert torch.equal(start, b.model[0].weight)==(opt=='torch_SGD')      # torch drops the gradients and fastai does not

@trips
def test_learner_and_its_parts(trip):
    "What is shared with something beside the Learner stays shared; what the Recorder knows arrives, with the schedule; an exported file goes without"
    a = twin(image_learner, cbs=MixUp())
    a.fit_one_cycle(2, 1e-2)
    b,model,cb,opt,w = trip((a, a.model, a.mix_up, a.opt, a.model[0].weight))
    assert b.model is model and b.mix_up is cb and cb.learn is b and b.opt is opt and model[0].weight is w
    equal(a, b)
    assert len(b.recorder.losses)==8==len(b.recorder.hps['lr']) and b.recorder.hps==a.recorder.hps
    a.export('e.pkl')
    assert 'losses' not in vars(load_learner('e.pkl').recorder)

def test_functions_stay_themselves():
    "What needs no help gets none: a copy and cloudpickle see the function itself, pickle writes a name where there is one"
    f,seen = lambda m: two_groups(m),[]
    a = twin(splitter=f, opt_func=lambda p,lr: seen.append(1) or SGD(p, lr=lr))
    assert copy(a).splitter is f and deepcopy(a).splitter is f
    b,theirs = cloudpickled((a, seen))
    b.create_opt()
    assert theirs==[1] and seen==[]
    assert pickled(twin(splitter=two_groups)).splitter is two_groups
    assert b'cloudpickle' not in pickle.dumps(twin(splitter=two_groups)) and b'fastai_xla' not in pickle.dumps(a)

# ---- in the middle of a fit

class Copies(Callback):
    "Copy the Learner with each of `trips`, at the end of epoch `epoch` or from its third training batch on, and cancel the fit if asked to"
    order = 90
    def __init__(self, event, trips=TRIPS, epoch=0, cancel=False): store_attr()
    def __call__(self, event):
        if event!=self.event or self.learn.epoch<self.epoch or 'copies' in vars(self): return
        if event!='after_epoch' and (not self.training or self.iter<2): return
        self.rng = torch.get_rng_state()
        self.copies = {k: f(self.learn) for k,f in self.trips.items()}
        if self.cancel: raise CancelFitException

def leave(b):
    "End the fit that `b` was copied in, as `CancelFitException` does"
    b('after_cancel_fit')
    b('after_fit')
    b._end_cleanup()
    return b.remove_cbs([ParamScheduler, Copies])

def finish(b):
    "Train the epochs that the fit `b` was copied in has left"
    b.remove_cb(Copies)
    for b.epoch in range(b.epoch+1, b.n_epoch): b._with_events(b._do_epoch, 'epoch', CancelEpochException)
    b('after_fit')
    b._end_cleanup()
    return b.remove_cb(ParamScheduler)

class RNN(nn.Module):
    "What `rnn_cbs` needs of a model"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 3)
    def reset(self): pass
    def forward(self, x): return (y := self.lin(x)), [y[:,None]], [y[:,None]]

def rnn_learner(cbs=None): return Learner(mlp_learner().dls, RNN(), loss_func=CrossEntropyLossFlat(), cbs=[*rnn_cbs(1., 1.), *L(cbs)])
def rng_learner(cbs=None): return mlp_learner(cbs=[MixUp(), GradientAccumulation(16), GradientClip(1.), *L(cbs)])
def csv_learner(cbs=None): return mlp_learner(cbs=[CSVLogger(), *L(cbs)])
def named_images(cbs=None): return image_learner(cbs=[MixUp(), *L(cbs)])
def halves(cbs=None): return mlp_learner(cbs=[MixedPrecision(), EarlyStoppingCallback(), SaveModelCallback(), ReduceLROnPlateau(), *L(cbs)])

MAKERS = dict(mlp=mlp_learner, mixup_accumulation=rng_learner, csv=csv_learner, images=named_images, rnn=rnn_learner, lambdas=block_learner, trackers=halves)

@pytest.mark.parametrize('mk,event', [*zip(MAKERS.values(), ['after_pred','after_step','after_batch']*3)], ids=MAKERS)
def test_cancelled(mk, event):
    "A copy that is made inside a batch leaves the fit as its cancelled original does, and both train on"
    a,cb = twin(mk),Copies(event, IN_BATCH, epoch=1, cancel=True)
    a.fit_one_cycle(2, 1e-2, cbs=cb)
    bs = {k: leave(b) for k,b in cb.copies.items()}
    train_on(a)
    for k,b in bs.items():
        linked(a, train_on(b))
        equal(a, b)

def test_finished():
    "A copy that is made after the first of three epochs trains the other two as its original does"
    a,cb = twin(rng_learner),Copies('after_epoch')
    a.fit_one_cycle(3, 1e-2, cbs=cb)
    for b in cb.copies.values():
        torch.set_rng_state(cb.rng)
        equal(a, finish(b))
        assert len(b.recorder.values)==3 and len(b.recorder.losses)==len(a.recorder.losses) and b.recorder.hps==a.recorder.hps

def test_cancelled_on_xla():
    "Losses that wait on the device arrive, each once"
    a,cb = twin(rng_learner, tpu=True),Copies('after_batch', dict(pickle=pickled), cancel=True)
    a.tpu_trainer.queue.every = 1e9
    a.fit_one_cycle(1, 1e-2, cbs=cb)
    assert len(a.recorder.losses)==3
    b = leave(cb.copies['pickle'])
    same(a, b)
    train_on(a)
    on_device(train_on(b))
    same(a, b)

def test_finished_on_xla():
    a,cb = twin(rng_learner, tpu=True),Copies('after_epoch', {k: TRIPS[k] for k in ('deepcopy','torch_save')})
    a.fit_one_cycle(2, 1e-2, cbs=cb)
    for b in cb.copies.values():
        torch.set_rng_state(cb.rng)
        same(a, finish(b))
        assert len(b.recorder.values)==2 and len(b.recorder.losses)==12 and devices(b.recorder.losses)=={'cpu'}
        assert devices([*b.detach_tpu().model.parameters()])=={'cpu'}

@trips
def test_csv_logger_in_a_fit(trip):
    "The copy writes on where the original was"
    a,cb = twin(csv_learner),Copies('after_epoch', dict(it=trip), cancel=True)
    a.fit(3, cbs=cb)
    b = finish(cb.copies['it'])
    assert b.csv_logger.read_log().epoch.tolist()==[0,1,2] and b.csv_logger.file.closed and b.logger.__name__==a.logger.__name__

# ---- torch_xla's optimizer_step

OPT_FUNCS = dict(Adam=Adam, ranger=ranger, torch_AdamW=OPTS['torch_AdamW'])

@pytest.mark.parametrize('opt_func', OPT_FUNCS.values(), ids=OPT_FUNCS)
def test_torch_xla_finds_the_gradients(opt_func):
    from torch_xla.core.xla_model import _fetch_gradients
    learn = twin(opt_func=opt_func)
    learn.create_opt()
    learn.freeze()
    ps = [p for p in opt_params(learn.opt) if p.requires_grad]
    for p in ps: p.grad = torch.ones_like(p)
    assert 0<len(ps)<len(opt_params(learn.opt))
    assert [g.data_ptr() for g in _fetch_gradients(learn.opt)]==[p.grad.data_ptr() for p in ps]
