"A Learner that is compiled for a TPU as its user has it: nothing of theirs is written, what they have patched counts, it may be on a device; what cannot be is said"
from pathlib import Path
import pytest, torch
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from fastai.vision.all import *
from fastai.callback.tensorboard import TensorBoardCallback
import fastai_xla.all
from fastai_xla.checkpoint import TPUCheckpoint
from fastai_xla.aot import compile as compiling, CompileError
from fastai_xla.sharding import ShardRule
from fresh import run_ok
from test_tpu_compile import as_fork, children, forks_serve, no_process_left, SimpleNamespace, slow, subprocess

for _nm in [o for o in dir() if o.startswith('test')]: del globals()[_nm]   # fastcore's own would be collected as tests

def learner(n=32, n_valid=8, bs=8, cbs=(), cls=Learner, **kwargs):
    torch.manual_seed(0)
    ds = [(torch.randn(4), torch.randn(1)) for _ in range(n)]
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return cls(DataLoaders(TfmdDL(ds, bs=bs), TfmdDL(ds[:n_valid], bs=bs)), model, loss_func=MSELossFlat(), cbs=cbs, **kwargs)

forking = SimpleNamespace(Popen=as_fork, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)

@pytest.fixture(scope='module')
def cache(tmp_path_factory): return tmp_path_factory.mktemp('programs')

@pytest.fixture(autouse=True)
def in_forks(monkeypatch, tmp_path, cache):
    "In a folder of the user's; the child is a fork of a process that has imported torch_xla and fastai"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('CACHE', str(cache))
    monkeypatch.setattr(compiling, 'subprocess', forking)

def compiled(learn, name='colab', *args, **kwargs): return learn.compile_for(name, *args, fast=True, limit=120, **{'cache': os.environ['CACHE'], **kwargs})
def sorts(r): return any('sort' in o for o in [*[w.kind for w in r.programs['train'].works], *[k for k,_ in r.programs['train'].unknown]])

class Sorts(Callback):
    "A part of the program"
    def after_pred(self): self.learn.pred = self.pred.sort(0)[0]
class Says(nn.Module):
    def forward(self, x):
        print('tracing what the model says')
        return x

def test_nothing_of_the_users_is_written(tmp_path, capfd, no_process_left):
    "What only shows, follows or writes stays here; what the Learner saves is in a folder of the child's"
    (tmp_path/'history.csv').write_text('of an earlier fit')
    class Saves(Callback):
        def before_train(self): self.learn.save('in_its_path')
    cbs = [CSVLogger(), SaveModelCallback(monitor='train_loss', every_epoch=True), ReduceLROnPlateau(), TensorBoardCallback(tmp_path/'tb', trace_model=False),
        TPUCheckpoint(tmp_path/'checkpoints'), Sorts(), Saves()]
    learn = learner(n=8, cbs=cbs, path=tmp_path)
    learn.model,before = nn.Sequential(Says(), learn.model),list(learn.cbs)
    r = compiled(learn)
    assert {o.name: o.read_text() for o in tmp_path.rglob('*')}=={'history.csv': 'of an earlier fit'}
    assert list(learn.cbs)==before and learn.csv_logger.learn is learn and 'what the model says' not in ''.join(capfd.readouterr())
    assert sorts(r) and 'CSVLogger, SaveModelCallback, ReduceLROnPlateau, TensorBoardCallback, TPUCheckpoint' in repr(r)

on_devices = """
import os, sys
sys.path.insert(0, %r)
os.environ['CACHE'],form = %r,%r
if form=='sharded': os.environ['CPU_NUM_DEVICES'] = '4'
from test_compile_for import *
compiling.subprocess = forking
attach = {'tpu': dict(), 'tpu_distributed': dict(n_cores=2, sync_bn=False), 'ranks': dict(n_cores=2, processes=True, sync_bn=True), 'tpu_sharded': dict(rules=[ShardRule('0.weight', min_size=0)])}[form]
slice = 'colab' if form=='tpu' else 'v5e-4'
learn = learner(cbs=CSVLogger())
def seen(): return [(p.device, p.requires_grad) for p in learn.model.parameters()], list(learn.cbs), learn.dls, vars(learn).keys(), learn.path, learn.opt
def compile_here():
    before = seen()
    r = compiled(learn, slice)
    assert seen()==before
    return r
with learn.no_logging(), getattr(learn, f'{"tpu_distributed" if form=="ranks" else form}_ctx')(**attach):
    first = compile_here()
    learn.fit(1)
    after_fit = compile_here()
    learn.fit(1)
assert first.job.strategy==form.removeprefix('tpu_') and first.job.options.get('sync_bn')==attach.get('sync_bn')
assert first.memory['optimizer state']==after_fit.memory['optimizer state']==2*first.memory['parameters']
if form=='tpu_sharded': assert first.memory['parameters']<196 and len(first.job.options['rules'])==1, first
"""

@slow
@pytest.mark.parametrize('form', ['tpu','tpu_distributed','ranks','tpu_sharded'])
def test_a_learner_that_is_on_devices(form, tmp_path, cache):
    run_ok(on_devices % (str(Path(__file__).parent), str(cache), form), cwd=tmp_path)

@pytest.mark.parametrize('name,strategy', [('colab',None), *[pytest.param('v5e-4', o, marks=slow) for o in (None,'sharded')]])
def test_accumulated_gradients(name, strategy):
    "The last of four batches ends with the optimizer; its memory has the gradients of those before"
    r = compiled(learner(n=32, cbs=GradientAccumulation(32)), name, strategy)
    train,n = r.programs['train'],196
    assert 'A step has 4 batches: reported is the last one' in repr(r)
    assert r.memory['optimizer state']==2*n and r.memory['gradients of the batches before']==n
    assert train.memory.alias>=3*n and train.memory.args>4*n

@slow
def test_a_loss_of_all_ranks():
    "Predictions and targets, which are of several types, are gathered within the step"
    learn,ds = learner(),[(torch.randn(4), tensor(i%3)) for i in range(32)]
    learn.dls,learn.model,learn.loss_func = DataLoaders(TfmdDL(ds, bs=8), TfmdDL(ds, bs=8)),nn.Linear(4, 3),CrossEntropyLossFlat(weight=tensor([1.,2,3]))
    train = compiled(learn, 'v5e-4', 'ranks', loss='batch').programs['train']
    assert any('all-gather' in o for o in [*[w.kind for w in train.works], *[k for k,_ in train.unknown]])

@slow
def test_few_samples_and_batches_that_are_cancelled():
    assert 'Compiled for 5 samples, since the training set gives no batch of bs=8.' in repr(compiled(learner(n=5)))
    few,many = [compiled(learner(n=n), 'v5e-4', 'sharded').programs['train'] for n in (8, 32)]
    assert few.memory==many.memory and few.cycles==many.cycles # a batch an epoch: the second step was a batch of validation
    class SkipsTwo(Callback):
        def before_batch(self):
            if self.training and self.iter<2: raise CancelBatchException
    class Cancels(Callback):
        def before_fit(self): raise CancelFitException
    assert compiled(learner(cbs=SkipsTwo())).memory==compiled(learner()).memory
    with pytest.raises(CompileError, match='no program was written: the DataLoader gave no batch, or a callback has cancelled each'): compiled(learner(cbs=Cancels()))

@slow
def test_patches_of_the_users(monkeypatch):
    old = nn.Linear.forward
    def forward(self, x): return old(self, x).sort(0)[0]
    def half(self): return self.pred/2
    class Halves(Callback):
        def after_pred(self): self.learn.pred = self.learn.half_pred()
    plain = compiled(learner())
    monkeypatch.setattr(nn.Linear, 'forward', forward)
    monkeypatch.setattr(Learner, 'half_pred', half, raising=False)
    assert sorts(compiled(learner(cbs=Halves()))) and not sorts(plain)
    assert sorts(compiled(learner(cbs=Halves()), 'v5e-4'))

def test_no_validation():
    learn = learner()
    learn.dls.loaders.pop()
    r = compiled(learn)
    assert list(r.programs)==['train'] and 'No validation step: there is no validation set.' in repr(r) and r.fits

@slow
def test_loaders_of_torch_with_workers():
    learn = learner()
    train,valid = [TorchDataLoader(o, batch_size=8, num_workers=2, persistent_workers=True) for o in (learn.dls.train_ds, learn.dls.valid_ds)]
    learn.dls = DataLoaders(train, valid)
    assert compiled(learn).bs==8

def test_what_cannot_be_sent():
    class Keeps(Callback):
        def __init__(self): self.lines = (o for o in ())
    learn = learner(cbs=Keeps())
    with pytest.raises(TypeError, match='lines cannot be sent'): compiled(learn)
    assert len(learn._grab_cbs(ProgressCallback))==1
