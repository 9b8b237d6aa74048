"""Which timm families train on XLA, what they compile and what falls back to the host:

    PJRT_DEVICE=CPU python benchmarks/timm_families.py [name ...]

One small, randomly initialized model of each family trains for five steps with a fixed batch. Printed are the graphs compiled in steps 1, 2 and 3 to 5, host fallbacks, device reads, and the loss.
"""
import sys, timm, torch
from fastai_xla.all import *
from fastai_xla.runtime.device import torch_xla

FAMILIES = dict(vit='test_vit', deit3='deit3_small_patch16_224', eva02='eva02_tiny_patch14_224', swin='swin_tiny_patch4_window7_224', mixer='mixer_s32_224', resnet='test_resnet', resnetv2='resnetv2_50',
                nfnet='test_nfnet', efficientnet='test_efficientnet', mobilenetv3='mobilenetv3_small_050', convnext='test_convnext', regnet='regnetx_002', levit='levit_128s', mobilevit='mobilevit_xxs', hrnet='hrnet_w18_small')
SMALL = dict(deit3=dict(img_size=64, depth=2, embed_dim=48, num_heads=3), eva02=dict(img_size=56, depth=2, embed_dim=48, num_heads=3), swin=dict(img_size=56, embed_dim=24, depths=(1,1,1,1), num_heads=(1,2,4,8)),
             mixer=dict(img_size=64), resnetv2=dict(layers=(1,1,1,1), channels=(32,32,64,64), stem_chs=16), levit=dict(img_size=64))

def size(model): return getattr(model, 'pretrained_cfg', {}).get('input_size', (3,64,64))

def make(family):
    torch.manual_seed(0)
    model = timm.create_model(FAMILIES[family], pretrained=False, num_classes=5, **SMALL.get(family, {}))
    n = SMALL.get(family, {}).get('img_size') or (64 if family not in ('vit','nfnet') else size(model)[-1])
    return xla_friendly(model),n

def steps(family, n=5):
    "Counts of each step, and the losses"
    model,sz = make(family)
    model,dev,res,losses = model.to(xla_device()),xla_device(),[],[]
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(4, 3, sz, sz, generator=g).to(dev),torch.arange(4).to(dev)
    for _ in range(n):
        before = xla_counts()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        torch_xla.sync(wait=True)
        res.append(xla_counts()-before)
        losses.append(loss.item())
    return res,losses

def row(family):
    res,losses = steps(family)
    c = [o.compiles for o in res]
    falls = sorted({k for o in res for k in o.fallbacks})
    return dict(family=family, model=FAMILIES[family], step1=c[0], step2=c[1], later=sum(c[2:]), reads=sum(o.reads for o in res), fallbacks=', '.join(falls) or 'none', losses=losses)

def main(names):
    print(f"{'family':13} {'model':29} {'step 1':>6} {'2':>3} {'3-5':>4} {'reads':>5}  {'loss':15} fallbacks")
    for o in names or FAMILIES:
        try: r = row(o)
        except Exception as e: print(f'{o:13} {FAMILIES[o]:29} {type(e).__name__}: {str(e).splitlines()[0][:90]}', flush=True)
        else: print(f"{o:13} {r['model']:29} {r['step1']:6} {r['step2']:3} {r['later']:4} {r['reads']:5}  {r['losses'][0]:.3f} -> {r['losses'][-1]:.3f}  {r['fallbacks']}", flush=True)

if __name__=='__main__': main(sys.argv[1:])
