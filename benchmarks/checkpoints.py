"""Checkpoints under attack, and what they cost.

    python benchmarks/checkpoints.py damage      # bits flipped, files cut, emptied, deleted: what is used then, and what is said
    python benchmarks/checkpoints.py malicious   # files that would run code
    python benchmarks/checkpoints.py cost        # what a save costs in steps, synchronous and asynchronous
    python benchmarks/checkpoints.py watchdog    # what is said of a rank that is stopped by SIGSTOP

`damage` makes the checkpoints of a training by `to_tpu` and of one by `to_tpu_sharded(fsdp=8)`, each in a process of its own, damages a
copy of the newest one, and has it opened and loaded as `resume_from` and `load_sharded` do.
"""
import contextlib, io, json, os, pickle, random, re, shutil, signal, subprocess, sys, tempfile, threading, time
from collections import Counter
from pathlib import Path
import torch
from fastai.basics import *
from fastai.callback.all import *
from fastai_xla.all import *
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
        with contextlib.redirect_stdout(out): found = CheckpointStore(run).newest()
        if found is None or found.folder.name==name or not same(load(learn, found.folder), before): return 'silently wrong', out.getvalue()
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
    rng,store,learn = random.Random(seed),CheckpointStore(run),learner()
    *_,previous,name = store.names()
    before,todo = load(learn, store.path/previous),damages(store.path/name, rng, flips)
    res = Counter()
    for file,damage in (rng.sample(todo, only) if only else todo):
        outcome,said = attack(Path(run), name, file, damage, rng, learn, before)
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

def _json(folder, name, f):
    "Change the JSON of a file by `f`"
    path = folder/name
    path.write_text(json.dumps(f(json.loads(path.read_text()))))

def _pickled_value(folder, mark):
    from safetensors.torch import save_file
    save_file({'host.0': torch.frombuffer(bytearray(pickle.dumps(Payload(mark))), dtype=torch.uint8)}, folder/'values.safetensors')
    (folder/'values.json').write_text(json.dumps({'dict': [{'tuple': ['opt','hypers']}, {'pickle': 'host.0'}]}))

def _pickled_progress(folder, mark):
    from safetensors.torch import save_file
    for o in (folder/'progress').glob('*.safetensors'):
        save_file({'host.0': torch.frombuffer(bytearray(pickle.dumps(Payload(mark))), dtype=torch.uint8)}, o)
        o.with_suffix('.json').write_text(json.dumps({'pickle': 'host.0'}))

def _shard(folder, b): next(folder.glob('shard*')).write_bytes(b)
def _first(d, **kw): return {**d, next(iter(d)): {**d[next(iter(d))], **kw}}

def attacks():
    "By name, what changes a good checkpoint `folder` into one that would call `Payload(mark)`"
    def torch_zip(mark):
        f = io.BytesIO()
        torch.save(Payload(mark), f)
        return f.getvalue()
    def value(o): return lambda folder, mark: (folder/'values.json').write_text(json.dumps({'dict': [{'tuple': ['opt','hypers']}, o(mark)]}))
    return {'pickle as .metadata': lambda folder, mark: [(folder/'.metadata').write_bytes(pickle.dumps(Payload(mark))), (folder/'index.json').unlink()],
        'pickle as progress.pkl': lambda folder, mark: (folder/'progress.pkl').write_bytes(pickle.dumps([Payload(mark)])),
        'pickle as position.json': lambda folder, mark: (folder/'position.json').write_bytes(pickle.dumps(Payload(mark))),
        'pickle as index.json': lambda folder, mark: (folder/'index.json').write_bytes(pickle.dumps(Payload(mark))),
        'pickle as values': _pickled_value, 'pickle in the progress': _pickled_progress, 'pickle as a shard': lambda folder, mark: _shard(folder, pickle.dumps(Payload(mark))),
        'torch.save as a shard': lambda folder, mark: _shard(folder, torch_zip(mark)),
        'a function as a tag': value(lambda mark: {'os.mkdir': str(mark)}), 'a module as a tag': value(lambda mark: {'posix.mkdir': {'tuple': [str(mark)]}}),
        'a factory of a defaultdict': value(lambda mark: {'defaultdict': ['mkdir', {'dict': []}]}),
        'a class of tensors': value(lambda mark: {'tensor': ['host.0', 'os.mkdir', False]}),
        'a dtype that is a function': lambda folder, mark: _json(folder, 'index.json', lambda d: _first(d, dtype='load')),
        'a file elsewhere': lambda folder, mark: _json(folder, 'index.json', lambda d: _first(d, pieces=[['../../../x', [0], [64]]])),
        'nested without end': lambda folder, mark: (folder/'values.json').write_text('['*10**5)}

def try_attack(f, good, learn, d):
    "(was it executed?, what was said by `load_sharded`, and by the store)"
    run,mark = Path(d)/'run',Path(d)/'executed'
    shutil.rmtree(run, ignore_errors=True)
    folder = run/good.name
    shutil.copytree(good, folder)
    f(folder, mark)
    (folder/'manifest.json').unlink()
    if not (folder/'.metadata').exists(): seal(folder)
    def said(g):
        try: g()
        except (DamagedCheckpoint, Undecodable) as e: return type(e).__name__
        except Exception as e: return f'bare {type(e).__name__}: {e}'
        return 'loaded'
    def resume():
        found = CheckpointStore(run).newest()
        load_state(learn, found.folder)
        Progress.read(found.folder/'progress/00000').restore(learn)
    return mark.exists(), said(lambda: learn.load_sharded(folder)), said(resume), mark.exists()

def malicious_table():
    n = 0
    with tempfile.TemporaryDirectory() as d:
        make('to_tpu', d)
        learn,good = learner().to_tpu(),CheckpointStore(f'{d}/run').folders()[-1]
        for name,f in attacks().items():
            _,loaded,resumed,ran = try_attack(f, good, learn, f'{d}/attacked')
            n += ran
            print(f"{name:28} {'EXECUTED' if ran else 'not run':9} load_sharded: {loaded:20} resume: {resumed}")
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
        learn = learner(folder, [Slow(), resume_from(f'{folder}/run', every=3)]).to_tpu_distributed(n_cores=2, watchdog=watchdog)
        with learn.no_bar(), learn.no_logging(): learn.fit(3)
        return learn
    with tempfile.TemporaryDirectory() as d:
        pid = get_pool(2).run(lambda rank: os.getpid())[0]
        def stop():
            while not CheckpointStore(f'{d}/run').good_names(): time.sleep(.1)
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
