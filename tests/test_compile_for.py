"A Learner that is compiled for a TPU as its user has it: nothing of theirs is written, what they have patched counts, it may be on a device; what cannot be is said"
import socket, threading
from functools import partial
from pathlib import Path
import pytest, torch
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from fastai.vision.all import *
from fastai.callback.tensorboard import TensorBoardCallback
import fastai_xla.all
from fastai_xla.checkpoint import TPUCheckpoint
from fastai_xla.monitor import compile as compiling, CompileError
from fastai_xla.sharding import ShardRule
from fresh import run, run_ok
from test_tpu_compile import as_fork, children, forks_serve, no_process_left, SimpleNamespace, subprocess

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

class Logs(Callback):
    "A part of the program, which logs too"
    def after_pred(self): self.learn.pred = self.pred.sort(0)[0]
    def before_batch(self): Path('log.txt').open('a').write('a line')
class Reports(Callback):
    def after_pred(self): socket.create_connection(('127.0.0.1', 9))
class Saves(Callback):
    def before_fit(self): self.learn.save(Path.cwd()/'here')
    def before_train(self): self.learn.save('in_its_path')
class Says(nn.Module):
    def forward(self, x):
        print('tracing what the model says')
        return x

def test_nothing_of_the_users_is_written(tmp_path, capfd, no_process_left):
    (tmp_path/'history.csv').write_text('of an earlier fit')
    cbs = [CSVLogger(), SaveModelCallback(monitor='train_loss', every_epoch=True), ReduceLROnPlateau(), TensorBoardCallback(tmp_path/'tb', trace_model=False),
        TPUCheckpoint(tmp_path/'checkpoints'), Logs(), Reports(), Saves()]
    learn = learner(n=8, cbs=cbs, path=tmp_path)
    learn.model,before = nn.Sequential(Says(), learn.model),list(learn.cbs)
    r = compiled(learn)
    assert {o.name: o.read_text() for o in tmp_path.rglob('*')}=={'history.csv': 'of an earlier fit'}
    assert list(learn.cbs)==before and learn.csv_logger.learn is learn and 'what the model says' not in ''.join(capfd.readouterr())
    assert sorts(r)
    said = repr(r)
    for o in ('CSVLogger, SaveModelCallback, ReduceLROnPlateau, TensorBoardCallback, TPUCheckpoint', f'`Logs.before_batch` was left out from where {tmp_path}/log.txt would',
        '`Reports.after_pred` was left out from where something would have been sent', f'`Saves.before_fit` was left out from where {tmp_path}/here.pth would'): assert o in said, said

def test_a_model_that_writes_is_an_error(tmp_path):
    class Writes(nn.Module):
        def forward(self, x):
            torch.save(x.shape, tmp_path/'shape.pth')
            return x
    learn = learner()
    learn.model = nn.Sequential(Writes(), learn.model)
    with pytest.raises(CompileError, match=r"in the model's module '0', a Writes: WriteRefused: .*shape.pth would have been written, and a compile writes"): compiled(learn)
    assert not [*tmp_path.iterdir()]

def test_a_cache_removes_only_its_own_files(tmp_path):
    for i in range(250): (tmp_path/f'{i}.txt').write_text('')
    for _ in range(2): compiled(learner(), cache=tmp_path)
    assert len([*tmp_path.glob('*.txt')])==250 and len([*tmp_path.glob('*.tpu_program')])==2

in_all_forms = """
import os, sys
sys.path.insert(0, %r)
os.environ['CACHE'],form = %r,%r
if form=='sharded': os.environ['CPU_NUM_DEVICES'] = '4'
from test_compile_for import *
compiling.subprocess = forking
attach = {'tpu': dict(), 'tpu_distributed': dict(n_cores=2, sync_bn=True), 'tpu_sharded': dict(rules=[ShardRule('0.weight', min_size=0)])}[form]
slice = 'colab' if form=='tpu' else 'v5e-4'
learn = learner(cbs=CSVLogger())
def seen(): return [(p.device, p.requires_grad) for p in learn.model.parameters()], list(learn.cbs), learn.dls, vars(learn).keys(), learn.path, learn.opt
def compile_here():
    before = seen()
    r = compiled(learn, slice)
    assert seen()==before
    return r
with learn.no_logging(), getattr(learn, f'{form}_ctx')(**attach):
    first = compile_here()
    learn.fit(1)
    after_fit = compile_here()
    learn.fit(1)
assert first.job.form==form.removeprefix('tpu_') and first.job.options.get('sync_bn')==attach.get('sync_bn')
assert first.memory['optimizer state']==after_fit.memory['optimizer state']==2*first.memory['parameters']
if form=='tpu_sharded': assert first.memory['parameters']<196 and len(first.job.options['rules'])==1, first
"""

@pytest.mark.parametrize('form', ['tpu','tpu_distributed','tpu_sharded'])
def test_a_learner_that_is_on_devices(form, tmp_path, cache):
    run_ok(in_all_forms % (str(Path(__file__).parent), str(cache), form), cwd=tmp_path)

class EachSecond(Callback):
    "Accumulates in its own way"
    def before_step(self):
        if (self.train_iter+1)%2: raise CancelBatchException

@pytest.mark.parametrize('name,form', [('colab',None), ('v5e-4',None), ('v5e-4','sharded')])
def test_accumulated_gradients(name, form):
    "A step of four batches ends with the optimizer; its memory has gradients, and the optimizer's state in each batch"
    r = compiled(learner(n=32, cbs=GradientAccumulation(32)), name, form)
    train,n = r.programs['train'],196
    assert [o.n for o in train.parts]==[3, 1] and [o.place for o in train.parts]==['the end of a batch before its last','the end of the step']
    micro,last = [o.report for o in train.parts]
    assert r.memory['optimizer state']==2*n and r.memory['gradients of the batches before']==n
    assert last.memory.alias>=3*n and train.memory.total==max(micro.memory.total, last.memory.total) and train.cycles==3*micro.cycles+last.cycles
    assert micro.memory.args>4*n

def test_gradients_accumulated_by_the_users_own_callback():
    r = compiled(learner(cbs=EachSecond()))
    assert [o.n for o in r.programs['train'].parts]==[1, 1] and r.memory['optimizer state']==2*196
    r = compiled(learner(cbs=EachSecond()), 'v5e-4')
    assert 'No weight is written in it' in repr(r)

def test_a_batch_that_is_the_whole_step_is_one_program():
    assert not hasattr(compiled(learner(cbs=GradientAccumulation(8))).programs['train'], 'parts')

def test_few_samples():
    r = compiled(learner(n=5))
    assert 'Compiled for 5 samples, since the training set gives no batch of bs=8.' in repr(r)
    few,many = [compiled(learner(n=n), 'v5e-4', 'sharded').programs['train'] for n in (8, 32)]
    assert few.memory==many.memory and few.cycles==many.cycles # a batch an epoch: the second step was a batch of validation
    learn = learner(n=5)
    learn.dls.train.drop_last = True
    with pytest.raises(ValueError, match='no batches, and a step needs one: 5 samples with bs=8 and drop_last=True'): compiled(learn)

@pytest.mark.parametrize('opt', ['Adam','SGD','Adagrad','AdamW'])
def test_state_of_torchs_optimizers(opt):
    "as much as it holds"
    learn = learner(opt_func=partial(OptimWrapper, opt=getattr(torch.optim, opt), **(dict(amsgrad=True) if opt=='AdamW' else {})))
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    held = sum(t.numel()*4 for st in learn.opt.opt.state.values() for t in st.values() if t is not None and t.ndim)
    learn.opt = None
    assert compiled(learn).memory['optimizer state']==held==196*dict(Adam=2, SGD=0, Adagrad=1, AdamW=3)[opt]

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

@pytest.mark.parametrize('valid,why', [(None,'there is no validation set'), (0,'the validation DataLoader has no batches'), (1,'a single sample is predicted on the host')])
def test_no_validation(valid, why):
    learn = learner(n_valid=valid or 0)
    if valid is None: learn.dls.loaders.pop()
    r = compiled(learn)
    assert list(r.programs)==['train'] and f'No validation step: {why}.' in repr(r) and r.fits

def test_loaders_of_torch_with_workers():
    learn = learner()
    train,valid = [TorchDataLoader(o, batch_size=8, num_workers=2, persistent_workers=True) for o in (learn.dls.train_ds, learn.dls.valid_ds)]
    learn.dls = DataLoaders(train, valid)
    assert compiled(learn).bs==8
    with pytest.raises(TypeError, match='a DataLoader has no `new`'): learn.largest_batch('colab', most=4)

def test_what_is_cancelled():
    class SkipsTwo(Callback):
        def before_batch(self):
            if self.training and self.iter<2: raise CancelBatchException
    class Cancels(Callback):
        def before_fit(self): raise CancelFitException
    assert compiled(learner(cbs=SkipsTwo())).memory==compiled(learner()).memory
    with pytest.raises(CompileError, match='no program was written: the DataLoader gave no batch, or a callback has cancelled each'): compiled(learner(cbs=Cancels()))

def test_what_cannot_be_sent():
    class Keeps(Callback):
        def __init__(self): self.lock = threading.Lock()
    learn = learner(cbs=Keeps())
    with pytest.raises(TypeError, match='lock cannot be sent'): compiled(learn)
    assert len(learn._grab_cbs(ProgressCallback))==1
