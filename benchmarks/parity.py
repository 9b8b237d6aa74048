"""Train small Learners in plain fastai on the CPU and through `learn.to_tpu()`, with the same seed and data, and print how far apart they end as a markdown table.

    python benchmarks/parity.py            # every model with every optimizer
    python benchmarks/parity.py cnn vit    # some models
"""
import sys, warnings
from pathlib import Path
warnings.filterwarnings('ignore')
sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'tests'))
from fastai_xla.all import *
from parity_models import LRS, MODELS, OPTS, TOL, TOLS, distance, outcome

columns = {'batch loss': 'loss of each batch', 'valid loss': 'validation loss', 'metrics': 'metrics', 'weights': 'weights and buffers',
           'opt state': 'optimizer state', 'preds': 'predictions'}

def row(model, opt):
    "Largest differences between the two runs of one model and optimizer"
    f,of,lr = MODELS[model],OPTS[opt],LRS[opt]
    ref = outcome(f(of), lr)
    return distance(outcome(f(of).to_tpu(), lr), ref)

def line(cells): return f"| {' | '.join(cells)} |"

def main(models):
    xla_device()
    print(line(['model', 'optimizer', *columns.values()]))
    print(line(['---']*(len(columns)+2)))
    for model in models:
        for opt in OPTS:
            d = row(model, opt)
            assert d['lr']==d['targs']==0
            print(line([model, opt, *[f'{d[k]:.0e}' for k in columns]]), flush=True)
    print(f"\nLargest difference between CPU and XLA ({device_kind()}) after five epochs in four fits, one of them frozen. Learning rates and targets are equal; "
          "optimizer state is relative to the largest value of its kind. Tolerances of the tests: " + ', '.join(f'{columns[k]} {TOL[k]:.0e}' for k in columns)
          + f" (text: {TOLS['text']['weights']:.0e} for weights and {TOLS['text']['opt state']:.0e} for optimizer state).")

if __name__ == '__main__': main(sys.argv[1:] or MODELS)
