"""What a loss of the whole batch costs a step on ranks: the gather of predictions and targets, beside a loss that is a mean over samples.

    python benchmarks/losses.py                # 4 ranks
    python benchmarks/losses.py --ranks 2

Each rank has a linear layer and a batch of as many predictions as the row says; the step is the same but for the loss function: `CrossEntropyLossFlat()`,
which each rank takes of its own part, and the same by `loss='batch'`, which each takes of all. Ranks are processes of this machine, whose collectives go
through the host: a TPU's links are not seen here. Numbers are medians over steps of the main rank. `bytes` are those of all ranks' predictions and targets,
of which `BatchLoss.max_bytes` is a limit.
"""
import os
os.environ.setdefault('PJRT_DEVICE', 'CPU')
os.environ.setdefault('OMP_NUM_THREADS', '1')
import statistics, time
from argparse import ArgumentParser
from fastai.basics import *
from fastai_xla.all import *

SIZES = (16, 10),(64, 1000),(512, 1000),(2048, 1000)

class Ticks(Callback):
    "Seconds of each step, and what XLA did in it"
    order,run_valid = 2000,False
    def before_fit(self): self.times,self.counts = [],[]
    def before_batch(self): self.start = time.perf_counter()
    def after_batch(self):
        self.times.append(time.perf_counter()-self.start)
        self.counts.append(xla_counts())

def steps(bs, c, ranks, loss, n=12):
    "(median of ms, executions, reads, compiles) of a step"
    set_seed(1)
    ds = [(torch.randn(32), i%c) for i in range(bs*ranks)]*n
    dls = DataLoaders(TfmdDL(ds, bs=bs, num_workers=0), TfmdDL(ds[:2*bs], bs=bs, num_workers=0))
    cb = Ticks()
    learn = Learner(dls, nn.Linear(32, c), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=cb, path='.').to_tpu_distributed(n_cores=ranks, processes=True, loss=loss)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
    a,b = cb.counts[-3:-1]
    return 1e3*statistics.median(cb.times[4:]),b.executions-a.executions,b.reads-a.reads,b.compiles-a.compiles

def line(cells): return f"| {' | '.join(map(str, cells))} |"

def main(ranks):
    use_virtual_cores(ranks)
    print(line(['predictions of a rank', 'bytes of all', 'ms, own part', 'ms, whole batch', 'executions, reads, compiles', 'of the whole batch']), line(['---']*6), sep='\n')
    for bs,c in SIZES:
        (own,*a),(whole,*b) = (steps(bs, c, ranks, loss) for loss in (None, 'batch'))
        print(line([f'{bs} x {c}', f'{bs*ranks*(4*c+8)/2**20:.2f} MB', f'{own:.1f}', f'{whole:.1f}', a, b]), flush=True)

if __name__=='__main__':
    p = ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--ranks', type=int, default=4)
    main(**vars(p.parse_args()))
