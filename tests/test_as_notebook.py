"What a notebook does, the replicas of its pool do too: classes and functions of `__main__`, their globals, user modules, exceptions and hooks."
import sys
from cases import Groups
from fresh import repo

groups = Groups(__file__, lambda: dict(PJRT_DEVICE='CPU', CPU_NUM_DEVICES=None, MPLBACKEND='Agg', XLA_FLAGS='--xla_backend_optimization_level=0'))
case = groups.case

# ---- in the process, whose `__main__` is this file, as that of a notebook is what its cells define

import importlib, os, signal, threading, time, warnings
from collections import Counter
from pathlib import Path
from fastai.vision.all import *
from fastai.callback.all import *
from fastai_xla.all import *
from fastai_xla.launch import get_pool, LaunchError
for o in [o for o in globals() if o.startswith('test')]: del globals()[o]  # fastai's, which pytest would collect

def learner(cbs=None, n=32, **kwargs):
    set_seed(1)
    x = torch.randn(n, 4)
    ds = list(zip(x, (x.sum(1)>0).long()))
    dls = DataLoaders(TfmdDL(ds, bs=4, shuffle=True, num_workers=0), TfmdDL(ds[:16], bs=4, num_workers=0))
    learn = Learner(dls, nn.Sequential(nn.Linear(4,4), nn.ReLU(), nn.Linear(4,2)), **{**dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs), **kwargs})
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def fitted(cbs=None, pool=True, epochs=1, **kwargs):
    learn = learner(cbs, **kwargs)
    if pool: learn.to_tpu_distributed(2, processes=True)
    learn.fit(epochs, 1e-2)
    return learn

def pids(): return [p.pid for p in get_pool(2)._procs.procs]

def raised(f):
    try: f()
    except BaseException as e: return e

# ---- Cancel exceptions, and hooks that were removed

def cancels(event, exc):
    def raises(self): raise exc
    return Callback(**{event: raises})

@case('notebook')
def cancel_exceptions():
    "As a class or an instance: as many events, losses and values as in plain fastai"
    for event,exc in (('after_pred', CancelBatchException()), ('before_validate', CancelValidException()), ('before_fit', CancelFitException)):
        a,b = [fitted(cancels(event, exc), pool=pool, epochs=2, n=32 if pool else 16) for pool in (False, True)]
        got = [(len(vars(o.recorder).get('losses', ())), len(vars(o.recorder).get('values', ())), o.epoch) for o in (a,b)]
        assert got[0]==got[1], (event, exc, got)

class Keeps(Callback):
    "Keeps the handle of a hook that it removed"
    def before_fit(self): self.handle,self.n = self.model[0].register_forward_hook(self.count),0
    def count(self, m, i, o): self.n += 1
    def after_fit(self): self.handle.remove()

@case('notebook')
def spent_hooks():
    "A second fit, with the same numbers"
    learn = fitted([ActivationStats(with_hist=True), Keeps()])
    first = len(learn.activation_stats.stats),learn.keeps.n
    learn.fit(2)
    assert (*first, len(learn.activation_stats.stats), learn.keeps.n)==(4,6,8,12), (first, len(learn.activation_stats.stats), learn.keeps.n)
    assert 0<=learn.activation_stats.layer_stats(-1)[2][-1]<=1

# ---- Ctrl-C

class Slow(Callback):
    "Takes a second before the first batch"
    def before_fit(self): self.seen = 0
    def before_train(self): time.sleep(1)
    def before_batch(self): self.seen += 1

@case('notebook')
def ctrl_c_before_the_first_batch():
    "The replicas live on, and so does what the Learner was"
    fitted()
    old = pids()
    learn = learner(Slow()).to_tpu_distributed(2, processes=True)
    threading.Timer(.7, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert isinstance(raised(lambda: learn.fit(3)), KeyboardInterrupt)
    assert pids()==old and get_pool(2).is_open and learn.slow.seen==1 and len(learn.recorder.losses)==1
    learn.remove_cb(Slow)
    learn.fit(1)
    assert pids()==old and len(learn.recorder.losses)==4

# ---- globals and what else functions share

history,losses,counts,nested,best = [],{},Counter(),dict(log=[]),0
frame,array,tensor_,ema,epochs_seen = pd.DataFrame(dict(loss=[0.])),np.zeros(3),torch.zeros(2),nn.Linear(1, 1),0
alias = nested['log']
class Tracker:
    def __init__(self): self.rows,self.n = [],0
    def log(self, x): self.rows.append(x); self.n += 1
tracker,draws = Tracker(),__import__('random').Random(0)

def note(x): history.append(x)

class Logs(Callback):
    "Writes to globals in every way"
    totals,order = [],80
    def __init__(self, mine): self.mine = mine
    def before_fit(self):
        global epochs_seen,made_in_a_fit,last_learner
        epochs_seen,made_in_a_fit,last_learner = 0,'yes',self.learn
    def after_batch(self):
        if not self.training: return
        counts['batches'] += 1
        array[self.train_iter%3] += 1
        self.mine.append(self.train_iter)
    def after_epoch(self):
        global epochs_seen,best
        epochs_seen += 1
        best = max(best, float(self.recorder.values[-1][-1]))
        note(float(self.recorder.losses[-1]))
        losses[self.epoch] = self.smooth_loss
        nested['log'].append(self.epoch)
        nested['last'] = nested['log']
        frame.loc[len(frame)] = [float(self.epoch)]
        tensor_.add_(1)
        tracker.log(self.epoch)
        Logs.totals.append(self.epoch)
        ema.weight.data.fill_(float(self.epoch)+5)
        draws.random()

def closures():
    n,seen = 0,[]
    def after_epoch(self):
        nonlocal n
        n += 1
        seen.append(n)
    return Callback(after_epoch=after_epoch), lambda: (n, seen)

def state(mine): return dict(history=len(history), losses=[*losses], counts=dict(counts), nested=str(nested), best=best>0, frame=frame.loss.tolist(),
    array=array.tolist(), tensor=tensor_.tolist(), rows=[*tracker.rows], n=tracker.n, totals=[*Logs.totals], epochs_seen=epochs_seen, mine=[*mine], alias=[*alias], fit=made_in_a_fit, ema=ema.weight.item(), drawn=draws.random())

def reset(mine):
    for o in (history, losses, counts, alias, tracker.rows, Logs.totals, mine): o.clear()
    nested.pop('last', None)
    globals().update(best=0, epochs_seen=0)
    array[:],tensor_[:],tracker.n = 0,0,0
    ema.weight.data.zero_()
    draws.seed(0)
    frame.__init__(dict(loss=[0.]))

@case('notebook')
def globals_come_home():
    "What callbacks write is here as in plain fastai, once, and in the objects that others hold; what cannot be is named"
    mine,res = [],[]
    cb,inner = closures()
    shared = history,losses,counts,nested,frame,array,tensor_,tracker,tracker.rows,Logs.totals,alias
    ids = [*map(id, shared)]
    for pool in (False, True):
        reset(mine)
        before = inner()[0]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            learn = fitted([Logs(mine), cb], pool=pool, epochs=2, n=32 if pool else 16)
        res.append(dict(state(mine), n_inner=inner()[0]-before, seen=inner()[1][-2:]!=[]))
        assert [id(o) for o in (history, losses, counts, nested, frame, array, tensor_, tracker, tracker.rows, Logs.totals, nested['log'])]==ids
        assert nested['last'] is nested['log'] is alias and learn.logs.mine is mine and type(learn.logs) is Logs
        assert all(isinstance(o, Tensor) and o.device.type=='cpu' or isinstance(o, float) for o in losses.values()), losses
        named = [str(o.message) for o in said if 'changed on the cores' in str(o.message)]
        assert not named and last_learner is learn, named
    assert res[0]==res[1], f'{res[0]}\n{res[1]}'
    assert Logs.after_epoch.__globals__ is globals() and note.__globals__ is globals(), 'the class is still the one of the notebook'

# ---- modules of the user, patches, settings

class Marks(Callback):
    def before_fit(self): self.said = self.learn.marked(),self.learn.n_marked,Learner.new_mark().__class__ is Marks,Learner.is_mark(self)
    def after_epoch(self): self.learn.writes_down()

patched_log = []
@patch
def writes_down(self:Learner): patched_log.append(self.epoch)
@patch
def marked(self:Learner): return [o.name for o in self.cbs if isinstance(o, Marks)]
@patch(as_prop=True)
def n_marked(self:Learner): return sum(type(o) is Marks for o in self.cbs)
@patch(cls_method=True)
def new_mark(cls:Learner): return Marks()
Learner.is_mark = staticmethod(lambda o: isinstance(o, Marks))

def all_marks(rank, learn): return learn.marked(),learn.n_marked,isinstance(learn.new_mark(), Marks),Learner.is_mark(learn.cbs[-1])

@case('notebook')
def patched_methods_know_classes():
    "A class of the notebook is the same in a callback, in a `@patch`ed method and in what a pool runs, on each rank; what these write comes home"
    want,log = (['marks'],1,True,True),patched_log
    for pool in (False, True): assert fitted(Marks(), pool=pool).marks.said==want
    assert log is patched_log and log==[0,0]
    learn = learner(Marks())
    assert get_pool(2).run(all_marks, learn)==[want]*2==[all_marks(0, learn)]*2

class Asks(Callback):
    def after_epoch(self): self.helper = importlib.import_module('helpers') and helpers.scale(1)

@case('notebook')
def modules_and_settings():
    "As they are in the notebook now"
    global helpers
    Path('helpers.py').write_text('K,log = 2,[]\ndef scale(x):\n    log.append(x)\n    return x*K')
    sys.path.insert(0, os.getcwd())
    import helpers
    assert fitted(Asks()).asks.helper==2 and helpers.log==[1]
    helpers.K = 3
    def inside(rank):
        from helpers import scale
        return scale(1)
    assert get_pool(2).run(inside)==[2]*2, 'from its file'
    assert fitted(Asks()).asks.helper==3 and helpers.log==[1,1]
    Path('helpers.py').write_text('K,log = 50,[]\ndef scale(x):\n    return x*K+1   # edited')
    assert fitted(Asks()).asks.helper==3, 'not reloaded here, so not there'
    importlib.reload(helpers)
    assert fitted(Asks()).asks.helper==51
    def mark(): os.environ['MARKED'] = 'yes'
    pool_setup(mark)
    marked = lambda rank: os.environ.get('MARKED')
    assert get_pool(2).run(marked)==['yes']*2
    assert pool_setup()==[mark]
    pool_setup(mark, remove=True)

@torch.compile(backend='eager')
def compiled_loss(p, y): return F.cross_entropy(p, y)

class Activation(nn.Module):
    "`torch.relu`, that torch has compiled if it is `wrapped`"
    def __init__(self, wrapped): super().__init__(); self.wrapped = wrapped
    def forward(self, x): return compiled_relu(x) if self.wrapped else torch.relu(x)

@torch.compile(backend='eager')
def compiled_relu(x): return torch.relu(x)

@case('notebook')
def wrapped_by_torch_compile():
    "Model, activation and loss that torch has compiled, and used here, train as what they are made of; here they stay wrapped"
    res = []
    for wrapped in (False, True):
        learn = learner(loss_func=compiled_loss if wrapped else CrossEntropyLossFlat())
        learn.model[1] = Activation(wrapped)
        if wrapped: learn.model = torch.compile(learn.model, backend='eager')
        learn.model(torch.ones(2, 4))
        set_seed(5)
        learn.to_tpu_distributed(2, processes=True).fit(1, 1e-2)
        res.append([list(map(list, learn.recorder.values)), [o.tolist() for o in learn.model.parameters()]])
    assert res[0]==res[1] and learn.loss_func is compiled_loss and all(k.startswith('_orig_mod.') for k in learn.model.state_dict())

# ---- exceptions; their ranks end, so they come last

class MyError(Exception):
    def __init__(self, code): super().__init__(code); self.code = code

class Raises(Callback):
    order = 90
    def after_batch(self):
        if self.training and self.train_iter==2: raise MyError(7)

@case('notebook')
def users_exceptions():
    "Each is the cause of a `LaunchError` that names the line; what was written before one is here too"
    n,want = counts['batches'],fitted().recorder.losses
    got = raised(lambda: fitted([Logs([]), Raises()]))
    assert isinstance(got, LaunchError) and isinstance(got.__cause__, MyError) and got.__cause__.code==7, got
    assert "self.train_iter==2: raise MyError(7)" in str(got) and str(got).count('File "')<6, got
    assert counts['batches']==n+2
    assert torch.allclose(torch.stack([*fitted().recorder.losses]), torch.stack([*want]))

if __name__=='__main__': groups.main(*sys.argv[1:])
else:
    import pytest

    @pytest.mark.parametrize('group,name', groups.names)
    def test_as_notebook(group, name): groups.check(group, name)
