"Steps of Learners through the TPU's own compiler: they compile, fit, and say so; what cannot be is an error, and no process stays"
import importlib.metadata, importlib.util, os, signal, subprocess, threading, time
from types import SimpleNamespace
import psutil, pytest, timm, torch
from packaging.specifiers import SpecifierSet
from torch import nn
from fastai.vision.all import accuracy, CrossEntropyLossFlat, DataLoaders, Learner, TfmdDL
import fastai_xla.all
from fastai_xla.runtime.device import runtime_started
from fastai_xla.aot import CompileError, compile as compiling, libtpu, plan_training
from fastai_xla.sharding import make_mesh, ShardRule
from compile_families import FAMILIES
from forks import Forked
from fresh import run

for _nm in [o for o in dir() if o.startswith('test')]: del globals()[_nm]   # fastcore's own would be collected as tests

slow = pytest.mark.slow

def learner(bs=16, wide=16, n=64, **kwargs):
    torch.manual_seed(0)
    ds = list(zip(torch.randn(n, 3, 16, 16), torch.randint(0, 10, (n,))))
    model = nn.Sequential(nn.Conv2d(3, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, wide),
        nn.Linear(wide, 10))
    return Learner(DataLoaders(TfmdDL(ds, bs=bs, shuffle=True), TfmdDL(ds, bs=bs)), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, **kwargs)

def children(): return {o.pid for o in psutil.Process().children(recursive=True) if o.status()!=psutil.STATUS_ZOMBIE}

def as_fork(args, start_new_session, **kwargs): return Forked(args[1:], **kwargs) # which has a session of its own

@pytest.fixture(scope='module', autouse=True)
def forks_serve(): run('-c', 'pass')

@pytest.fixture(autouse=True)
def cold_cache_and_forks(tmp_path, monkeypatch, request):
    "Nothing is compiled yet; the child is a fork of a process that has imported torch_xla and fastai, but in tests named `as_users_start`"
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'cache'))
    if 'as_users_start' not in request.node.name:
        monkeypatch.setattr(compiling, 'subprocess', SimpleNamespace(Popen=as_fork, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT))

@pytest.fixture
def no_process_left():
    before = children()
    yield
    until = time.time()+10
    while children()-before and time.time()<until: time.sleep(.1)
    assert not children()-before

def check_report(learn, r, strategy, n):
    train = r.programs['train']
    assert r.fits and r.slice.n==n and train.cycles>1000 and r.programs['valid'].cycles<train.cycles
    n_params = sum(p.numel()*4 for p in learn.model.parameters())
    held = r.memory['parameters']
    assert held==n_params if not strategy else held<n_params*.7
    assert r.memory['optimizer state']==2*held
    assert sum(r.memory.values())==train.memory.total
    assert r.programs['valid'].memory.args>held
    assert ('all-reduce' in train.collectives)==(n>1)
    assert train.memory.alias>=3*held # parameters and optimizer state are written in place
    assert next(learn.model.parameters()).device.type=='cpu' and not runtime_started()

def test_one_core_as_users_start(no_process_left):
    "From shapes alone `plan_training` says what a step holds, and more activations than the compiler, which recomputes some"
    learn = learner(bs=512, wide=64, n=1024)
    r = learn.compile_for('colab', fast=True)
    check_report(learn, r, None, 1)
    assert 'to_bf16' in repr(r) and 'by module: ' in repr(r)
    p = plan_training(learn.model, make_mesh(n=1), 512, (3,16,16))
    assert [p.memory[k] for k in ('parameters','optimizer state')]==[r.memory[k] for k in ('parameters','optimizer state')]
    assert 1<=p.total/r.programs['train'].memory.total<2.2, (p.memory, r.memory)

@slow
@pytest.mark.parametrize('name,strategy,options,n', [('v5e-4',None,{},4), ('v5e-32','sharded',dict(fsdp=32),32), ('v4-32','sharded',dict(fsdp=4, replica=4, rules=[ShardRule('weight')]),16)])
def test_strategies(name, strategy, options, n, no_process_left):
    "on one host, and sharded over the devices of eight and of four hosts"
    learn = learner(**dict(wide=256, bs=64, n=128) if strategy else {})
    if n==32: learn.model = timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=8, embed_dim=64, num_heads=2, depth=1, num_classes=10)
    r = learn.compile_for(name, strategy, fast=True, **options)
    check_report(learn, r, strategy, n)
    if strategy: assert r.slice.n_hosts==n//4 and r.programs['train'].collectives['all-gather']>1

def test_what_was_compiled_is_kept(tmp_path, no_process_left):
    "in a folder of which other files stay; one that cannot be written costs nothing else"
    for i in range(250): (tmp_path/f'{i}.txt').write_text('')
    first,again = [learner().compile_for('colab', fast=True, cache=tmp_path) for _ in range(2)]
    assert repr(first)==repr(again) and [len([*tmp_path.glob(o)]) for o in ('*.tpu_program','*.txt')]==[2,250]
    assert learner().compile_for('colab', fast=True, cache=tmp_path/'0.txt'/'cache').fits

# ---- the forms that programs take for a TPU

@slow
def test_layouts_of_arguments():
    "libtpu lays out what a program takes as `tpu_layout` says"
    res = run('-c', layouts, timeout=120)
    assert res.returncode==0, res.stderr

layouts = """
import torch
from fastai_xla.aot.libtpu import hlo_message
from fastai_xla.aot.plan import tpu_slice
from fastai_xla.aot.libtpu import TPUCompiler
from fastai_xla.train.steppers import _pinning, tpu_layout
compiler = TPUCompiler(tpu_slice('v5e-1'))
for shape in ((64,64,3,3), (128,64,3,3), (128,64,1,1), (64,128,1,1), (64,3,7,7), (96,1,7,7), (100,96,3,3), (768,3,16,16), (64,48,5,5,5), (64,48,5), (24,10,3,3)):
    for dtype in (torch.float32, torch.bfloat16):
        module,_ = compiler.compile(hlo_message('HloModuleProto').FromString(_pinning(dtype, shape)))
        x, = [o for c in module.computations if c.id==module.entry_computation_id for o in c.instructions if o.opcode=='parameter']
        assert [*x.shape.layout.minor_to_major]==tpu_layout(shape, dtype), (shape, dtype)
"""

@slow
@pytest.mark.parametrize('name', FAMILIES)
def test_families(name, no_process_left):
    make,slice,strategy,options = FAMILIES[name]
    learn = make()
    r = learn.compile_for(slice, strategy, fast=True, limit=120, **options)
    train = r.programs['train']
    assert r.fits and train.cycles>r.programs['valid'].cycles>1000 and train.memory.alias>0
    assert ('all-reduce' in train.collectives)==(r.slice.n>1)
    assert ('It is cut at after_pred, compile_families.py:' in repr(r))==(name=='cut')
    if options.get('fsdp'): assert train.collectives['all-gather']>8
    if options.get('scan'): assert {'0.model.blocks'} < {m for m,_ in train.by_module(9)} # the loop as one, and what is outside of it
    assert 'replicas' not in name or r.programs['valid'].memory.args>r.memory['parameters'] # it is the model's
    if 'replicas' in name: assert any(k=='all-reduce' and s.count('f32[')>3 for k,s in train.unknown), train.unknown # of each gradient as it is
    n_copies = sum(o.runs for o in train.works if o.kind=='copy')
    if name=='unet': assert n_copies<60 # 130 if updates had the layout of the convolutions and wrote over each other's tensors
    if name=='convnext': assert train.memory.out<15e6, train # 19 MB if scopes of modules kept a part of the graph
    if name=='small_images':
        assert not [o for o in train.works if 'reverse' in o.kind and ',3,3]' in o.shape], train # of the kernels
    if name=='vit_checkpointed': assert train.memory.out<20e6 and train.memory.temp<60e6, train # 135 MB if what is recomputed stayed, 65 MB if all was kept
    if name=='vit_v6e': assert n_copies<30, train # 49 with torch_xla's attention
    if 'collab' in name: assert train.n_64bit<4, train # 6 and 8 if a look-up and its gradient made numbers of rows of their own
    if 'bf16' in name: assert not any('float32' in o for o in r.advice['train'])
    if 'images' in name: # what is looked up (by CutMix from the batch of all cores) are whole images and numbers of classes: pixels are sampled by products
        assert max([int(s.split('[')[1].split(',')[0].rstrip(']')) for k,s in train.unknown if 'gather' in k], default=0)<=learn.dls.bs*r.job.n**(r.job.strategy=='distributed')

# ---- what does not fit, and what fails

@slow
def test_what_does_not_fit(no_process_left):
    class Wide(nn.Module):
        def forward(self, x): return (x.expand(40_000, 200_000).sin().cumsum(0)*x).sum()
    class Large(nn.Module):
        def __init__(self): super().__init__(); self.l,self.big,self.wide = nn.Linear(768, 10),nn.Parameter(torch.zeros(1)),Wide()
        def forward(self, x): return self.l(x.flatten(1)) + self.wide(self.big)
    learn = learner()
    learn.model = Large()
    with pytest.raises(CompileError, match="training step could not be compiled .*40000,200000.* in the model's module 'wide'") as e: learn.compile_for('colab', fast=True)
    assert e.value.is_memory

@slow
def test_largest_batch(no_process_left):
    "Results of 1.6 GB for each sample"
    class Widen(nn.Module):
        def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(1))
        def forward(self, x): return (x.flatten(1)[:,:500,None]*self.w).expand(-1, 500, 800_000).sin().cumsum(1).mean((1,2))[:,None].expand(-1, 10)
    learn = learner(bs=4, n=16)
    learn.model,dls = Widen(),learn.dls
    n = learn.largest_batch('v5e-1', most=16)
    assert 1<=n<16 and learn.dls is dls and dls.bs==4

def test_a_learner_that_cannot_be_traced(no_process_left):
    learn = learner()
    learn.model = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(7, 2)))
    with pytest.raises(CompileError, match="training step could not be traced in the model's module '1.0', a Linear: RuntimeError: .*dot"): learn.compile_for('colab')

@slow
def test_limit_and_ctrl_c_as_users_start(no_process_left):
    class Sleeps(nn.Module):
        def forward(self, x): time.sleep(99)
    learn = learner()
    learn.model = nn.Sequential(Sleeps(), learn.model)
    with pytest.raises(TimeoutError, match='longer than the time limit of 1 s.*fast=True'): learn.compile_for('colab', limit=1)
    threading.Timer(8, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt): learn.compile_for('colab')

def test_no_space_on_disk(monkeypatch):
    monkeypatch.setattr(compiling, '_needed', 10**18)
    with pytest.raises(OSError, match=r'Programs are written to .*, which has .* left, and 1e\+09 GB are needed.*set TMPDIR'): learner().compile_for('colab', fast=True)

def test_without_libtpu_or_with_another(monkeypatch):
    "The remedy names what is known: 0.0.17 has a wheel for any Python, 0.0.21 for 3.10 to 3.12, 0.0.21.1 for 3.11 and later"
    assert all(o in SpecifierSet(libtpu.libtpu_versions) for o in ('0.0.17','0.0.21','0.0.21.1'))
    find_spec,version = importlib.util.find_spec,importlib.metadata.version
    monkeypatch.setattr(libtpu.importlib.metadata, 'version', lambda name: '0.0.52' if name=='libtpu' else version(name))
    with pytest.raises(ImportError, match=r"libtpu 0.0.52 is installed.*run `pip install 'libtpu>=0.0.17,<0.0.22'`"): learner().compile_for('colab')
    monkeypatch.setattr(libtpu.importlib.util, 'find_spec', lambda name: None if name=='libtpu' else find_spec(name))
    with pytest.raises(ImportError, match=r"pip install 'fastai_xla\[compile\]'"): learner().compile_for('colab')
