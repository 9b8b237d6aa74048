"""Train small Learners in plain fastai on the CPU and through `learn.to_tpu()`, with the same seed and data, and print how far apart they end as a markdown table.
With --cores, the same for `learn.to_tpu_distributed()` on ranks, each a process with a virtual core, that share each batch, and a table of what each metric is on one process and on all cores.

    python benchmarks/parity.py                    # every model with every optimizer, on one core
    python benchmarks/parity.py cnn vit            # some models
    python benchmarks/parity.py --cores 4          # on 4 ranks, with the table of metrics
"""
import sys, warnings
from argparse import ArgumentParser
from pathlib import Path
warnings.filterwarnings('ignore')
sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'tests'))
from fastai_xla.all import *
from fastai_xla.data.rng import rng_state, set_rng_state
from fastai_xla.launch import get_pool
from metric_cases import CASES, USER_CASES, metric_learner, metric_values
from parity_models import LRS, MODELS, OPTS, TOL, TOLS, distance, outcome

columns = {'batch loss': 'loss of each batch', 'valid loss': 'validation loss', 'metrics': 'metrics', 'weights': 'weights and buffers',
           'opt state': 'optimizer state', 'preds': 'predictions'}
one_order = [o for o in MODELS if o!='text'] # fastai sorts texts by length within chunks whose size depends on `bs`

def line(cells): return f"| {' | '.join(cells)} |"

def head(*cells): print(line(cells), line(['---']*len(cells)), sep='\n')

# ---- training

def on_main(n, f, *args):
    "What `f(*args)` returns on the main rank of `n`"
    return get_pool(n).run(with_draws, rng_state(), f, *args)[0]

def with_draws(rank, state, f, *args):
    "`f(*args)` on a rank, from the random state of this process"
    set_rng_state(state)
    return f(*args)

def on_one_core(f, of, lr): return outcome(f(of).to_tpu(), lr)

def on_cores(n):
    "A run on `n` cores, of which each gets its part of the batches of one process"
    def share(learn):
        for dl in learn.dls.loaders: dl.bs //= n
        return learn
    def run(f, of, lr):
        learn = share(f(of))
        return on_main(n, lambda: outcome(learn.to_tpu_distributed(sync_bn=True), lr))
    return run

def parity_table(models, run):
    head('model', 'optimizer', *columns.values())
    for model in models:
        f,lr = MODELS[model],LRS
        for opt,of in OPTS.items():
            d = distance(run(f, of, lr[opt]), outcome(f(of), lr[opt]))
            assert d['lr']==d['targs']==0
            print(line([model, opt, *[f'{d[k]:.0e}' for k in columns]]), flush=True)

def footer(what): print(f"\nLargest difference between {what} after five epochs in four fits, one of them frozen. Learning rates and targets are equal; "
                        "optimizer state is relative to the largest value of its kind. Tolerances of the tests: " + ', '.join(f'{columns[k]} {TOL[k]:.0e}' for k in columns)
                        + f" (text: {TOLS['text']['weights']:.0e} for weights and {TOLS['text']['opt state']:.0e} for optimizer state).")

# ---- metrics

def metric_row(name, kind, f, n):
    "The metric's value on one process and on the main rank of `n` cores"
    def measure(learn): return metric_values(learn, [name])[name]
    want = measure(metric_learner(kind, [f()]))
    learn = metric_learner(kind, [f()])
    got = on_main(n, lambda: measure(learn.to_tpu_distributed()))
    print(line([name, kind, f'{want:.6f}', f'{got:.6f}', f'{abs(got-want):.0e}']), flush=True)

def metric_table(n):
    head('metric', 'data', 'one process', f'{n} cores', 'difference')
    for name,(kind,f) in {**CASES, **USER_CASES}.items(): metric_row(name, kind, f, n)
    print(f"\nEach metric of fastai, and metrics as users write them, over 53 samples in batches of 4: in plain fastai, and shared by {n} cores ({device_kind()}).")

def main(models, cores):
    if cores is None:
        xla_device()
        parity_table(models or MODELS, on_one_core)
        return footer(f'CPU and XLA ({device_kind()})')
    parity_table(models or one_order, on_cores(cores))
    footer(f"one process (CPU) and {cores} cores ({device_kind()}, a process each) with batches 1/{cores} of its size and `sync_bn=True`,")
    print()
    metric_table(cores)

if __name__ == '__main__':
    p = ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('models', nargs='*', choices=[[], *MODELS], metavar='model', help=', '.join(MODELS))
    p.add_argument('--cores', type=int, help='Share each batch between this number of virtual cores')
    main(**vars(p.parse_args()))
