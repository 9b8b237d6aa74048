"""Memory of a notebook and of its ranks over many fits, with an array of 400 MB among the notebook's globals. Run it alone:

    python benchmarks/memory.py --fits 20 --plot memory.png

Each row is the memory of all processes after a fit (proportional set size, so memory that several of them share counts once) and the fit's seconds.
`--kind` says what is done: one Learner that is fitted again, a new Learner each time, `lr_find`, `get_preds`, or a fit that fails.
"""
import argparse, inspect, json, os, time
os.environ.setdefault('PJRT_DEVICE', 'CPU')
os.environ.setdefault('OMP_NUM_THREADS', '1')
import gc, numpy as np, psutil
from fastai.basics import *
from fastai.callback.schedule import *
from fastai_xla.all import *

kinds = 'fit','new','lr_find','get_preds','fail'

class Rows:
    "A dataset that looks into an array of the notebook's"
    def __len__(self): return 64
    def __getitem__(self, i):
        if not 0<=i<64: raise IndexError(i)
        return torch.from_numpy(big[i*1000:i*1000+8].copy()),torch.tensor(i%2)

class Fails(Callback):
    def after_pred(self):
        if self.training and self.train_iter==2: raise ValueError('as it was asked to')

def learner(n, cbs=None):
    dls = DataLoaders(*[DataLoader(Rows(), bs=8, num_workers=0) for _ in range(2)])
    learn = Learner(dls, nn.Linear(8, 2), loss_func=CrossEntropyLossFlat(), cbs=cbs)
    ranks = dict(processes=True) if 'processes' in inspect.signature(Learner.to_tpu_distributed).parameters else {}
    return learn.to_tpu_distributed(n, **ranks)

def memory():
    "MB of this process and of all that it has started"
    gc.collect()
    own = psutil.Process()
    return [sum(o.memory_full_info().pss for o in os_)/1e6 for os_ in ([own], own.children(recursive=True))]

def once(kind, learn, n):
    if kind=='new': learn = learner(n)
    with learn.no_bar(), learn.no_logging():
        if kind=='lr_find': learn.lr_find(num_it=8, show_plot=False)
        elif kind=='get_preds': learn.get_preds()
        else:
            try: learn.fit(1, 1e-3)
            except (LaunchError,ValueError): assert kind=='fail'

def run(kind, fits, n):
    learn,res = learner(n, Fails() if kind=='fail' else None),[]
    for i in range(fits):
        start = time.time()
        once(kind, learn, n)
        res.append([i+1, time.time()-start, *memory()])
        print(f'{kind:10} {i+1:3} {res[-1][1]:6.1f} s  notebook {res[-1][2]:7.0f} MB  ranks {res[-1][3]:7.0f} MB', flush=True)
    return res

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--fits', type=int, default=20)
    p.add_argument('--cores', type=int, default=2)
    p.add_argument('--mb', type=int, default=400, help='size of the array')
    p.add_argument('--kind', choices=kinds, nargs='*', default=['fit'])
    p.add_argument('--json', help='file for the numbers')
    p.add_argument('--plot', nargs='*', help='a picture, and other files of --json that it shows too')
    a = p.parse_args()
    big = np.random.RandomState(0).rand(a.mb*250_000).astype(np.float32)
    res = {k: run(k, a.fits, a.cores) for k in a.kind}
    if a.json: Path(a.json).write_text(json.dumps(res))
    if a.plot:
        import matplotlib; matplotlib.use('Agg')
        import matplotlib.pyplot as plt
        for name,rows in [*((Path(o).stem+' '+k, v) for o in a.plot[1:] for k,v in json.loads(Path(o).read_text()).items()), *res.items()]:
            plt.plot([o[0] for o in rows], [o[2]+o[3] for o in rows], marker='.', label=name)
        plt.xlabel('fit'); plt.ylabel('MB of all processes'); plt.ylim(0); plt.legend(); plt.tight_layout(); plt.savefig(a.plot[0], dpi=120)
