"""A training step through the TPU's own compiler, beside a plain JAX program of the same model through the same compiler.

    python -m venv jax && jax/bin/pip install 'jax[cpu]==0.7.1'   # its programs are of libtpu 0.0.21's time
    python benchmarks/device.py --jax jax/bin/python                  # all works; those at 224 px take long: see --fast and --limit
    python benchmarks/device.py --jax jax/bin/python vit_f32          # some
    python benchmarks/device.py --jax jax/bin/python --counts         # parameters and operations of both, without the TPU's compiler
    python benchmarks/device.py --sampling                            # what sampling alone takes, by look-ups and by products
Needs `pip install 'fastai_xla[compile]'`, and for the JAX column a Python with jax, which is asked for the program alone; without it the column is empty.
Estimates of a compiler for a described chip: nothing runs on a TPU. Gathers have no estimate: their rows are counted at 5.3 cycles each, as libtpu's assembly has them.
The loop that makes tiles again which look further (`patches.sampling`) is counted with one turn, and beside it with as many as `aug_transforms()`'s draws take on average.
"""
import argparse, math, os, re, signal, subprocess, sys, tempfile, warnings
from pathlib import Path
from jax_twins import n_cont, n_words, works
warnings.filterwarnings('ignore')
row_cycles = 5.3

# ---- ours

def model_of(w):
    "The model of the work `w`"
    import timm, torchvision
    from fastai.collab import EmbeddingDotBias
    from fastai.tabular.model import TabularModel
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
    from fastai.text.models.core import get_language_model
    from fastai.vision.learner import create_unet_model
    if w.model=='unet': return create_unet_model(torchvision.models.resnet18, 3, (w.size,w.size), pretrained=False)
    if w.model=='awd_lstm': return get_language_model(AWD_LSTM, n_words, {**awd_lstm_lm_config})
    if w.model=='tabular': return TabularModel([(n_words,50)]*w.size, n_cont, 10, [200,100])
    if w.model=='collab': return EmbeddingDotBias(50, n_words, n_words, (0,5.5))
    if w.model.startswith('resnet'): return getattr(torchvision.models, w.model)(num_classes=10)
    if w.model=='convnext': return timm.create_model('convnext_tiny', num_classes=10)
    if w.model=='efficientnet': return timm.create_model('efficientnet_b0', num_classes=10)
    if w.model=='vit_base': return timm.create_model('vit_base_patch16_224', img_size=w.size, num_classes=10)
    return timm.create_model('vit_tiny_patch16_224', img_size=w.size, patch_size=8, num_classes=10)

def planned(w):
    "Bytes that `plan_training` says a step of the work `w` takes; of images on one chip"
    from fastai_xla.aot import plan_training
    from fastai_xla.sharding import make_mesh
    if w.form!='tpu' or w.model in ('awd_lstm','tabular','collab'): return
    return plan_training(model_of(w), make_mesh(n=1), w.bs, (3,w.size,w.size), bf16=w.bf16).total

def samples(w, n):
    "`n` samples without augmentation"
    import torch
    if w.model=='awd_lstm': return [(torch.randint(2, n_words, (w.size,)), torch.randint(2, n_words, (w.size,))) for _ in range(n)]
    if w.model=='collab': return [(torch.randint(0, n_words, (w.size,)), torch.tensor(float(i%5))) for i in range(n)]
    if w.model=='tabular': return [(torch.randint(0, n_words, (w.size,)), torch.randn(n_cont), torch.tensor(i%10)) for i in range(n)]
    ys = torch.randint(0, 3, (n,w.size,w.size)) if w.model=='unet' else torch.arange(n)%10
    return list(zip(torch.randn(n, 3, w.size, w.size), ys))

def learner(w):
    "A Learner of the work `w`"
    import torch, numpy as np
    from fastai.callback.rnn import rnn_cbs
    from fastai.vision.all import (aug_transforms, CategoryBlock, CrossEntropyLossFlat, DataBlock, DataLoaders, ImageBlock, imagenet_stats, IndexSplitter, Learner,
        MSELossFlat, Normalize, TfmdDL)
    torch.manual_seed(0)
    if w.aug:
        ims = [np.random.RandomState(i).randint(0, 256, (w.size, w.size, 3)).astype(np.uint8) for i in range(3*w.bs)]
        db = DataBlock((ImageBlock, CategoryBlock(vocab=list(range(10)))), get_x=lambda i: ims[i], get_y=lambda i: i%10, splitter=IndexSplitter(range(2*w.bs, 3*w.bs)),
            batch_tfms=[*aug_transforms(), Normalize.from_stats(*imagenet_stats)])
        dls = db.dataloaders(range(3*w.bs), bs=w.bs, num_workers=0)
    else:
        ds = samples(w, 2*w.bs*tpu_slice_of(w).n) # two batches on each core
        dls = DataLoaders(*[TfmdDL(ds, bs=w.bs, num_workers=0) for _ in range(2)])
    loss = dict(collab=MSELossFlat(), unet=CrossEntropyLossFlat(axis=1)).get(w.model, CrossEntropyLossFlat())
    learn = Learner(dls, model_of(w), loss_func=loss, cbs=rnn_cbs(2, 1) if w.model=='awd_lstm' else None)
    return learn.to_bf16() if w.bf16 else learn

def options_of(w):
    "Of `to_tpu_sharded`"
    return dict(fsdp=tpu_slice_of(w).n) if w.form=='sharded' else {}

def tpu_slice_of(w):
    from fastai_xla.aot.plan import tpu_slice
    return tpu_slice(w.chips)

def compiled(module, w, effort, cache):
    "What the compiler says of a step of the work `w`"
    from fastai_xla.aot.libtpu import ProgramCache
    from fastai_xla.aot.report import ProgramReport
    s = tpu_slice_of(w)
    n = dict(tpu={}, ranks=dict(replicas=s.n), sharded=dict(partitions=s.n))[w.form]
    res,memory,seconds = ProgramCache(s, cache).compile(module, effort=effort, **n)
    return ProgramReport(res, memory, s, seconds)

def our_program(w):
    "Our training step"
    import fastai_xla.all
    from fastai_xla.launch.launcher import pack_run
    from fastai_xla.aot.libtpu import tpu_collectives
    from fastai_xla.aot.trace import CompileJob, trace_phase
    from fastai_xla.runtime.device import make_programs_for
    make_programs_for('TPU')
    with tempfile.TemporaryDirectory() as d:
        run,*_ = pack_run(print, (learner(w),), share=False)
        program,_ = trace_phase(CompileJob(w.chips, w.form, tpu_slice_of(w).n, options_of(w)), run, Path(d)/'train', 'train')
    return tpu_collectives(program) if w.form=='ranks' else program

def ours(w, effort, cache):
    "What the compiler says of our training step"
    return compiled(our_program(w), w, effort, cache)

def n_params(w): return sum(p.numel() for p in model_of(w).parameters())

def asked(python, *args):
    "What `jax_twins.py` says"
    return subprocess.run([python, Path(__file__).with_name('jax_twins.py'), *args], check=True, env={}, stdout=subprocess.PIPE, text=True).stdout

def jax_program(name, python):
    "JAX's step, of a model that has as many parameters as ours"
    from fastai_xla.aot.libtpu import hlo_message
    with tempfile.TemporaryDirectory() as d:
        n,own = int(asked(python, name, f'{d}/hlo')),n_params(works[name])
        if n!=own: sys.exit(f"JAX's model of {name} has {n} parameters and ours {own}, so their steps cannot be compared: mend it in jax_twins.py.")
        return hlo_message('HloModuleProto').FromString(Path(f'{d}/hlo').read_bytes())

def of_jax(name, python, effort, cache):
    "What the compiler says of JAX's step"
    w = works[name]
    return compiled(jax_program(name, python), w._replace(form='sharded') if w.form=='ranks' else w, effort, cache) # JAX's replicas are parts of one program

# ---- the same work?

def flops(module, python):
    "Operations of a program, as XLA counts them before it optimizes"
    with tempfile.TemporaryDirectory() as d:
        path = Path(d)/'hlo'
        path.write_bytes(module.SerializeToString())
        return float(asked(python, '--flops', path))

def counts(names, python):
    "The table of parameters and operations"
    print('| work | parameters | GFLOP, ours | JAX | ratio |', '| --- | --- | --- | --- | --- |', sep='\n')
    for name in names:
        a,b = [flops(o, python)/1e9 for o in (our_program(works[name]), jax_program(name, python))]
        print(f'| {name} | {n_params(works[name])} | {a:.2f} | {b:.2f} | {a/b:.3f} |', flush=True)

# ---- sampling alone

def sampled(size, kind, cache, bs=16):
    "What the compiler says of the bilinear sampling of a batch, by 'look-ups', or of 'numbers' or 'bytes' by products, over whole images or by 'tiles of' them"
    import torch
    from fastai_xla.aot.libtpu import hlo_message
    from fastai_xla.aot.libtpu import ProgramCache
    from fastai_xla.aot.report import ProgramReport
    from fastai_xla.aot.plan import tpu_slice
    from fastai_xla.patches.sampling import grid_sample_xla, sampled_by_tiles, tile_grid
    from fastai_xla.runtime.device import make_programs_for, torch_xla, xla_device
    x,grid,mat = [torch.rand(bs, *o).to(xla_device()) for o in ((3,size,size), (size,size,2), (2,3))]
    make_programs_for(None if kind=='look-ups' else 'TPU')
    how = 'reflection',True,255 if 'bytes' in kind else None
    res = sampled_by_tiles(x, tile_grid(mat, size, size, True), size, size, *how) if 'tiles' in kind else grid_sample_xla(x, grid, 'bilinear', *how)
    module = hlo_message('HloModuleProto').FromString(torch_xla._XLAC._get_xla_tensors_hlo_proto([res]))
    s = tpu_slice('v5e-1')
    res,memory,seconds = ProgramCache(s, cache).compile(module, effort=0.)
    return ProgramReport(res, memory, s, seconds)

def sampling(cache):
    "The table of what sampling takes; of tiles with one turn of the loop, and with as many as it takes"
    kinds = 'look-ups','numbers','tiles of numbers','bytes','tiles of bytes'
    print('| 16 images of | four look-ups a pixel, at 5.3 cycles a row | products of any numbers | by tiles | by mean turns | of bytes | by tiles | by mean turns | mean turns |',
        f"|{' --- |'*9}", sep='\n')
    for size in (64, 128, 224):
        turns,cells = far_tiles(size),[]
        for k in kinds:
            r = sampled(size, k, cache)
            cells += [r.cycles+gathered(r)] + [by_turns(r, turns)]*('tiles' in k)
        print(f"| {size} px | {' | '.join(f'{o/1e6:.2f}' for o in cells)} | {turns:.2f} |", flush=True)

def far_tiles(size, n=8000, bs=16):
    """Tiles of a batch of `bs` images, on average, that look further than the part of 49 by 49 pixels which they choose from, as `aug_transforms()` draws:
    the turns of the loop that makes them again, one after the other"""
    import torch
    from fastai.vision.augment import AffineCoordTfm, aug_transforms, compose_tfms, setup_aug_tfms
    from fastai.vision.core import TensorImage
    from fastai_xla.patches.sampling import source_pixel, tile_grid
    torch.manual_seed(0)
    tfm,found,last = next(o for o in setup_aug_tfms(aug_transforms()) if isinstance(o, AffineCoordTfm)),0,size-49
    for _ in range(n//bs):
        tfm.before_call(TensorImage(torch.zeros(bs, 3, size, size)), 0)
        grid = compose_tfms(tile_grid(tfm.mat, size, size, tfm.align_corners), tfms=tfm.coord_fs)
        ps = [source_pixel(grid[...,i], size, tfm.pad_mode, tfm.align_corners) for i in (0,1)]
        firsts = [p.amin(-1).floor().clamp(0, last) for p in ps]
        found += sum((p.amax(-1)-f>48) & (f<last) for p,f in zip(ps, firsts)).bool().sum().item()
    return found*bs/n

# ---- the table

def gathered(r):
    "Cycles of the rows that are looked up: all dims of a result but the last"
    n = 0
    for (kind,shape),runs in r.unknown.items():
        if 'gather' in kind.split('+'):
            dims = [int(o) for o in re.search(r'\[([\d,]*)\]', shape)[1].split(',') if o]
            n += runs*max(1, math.prod(dims[:-1]))
    return n*row_cycles

def by_turns(r, turns):
    "Cycles with look-ups, if loops in which the data decide take so many turns"
    return r.cycles+gathered(r)+(turns-1)*r.unknown_loops

def shown(x, form='.2f'): return '' if x is None else format(x, form)

def row(name, python, effort, cache, kinds):
    "The cells of a work, and our million cycles, with one turn of loops in which the data decide and by mean turns"
    w = works[name]
    rs = [ours(w, effort, cache)] + ([of_jax(name, python, effort, cache)] if python else [])
    if kinds: print(*[f'{who}: {r}' for who,r in zip(('ours','JAX'), rs)], sep='\n\n')
    (c,full,mem),(jc,jfull,jmem) = ([(r.cycles/1e6, (r.cycles+gathered(r))/1e6, r.memory.total/1e6) for r in rs]+[(None,)*3])[:2]
    plan,turned = planned(w),by_turns(rs[0], far_tiles(w.size, bs=w.bs))/1e6 if w.aug and rs[0].unknown_loops else None
    cells = (name, shown(c), shown(full), shown(turned), shown(jc), shown(jfull), shown(jfull and (turned or full)/jfull),
        shown(mem, '.0f'), shown(plan and plan/1e6, '.0f'), shown(jmem, '.0f'), shown(jmem and mem/jmem), '+'.join(f'{r.seconds:.0f}' for r in rs))
    return cells,(full,turned or full)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('names', nargs='*', help=f'of {", ".join(works)}')
    p.add_argument('--jax', help='a Python that has jax')
    p.add_argument('--fast', action='store_true', help='compile both in a fifth of the time; cycles are then too many')
    p.add_argument('--kinds', action='store_true', help='the reports besides, with cycles by kind of work')
    p.add_argument('--limit', type=int, default=1800, help='seconds for one work, after which the table ends (default: 1800)')
    p.add_argument('--cache', type=Path, default=Path.home()/'.cache'/'fastai_xla'/'compiled', help='folder of what was compiled before')
    p.add_argument('--counts', action='store_true', help='parameters and operations of both alone')
    p.add_argument('--sampling', action='store_true', help='what sampling alone takes, by look-ups and by products')
    a = p.parse_args()
    for o in a.names:
        if o not in works: p.error(f'there is no work {o!r}: choose of {", ".join(works)}')
    os.environ.update(PJRT_DEVICE='CPU', OMP_NUM_THREADS='1') # a fork of a process with OpenMP's threads would wait for them
    if a.counts and not a.jax: p.error('--counts compares with JAX: add --jax and a Python that has it')
    if a.sampling: return sampling(a.cache)
    if a.counts: return counts(a.names or works, a.jax)
    print('| work | Mcycles, ours | with look-ups | by mean turns | JAX | with look-ups | ratio | MB, ours | planned | JAX | ratio | compiled in, s |')
    print(f"|{' --- |'*12}")
    took = {}
    for name in a.names or works:
        signal.alarm(a.limit)
        cells,took[name] = row(name, a.jax, -.5 if a.fast else 0., a.cache, a.kinds)
        print(f"| {' | '.join(cells)} |", flush=True)
    signal.alarm(0)
    for name in took:
        base = took.get(name.replace('_aug', ''))
        if works[name].aug and base: print('{}: augmentation adds {:.1%}, by mean turns {:.1%}'.format(name, *[a/b-1 for a,b in zip(took[name], base)]))

if __name__ == '__main__': main()
