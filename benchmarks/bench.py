"""What the host does in a step: fastai_xla beside a hand-written torch_xla loop and other ways to train the same model.

    make bench                                          # installs accelerate and Lightning too; the table, and bench.json
    python benchmarks/bench.py --works vit --rounds 3   # some of it
    python benchmarks/bench.py --works vit --who 'hand fastai_xla scanned'     # what was tried and did not pay
    python benchmarks/bench.py --works resnet18 --who 'hand fastai_xla seldom sharded sharded_seldom' # what it costs to show each loss
    python benchmarks/bench.py --works 'vit vit24' --who 'hand fastai_xla traced'       # what depth costs
    python benchmarks/bench.py --works vit --who 'hand fastai_xla watched traced'       # what a callback of the user's costs
    python benchmarks/bench.py --works 'mlp resnet18 vit_tiny' --who 'hand fastai_xla' --tpu v5e-1  # beside what the chip would need

Each contender trains in a process of its own, in turn with the others; a number is the median over the steps of all rounds. Host time
is the CPU time of the training thread from the end of a step to the end of the next, which another busy process doesn't change as it does wall time. It is
taken of the steps before the middle of a training, and what XLA does is counted in those after it, as counting takes time and chills the host's caches.
All train the same model on the same batches with AdamW on a one-cycle schedule; fastai's and fastai_xla's have a progress
bar, a recorder and a metric. On 8 virtual cores each replica has an eighth of the batch, and its numbers are those of one core; all of them
share one interpreter, which on a TPU each has to itself: `replica` is one in a process of its own, whose program has nobody to reduce with.
The process has one program for all cores when the parameters are sharded, by hand too; what torch_xla does for the tensors of 8 cores is in both. With `--tpu` the TPU's compiler estimates how long a described chip takes for
the step, which hides the host's work where that is less. Graph and memory are XLA's own account of the program of a step, of one core.
Lightning knows no XLA device but a TPU, so three of its methods are replaced to let it run on the CPU.
"""
import os
os.environ.setdefault('PJRT_DEVICE', 'CPU')
os.environ.setdefault('OMP_NUM_THREADS', '1')
import json, platform, statistics, subprocess, sys, tempfile, time, warnings
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from fastcore.script import call_parse
warnings.filterwarnings('ignore')

BS,LR,WARM,CORES = 16,1e-3,6,8
WORKS = dict(vit='timm ViT, 12 blocks of width 64, 16 px', resnet18='resnet18, 64 px', mlp='MLP of 8 layers')
MORE = dict(vit24='timm ViT, 24 blocks of width 64, 16 px', vit_tiny='timm ViT-tiny, 12 blocks of width 192, 64 px')
CONTENDERS = dict(hand='hand-written torch_xla loop, `torch.optim.AdamW`', syncfree='the hand-written loop with `torch_xla.amp.syncfree.AdamW`', hand_sharded='the hand-written loop, parameters and batches spread over 8 virtual cores by `mark_sharding`', naive='naive fastai: `model.to`, a callback that syncs',
                  fastai_xla='fastai_xla, one core', watched='fastai_xla, one core, with a callback of the user\'s: `before_batch`, `after_pred`, `after_batch`', traced='fastai_xla, one core, by `to_tpu(replay=False)`', distributed='fastai_xla, distributed, 8 virtual cores', replica='one of its replicas, alone in its process', sharded='fastai_xla, sharded, 8 virtual cores',
                  stock='fastai_xla with the optimizer step of fastai', accelerate='accelerate', lightning='Lightning')
TRIED = dict(scanned='fastai_xla, the blocks of the ViT by `scan_layers`',
             seldom='fastai_xla, one core, by `to_tpu(fetch_every=60)`',
             sharded_seldom='fastai_xla, sharded, by `to_tpu_sharded(fetch_every=60)`')

FORMS = dict.fromkeys(('sharded','sharded_seldom'), 'hand_sharded') # what does the same by hand, where that is not `hand`
STRANGERS = 'hand','syncfree','hand_sharded','naive','accelerate','lightning' # train without anything of ours but what counts
COUNTS = 'compiles','reads','uploads','upload_bytes','executions','nodes'

def model(work):
    import torch, timm
    from torch import nn
    torch.manual_seed(0)
    if work=='vit_tiny': return timm.create_model('vit_tiny_patch16_224', img_size=64, patch_size=8, num_classes=10)
    if work.startswith('vit'):
        return timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=8, num_classes=10, depth=24 if work=='vit24' else 12, embed_dim=64, num_heads=2)
    if work=='resnet18': return timm.create_model('resnet18', num_classes=10)
    return nn.Sequential(*[o for _ in range(8) for o in (nn.Linear(64,64), nn.ReLU())], nn.Linear(64,10))

def data(work, n):
    import torch
    shape = dict(resnet18=(3,64,64), vit_tiny=(3,64,64), mlp=(64,)).get(work, (3,16,16))
    g = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(n*BS, *shape, generator=g), torch.randint(0, 10, (n*BS,), generator=g))

class Ticks:
    "When the steps before the middle ended, and what had been counted at the end of those after it: counting takes time, and what it chills the next step warms up"
    def __init__(self, n): self.middle,self.times,self.rows = (n+WARM)//2,[],{}
    def __call__(self):
        from fastai_xla.runtime.counts import xla_counts # which replaces nothing
        i = len(self.times)
        if i==WARM or i>=self.middle: self.rows[i] = xla_counts()
        self.times.append(dict(wall=time.perf_counter(), host=time.thread_time()))
    def result(self, cores=1):
        "Times of each step before the middle, and the means of the counts after it; of one of `cores` that share a process"
        from fastai_xla.monitor.profile import usual_step
        first,*rows = self.rows.values()
        counts = {k: v/cores for k,v in usual_step([b-a for a,b in zip(rows, rows[1:])], 0).items() if k in COUNTS}
        timed = self.times[WARM+1:self.middle]
        return dict({k: [1e3*(b[k]-a[k]) for a,b in zip(timed, timed[1:])] for k in ('wall','host')}, **counts, first_compiles=first.compiles, first_seconds=first.compile_seconds)

def one_cycle(opt, n):
    import torch
    return torch.optim.lr_scheduler.OneCycleLR(opt, LR, total_steps=n)

def spread(m):
    "Spread each parameter of `m` over the cores by its largest dim that they divide; how a batch is spread"
    import torch_xla.distributed.spmd as xs
    mesh = xs.Mesh(list(range(CORES)), (CORES,), ('fsdp',))
    for p in m.parameters():
        fits = [i for i,o in enumerate(p.shape) if o%CORES==0]
        if fits: xs.mark_sharding(p, mesh, tuple('fsdp' if i==max(fits, key=lambda o: p.shape[o]) else None for i in range(p.ndim)))
    return lambda x: xs.ShardingSpec(mesh, ('fsdp', *[None]*(x.ndim-1)))

def run_hand(work, n, tick, syncfree=False, sharded=False):
    import torch, torch_xla, torch_xla.distributed.parallel_loader as pl, torch_xla.runtime as xr
    from torch.nn import functional as F
    from torch_xla.amp.syncfree import AdamW
    if sharded: xr.use_spmd()
    dev,ds = torch_xla.device(),data(work, n)
    m = model(work).to(dev)
    dl = pl.MpDeviceLoader(torch.utils.data.DataLoader(ds, batch_size=BS), dev, **(dict(input_sharding=spread(m)(ds[:1][0])) if sharded else {}))
    opt = (AdamW if syncfree else torch.optim.AdamW)(m.parameters(), lr=LR)
    sched,kw = one_cycle(opt, n),dict(found_inf=torch.zeros((), device=dev)) if syncfree else {}
    for x,y in dl:
        opt.zero_grad()
        loss = F.cross_entropy(m(x), y)
        loss.backward()
        opt.step(**kw)
        sched.step()
        torch_xla.sync()
        tick()
    return loss.item()

def learner(work, n, cbs, bs=BS):
    from fastai.vision.all import DataLoader, DataLoaders, Learner, CrossEntropyLossFlat, accuracy
    ds = data(work, n)
    dls = DataLoaders(DataLoader(ds, bs=bs, drop_last=True), DataLoader(data(work, 1), bs=bs))
    return Learner(dls, model(work), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs, path=Path('.'))

def ticker(tick):
    from fastai.basics import Callback
    class Tick(Callback):
        order = 2000
        def after_batch(self):
            if self.training: tick()
    return Tick()

def run_naive(work, n, tick):
    import torch, torch_xla
    from fastai.basics import Callback
    torch.__future__.set_swap_module_params_on_conversion(True)
    class Sync(Callback):
        order = 100
        def after_batch(self): torch_xla.sync()
    learn = learner(work, n, [Sync(), ticker(tick)])
    learn.dls.device = dev = torch_xla.device()
    for dl in learn.dls.loaders: dl.device = dev
    learn.model.to(dev)
    learn.fit_one_cycle(1, LR)
    return float(learn.recorder.losses[-1])

def watch():
    from fastai.basics import Callback
    class Watch(Callback):
        "What users write: a clock, a counter, the shapes that are seen"
        def before_fit(self): self.n,self.secs,self.shapes = 0,0.,set()
        def before_batch(self): self.start = time.perf_counter()
        def after_pred(self): self.shapes.add(tuple(self.pred.shape))
        def after_batch(self):
            self.n += 1
            self.secs += time.perf_counter()-self.start
    return Watch()

def run_fastai_xla(work, n, tick, stock=False, watched=False, **kwargs):
    import fastai_xla.all
    from fastai.basics import Callback
    class StockStep(Callback):
        "Takes back the step that is lent to the optimizer for the time of the training"
        order = fastai_xla.all.TPUTrainer.order+.1
        def before_train(self): vars(self.opt).pop('step')
    for o in fastai_xla.all.patches_in_force():
        if stock and o.name=='zero_grad': o.undo()
    learn = learner(work, n, [ticker(tick), *([StockStep()] if stock else []), *([watch()] if watched else [])]).to_tpu(**kwargs)
    learn.fit_one_cycle(1, LR)
    return float(learn.recorder.losses[-1])

def run_scanned(work, n, tick):
    from torch import nn
    from torch_xla.experimental.scan_layers import scan_layers
    import fastai_xla.all
    class Scanned(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = blocks
        def forward(self, x): return scan_layers(self.blocks, x)
    learn = learner(work, n, [ticker(tick)])
    learn.model.blocks = Scanned(learn.model.blocks)
    learn.to_tpu().fit_one_cycle(1, LR)
    return float(learn.recorder.losses[-1])

def run_sharded(work, n, tick, **kwargs):
    import fastai_xla.all
    learn = learner(work, n, [ticker(tick)]).to_tpu_sharded(fsdp=CORES, **kwargs)
    learn.fit_one_cycle(1, LR)
    return float(learn.recorder.losses[-1])

def replica(rank, work, n, cores):
    "One of the replicas of `run_distributed`, which trains what one of 8 would; what the main one counted"
    import fastai_xla.all
    tick = Ticks(n)
    learn = learner(work, n, [ticker(tick)], bs=BS//CORES).to_tpu_distributed()
    learn.fit_one_cycle(1, LR)
    return dict(tick.result(cores), loss=float(learn.recorder.losses[-1]))

def run_distributed(work, n, tick, cores=CORES):
    from fastai_xla.all import tpu_launch
    return tpu_launch(replica, work, n, cores, n_cores=cores)[0]

def run_accelerate(work, n, tick):
    import torch
    from torch.nn import functional as F
    from accelerate import Accelerator
    acc,m = Accelerator(),model(work)
    opt = torch.optim.AdamW(m.parameters(), lr=LR)
    m,opt,dl,sched = acc.prepare(m, opt, torch.utils.data.DataLoader(data(work, n), batch_size=BS), one_cycle(opt, n))
    for x,y in dl:
        opt.zero_grad()
        loss = F.cross_entropy(m(x), y)
        acc.backward(loss)
        opt.step()
        sched.step()
        tick()
    return loss.item()

def run_lightning(work, n, tick):
    import torch, lightning
    from torch.nn import functional as F
    from lightning.pytorch.accelerators import XLAAccelerator
    from lightning.fabric.accelerators.xla import XLAAccelerator as Fabric
    for c in (XLAAccelerator,Fabric):
        c.auto_device_count,c.is_available = staticmethod(lambda: 1),staticmethod(lambda: True)
        c.get_parallel_devices = staticmethod(lambda d: [torch.device('xla', 0)])
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.m = model(work)
        def training_step(self, b, i):
            loss = F.cross_entropy(self.m(b[0]), b[1])
            self.log('loss', loss, prog_bar=True)
            return loss
        def configure_optimizers(self):
            opt = torch.optim.AdamW(self.parameters(), lr=LR)
            return dict(optimizer=opt, lr_scheduler=dict(scheduler=one_cycle(opt, n), interval='step'))
        def on_train_batch_end(self, *args): tick()
    trainer = lightning.Trainer(accelerator='tpu', devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer.fit(Module(), torch.utils.data.DataLoader(data(work, n), batch_size=BS))
    return float(trainer.callback_metrics['loss'])

RUNS = dict(hand=run_hand, syncfree=partial(run_hand, syncfree=True), hand_sharded=partial(run_hand, sharded=True), naive=run_naive, fastai_xla=run_fastai_xla, watched=partial(run_fastai_xla, watched=True), traced=partial(run_fastai_xla, replay=False), distributed=run_distributed, replica=partial(run_distributed, cores=1), sharded=run_sharded,
            stock=partial(run_fastai_xla, stock=True), accelerate=run_accelerate, lightning=run_lightning, scanned=run_scanned,
            seldom=partial(run_fastai_xla, fetch_every=60.), sharded_seldom=partial(run_sharded, fetch_every=60.))

def contend(work, who, n):
    "In a process of its own: train, and print what it cost"
    import torch
    torch.set_num_threads(1)
    tick = Ticks(n)
    res = RUNS[who](work, n, tick)
    if who in STRANGERS and 'fastai_xla.patches' in sys.modules: raise RuntimeError(f'{who} was trained with the patches of fastai_xla in force')
    print('\nRESULT '+json.dumps(res if isinstance(res, dict) else dict(tick.result(), loss=res)), flush=True)

def measure(work, who, n):
    "What a process of `who` printed, with XLA's account of its graph; None, with the end of its complaint, if it failed"
    from dump import read_dump, training_graph
    with tempfile.TemporaryDirectory() as dump:
        env = dict(os.environ, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text")
        if who!='distributed' and who not in FORMS: env['CPU_NUM_DEVICES'] = str(CORES if who=='hand_sharded' else 1)
        res = subprocess.run([sys.executable, __file__, '--child', f'{work} {who}', '--steps', str(n)], capture_output=True, text=True, env=env)
        lines = [o for o in res.stdout.splitlines() if o.startswith('RESULT ')]
        if not lines: return print(f'{work} {who} failed: {res.stderr[-600:]}', file=sys.stderr)
        g = training_graph(read_dump(dump))
    r = dict(json.loads(lines[-1][7:]), instructions=g.instructions, nbytes=g.nbytes, donated=g.donated)
    print(f"{work} {who}: {statistics.median(r['host']):.1f} ms of host time a step", file=sys.stderr, flush=True)
    return r

def pool(rounds):
    "The medians of several rounds, and the counts of the last"
    return {**rounds[-1], **{k: statistics.median([v for r in rounds for v in r[k]]) for k in ('wall','host')}, 'rounds': [statistics.median(r['host']) for r in rounds]}

HEAD = ['', 'host ms a step', 'ratio', 'to its form by hand', 'ratio of each round', 'wall ms', 'ratio', 'compiles', 'reads', 'uploads', 'bytes sent', 'executions', 'HLO instructions', 'memory, MB', 'compiles before']

def row(name, r, base, form):
    return [name, f"{r['host']:.1f}", f"**{r['host']/base['host']:.2f}**", f"{r['host']/form['host']:.2f}" if form else '', ' '.join(f'{a/b:.2f}' for a,b in zip(r['rounds'], base['rounds'])), f"{r['wall']:.1f}", f"{r['wall']/base['wall']:.2f}",
            *(f'{r[c]:.2f}' for c in ('compiles','reads','uploads')), f"{r['upload_bytes']:.0f}", f"{r['executions']:.2f}", r['instructions'], f"{r['nbytes']/1e6:.2f}", f"{r['first_compiles']} in {r['first_seconds']:.0f} s"]

def table(work, res):
    "The markdown table of one work"
    rows = [row({**CONTENDERS, **TRIED}[k], r, res['hand'], res.get(FORMS.get(k))) for k,r in res.items()]
    return '\n'.join([f'### {(WORKS|MORE)[work]}, batch of {BS}\n', *(f"| {' | '.join(map(str, o))} |" for o in (HEAD, ['---']*len(HEAD), *rows))])

def device_ms(work, chip):
    "The estimate of the TPU's compiler for a training step on `chip`"
    import fastai_xla.all
    return learner(work, WARM, []).compile_for(chip).programs['train'].time*1e3

def machine():
    return dict(versions={o: version(o) for o in ('torch','torch_xla','fastai','timm','accelerate','lightning') if find_spec(o)}, python=platform.python_version(),
                cpus=os.cpu_count(), load=os.getloadavg())

@call_parse
def main(
    works:str=' '.join(WORKS), # What to train
    who:str=' '.join(CONTENDERS), # Who trains
    rounds:int=2, # How often each trains
    steps:int=60, # Steps of a training, half of them timed and half of them counted
    out:str='bench.json', # File for the numbers
    tpu:str='', # A described chip, such as 'v5e-1', for which steps are compiled too
    child:str='', # Train in this process: work and contender
):
    "Print a table for each work and write the numbers as JSON"
    if child: return contend(*child.split(), steps)
    here = [o for o in who.split() if o not in ('accelerate','lightning') or find_spec(o)]
    for o in set(who.split())-set(here): print(f'{o} is not installed, so it does not take part: `make bench` installs it\n')
    res = dict(machine=machine())
    for work in works.split():
        got = {o: [] for o in here}
        for _ in range(rounds):
            for o in here: got[o].append(measure(work, o, steps))
        res[work] = {o: pool(r) for o,r in got.items() if all(r)}
        print(table(work, res[work]), '\n', flush=True)
        if tpu:
            res[work]['device'] = ms = device_ms(work, tpu)
            print(f"The TPU's compiler estimates {ms:.2f} ms for the step on a {tpu}; the host takes "+', '.join(f"{r['host']/ms:.1f} times that by {k}" for k,r in res[work].items() if k!='device')+'\n', flush=True)
        Path(out).write_text(json.dumps(res, indent=1))
