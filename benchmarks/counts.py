"""Count what XLA does in one steady training epoch: compilations, reads, uploads, executions and operators that fell back to the CPU.

    python benchmarks/counts.py              # resnet18 at 64 px
    python benchmarks/counts.py vit tabular  # other models of tests/parity_models.py
"""
import sys, warnings
from pathlib import Path
warnings.filterwarnings('ignore')
sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'tests'))
from fastai_xla.all import *
from count_models import COUNTED, BatchCounts

def line(cells): return f"| {' | '.join(map(str, cells))} |"

def row(name):
    "Train two epochs, with progress bar and metrics, and return the counts of the second's training"
    learn = COUNTED[name]().to_tpu(batch_tfms='auto', fetch_every=1e9)
    cb = BatchCounts()
    learn.fit(2, 1e-3, cbs=cb)
    print(f'\n{learn.tfm_placement}\n')
    c,e,n = cb.batches[1],cb.epochs[1],cb.n_batches
    return [name, n, c.compiles, c.reads, e.reads-c.reads, sum(c.fallbacks.values()), c.executions/n, f'{c.uploads/n:.1f}']

def main(names):
    rows = [row(o) for o in names]
    print(line(['model', 'batches', 'compiles', 'reads during batches', 'reads at the end', '`aten::` fallbacks', 'executions a batch', 'uploads a batch']))
    print(line(['---']*len(rows[0])))
    for r in rows: print(line(r))
    print(f'\nSecond training epoch on XLA ({device_kind()}), with progress bar, recorder and metrics. The fetch of losses about once a second, which the progress bar shows, '
          'is turned off here (fetch_every=1e9): no batch needs a read of its own.')

if __name__ == '__main__': main(sys.argv[1:] or ['resnet18'])
