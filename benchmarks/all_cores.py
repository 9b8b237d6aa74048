"""`to_tpu_distributed` in one process beside a rank for each core: what the TPU's compiler says of both programs.

    python benchmarks/all_cores.py                          # seven models at 64 px, training and validation, for v5e-8
    python benchmarks/all_cores.py resnet18 vit --size 224  # some, larger
Needs `pip install 'fastai_xla[compile]'`. 64 samples a core, bfloat16. Estimates of a compiler for a described chip: nothing runs on a TPU.
A ratio is cycles of one process by those of a rank. `norms` are the all-reduces of BatchNorm, which a rank does without: its statistics are its own.
"""
import argparse, os, tempfile, time, warnings
from pathlib import Path
warnings.filterwarnings('ignore')

def text_learner(bs, n):
    "A language model by AWD_LSTM"
    from fastai.text.all import AWD_LSTM, awd_lstm_lm_config, CrossEntropyLossFlat, DataLoaders, get_language_model, Learner, rnn_cbs, TfmdDL, torch
    ds = [(torch.randint(2, 10_000, (72,)), torch.randint(2, 10_000, (72,))) for _ in range(2*bs*n)]
    dls = DataLoaders(*[TfmdDL(ds, bs=bs, num_workers=0) for _ in range(2)])
    return Learner(dls, get_language_model(AWD_LSTM, 10_000, {**awd_lstm_lm_config}), loss_func=CrossEntropyLossFlat(), cbs=rnn_cbs(2, 1))

def image_learner(name, bs, size, n):
    "A Learner on pictures"
    import timm, torchvision
    from fastai.vision.all import create_unet_model, CrossEntropyLossFlat, DataLoaders, Learner, TfmdDL, torch
    ys = torch.randint(0, 3, (2*bs*n,size,size)) if name=='unet' else torch.arange(2*bs*n)%10
    dls = DataLoaders(*[TfmdDL(list(zip(torch.randn(len(ys), 3, size, size), ys)), bs=bs, num_workers=0) for _ in range(2)])
    if name=='unet': model = create_unet_model(torchvision.models.resnet18, 3, (size,size), pretrained=False)
    elif name.startswith('resnet'): model = getattr(torchvision.models, name)(num_classes=10)
    elif name=='vit': model = timm.create_model('vit_tiny_patch16_224', img_size=size, patch_size=8 if size<100 else 16, num_classes=10)
    else: model = timm.create_model(dict(convnext='convnext_tiny', efficientnet='efficientnet_b0')[name], num_classes=10)
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(axis=1) if name=='unet' else CrossEntropyLossFlat())

models = 'resnet18','resnet50','convnext','efficientnet','vit','awd_lstm','unet'

def learner(name, bs, size, n=8):
    import torch
    torch.manual_seed(0)
    learn = text_learner(bs, n) if name=='awd_lstm' else image_learner(name, bs, size, n)
    return learn.to_bf16()

def report(name, form, a, **options):
    "What the compiler says of the steps of a Learner"
    import fastai_xla.all
    bs = {'awd_lstm': 16, 'unet': 8}.get(name, a.bs)
    return learner(name, bs, a.size).compile_for('v5e-8', form, fast=a.fast, limit=a.limit, **options)

def vector_copies(r):
    "Number, and thousand cycles, of copies of vectors: what BatchNorm's all-reduces take and give is copied"
    found = [w.cycles for w in r.works if w.kind=='copy' and sum(n!='1' for n in w.shape.split('[')[-1].rstrip(']').split(','))<2]
    return f'{len(found)}, {sum(found)/1e3:.0f}'

def kinds(r, *names): return ' '.join(f'{sum(w.cycles for w in r.works if n in w.kind)/1e3:.0f}' for n in names)

def row(name, a):
    "A row for each phase"
    from fastai_xla.models.forms import batch_norms
    rs = {}
    for form in ('ranks','distributed'):
        try: rs[form] = report(name, form, a, **(dict(sync_bn=False) if a.no_sync_bn and form=='distributed' else {}))
        except Exception as e: print(f'| {name} | {form}: {str(e)[:200]} |', flush=True)
    if len(rs)<2: return
    for phase in ('train','valid'):
        one,all_ = rs['ranks'].programs[phase],rs['distributed'].programs[phase]
        ratio = all_.cycles/one.cycles
        print(f"| {name} | {phase} | {one.cycles/1e6:.2f} | {all_.cycles/1e6:.2f} | {ratio:.2f} | {sum(one.collectives.values())} | {sum(all_.collectives.values())} "
            f"| {kinds(one, 'copy', 'convert', 'reverse')} | {kinds(all_, 'copy', 'convert', 'reverse')} | {vector_copies(one)} | {vector_copies(all_)} |", flush=True)

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('models', nargs='*', default=models)
    p.add_argument('--size', type=int, default=64)
    p.add_argument('--bs', type=int, default=64)
    p.add_argument('--fast', action='store_true', help='compile with less effort')
    p.add_argument('--no_sync_bn', action='store_true', help='BatchNorm of one process has the statistics of each core, as that of a rank')
    p.add_argument('--limit', type=float, default=3600)
    a = p.parse_args()
    print('| model | step | a rank, million cycles | one process | ratio | collectives of a rank | of one process | copies, converts, reverse of a rank (thousand cycles) | of one process | copies of vectors of a rank (number, thousand cycles) | of one process |')
    print('| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |', flush=True)
    for o in a.models or models: row(o, a)
