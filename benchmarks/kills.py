"""Trainings that are killed and run again: does each that ends equal the one that was not killed, bit for bit?

`python benchmarks/kills.py` kills 20 of them by SIGKILL at random moments, half of them while a checkpoint is written;
`python benchmarks/kills.py --chained` lets each form die at batch 3 of its first fit, go on, die at batch 4, go on, die as that fit has ended, and go on;
`python benchmarks/kills.py --at fsdp fine_tune 0.3 0.4 fit1` does that with one.
"""
import argparse, os, random, shutil, signal, sys, tempfile, time
from functools import partial
from pathlib import Path
for k,v in dict(OMP_NUM_THREADS='1', PJRT_DEVICE='CPU', XLA_FLAGS='--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false', MPLBACKEND='Agg').items(): os.environ.setdefault(k, v)

import numpy as np, torch
from fastai.basics import *
from fastai.callback.all import *
from fastai.vision.augment import RandTransform
from fastai_xla.all import *
from fastai_xla.runtime.ranks import barrier
from fastai_xla.runtime.transfer import to_host

forms = 'to_tpu','cores','pool','script','fsdp'
schedules = 'one_cycle','fine_tune'

# ---- the training

class Noise(ItemTransform):
    "Draws for each sample"
    def encodes(self, o): return o[0]+torch.randn(16)*.1+random.random(),o[1]

class Jitter(RandTransform):
    "Draws for each batch"
    def before_call(self, b, split_idx): self.by = .5+random.random()
    def encodes(self, x:TensorBase): return x*self.by + torch.randn_like(x)*.1
    def encodes(self, x:TensorCategory): return x

def learner(cbs=()):
    "A small Learner that draws wherever fastai does"
    set_seed(1)
    x = torch.randn(77, 16, generator=torch.Generator().manual_seed(0))
    samples = list(zip(map(TensorBase, x), map(TensorCategory, x[:,:4].argmax(1))))
    dls = DataLoaders(TfmdDL(samples[:64], bs=8, shuffle=True, after_item=Noise(), after_batch=Jitter()), TfmdDL(samples[64:], bs=8))
    body = nn.Sequential(nn.Linear(16,64,bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(.5))
    learn = Learner(dls, nn.Sequential(body, nn.Linear(64,4)), loss_func=CrossEntropyLossFlat(), path=Path('.'), metrics=[accuracy],
        splitter=lambda m: L(m[0], m[1]).map(params), cbs=cbs)
    learn.recorder.train_metrics = True
    return learn

class Dies(Callback):
    "Ends by SIGKILL, a pool with its parent, at the fit and training batch that the environment says, or at the first that it sees after it"
    order,run_valid = 2000,False
    def after_batch(self):
        fit,batch,parent = map(int, os.environ['KILL'].split())
        if (self.learn.checkpoint_run.fits,self.train_iter)>=(fit,batch): die(parent)

def die(parent):
    for pid in (parent, os.getpid()): os.kill(pid, signal.SIGKILL)
    time.sleep(60)

def fits(learn, schedule, mixup, fit_done=noop):
    "Two fits; `fit_done(i)` is called after each"
    set_seed(3)
    cbs = [GradientAccumulation(16), *([MixUp()] if mixup else [])] if 'PLAIN' not in os.environ else []
    unfreeze,n = learn.unfreeze,[0]
    def done():
        n[0] += 1
        fit_done(n[0])
    with learn.no_bar(),learn.no_logging():
        if schedule=='one_cycle':
            learn.fit_one_cycle(2, 1e-2)
            done()
            learn.fit_one_cycle(2, 1e-2, cbs=cbs)
        else:
            def thaw():
                done()
                unfreeze()
            learn.unfreeze = thaw
            learn.fine_tune(2, 1e-2, freeze_epochs=1, cbs=cbs)
            learn.unfreeze = unfreeze
        done()
    return learn

def outcome(learn):
    "All that a training leaves"
    rec = learn.recorder
    res = dict(losses=list(map(float, rec.losses)), values=list(rec.values), lrs=list(rec.lrs), iters=list(rec.iters),
        model=dict(learn.model.state_dict()), opt=learn.opt.state_dict()['state'], hypers=[dict(h) for h in learn.opt.hypers],
        frozen=learn.opt.frozen_idx, learns=[p.requires_grad for p in learn.model.parameters()], n=learn.train_iter, next=torch.rand(2))
    return to_host(res)

def flat(o, key=''):
    "The numbers in nested `o` by where they are"
    if isinstance(o, (dict,list,tuple,L)):
        return {k: v for i,p in (o.items() if isinstance(o, dict) else enumerate(o)) for k,v in flat(p, f'{key}.{i}').items()}
    return {key: np.asarray(o.detach().numpy() if isinstance(o, torch.Tensor) else o)}

def differences(a, b):
    "Where two outcomes differ"
    a,b = flat(a),flat(b)
    return [k for k in sorted({*a, *b}) if k not in a or k not in b or not np.array_equal(a[k], b[k], equal_nan=True)]

# ---- one run of it, in a process of its own

def on_rank(rank, schedule, every, dies, fit_done):
    "The part of a launched script on one rank"
    learn = learner([resume_from('run', every=every), *([Dies()] if dies and not rank else [])]).to_tpu_distributed()
    fits(learn, schedule, False, noop if rank else fit_done)
    return outcome(learn) if rank==0 else None

def train(form, schedule, every, at=None, fit=None):
    "Train in this process, until `at`, a fit and a batch, or until fit number `fit` is done"
    pid = os.getpid()
    if at: os.environ['KILL'] = f'{at[0]} {at[1]} {pid}'
    def fit_done(i):
        if i==fit: die(pid)
    if form=='script': return tpu_launch(on_rank, schedule, every, bool(at), fit_done, n_cores=2)[0]
    learn = learner([resume_from('run', every=every), *([Dies()] if at else [])])
    if form=='to_tpu': learn.to_tpu()
    elif form=='fsdp': learn.to_tpu_sharded(fsdp=int(os.environ.get('KILLS_FSDP', 8)))
    else: learn.to_tpu_distributed(n_cores=2, processes=form=='pool')
    return outcome(fits(learn, schedule, form!='pool', fit_done))

def start(folder, *args, **kwargs):
    "Start `train` in a fork of this process, which has a session and a folder of its own; returns its id"
    folder.mkdir(parents=True, exist_ok=True)
    if pid := os.fork(): return pid
    try:
        os.setsid()
        os.chdir(folder)
        log = os.open('log', os.O_CREAT|os.O_WRONLY|os.O_APPEND)
        for fd in (1,2): os.dup2(log, fd)
        torch.save(train(*args, **kwargs), 'res.pth')
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        sys.stderr.flush()
    finally: os._exit(1)

def wait(pid): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def result(folder, *args, **kwargs):
    "What a run in `folder` leaves, that is not killed"
    if code := wait(start(folder, *args, **kwargs)): raise RuntimeError(f"exit {code}\n{(folder/'log').read_text()}")
    return torch.load(folder/'res.pth', weights_only=False)

def timed(folder, *args):
    "The same, and the seconds from its first checkpoint to its end"
    pid = start(folder, *args)
    while not (folder/'run').exists() and os.waitid(os.P_PID, pid, os.WEXITED|os.WNOHANG|os.WNOWAIT) is None: time.sleep(.01)
    began = time.monotonic()
    if code := wait(pid): raise RuntimeError(f"exit {code}\n{(folder/'log').read_text()}")
    return torch.load(folder/'res.pth', weights_only=False),time.monotonic()-began

# ---- deaths

def chained(tmp, form, schedule, deaths, every=1):
    "The differences of a run that dies at each of `deaths` from one that does not"
    whole = result(tmp/'whole', form, schedule, every)
    for o in deaths:
        kw = dict(fit=int(o[3:])) if o.startswith('fit') else dict(at=tuple(map(int, o.split('.'))))
        code = wait(start(tmp/'killed', form, schedule, every, **kw))
        newest = sorted(o.name for o in (tmp/'killed/run').glob('fit*'))[-1:]
        print(f"  {o}: {'killed' if code else 'ended'}, the newest checkpoint is {''.join(newest) or 'not there'}", flush=True)
        assert code in (0, -signal.SIGKILL), (tmp/'killed/log').read_text()
        if not code: break
        if form in ('pool','script'): time.sleep(5) # until the replicas have noticed
    return differences(whole, result(tmp/'killed', form, schedule, every) if code else torch.load(tmp/'killed/res.pth', weights_only=False))

def chained_table(every):
    "Each form, each schedule, dies at batch 3 and 4 of its first fit and at its end"
    n = 0
    for form,schedule in [(f,s) for s in schedules for f in forms]:
        with tempfile.TemporaryDirectory() as d:
            print(form, schedule, flush=True)
            diff = chained(Path(d), form, schedule, ('0.3','0.4','fit1'), every)
            print(f"  {diff or 'equal'}", flush=True)
            n += not diff
    print(f'{n} of {len(forms)*len(schedules)} trainings that died three times equal the whole one bit for bit')

def is_writing(run): return any(o.name.startswith('.fit') for o in run.iterdir()) if run.exists() else False

def kill_at_random(folder, rnd, seconds, writing, *args):
    "Start a run and kill it, while it writes a checkpoint or within so many `seconds`; returns its exit code"
    pid,delay,code = start(folder, *args),rnd.random()*(.02 if writing else seconds),None
    skip = rnd.randint(0, 6)
    def ended():
        nonlocal code
        if code is None and (found := os.waitpid(pid, os.WNOHANG))[0]: code = os.waitstatus_to_exitcode(found[1])
        return code is not None
    while not (folder/'run').exists() and not ended(): time.sleep(.01)
    while writing and skip>=0 and not ended():
        while not is_writing(folder/'run') and not ended(): time.sleep(.001)
        if skip:
            while is_writing(folder/'run') and not ended(): time.sleep(.001)
        skip -= 1
    end = time.monotonic()+delay
    while time.monotonic()<end and not ended(): time.sleep(.001)
    was_writing = is_writing(folder/'run')
    if not ended():
        os.killpg(pid, signal.SIGKILL)
        code = wait(pid)
    if args[0] in ('pool','script'): time.sleep(5) # until the replicas have noticed
    return code,was_writing

def table(n, seed):
    "Kill `n` trainings at random, half of them while they write, and run each again until it ends"
    rnd,combos,wholes,rows = random.Random(seed),[(f,s) for s in schedules for f in forms],{},[]
    with tempfile.TemporaryDirectory() as d:
        for i in range(n):
            o = combos[i%len(combos)]
            if o not in wholes:
                wholes[o] = timed(Path(d)/'-'.join(o), *o, 2)
            folder,(whole,seconds) = Path(d)/str(i),wholes[o]
            kills = []
            for _ in range(rnd.choice([1,1,2,3])):
                code,writing = kill_at_random(folder, rnd, seconds*.9, (i+i//len(combos))%2==0, *o, 2)
                if not code: break
                kills.append('writing' if writing else 'training')
            try: diff = differences(whole, result(folder, *o, 2) if code else torch.load(folder/'res.pth', weights_only=False))
            except RuntimeError as e: diff = [str(e)[-300:]]
            rows.append((bool(kills), not diff))
            print(f"{i+1:3} {o[0]:8}{o[1]:10} killed while {', '.join(kills) or 'it had ended already':28} {'equal' if not diff else diff}", flush=True)
    killed = [ok for k,ok in rows if k]
    print(f"{sum(killed)} of {len(killed)} trainings that were killed equal the whole one bit for bit; {len(rows)-len(killed)} had ended before")

def fuzz(n, seed):
    "Random chains of deaths"
    r = random.Random(seed)
    for i in range(n):
        form,schedule,every = r.choice(forms),r.choice(schedules),r.choice([1,2,3,None])
        deaths = sorted(r.choice([f'0.{r.randint(1,8)}', f'1.{r.randint(1,8)}', 'fit1']) for _ in range(r.randint(1,4)))
        os.environ.pop('PLAIN', None)
        if r.random()<.5: os.environ['PLAIN'] = '1'
        with tempfile.TemporaryDirectory() as d:
            try: res = chained(Path(d), form, schedule, deaths, every)
            except Exception as e: res = str(e)[-1500:]
        print(form, schedule, every, deaths, os.environ.get('PLAIN'), '->', res or 'equal', flush=True)

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--at', nargs='+', metavar='X', help='form, schedule, and fits and batches (as `0.3`) or ends of fits (as `fit1`) at which it dies')
    p.add_argument('--chained', action='store_true', help='each form dies three times in a row')
    p.add_argument('--fuzz', type=int, help='so many random chains of deaths')
    p.add_argument('--n', type=int, default=20)
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--every', type=int, default=1)
    args = p.parse_args()
    if args.fuzz: return fuzz(args.fuzz, args.seed)
    if args.chained: return chained_table(args.every)
    if not args.at: return table(args.n, args.seed)
    tmp = Path(tempfile.mkdtemp())
    try: print(chained(tmp, *args.at[:2], args.at[2:], args.every) or 'equal')
    finally: shutil.rmtree(tmp)

if __name__=='__main__': main()
