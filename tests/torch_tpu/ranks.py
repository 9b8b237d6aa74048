"""Small Learners that two ranks train, each in a process with a device of its own, beside plain fastai with the whole batch in one.

As a script it prints a table: python tests/torch_tpu/ranks.py [NAME ...]; with --rank it is one of the ranks."""
import conftest # before torch
import argparse, pickle, subprocess, sys, tempfile, warnings
from pathlib import Path
import torch, torch.distributed as dist
from fastai.callback.all import *
from parity_models import *
from workloads import outcome, plain_fastai, TOL
from fastai_xla.all import *

RANKS = {}
def work(f):
    "Decorator: `f(bs)` makes a Learner, or a Learner and a function that trains it"
    RANKS[f.__name__] = f
    return f

def linear_cnn(): return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.GroupNorm(4, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(16, 4))
def images_learner(bs, *cbs, n=61, **kwargs):
    return Learner(image_dls(bs=bs, n=n), linear_cnn(), metrics=[accuracy, F1Score(average='macro'), Perplexity()], cbs=list(cbs), **kwargs)

@work
def uneven_epoch(bs): return images_learner(bs, n=58)
@work
def torch_adamw(bs): return images_learner(bs, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW, eps=1e-5))
@work
def clip_and_accumulate(bs): return images_learner(bs, GradientClip(.1), GradientAccumulation(2*bs))
@work
def label_smoothing(bs): return images_learner(bs, loss_func=LabelSmoothingCrossEntropyFlat())
@work
def vit_tiny(bs):
    return vision_learner(image_dls(32, bs=bs), 'vit_tiny_patch16_224', pretrained=False, metrics=accuracy, custom_head=nn.Linear(24, 4), img_size=32, patch_size=8,
        embed_dim=24, depth=2, num_heads=2)
@work
def table(bs):
    df = people()
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, FillMissing, Normalize], cat_names=['job','town'], cont_names=['age','income','hours'], y_names='rich',
        y_block=CategoryBlock(), valid_idx=list(range(len(df)-29, len(df))), bs=2*bs)
    return tabular_learner(dls, layers=[20,10], metrics=[accuracy, RocAucBinary()], config=dict(use_bn=False, bn_cont=False))
@work
def collab(bs): return collab_learner(CollabDataLoaders.from_df(ratings(), seed=3, bs=2*bs), n_factors=6, y_range=(0,5.5), metrics=[rmse, mae])

def trained(name, bs, attach=None): return outcome(partial(RANKS[name], bs), attach=attach)

def join(rank, place, n=2):
    import gloo_tpu
    dist.init_process_group('tpu_gloo', rank=rank, world_size=n, init_method=f'file://{place}/group')

def on_two_ranks(names, place, n=2):
    "What each workload has left behind on each rank, and what the processes said"
    cmds = [[sys.executable, '-W', 'ignore', __file__, '--rank', str(r), '--place', str(place), *names] for r in range(n)]
    ps = [subprocess.Popen(c, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in cmds]
    try: said = [p.communicate(timeout=600)[0] for p in ps]
    finally:
        for p in ps: p.kill()
    assert not any(p.returncode for p in ps), '\n'.join(said)
    return [pickle.loads((Path(place)/f'{r}.pkl').read_bytes()) for r in range(n)],said

def one_rank(names, rank, place):
    join(rank, place)
    res = {name: trained(name, 8, lambda l: l.to_tpu_distributed())[0] for name in names}
    (Path(place)/f'{rank}.pkl').write_bytes(pickle.dumps(res))
    dist.destroy_process_group()

def compared(names, place):
    "`{name: largest differences between rank 0 and plain fastai, and between the ranks' weights}`"
    (first,second),_ = on_two_ranks(names, place)
    res = {}
    for name in names:
        with plain_fastai(): want,_ = trained(name, 16)
        res[name] = distance(first[name], want),distance({'weights': second[name]['weights']}, {'weights': first[name]['weights']})['weights']
    return res

if __name__ == '__main__':
    warnings.filterwarnings('ignore')
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument('names', nargs='*')
    ap.add_argument('--rank', type=int)
    ap.add_argument('--place')
    a = ap.parse_args()
    if a.rank is not None: one_rank(a.names, a.rank, a.place)
    else:
        groups = [k for k in TOL if k!='targs']
        print(f"| workload, two ranks | {' | '.join(groups)} |\n|---|{'---|'*len(groups)}")
        with tempfile.TemporaryDirectory() as place:
            for name,(d,_) in compared(a.names or list(RANKS), place).items(): print(f"| {name.replace('_', ' ')} | {' | '.join(f'{d[k]:.0e}' for k in groups)} |")
