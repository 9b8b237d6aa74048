"""What a Learner's callbacks do to it and to what they hold is the same wherever it trains: one core, all cores of a process, ranks and sharded, beside plain fastai.
The cases of a group run in one process, by `python test_round_trip.py <group> [case ...]`; as `__main__`, which a notebook's cells are too."""
import sys
from cases import Groups

FORMS = 'one_core','all_cores','ranks','sharded'
groups = Groups(__file__, lambda: dict(PJRT_DEVICE='CPU', CPU_NUM_DEVICES='4', MPLBACKEND='Agg', XLA_FLAGS='--xla_backend_optimization_level=0'))

import functools, gc, io, json, logging, os, signal, subprocess, threading, time, warnings
from contextlib import redirect_stderr
from pathlib import Path
from fastai.vision.all import *
from fastai.callback.all import *
from fastai_xla.all import *
from fastai_xla.launch import get_pool, LaunchError
from fastai_xla.runtime.ranks import rank
from torch.nn.utils import parametrize, prune
for o in [o for o in globals() if o.startswith('test')]: del globals()[o] # fastai's, which pytest would collect

N = 4
form = sys.argv[1].removesuffix(',slow') if __name__=='__main__' else None

def case(*forms):
    "A function without arguments that a process of each of `forms` calls"
    def _inner(f):
        for o in forms or FORMS: groups.case(o)(f)
        return f
    return _inner

def to_form(learn):
    if form=='one_core': return learn.to_tpu()
    if form=='all_cores': return learn.to_tpu_distributed(N)
    if form=='ranks': return learn.to_tpu_distributed(N, processes=True)
    return learn.to_tpu_sharded(fsdp=N)

def data(n=64):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1))
    return list(zip(x, (x.sum(1)>0).long()))

def learner(cbs=None, on=False, mk=lambda: nn.Sequential(nn.Linear(4,8), nn.ReLU(), nn.Linear(8,2)), loss_func=None, ds=None, **kwargs):
    "A Learner in plain fastai, or `on` the cores: there `bs` is that of one rank"
    ds,bs = ds or data(),16//N if on and form in ('all_cores','ranks') else 16
    set_seed(5)
    dls = DataLoaders(TfmdDL(ds, bs=bs, shuffle=True, num_workers=0, **kwargs), TfmdDL(ds[:16] if isinstance(ds, list) else ds, bs=16, num_workers=0))
    set_seed(5)
    learn = Learner(dls, mk(), loss_func=loss_func or CrossEntropyLossFlat(), opt_func=partial(SGD, mom=.9), cbs=cbs, metrics=accuracy)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return to_form(learn) if on else learn

def fitted(cbs=None, epochs=2, **kwargs):
    "Two Learners after a fit: in plain fastai and on the cores; `cbs` makes their callbacks"
    res = []
    for on in (False, True):
        learn = learner(cbs and cbs(), on, **kwargs)
        set_seed(7)
        learn.fit(epochs, .05)
        res.append(learn)
    return res

def host(t): return t.detach().cpu().as_subclass(Tensor)

def close(a, b, tol=2e-5): assert torch.allclose(host(torch.as_tensor(a)).float(), host(torch.as_tensor(b)).float(), atol=tol), (a, b)

def same_model(a, b):
    "Names, values, kinds of modules, and what the optimizer holds"
    sa,sb = a.model.state_dict(),b.model.state_dict()
    assert [*sa]==[*sb], (sa.keys(), sb.keys())
    for k in sa: close(sa[k], sb[k])
    assert [type(m).__name__ for m in a.model.modules()]==[type(m).__name__ for m in b.model.modules()]
    assert {id(p) for p in b.model.parameters()}=={id(p) for pl in b.opt.param_lists for p in pl}
    for p,q in zip(a.opt.all_params(), b.opt.all_params()): close(a.opt.state[p[0]]['grad_avg'], b.opt.state[q[0]]['grad_avg'])
    close(a.recorder.values[-1][0], b.recorder.values[-1][0])

# ---- what a callback adds to the model

class AddsBuffer(Callback):
    "As fasterai's SparsifyCallback"
    def before_fit(self):
        self.model[0].register_buffer('mask', (torch.arange(32).view(8,4)%3>0).float().to(self.model[0].weight.device))
    def after_step(self):
        with torch.no_grad(): self.model[0].weight.mul_(self.model[0].mask)

@case()
def a_buffer():
    a,b = fitted(AddsBuffer)
    same_model(a, b)
    assert 'mask' in dict(b.model[0].named_buffers()) and (host(b.model[0].weight)==0).sum()==11
    for o in (a,b):
        set_seed(3)
        o.remove_cb(AddsBuffer)
        o.fit(1, .05)
    same_model(a, b)

class Prunes(Callback):
    def before_fit(self): prune.custom_from_mask(self.model[0], 'weight', (torch.arange(32).view(8,4)%3>0).float().to(self.model[0].weight.device))

@case('one_core','ranks')
def pruned():
    a,b = fitted(Prunes)
    same_model(a, b)
    assert {'weight_orig','weight_mask'}=={k for k in b.model[0].state_dict() if 'weight' in k}
    prune.remove(b.model[0], 'weight')
    assert (host(b.model[0].weight)==0).sum()==11

class Doubled(nn.Module):
    def __init__(self, by=2.): super().__init__(); self.by = by
    def forward(self, w): return w*self.by

class Parametrizes(Callback):
    "In the middle of a training, when steps have replaced what the weights are stored in"
    def before_epoch(self):
        if self.epoch==1: parametrize.register_parametrization(self.model[0], 'weight', Doubled())

@case('one_core','ranks','sharded')
def parametrized():
    a,b = fitted(Parametrizes, ds=data(256))
    same_model(a, b)
    assert parametrize.is_parametrized(b.model[0], 'weight')
    a.remove_cb(Parametrizes), b.remove_cb(Parametrizes)
    for o in (a,b):
        set_seed(3)
        o.fit(1, .05) # it goes as what it is
        parametrize.remove_parametrizations(o.model[0], 'weight')
    close(a.model[0].weight, b.model[0].weight)

class Replaces(Callback):
    "The head of the model in the middle of a training, with an optimizer for it"
    def before_epoch(self):
        if self.epoch!=1: return
        head = nn.Linear(8, 2).to(next(self.model.parameters()).device)
        with torch.no_grad(): head.weight.fill_(.1), head.bias.zero_()
        self.model[2] = head
        self.learn.create_opt()
        self.opt.set_hyper('lr', .05)

@case('one_core','ranks','sharded')
def replaced_layer():
    a,b = fitted(Replaces, epochs=3)
    sa,sb = a.model.state_dict(),b.model.state_dict()
    for k in sa: close(sa[k], sb[k])
    assert {id(p) for p in b.model.parameters()}=={id(p) for pl in b.opt.param_lists for p in pl}

# ---- what a notebook does to the model between two fits

@case()
def a_model_that_was_moved():
    "`learn.model.cpu()` after a fit: the next goes on with the optimizer's state, and tied weights stay tied"
    class Tied(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4,4), nn.ReLU(), nn.Linear(4,4), nn.Linear(4,2))
            self[2].weight = self[0].weight
    a,b = fitted(mk=Tied)
    for o in (a,b):
        o.model.cpu()
        set_seed(3)
        o.fit(1, .05)
    same_model(a, b)
    assert b.model[2].weight is b.model[0].weight

@case('one_core','ranks')
def a_new_head():
    "without an optimizer for it, as tsai's MVP has it: the rest trains, as in plain fastai, and it is said"
    a,b = fitted()
    for o in (a,b):
        set_seed(4)
        o.model[2] = nn.Linear(8, 2)
        with redirect_stderr(io.StringIO()) as said, warnings.catch_warnings():
            warnings.simplefilter('default')
            o.fit(1, .05)
    assert said.getvalue().count('holds 2 parameters that are not the model')==1, said.getvalue() # of a rank, it is shown here
    for p,q in zip(a.model.parameters(), b.model.parameters()): close(p, q)
    for o in (a,b): o.model = nn.Linear(4, 2)
    try: b.fit(1)
    except (AssertionError,LaunchError) as e: assert 'learn.create_opt()' in str(e)
    else: assert False

# ---- whatever fails on the way home

class Sits:
    "Can be pickled, and not be read where it was not made"
    def __init__(self): self.pid = os.getpid()
    def __setstate__(self, state):
        if state['pid']!=os.getpid(): raise OSError('made in another process')

class KeepsSits(Callback):
    def __init__(self, what): self.what = what
    def before_fit(self): self.kept = self.what()

@case('ranks')
def a_way_home_that_fails():
    "What cannot be written, what cannot be read: the trained weights are there, and it is named"
    for what,text in ((lambda: (o for o in ()), 'kept \\(generator\\)'), (Sits, 'all but weights \\(OSError: made in another process')):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            a,b = fitted(lambda: KeepsSits(what))
        for p,q in zip(a.model.parameters(), b.model.parameters()): close(p, q)
        assert any(re.search(text, str(o.message)) for o in said), [str(o.message) for o in said]
        b.remove_cb(KeepsSits)
        b.fit(1)

# ---- modules and tensors that callbacks hold

teacher_learn = None

class Distills(Callback):
    "As fasterai's KnowledgeDistillationCallback: a teacher that was trained on the cores, and a projection of its own"
    def __init__(self, teacher): self.teacher,self.scale = teacher,torch.tensor([2.])
    def before_fit(self): self.teacher.eval()
    def after_loss(self):
        if not self.training: return
        with torch.no_grad(): t = self.teacher(self.x)
        self.learn.loss_grad = self.loss_grad+self.scale[0]*F.mse_loss(self.pred, t)
        self.learn.loss = self.loss_grad.clone()

@case()
def a_teacher():
    teachers = [o.model for o in fitted()]
    weights = [[p.detach().clone() for p in m.parameters()] for m in teachers]
    a,b = [learner(Distills(m), on) for m,on in zip(teachers, (False,True))]
    for o in (a,b):
        set_seed(7)
        o.fit(2, .05)
    same_model(a, b)
    for m,ws in zip(teachers, weights):
        for p,w in zip(m.parameters(), ws): close(p, w, 0)
    assert b.distills.teacher is teachers[1]

# ---- callbacks that leave `learn` out of their pickle

class LeavesLearn(Callback):
    order = 70
    def __init__(self): self.seen = 0
    def __getstate__(self): return {k: v for k,v in vars(self).items() if k!='learn'}
    def after_batch(self): self.seen += self.training

@case('one_core','ranks')
def callbacks_without_learn():
    a,b = fitted(LeavesLearn)
    assert a.leaves_learn.seen==b.leaves_learn.seen==8 and b.leaves_learn.learn is b

@case('one_core','ranks')
def callbacks_of_this_package():
    "stay the notebook's, with what they have come to; those of one fit go with it"
    learn = learner([meter := TPUMeter(show=False), guard := NaNGuard()], True)
    for n in (1, 2):
        learn.fit(1, .05, cbs=EMACallback())
        assert {id(o) for o in learn.cbs if isinstance(o, (EMACallback,NaNGuard,TPUMeter))}=={id(meter), id(guard)}
        assert learn.tpu_meter is meter and meter.learn is learn and meter.total['samples']==64*n, meter.total

# ---- loaders in callbacks

class UpdatesBN(Callback):
    def before_fit(self): self.first = next(iter(self.dls.train))[0].device.type
    def after_fit(self):
        self.n = sum(len(x) for x,_ in self.dls.train)
        torch.optim.swa_utils.update_bn(self.dls.train, self.model)

@case()
def loaders_in_callbacks():
    "`self.dls.train` has what the model needs; on a rank all samples"
    a,b = fitted(UpdatesBN, mk=lambda: nn.Sequential(nn.Linear(4,8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8,2)), epochs=1)
    assert b.updates_bn.first=='xla' and b.updates_bn.n==64

# ---- globals that pickle refuses

@functools.lru_cache(None)
def cached(n): return n if n<2 else cached(n-1)+cached(n-2)

@functools.singledispatch
def kind_of(o): return 'any'
@kind_of.register
def _(o:int): return 'int'

class Table:
    @functools.cache
    def at(self, i): return i+1
    @functools.singledispatchmethod
    def show(self, o): return 'any'
    @show.register
    def _(self, o:str): return 'str'

table,lock,calls = Table(),threading.RLock(),[]
log = logging.getLogger('round.trip')

class UsesGlobals(Callback):
    def after_epoch(self):
        with lock: calls.append((cached(10), kind_of(1), kind_of('a'), table.at(3), table.show('a'), table.show(1)))
        log.info(f'epoch {self.epoch}')

@case('ranks')
def globals_that_pickle_refuses():
    "Functions under a cache, single dispatch, locks and loggers: as in plain fastai, once"
    res = []
    log.setLevel(logging.INFO)
    for on in (False, True):
        said = io.StringIO()
        log.handlers = [logging.StreamHandler(sys.stdout)]
        sys.stdout,old = said,sys.stdout
        log.handlers[0].stream = sys.stdout
        try: learner(UsesGlobals(), on).fit(2)
        finally: sys.stdout = old
        res.append(([*calls], said.getvalue()))
        calls.clear()
    assert res[0]==res[1], res

@case('ranks')
def a_logger_with_a_file():
    "is written by each rank"
    log.handlers = [logging.FileHandler('said')]
    log.handlers[0].setFormatter(logging.Formatter('rank says %(message)s'))
    log.setLevel(logging.INFO)
    learner(UsesGlobals(), True).fit(2)
    calls.clear()
    assert sorted(Path('said').read_text().splitlines())==sorted([f'rank says epoch {i}' for i in range(2)]*N)
    log.handlers = []

class NeedsGenerator(Callback):
    def after_batch(self): next(endless)
endless = iter(lambda: 0, 1)
generator = (o for o in range(9))
def uses_generator(rank): return next(generator)

@case('ranks')
def what_cannot_go_is_named():
    "before anything starts"
    get_pool(N).close()
    for f in (lambda: get_pool(N).run(uses_generator), lambda: learner(Callback(after_batch=lambda self: next(generator)), True).fit(1)):
        try: f()
        except TypeError as e: assert 'generator' in str(e) and 'cannot be sent to or from a rank' in str(e), e
        else: assert False
    assert not get_pool(N).is_open

# ---- memory

class Rows:
    "A dataset that looks into an array of the notebook's"
    def __len__(self): return 64
    def __getitem__(self, i): return torch.from_numpy(big[i*1000:i*1000+4].copy()),torch.tensor(i%2)

class Fails(Callback):
    def after_pred(self):
        if self.training and self.train_iter==2: raise ValueError('as it was asked to')

def megabytes():
    "Proportional set size of this process and of its children"
    import psutil
    gc.collect()
    return sum(o.memory_full_info().pss for o in (psutil.Process(), *psutil.Process().children(recursive=True)))/1e6

@case('ranks,slow')
def memory_stays():
    "over fits, new Learners, `lr_find`, `get_preds` and failed fits, with an array of 100 MB among the globals, which goes to the ranks once"
    global big
    big = np.random.RandomState(0).rand(100*250_000).astype(np.float32)
    learn,fails = [learner(cbs, True, ds=Rows()) for cbs in (None, Fails())]
    def failed():
        try: fails.fit(1)
        except LaunchError as e: assert isinstance(e.__cause__, ValueError)
        else: assert False
    kinds = [lambda: learn.fit(1), lambda: learner(None, True, ds=Rows()).fit(1), lambda: learn.lr_find(num_it=8, show_plot=False), learn.get_preds]
    held = []
    for i in range(5):
        for f in kinds:
            with learn.no_bar(): f()
        held.append(megabytes())
    assert max(held[2:])-held[1]<50, held
    big[0] += 1 # what has changed is sent, in place of what was
    for f in (failed, failed, lambda: learn.fit(1)): f()
    assert megabytes()-held[1]<50
    del big

# ---- modes and workers

@case('one_core','ranks')
def anomaly_mode():
    "A NaN is found where it is made, as in plain fastai"
    class Bad(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(4, 2)
        def forward(self, x): return torch.sqrt(self.lin(x)*0-0*x.sum()) # the gradient of a root at 0
    said = []
    for on in (False, True):
        with torch.autograd.set_detect_anomaly(True):
            try: learner(on=on, mk=Bad).fit(1, 1.)
            except RuntimeError as e: said.append(re.search(r"Function '(\w+)' returned nan", str(e))[1])
    assert len({*said})==1 and len(said)==2, said

class Doubles(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.full((4,), i/64),torch.tensor(i%2)

@case('ranks,slow')
def spawned_workers():
    "of a dataset class of the notebook"
    dls = DataLoaders(*[torch.utils.data.DataLoader(Doubles(), batch_size=4, num_workers=1, multiprocessing_context='spawn') for _ in range(2)])
    learn = Learner(dls, nn.Linear(4, 2), loss_func=CrossEntropyLossFlat()).to_tpu_distributed(2, processes=True)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert len(learn.recorder.losses)==8

if __name__=='__main__': groups.main(*sys.argv[1:])
else:
    import pytest

    @pytest.mark.parametrize('group,name', [pytest.param(*o, marks=pytest.mark.slow) if 'slow' in o[0] else o for o in groups.names])
    def test_round_trip(group, name): groups.check(group, name)
