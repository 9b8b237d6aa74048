"`examples/train_timm.py` by the recipe of a timm model card, and the same recipe as a plain loop over timm's own functions. `python timm_recipe.py FILE FLAG...` trains by the script."
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent.parent/'examples'))
from train_timm import *
from timm.utils import dispatch_clip_grad, ModelEmaV3

flags = ('--dataset synthetic --samples 80 --model test_vit --img-size 32 --workers 0 --epochs 3 --seed 7 --opt adamw --lr 2e-3 --weight-decay .05 --warmup-epochs 1 --warmup-lr 1e-4 --min-lr 1e-5 --clip-grad 1 '
    '--aa rand-m9-mstd0.5-inc1 --scale .3 1 --mixup .8 --cutmix 1 --reprob .25 --smoothing .1 --model-ema --model-ema-decay .95 --model-ema-warmup --eval-metric loss').split()

def host(model): return {k: v.detach().cpu().float().clone() for k,v in model.state_dict().items()}

def by_script(out, more):
    "What the script's training ends with: best averaged weights, and losses and accuracies of its epochs"
    learn = train(parse([*flags, '--output', str(Path(out).parent/'out'), *more]))
    torch.save((host(learn.model), [list(map(float, o)) for o in learn.recorder.values]), out)

def by_timm(bs, bce=False):
    "The same, by timm's functions in a loop on the CPU"
    a = parse(flags)
    set_seed(a.seed)
    train_items,valid_items,n = get_items(a)
    model = timm.create_model('test_vit', num_classes=n)
    model.set_input_size(32)
    stats = dict(mean=model.default_cfg['mean'], std=model.default_cfg['std'])
    tfm = create_transform(32, is_training=True, auto_augment='rand-m9-mstd0.5-inc1', scale=(.3,1), re_prob=.25, re_mode='pixel', interpolation='random', **stats)
    valid_tfm = create_transform(32, interpolation=model.default_cfg['interpolation'], crop_pct=model.default_cfg['crop_pct'], **stats)
    mix = Mixup(mixup_alpha=.8, cutmix_alpha=1., label_smoothing=.1, num_classes=n)
    loss_func = BinaryCrossEntropy(smoothing=0.) if bce else SoftTargetCrossEntropy()
    opt = create_optimizer_v2(model, 'adamw', lr=2e-3, weight_decay=.05)
    sched,epochs = create_scheduler_v2(opt, 'cosine', num_epochs=3, warmup_epochs=1, warmup_lr=1e-4, min_lr=1e-5)
    ema,step,shown,best,rows = ModelEmaV3(model, decay=.95, use_warmup=True),0,0.,None,[]
    batches,valid = DataLoader(train_items, bs=bs, shuffle=True, drop_last=True, create_batch=noop),DataLoader(valid_items, bs=bs, create_batch=noop)
    for epoch in range(epochs):
        model.train()
        for samples in batches:
            x,y = mix(torch.stack([tfm(o) for o,_ in samples]), torch.tensor([o for _,o in samples]))
            loss = loss_func(model(x), y)
            opt.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1., 'norm')
            opt.step()
            step += 1
            ema.update(model, step=step)
            shown = .98*shown+.02*loss.item() # fastai shows this average
        with torch.no_grad():
            x,y = map(torch.cat, zip(*[(torch.stack([valid_tfm(o) for o,_ in b]), torch.tensor([o for _,o in b])) for b in valid]))
            pred = ema.module.eval()(x)
        rows.append([shown/(1-.98**step), F.cross_entropy(pred, y).item(), (pred.argmax(1)==y).float().mean().item(), 1.])
        if best is None or rows[-1][1]<best[0]: best = rows[-1][1],host(ema.module)
        sched.step(epoch+1, rows[-1][1])
    return best[1],rows

if __name__=='__main__': by_script(sys.argv[1], sys.argv[2:])
