"""Checkpoints under attack, and what they cost.

    python benchmarks/checkpoints.py damage      # bits flipped, files cut, emptied, deleted: what is used then, and what is said
    python benchmarks/checkpoints.py malicious   # files that would run code
    python benchmarks/checkpoints.py cost        # what a save costs in steps, synchronous and asynchronous
    python benchmarks/checkpoints.py watchdog    # what is said of a rank that is stopped by SIGSTOP

`damage` makes the checkpoints of a training by `to_tpu` and of one by `to_tpu_sharded(fsdp=8)`, each in a process of its own, damages a
copy of the newest one, and has it opened and loaded as `resume_from` and `load_sharded` do.
"""
import contextlib, io, json, os, pickle, random, re, shutil, signal, subprocess, sys, tempfile, threading, time, zipfile
from collections import Counter
from pathlib import Path
import torch
from fastai.basics import *
from fastai.callback.all import *
from fastai_xla.all import *
from fastai_xla.checkpoint.callback import plan_resume
from fastai_xla.checkpoint.storage import CheckpointManager
from fastai_xla.checkpoint.safe import Undecodable
from fastai_xla.checkpoint.storage import CheckpointDir
from fastai_xla.checkpoint.train_state import read_state, restore_state
from fastai_xla.runtime.device import xm
from fastcore.script import call_parse

def learner(path='.', cbs=(), width=64, n=64):
    set_seed(1)
    x = torch.randn(n, 16, generator=torch.Generator().manual_seed(0))
    dls = DataLoaders(*[DataLoader(list(zip(x, x[:,:4].argmax(1))), bs=8, shuffle=o) for o in (True,False)])
    return Learner(dls, nn.Sequential(nn.Linear(16,width), nn.ReLU(), nn.Dropout(.1), nn.Linear(width,4)), loss_func=CrossEntropyLossFlat(),
                   path=path, cbs=cbs, metrics=accuracy)

places = dict(to_tpu=lambda o: o.to_tpu(), fsdp=lambda o: o.to_tpu_sharded(fsdp=8, rules=[('.*weight', 'fsdp')]))

def make(kind, folder):
    "Train and leave three checkpoints in `folder`/run"
    learn = places[kind](learner(folder, TPUCheckpoint(f'{folder}/run', every=3, keep=3)))
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, 1e-2, cbs=MixUp())

# ---- damage

def flip(path, rng):
    b = bytearray(path.read_bytes())
    b[rng.randrange(len(b))] ^= 1 << rng.randrange(8)
    path.write_bytes(b)
def truncate(path, rng): os.truncate(path, rng.randrange(path.stat().st_size))
def delete(path, rng): path.unlink()
def empty(path, rng): path.write_bytes(b'')

def damages(folder, rng, flips):
    "Every (file, damage) of the checkpoint `folder`"
    files = [o for o in sorted(folder.rglob('*')) if o.is_file() and o.stat().st_size]
    return [(o.relative_to(folder), f) for o in files for f in (*[flip]*flips, truncate, truncate, delete, empty)]

def state_of(learn): return {k: v.clone() for k,v in learn.model.state_dict().items()}, [dict(o) for o in learn.opt.state.values()]

def same(a, b): return all(torch.equal(a[0][k], b[0][k]) for k in a[0]) and all(torch.equal(v, w[k]) if isinstance(v, torch.Tensor) else v==w[k]
                                                                                for v_,w in zip(a[1], b[1]) for k,v in v_.items())

def load(learn, folder):
    load_state(learn, folder)
    return state_of(learn)

def attack(run, name, file, damage, rng, learn, before):
    "What comes of one damage: 'fell back', 'silently wrong', or the type of a bare exception; and what was said"
    shutil.copytree(run/name, (copy := run/name).with_name(f'.{name}.saved'))
    out = io.StringIO()
    try:
        damage(copy/file, rng)
        with contextlib.redirect_stdout(out): found = CheckpointManager(run).newest()
        if found is None or found.name==name or not same(load(learn, found), before): return 'silently wrong', out.getvalue()
        try: learn.load_sharded(copy)
        except (DamagedCheckpoint, FileNotFoundError) as e: pass
        else: return 'silently wrong', 'load_sharded'
        return 'fell back', out.getvalue()
    except Exception as e: return f'bare {type(e).__name__}: {e}', out.getvalue()
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        copy.with_name(f'.{name}.saved').rename(copy)

def attack_all(run, flips=8, only=None, seed=0):
    "A Counter of the outcomes of all damages, or of `only` so many, of the newest checkpoint in `run`"
    run = Path(run)
    rng,names,learn = random.Random(seed),CheckpointManager(run).names(),learner()
    *_,previous,name = names
    before,todo = load(learn, run/previous),damages(run/name, rng, flips)
    res = Counter()
    for file,damage in (rng.sample(todo, only) if only else todo):
        outcome,said = attack(run, name, file, damage, rng, learn, before)
        if outcome=='fell back' and not (name in said and said.count('\n')==1): outcome = 'fell back without a line'
        res[damage.__name__,outcome] += 1
    return res

def damage_table(flips):
    total = Counter()
    for kind in places:
        with tempfile.TemporaryDirectory() as d:
            subprocess.run([sys.executable, __file__, 'make', '--kind', kind, '--folder', d], check=True,
                           env={**os.environ, 'PJRT_DEVICE': 'CPU', 'CPU_NUM_DEVICES': '8' if kind=='fsdp' else '1'})
            files = len([o for o in (Path(d)/'run').glob('fit*/*')])
            res = attack_all(f'{d}/run', flips)
        print(f'{kind} ({files} files in its checkpoints)')
        for (what,outcome),n in sorted(res.items()): print(f'  {what:10} {n:4}  {outcome}')
        total.update(res)
    outcomes = Counter()
    for (_,outcome),n in total.items(): outcomes[outcome] += n
    bare = sum(n for o,n in outcomes.items() if o.startswith('bare'))
    print(f"{sum(outcomes.values())} damages: {outcomes['fell back']} fell back with a line, {outcomes['silently wrong']} silently wrong, {bare} bare exceptions")

# ---- malicious files

class Payload:
    "Makes a file when it is unpickled"
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.mkdir, (str(self.path),)

def _saved(o):
    "`o` as torch.save writes it"
    f = io.BytesIO()
    torch.save(o, f)
    return f.getvalue()

class Called:
    "Pickled as a call of `f`"
    def __init__(self, f, *args): self.f,self.args = f,args
    def __reduce__(self): return self.f,self.args

def _zipped(pkl):
    "A file of torch.save's with the pickle `pkl`"
    f,g = io.BytesIO(_saved(0)),io.BytesIO()
    with zipfile.ZipFile(f) as a, zipfile.ZipFile(g, 'w') as b:
        for o in a.namelist(): b.writestr(o, pkl if o.endswith('data.pkl') else a.read(o))
    return g.getvalue()

# `__code__` for a function that may be called; a list in a list in a list ...
_built = b'\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x08\x00\x00\x00__code__K\x01sb.'
_deep = b'\x80\x02'+b']'*10**5+b'a'*(10**5-1)+b'.'

def attacks():
    "By name, what changes the files of a good checkpoint in `folder` into ones that would make the folder `mark`"
    def write(file, b): return lambda folder, mark: (folder/file).write_bytes(b(mark))
    def shard(b): return lambda folder, mark: next(folder.glob('shard*')).write_bytes(b(mark))
    pickled,torch_saved = lambda mark: pickle.dumps(Payload(mark), 2),lambda mark: _saved([Payload(mark)])
    res = {'pickle as settings.json': write('settings.json', pickled), 'pickle as a shard': shard(pickled), 'torch.save as a shard': shard(torch_saved)}
    for file in ('state.pt','train_state/00000.pt'):
        res.update({f'{what}, {file}': write(file, b) for what,b in {'pickle': pickled, 'torch.save': torch_saved,
            'a newer pickle': lambda mark: pickle.dumps(Payload(mark)), 'a module by name': lambda mark: _saved([Called(__import__, 'os')]),
            'an attribute of a function': lambda mark: _zipped(_built),
            'eval': lambda mark: _saved(Called(eval, f'__import__("os").mkdir({str(mark)!r})')), 'nested without end': lambda mark: _zipped(_deep)}.items()})
    return res

def try_attack(f, good, learn, d):
    "(was it executed?, what was said by `load_sharded`, and by the store)"
    run,mark,settings = Path(d)/'run',Path(d)/'executed',json.loads(good.files['settings.json'].read_text())['settings']
    shutil.rmtree(run, ignore_errors=True)
    with CheckpointDir(run).replacing(good.name, good.info) as folder: # its checksums are right
        for k,o in good.files.items():
            (folder/k).parent.mkdir(exist_ok=True)
            shutil.copy(o, folder/k)
        f(folder, mark)
    def said(g):
        try: g()
        except (DamagedCheckpoint, Undecodable) as e: return type(e).__name__
        except Exception as e: return f'bare {type(e).__name__}: {e}'
        return 'loaded'
    def resume():
        with contextlib.redirect_stdout(io.StringIO()): found = CheckpointManager(run).newest()
        plan_resume(found, settings, found.position.fit)
        load_state(learn, found)
        restore_state(learn, read_state(learn, found.files['train_state/00000.pt']))
    return mark.exists(), said(lambda: learn.load_sharded(run/good.name)), said(resume), mark.exists()

def malicious_table():
    n = 0
    with tempfile.TemporaryDirectory() as d:
        make('to_tpu', d)
        manager,learn = CheckpointManager(f'{d}/run'),learner().to_tpu()
        good = manager.newest()
        for name,f in attacks().items():
            _,loaded,resumed,ran = try_attack(f, good, learn, f'{d}/attacked')
            n += ran
            print(f"{name:48} {'EXECUTED' if ran else 'not run':9} load_sharded: {loaded:20} resume: {resumed}")
    print(f'{len(attacks())} malicious checkpoints: {n} executed')

# ---- cost

def cost_table(mb, saves, every):
    n_in = 1024
    width = int(mb*1e6/4/(n_in+8))
    x = torch.randn(8*every*saves, n_in)
    def fit(**kw):
        set_seed(1)
        dls = DataLoaders(*[DataLoader(list(zip(x, x[:,:4].argmax(1))), bs=8) for _ in range(2)])
        learn = Learner(dls, nn.Sequential(nn.Linear(n_in,width), nn.ReLU(), nn.Linear(width,8)), loss_func=CrossEntropyLossFlat()).to_tpu()
        blocked = []
        class Timed(TPUCheckpoint):
            def _save(self, *args, **kwargs):
                self.learn.opt.zero_grad()
                XLAWait()
                start = time.perf_counter()
                super()._save(*args, **kwargs)
                blocked.append(time.perf_counter()-start)
        with tempfile.TemporaryDirectory() as d, learn.no_bar(), learn.no_logging():
            learn.fit(1, 1e-3)
            if kw: learn.add_cb(Timed(f'{d}/run', **kw))
            start = time.perf_counter()
            learn.fit(1, 1e-3)
            return time.perf_counter()-start,blocked
    def XLAWait(): xm.wait_device_ops()
    plain,_ = fit()
    step = plain/(every*saves)
    print(f'{mb} MB of weights, Adam ({3*mb} MB in a checkpoint), one in {every} steps of {step:.3f} s')
    for name,asynchronous in (('synchronous',False), ('asynchronous',True)):
        total,blocked = fit(every=every, asynchronous=asynchronous)
        print(f'{name:13} a step waits {sum(blocked[:-1])/len(blocked[:-1]):.3f} s for a save, {sum(blocked[:-1])/len(blocked[:-1])/step:.1f} steps; '
              f'the fit takes {(total-plain)/step:.1f} steps longer, for {len(blocked)} saves')

# ---- a rank that is stopped

class Slow(Callback):
    def after_batch(self): time.sleep(.2)

def watchdog_report(minutes):
    "Stop the process of two replicas by SIGSTOP once there is a checkpoint, show what is said, and go on"
    def fit(folder, watchdog):
        learn = learner(folder, [Slow(), resume_from(f'{folder}/run', every=3)]).to_tpu_distributed(n_cores=2, processes=True, watchdog=watchdog)
        with learn.no_bar(), learn.no_logging(): learn.fit(3)
        return learn
    with tempfile.TemporaryDirectory() as d:
        pid = get_pool(2).run(lambda rank: os.getpid())[0]
        def stop():
            while not CheckpointManager(f'{d}/run').names(): time.sleep(.1)
            os.kill(pid, signal.SIGSTOP)
        threading.Thread(target=stop).start()
        try: fit(d, minutes)
        except LaunchError as e: print('LaunchError:', re.sub(r'/\S*/(?=(fastai_xla|fastai|torch_xla|torch|benchmarks|python\d\S*)/)', '', str(e)))
        print('---- and again')
        learn = fit(d, None)
        print(f'epochs: {len(learn.recorder.values)}')

@call_parse
def main(
    what:str, # damage, malicious, cost or watchdog
    flips:int=8, # Bits that are flipped in each file, one at a time
    mb:float=40, # Size of the model for `cost`
    saves:int=4, # Saves for `cost`
    every:int=10, # Steps between two
    kind:str='to_tpu', # For `make`
    folder:str='.', # For `make`
    minutes:float=.1, # For `watchdog`
):
    if what=='make': make(kind, folder)
    elif what=='damage': damage_table(flips)
    elif what=='malicious': malicious_table()
    elif what=='cost': cost_table(mb, saves, every)
    elif what=='watchdog': watchdog_report(minutes)
    else: raise SystemExit(f'damage, malicious, cost or watchdog? Got {what}')
