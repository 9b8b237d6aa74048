"""What a call costs: the time of the first and the second `fit` on a pool, and the memory of the notebook and the replicas.

    python benchmarks/second_fit.py    # 8 virtual cores, a process for each; 1 GB of images in memory

Memory is the proportional set size (PSS, Linux): what several processes share counts once. RSS counts it in each.
Both are shown of each process at the end, when each has read the whole dataset, and after that.
"""
import time
import psutil, torch
from fastai.basics import *
from fastai_xla.all import *
from fastai_xla.runtime.ranks import barrier, gather_objects
from fastai_xla.launch import get_pool
from fastai_xla.runtime import xla_counts
from fastcore.script import call_parse

class Images:
    "Pixels in memory, as a dataset"
    def __init__(self, n, size=64): self.x,self.y = torch.randint(0, 256, (n,3,size,size), dtype=torch.uint8),torch.arange(n)%10
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i].float()/255,self.y[i]

class ReadsAll(Callback):
    "What each replica holds when all have looked at each byte of the dataset"
    def before_fit(self):
        self.dls.train.dataset.x.amax()
        barrier()
        self.held = gather_objects(held())
        barrier()

def gigabytes(p, kind='pss'): return getattr(p.memory_full_info(), kind)/2**30
def held(p=None): return [gigabytes(p or psutil.Process(), o) for o in ('rss','pss')]

def memory():
    "Of this process, and of the replicas"
    me = psutil.Process()
    return gigabytes(me),sum(gigabytes(p) for p in me.children(recursive=True))

def each(learn):
    "RSS and PSS of this process and each replica, as markdown"
    cb = ReadsAll()
    learn.fit(1, cbs=cb)
    rows = [('notebook', held(), held()), *((f'rank {i}', cb.held[i], held(p)) for i,p in enumerate(psutil.Process().children()))]
    table = [f"| {k} | {' | '.join(f'{o:.2f}' for o in (*in_fit, *after))} |" for k,in_fit,after in rows]
    return '\n'.join(['| | RSS in a fit, GB | PSS in a fit, GB | RSS after it, GB | PSS after it, GB |\n|---|---|---|---|---|', *table])

def fit(learn, cores):
    "Seconds until the first batch, seconds in all, compiles in the replicas"
    class First(Callback):
        order = 70
        def after_batch(self):
            if not hasattr(self, 'at'): self.at = time.time()
    cb,start = First(),time.time()
    learn.fit(1, 1e-3, cbs=cb)
    return cb.at-start,time.time()-start,get_pool(cores).run(lambda rank: xla_counts().compiles)[0]

@call_parse
def main(
    cores:int=8, # Virtual cores
    gb:float=1., # Size of the dataset in GB
    steps:int=4, # Steps of a fit
):
    "Print the table as markdown"
    n = int(gb*2**30/(3*64*64))
    data = Images(n)
    sample = random.sample(range(n), steps*cores*4)
    dl = DataLoader(data, bs=4, num_workers=0, n=n, get_idxs=lambda: sample)
    learn = Learner(DataLoaders(dl, DataLoader(data, bs=4, num_workers=0, n=n, get_idxs=lambda: sample[:8])),
                    nn.Sequential(nn.Conv2d(3,8,3,2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8,10)), CrossEntropyLossFlat())
    print(f'{cores} virtual cores, each of a process, a dataset of {data.x.nbytes/2**30:.2f} GB in memory\n')
    print('| | seconds to the first batch | seconds in all | compiles so far | notebook, GB | replicas, GB |\n|---|---|---|---|---|---|')
    here,there = memory()
    print(f'| before | | | | {here:.2f} | {there:.2f} |')
    learn.to_tpu_distributed(cores, processes=True)
    for name in ('first fit','second fit','third fit'):
        with learn.no_bar(), learn.no_logging(): first,total,compiles = fit(learn, cores)
        here,there = memory()
        print(f'| {name} | {first:.2f} | {total:.2f} | {compiles:.0f} | {here:.2f} | {there:.2f} |')
    with learn.no_bar(), learn.no_logging(): print(f'\n{each(learn)}')
    learn.detach_tpu_distributed()
