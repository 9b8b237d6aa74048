"Steps of Learners through the TPU's own compiler: they compile, fit, and say so; what cannot be is an error, and no process stays"
import os, signal, threading, time
import psutil, pytest, torch
from torch import nn
from fastai.vision.all import accuracy, CrossEntropyLossFlat, DataLoaders, Learner, TfmdDL
import fastai_xla.all
from fastai_xla.runtime import runtime_started
from fastai_xla.monitor import CompileError, libtpu, ProgramReport, read_program, tpu_slice

def learner(bs=16, wide=16, n=64, **kwargs):
    torch.manual_seed(0)
    ds = list(zip(torch.randn(n, 3, 16, 16), torch.randint(0, 10, (n,))))
    model = nn.Sequential(nn.Conv2d(3, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, wide),
        nn.Linear(wide, 10))
    return Learner(DataLoaders(TfmdDL(ds, bs=bs, shuffle=True), TfmdDL(ds, bs=bs)), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, **kwargs)

def children(): return {o.pid for o in psutil.Process().children(recursive=True) if o.status()!=psutil.STATUS_ZOMBIE}

@pytest.fixture
def no_process_left():
    before = children()
    yield
    until = time.time()+10
    while children()-before and time.time()<until: time.sleep(.1)
    assert not children()-before

@pytest.mark.parametrize('name,form,options,n', [('colab',None,{},1), ('v5e-4',None,{},4), ('v6e-4','sharded',dict(fsdp=4),4), ('v4-8','sharded',dict(fsdp=2, replica=2),4)])
def test_forms(name, form, options, n, no_process_left):
    learn = learner(wide=256 if form else 16)
    r = learn.compile_for(name, form, fast=True, **options)
    train = r.programs['train']
    assert r.fits and r.slice.n==n and train.cycles>1000 and r.programs['valid'].cycles<train.cycles
    n_params = sum(p.numel()*4 for p in learn.model.parameters())
    held = r.memory['parameters']
    assert held==n_params if not form else held<n_params*.7
    assert r.memory['optimizer state']==2*held
    assert sum(r.memory.values())==train.memory.total
    assert r.programs['valid'].memory.args>held
    assert ('all-reduce' in train.collectives)==(n>1)
    assert train.memory.alias>=3*held # parameters and optimizer state are written in place
    assert name!='colab' or 'to_bf16' in repr(r)
    assert next(learn.model.parameters()).device.type=='cpu' and not runtime_started()

def test_what_does_not_fit(no_process_left):
    class Large(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.Linear(768, 10); self.big = nn.Parameter(torch.zeros(1))
        def forward(self, x): return self.l(x.flatten(1)) + (self.big.expand(40_000, 200_000).sin().cumsum(0)*self.big).sum()
    learn = learner()
    learn.model = Large()
    with pytest.raises(CompileError, match='training step could not be compiled') as e: learn.compile_for('colab', fast=True)
    assert e.value.is_memory

def test_a_learner_that_cannot_be_traced(no_process_left):
    learn = learner()
    learn.model = nn.Linear(7, 2)
    with pytest.raises(CompileError, match='training step could not be traced: RuntimeError: .*mul'): learn.compile_for('colab')

def test_limit(no_process_left):
    with pytest.raises(TimeoutError, match='longer than the time limit of 1 s.*fast=True'): learner().compile_for('colab', limit=1)

def test_ctrl_c(no_process_left):
    threading.Timer(4, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt): learner().compile_for('colab')

def test_without_libtpu(monkeypatch):
    find_spec = libtpu.importlib.util.find_spec
    monkeypatch.setattr(libtpu.importlib.util, 'find_spec', lambda name: None if name=='libtpu' else find_spec(name))
    with pytest.raises(ImportError, match=r"pip install 'fastai_xla\[compile\]'"): learner().compile_for('colab')

def test_another_libtpu(monkeypatch):
    monkeypatch.setattr(libtpu, 'known_libtpu', ('0.0.1',))
    with pytest.raises(ImportError, match=r'pip install libtpu==0.0.1'): learner().compile_for('colab')

def test_bad_arguments():
    with pytest.raises(ValueError, match="no TPU slice 'v7-8'"): learner().compile_for('v7-8')
    with pytest.raises(ValueError, match="`form` can be one of"): learner().compile_for('colab', form='x')
