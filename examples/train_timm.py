"""timm's training recipe for a fastai Learner: its models, augmentation, splits, loss, optimizers, schedule, clipping and averaged weights, on TPU cores or on XLA's CPU devices.

    python examples/train_timm.py --data-dir imagenet --model vit_small_patch16_224 --pretrained --form distributed -b 128 --epochs 30 --lr-base 1e-3 --layer-decay .75 --model-ema --mixup .2 --amp
    python examples/train_timm.py --dataset digits --model test_resnet --img-size 32 --epochs 5 --lr 1e-3 --warmup-epochs 1 --model-ema --model-ema-warmup

Flags are those of timm's `train.py`; `-b` is the batch of a core there too. Writes `summary.csv`, the best weights and checkpoints into `--output`; with `--resume` the same command goes on where it was killed.
"""
import argparse, math
import timm
from fastai.vision.all import *
from fastai_xla.all import *
from timm.data.auto_augment import augment_and_mix_transform, rand_augment_transform
from timm.layers import convert_splitbn_model
from timm.optim import create_optimizer_v2

def noise(n, n_classes=4):
    "Pictures of noise whose brightness tells the class"
    def one(i): return (np.random.RandomState(i).randint(0, 120, (16,16,3)) + 120*(i%n_classes)//n_classes).astype(np.uint8)
    return [(one(i), i%n_classes) for i in range(n)]

def digits():
    "Scikit-learn's handwritten digits"
    from sklearn.datasets import load_digits
    data = load_digits()
    return [(np.repeat((im*255/16).round().astype(np.uint8)[...,None], 3, 2), int(c)) for im,c in zip(data.images, data.target)]

def augmentation(config):
    "timm's RandAugment or AugMix"
    return (augment_and_mix_transform if config.startswith('augmix') else rand_augment_transform)(config, {})

class Augment(Transform):
    "timm's, of pictures to train with"
    split_idx,order = 0,2
    def __init__(self, config): self.tfm = augmentation(config)
    def encodes(self, o:PILImage): return PILImage.create(self.tfm(o))

def get_dls(a):
    "Batches of `-b` samples a core; one program on all cores has those of all"
    bs = a.batch_size*(a.cores if a.form=='sharded' else 1)
    kwargs = dict(bs=bs, num_workers=a.workers, batch_tfms=[Normalize.from_stats(*imagenet_stats)])
    more = [Augment(a.aa)] if a.aa and not a.aug_splits else []
    if a.aug_splits: kwargs['before_batch'] = AugSplits(augmentation(a.aa), a.aug_splits)
    if a.data_dir:
        if a.aug_splits: more.append(FlipItem()) # the same for all views
        else: kwargs['batch_tfms'].insert(0, Flip())
        return ImageDataLoaders.from_folder(a.data_dir, train=a.train_split, valid=a.val_split, item_tfms=[RandomResizedCrop(a.img_size, min_scale=.08), *more], **kwargs)
    items = digits() if a.dataset=='digits' else noise(a.samples)
    block = DataBlock((ImageBlock, CategoryBlock), getters=[ItemGetter(0), ItemGetter(1)], splitter=RandomSplitter(.2, seed=42),
                      item_tfms=[Resize(a.img_size), *more], batch_tfms=kwargs.pop('batch_tfms'))
    return block.dataloaders(items, **kwargs)

opts = dict(adamw=partial(Adam, mom=.9, sqr_mom=.999, eps=1e-8), adam=partial(Adam, mom=.9, sqr_mom=.999, eps=1e-8, decouple_wd=False),
    sgd=partial(SGD, mom=.9, decouple_wd=False), rmsprop=partial(RMSProp, mom=.9, sqr_mom=.9, decouple_wd=False))

def opt_func(name):
    "fastai's optimizer where it has that one, else timm's"
    return opts.get(name) or partial(OptimWrapper, opt=partial(create_optimizer_v2, opt=name))

def cosine(lrs, warmup, warmup_lr, min_lr):
    "The rates of all groups as a function of the part of the training that is done: up in a line from `warmup_lr`, then along the cosine"
    def _at(pos): return [warmup_lr+(lr-warmup_lr)*pos/warmup if pos<warmup else min_lr+(lr-min_lr)*(1+math.cos(math.pi*pos))/2 for lr in lrs]
    return _at

def base_lr(a):
    "`--lr`, or that of `--lr-base` for the samples of a step"
    rule = a.lr_base_scale or ('sqrt' if any(o in a.opt for o in ('ada','lamb')) else 'linear')
    return a.lr or scaled_lr(a.lr_base, a.batch_size*a.cores*a.grad_accum_steps, a.lr_base_size, rule)

def get_cbs(a):
    clip = dict(norm=GradientClip, value=GradientClipValue, agc=AdaptiveGradientClip)[a.clip_mode]
    cbs = [SaveModelCallback(monitor='accuracy', fname='model_best'), CSVLogger('summary.csv', append=a.resume), TPUCheckpoint(Path(a.output)/'checkpoints', resume=a.resume)]
    if a.clip_grad: cbs.append(clip(a.clip_grad))
    if a.jsd_loss: cbs.append(JSDLoss(a.aug_splits, smoothing=a.smoothing))
    if a.mixup: cbs.append(MixUp(a.mixup))
    if a.cutmix: cbs.append(CutMix(a.cutmix))
    if a.grad_accum_steps>1: cbs.append(GradientAccumulation(a.batch_size*a.grad_accum_steps))
    if a.model_ema: cbs.append(EMACallback(a.model_ema_decay, use_warmup=a.model_ema_warmup))
    return cbs

def get_model(a, n_classes):
    "The model for pictures of `--img-size`, in a form that compiles once"
    kwargs = {'drop_path_rate': a.drop_path} if a.drop_path else {}
    model = timm.create_model(a.model, pretrained=a.pretrained, num_classes=n_classes, drop_rate=a.drop, **kwargs)
    if a.split_bn: model = convert_splitbn_model(model, a.aug_splits)
    return xla_friendly(model, a.img_size if hasattr(model, 'set_input_size') else None)

def get_learner(a):
    set_seed(a.seed)
    dls = get_dls(a)
    learn = Learner(dls, get_model(a, dls.c), loss_func=LabelSmoothingCrossEntropyFlat(eps=a.smoothing), opt_func=opt_func(a.opt), metrics=accuracy, path=a.output,
                    splitter=LayerDecay(a.layer_decay or 1., by_wd=True), wd_bn_bias=True)
    if a.amp: learn.to_bf16()
    if a.form=='tpu': return learn.to_tpu()
    return learn.to_tpu_distributed(a.cores) if a.form=='distributed' else learn.to_tpu_sharded(fsdp=a.cores)

def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    def flag(name, help): add(name, action='store_true', help=help)
    def number(name, default, help): add(name, type=type(default), default=default, help=f'{help} (default: {default})')
    add('--data-dir', help='folder with a folder for each of --train-split and --val-split, and in it one for each class')
    add('--dataset', choices=('digits','synthetic'), default='digits', help="without --data-dir: scikit-learn's digits, or noise")
    number('--train-split', 'train', 'its folder'); number('--val-split', 'val', 'its folder'); number('--samples', 128, 'of noise')
    number('--model', 'resnet50', "one of timm's"); flag('--pretrained', 'begin with its weights'); number('--img-size', 224, 'side of the pictures')
    number('--drop', 0., 'dropout'); number('--drop-path', 0., 'stochastic depth')
    add('-b', '--batch-size', type=int, default=128, help='samples of a step on a core (default: 128)'); number('--epochs', 300, 'of training')
    number('--workers', 4, 'processes that load data, of a core'); number('--grad-accum-steps', 1, 'batches of a step')
    number('--opt', 'sgd', f"{', '.join(opts)}, or another name of timm's"); number('--weight-decay', 2e-5, 'not for biases, norms and what the model names')
    add('--lr', type=float, help='the rate of the head; without it, by --lr-base'); number('--lr-base', .1, 'for steps of --lr-base-size samples')
    number('--lr-base-size', 256, 'samples'); add('--lr-base-scale', choices=('linear','sqrt'), help='default: sqrt for Adam and its kin')
    add('--layer-decay', type=float, help='of the rate of a layer, the part that the one before it has')
    add('--sched', choices=('cosine','none'), default='cosine'); number('--warmup-epochs', 5, 'with a rate that rises')
    number('--warmup-lr', 1e-5, 'where it begins'); number('--min-lr', 0., 'where it ends')
    add('--clip-grad', type=float, help='no clipping without it'); add('--clip-mode', choices=('norm','value','agc'), default='norm')
    number('--smoothing', .1, 'of labels'); number('--mixup', 0., 'alpha'); number('--cutmix', 0., 'alpha'); add('--aa', help="timm's RandAugment or AugMix, as rand-m9-mstd0.5 or augmix-m3-w3")
    number('--aug-splits', 0, 'views of a picture, 0 or at least 2: one as it is, the others by --aa'); flag('--jsd-loss', 'one answer to all of them'); flag('--split-bn', 'norms of their own for each')
    flag('--model-ema', 'validate and save averaged weights'); number('--model-ema-decay', .9998, 'of the average'); flag('--model-ema-warmup', 'begin with a smaller one')
    flag('--amp', 'bfloat16'); number('--seed', 42, 'of all draws'); number('--output', 'output', 'folder'); flag('--resume', 'go on with what is in --output')
    add('--form', choices=('tpu','distributed','sharded'), default='tpu', help='one core, a process for each, or one program on all'); add('--cores', type=int, help='default: all, one with --form tpu')
    return p

def main(args=None):
    p = parser()
    a = p.parse_args(args)
    if a.mixup and a.cutmix: p.error('--mixup or --cutmix: fastai mixes each batch in one way')
    if a.aug_splits and (a.aug_splits<2 or not a.aa): p.error('--aug-splits: at least 2, with --aa to make them')
    if (a.jsd_loss or a.split_bn) and not a.aug_splits: p.error('--jsd-loss and --split-bn need --aug-splits')
    if a.aug_splits and (a.mixup or a.cutmix or a.grad_accum_steps>1): p.error('--aug-splits goes with neither --mixup, --cutmix nor --grad-accum-steps')
    if a.form=='tpu' and a.cores not in (None, 1): p.error('--form tpu trains on one core; --form distributed or sharded on several')
    a.cores = 1 if a.form=='tpu' else a.cores or n_cores()
    Path(a.output).mkdir(parents=True, exist_ok=True)
    learn = get_learner(a)
    rates,wd = learn.splitter.lr(learn.model, base_lr(a)),learn.splitter.wd(learn.model, a.weight_decay)
    sched = [ParamScheduler({'lr': cosine(rates, a.warmup_epochs/a.epochs, a.warmup_lr, a.min_lr)})] if a.sched=='cosine' else []
    print(f'{a.model}: {sum(o.numel() for o in learn.model.parameters()):,} parameters in {len(rates)} groups, rates up to {rates[-1]:.3g}, steps of {a.batch_size*a.cores*a.grad_accum_steps} samples', flush=True)
    learn.fit(a.epochs, rates, wd=wd, cbs=[*get_cbs(a), *sched])
    loss,acc = learn.validate()
    print(f"Done: {acc:.2%} of {len(learn.dls.valid_ds)} pictures right; weights in {learn.path/learn.model_dir/'model_best.pth'}", flush=True)

if __name__=='__main__': main()
