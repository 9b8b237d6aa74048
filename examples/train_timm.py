"""timm's training script for a fastai Learner: its models, pictures, losses, optimizers and schedules, by timm's own functions, on TPU cores or on XLA's CPU devices.

    python examples/train_timm.py imagenet --model vit_small_patch16_224 --form distributed -b 128 --epochs 300 --opt adamw --lr-base 5e-4 --lr-base-size 512 --weight-decay .05 --warmup-epochs 5 \\
        --aa rand-m9-mstd0.5-inc1 --mixup .8 --cutmix 1 --reprob .25 --drop-path .1 --model-ema --amp
    python examples/train_timm.py --dataset digits --model test_resnet --img-size 32 --scale .6 1 --hflip 0 --crop-pct 1 --color-jitter 0 --epochs 5 --opt adamw --lr 1e-3 --warmup-epochs 1

Flags have the names of timm bits' `train.py` and of timm's, with the defaults of timm's. `-b` is the batch of a core there too. What those scripts take and this one does not stands at the end of `--help`, with the reason;
`train_timm_flags.md`, beside this file, compares all three. Writes `summary.csv`, the best weights and checkpoints into `--output`; with `--resume` the same command goes on where it was killed.
"""
import argparse, sys
import timm, yaml
from fastai.vision.all import *
from fastai_xla.all import *
from timm.data import create_dataset, create_transform, FastCollateMixup, Mixup, resolve_data_config
from timm.layers import convert_splitbn_model
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler_factory import scheduler_kwargs
from timm.utils import ParseKwargs

# ---- pictures

def noise(n, n_classes=4):
    "Pictures of noise whose brightness tells the class"
    def one(i): return (np.random.RandomState(i).randint(0, 120, (16,16,3)) + 120*(i%n_classes)//n_classes).astype(np.uint8)
    return [(one(i), i%n_classes) for i in range(n)]

def digits():
    "Scikit-learn's handwritten digits"
    from sklearn.datasets import load_digits
    data = load_digits()
    return [(np.repeat((im*255/16).round().astype(np.uint8)[...,None], 3, 2), int(c)) for im,c in zip(data.images, data.target)]

def get_items(a):
    "Pictures and classes to train with and to validate with, and the number of classes, None where it is not known"
    if a.data_dir or a.dataset not in ('digits','synthetic'):
        common = dict(name=a.dataset if a.data_dir is None or '/' in a.dataset else '', root=a.data_dir, class_map=a.class_map or None, download=a.dataset_download, input_img_mode='L' if a.in_chans==1 else 'RGB')
        res = [create_dataset(split=split, is_training=training, batch_size=a.batch_size, **common) for split,training in ((a.train_split,True), (a.val_split,False))]
        classes = getattr(getattr(res[0], 'reader', res[0]), 'class_to_idx', None)
        return *res, classes and max(classes.values())+1
    items = digits() if a.dataset=='digits' else noise(a.samples)
    items = [(PILImage.create(x),y) for x,y in items]
    train,valid = RandomSplitter(.2, seed=42)(items)
    return [items[i] for i in train],[items[i] for i in valid],10 if a.dataset=='digits' else 4

class Samples:
    "Pictures after a transform of timm's, and their classes"
    n_inp = 1
    def __init__(self, items, tfm, split_idx): self.items,self.tfm,self.split_idx = items,tfm,split_idx
    def __len__(self): return len(self.items)
    def __getitem__(self, i):
        x,y = self.items[i]
        return TensorImage(torch.as_tensor(self.tfm(x))),TensorCategory(y)

class Mix:
    "Makes batches in the loader's processes, with timm's MixUp and CutMix: the device always sees one program"
    def __init__(self, on_bytes, **kwargs): self.on_bytes,self.mix = on_bytes,(FastCollateMixup if on_bytes else Mixup)(**kwargs)
    def __call__(self, samples):
        if self.on_bytes: x,y = self.mix([(x.numpy(),int(y)) for x,y in samples])
        else: x,y = self.mix(*[torch.stack([torch.Tensor(t) if i==0 else torch.as_tensor(int(t)) for t in o]) for i,o in enumerate(zip(*samples))])
        return TensorImage(x),y

class Repeat:
    "The order of `RepeatAugSampler`: each sample several times, one after the other, and as many samples as without it"
    def __init__(self, n): self.n = n
    def __call__(self, idxs): return [o for o in np.random.permutation(idxs).tolist() for _ in range(self.n)][:len(idxs)]

def transforms(a, cfg):
    "Of pictures to train with, of further views of those, and of pictures to validate with"
    common = dict(input_size=cfg['input_size'], mean=cfg['mean'], std=cfg['std'], use_prefetcher=not a.reprob) # pixels are erased after the normalization, so that is the host's then
    interpolation = cfg['interpolation'] if a.no_aug or not a.train_interpolation else a.train_interpolation
    train = create_transform(**common, is_training=True, no_aug=a.no_aug, train_crop_mode=a.train_crop_mode, scale=a.scale, ratio=a.ratio, hflip=a.hflip, vflip=a.vflip, color_jitter=a.color_jitter,
        color_jitter_prob=a.color_jitter_prob, grayscale_prob=a.grayscale_prob, gaussian_blur_prob=a.gaussian_blur_prob, auto_augment=a.aa, interpolation=interpolation, re_prob=a.reprob, re_mode=a.remode,
        re_count=a.recount, separate=a.aug_splits>0)
    first,more,last = train if a.aug_splits else (train,None,None)
    return (lambda o: last(first(o))) if last else first,more,create_transform(**common, interpolation=cfg['interpolation'], crop_pct=cfg['crop_pct'], crop_mode=cfg.get('crop_mode'))

def get_dls(a, train, valid, cfg, n_classes):
    "Batches of `-b` samples a core; `to_tpu_sharded` counts those of all cores"
    n = a.cores if a.form=='sharded' else 1
    tfm,more,valid_tfm = transforms(a, cfg)
    kwargs = {}
    if a.aug_splits: kwargs['before_batch'] = AugSplits(more, a.aug_splits)
    if mixes(a):
        kwargs['create_batch'] = Mix(not a.reprob, mixup_alpha=a.mixup, cutmix_alpha=a.cutmix, cutmix_minmax=a.cutmix_minmax, prob=a.mixup_prob, switch_prob=a.mixup_switch_prob, mode=a.mixup_mode,
            label_smoothing=a.smoothing, num_classes=n_classes)
    if a.aug_repeats: kwargs['shuffle_fn'] = Repeat(a.aug_repeats)
    common = dict(num_workers=a.workers, after_batch=[] if a.reprob else [IntToFloatTensor(), Normalize.from_stats(cfg['mean'], cfg['std'])])
    return DataLoaders(TfmdDL(Samples(train, tfm, 0), bs=a.batch_size*n, shuffle=True, drop_last=True, **kwargs, **common),
                       TfmdDL(Samples(valid, valid_tfm, 1), bs=(a.validation_batch_size or a.batch_size)*n, **common))

# ---- model, loss, optimizer

def mixes(a): return bool(a.mixup or a.cutmix or a.cutmix_minmax)

def get_model(a, n_classes):
    model = timm.create_model(a.model, pretrained=a.pretrained, in_chans=a.in_chans, num_classes=n_classes, drop_rate=a.drop, drop_path_rate=a.drop_connect if a.drop_path is None else a.drop_path,
        drop_block_rate=a.drop_block, global_pool=a.gp, bn_momentum=a.bn_momentum, bn_eps=a.bn_eps, checkpoint_path=a.initial_checkpoint, **a.model_kwargs)
    head = model.get_classifier()
    if isinstance(head, nn.Linear) and not a.pretrained:
        with torch.no_grad():
            if a.head_init_scale is not None: head.weight.mul_(a.head_init_scale)
            if a.head_init_bias is not None: nn.init.constant_(head.bias, a.head_init_bias)
    return convert_splitbn_model(model, a.aug_splits) if a.split_bn else model

class TimmLoss(nn.Module):
    "The loss that timm's script trains with, and cross-entropy where there are no gradients"
    def __init__(self, a):
        super().__init__()
        bce = dict(target_threshold=a.bce_target_thresh, sum_classes=a.bce_sum, pos_weight=a.bce_pos_weight)
        if a.bce_loss: self.train_loss = BinaryCrossEntropy(smoothing=0. if mixes(a) else a.smoothing, **bce)
        else: self.train_loss = SoftTargetCrossEntropy() if mixes(a) else LabelSmoothingCrossEntropy(a.smoothing) if a.smoothing else nn.CrossEntropyLoss()
        self.valid_loss = nn.CrossEntropyLoss()
    def forward(self, pred, targ): return (self.train_loss if torch.is_grad_enabled() else self.valid_loss)(pred, targ)

def get_opt(a):
    "timm's factory"
    given = {k: v for k,v in dict(eps=a.opt_eps, betas=a.opt_betas).items() if v is not None}
    return partial(OptimWrapper, opt=partial(create_optimizer_v2, opt=a.opt, momentum=a.momentum, **given, **a.opt_kwargs))

def base_lr(a):
    "`--lr`, or that of `--lr-base` for the samples of a step"
    rule = a.lr_base_scale or ('sqrt' if any(o in a.opt for o in ('ada','lamb')) else 'linear')
    return a.lr or scaled_lr(a.lr_base, a.batch_size*a.cores*a.grad_accum_steps, a.lr_base_size, rule)

# ---- callbacks

metric_names = dict(top1='accuracy', top5='top_k_accuracy', loss='valid_loss')

def timm_scheduler(a, lrs, updates):
    "timm's scheduler for groups with these rates, the groups that it changes, and the number of epochs"
    groups = torch.optim.SGD([dict(params=[nn.Parameter(torch.zeros(1))], lr=lr) for lr in lrs], lr=1.)
    sched,n = create_scheduler_v2(groups, **scheduler_kwargs(a, decreasing_metric=a.eval_metric=='loss'), updates_per_epoch=updates)
    return sched,groups.param_groups,n

class TimmSchedule(Callback):
    "Learning rates by a scheduler of timm's, which is told the metric at the end of each epoch"
    order,checkpointed = Recorder.order+10,('seen',)
    def __init__(self, a, lrs): self.a,self.lrs,self.seen = a,lrs,[]
    def before_fit(self): self.seen,self.sched = [],None
    def before_epoch(self):
        "A scheduler is what its metrics made it, also where a training goes on that was killed"
        self.updates = -(-len(self.dls.train)//self.a.grad_accum_steps)
        self.sched,self.groups,_ = timm_scheduler(self.a, self.lrs, self.updates)
        for i,metric in enumerate(self.seen):
            self.sched.step_update((i+1)*self.updates)
            self.sched.step(i+1, metric)
        self.give()
    def after_batch(self):
        if not self.training or not self.a.sched_on_updates or (self.iter+1)%self.a.grad_accum_steps: return
        self.sched.step_update(self.epoch*self.updates + (self.iter+1)//self.a.grad_accum_steps)
        self.give()
    def after_epoch(self): self.seen.append(float(self.recorder.values[-1][self.recorder.metric_names[1:-1].index(metric_names[self.a.eval_metric])]))
    def give(self): self.opt.set_hypers(lr=[o['lr'] for o in self.groups])

class MixUntil(Callback):
    "Stops mixing after some epochs"
    def __init__(self, n): self.n = n
    def before_epoch(self): self.dls.train.create_batch.mix.mixup_enabled = self.epoch<self.n

def get_cbs(a, lrs):
    out,clip = Path(a.output),dict(norm=GradientClip, value=GradientClipValue, agc=AdaptiveGradientClip)[a.clip_mode]
    cbs = [SaveModelCallback(monitor=metric_names[a.eval_metric], fname='model_best'), CSVLogger('summary.csv', append=a.resume is not None),
           TPUCheckpoint(out/'checkpoints', every=a.recovery_interval or None, keep=a.checkpoint_hist, resume=a.resume is not None, resume_from=a.resume or None)]
    if lrs: cbs.append(TimmSchedule(a, lrs))
    if a.clip_grad: cbs.append(clip(a.clip_grad))
    if a.jsd_loss: cbs.append(JSDLoss(a.aug_splits, smoothing=a.smoothing))
    if a.mixup_off_epoch and mixes(a): cbs.append(MixUntil(a.mixup_off_epoch))
    if a.grad_accum_steps>1: cbs.append(GradientAccumulation(a.batch_size*a.grad_accum_steps))
    if a.model_ema: cbs.append(EMACallback(a.model_ema_decay, use_warmup=a.model_ema_warmup))
    if a.log_wandb:
        import wandb
        from fastai.callback.wandb import WandbCallback
        wandb.init(project=a.wandb_project or 'train_timm', name=a.experiment or None, tags=a.wandb_tags, config=vars(a), dir=a.output)
        cbs.append(WandbCallback(log_preds=False, log_model=False))
    return cbs

# ---- together

def get_learner(a):
    set_seed(a.seed)
    train,valid,known = get_items(a)
    model = get_model(a, a.num_classes or known)
    cfg = resolve_data_config(vars(a), model=model)
    dls = get_dls(a, train, valid, cfg, model.num_classes)
    model = xla_friendly(model, cfg['input_size'][1:] if hasattr(model, 'set_input_size') else None)
    learn = Learner(dls, model, loss_func=TimmLoss(a), opt_func=get_opt(a), metrics=[accuracy, partial(top_k_accuracy, k=min(5, model.num_classes))], path=a.output,
                    splitter=LayerDecay(a.layer_decay or 1., a.layer_decay_min_scale, by_wd=True), wd_bn_bias=True)
    if a.amp: learn.to_bf16()
    if a.form=='tpu': return learn.to_tpu()
    if a.form=='sharded': return learn.to_tpu_sharded(fsdp=a.cores, grad_ckpt=a.grad_checkpointing)
    return learn.to_tpu_distributed(a.cores, sync_bn=True if a.sync_bn else 'stats' if a.dist_bn=='reduce' else False)

left_out = {
    'XLA compiles the model and chooses layouts': 'channels-last torchscript torchcompile torchcompile-mode fuser fast-norm',
    'for CUDA and its processes': 'device device-modules pin-mem no-prefetcher no-ddp-bb synchronize-step local_rank use-multi-epochs-loader model-ema-force-cpu',
    'the progress bar shows each batch': 'log-interval',
    'a checkpoint knows its epoch': 'start-epoch',
    'set WANDB_RUN_ID and WANDB_RESUME': 'wandb-resume-id',
    'each batch of a worker has a seed of its own': 'worker-seeding',
    'PJRT_DEVICE=CPU does it': 'force-cpu',
    '--initial-checkpoint begins with the weights alone': 'no-resume-opt pretrained-path',
    'weights stay in float32, --amp computes in bfloat16': 'model-dtype',
    'for data sets that are streams (wds, tfds, hfds): see fastai_xla.data.shards': 'train-num-samples val-num-samples input-img-mode input-key target-key dataset-trust-remote-code epoch-repeats',
    'a size of pictures, a length of sequences or a number of steps that changes is a compilation': 'train-img-sizes train-batch-sizes train-size-probs train-size-schedule train-size-schedule-spread '
        'train-size-random-mix train-batches-per-epoch train-steps-per-epoch variable-batch-loss-scale naflex-loader naflex-train-seq-lens naflex-max-seq-len naflex-patch-sizes naflex-patch-size-probs naflex-loss-scale '
        'naflex-patchify-channels-first',
    'a loss of its own: write a Callback': 'kd-model-name kd-distill-type kd-loss-type distill-loss-weight task-loss-weight kd-temperature kd-student-feature-dim kd-teacher-feature-dim kd-token-distill-type',
    '`learn.tta` and `dls.show_batch` of fastai': 'tta save-images',
    'EvalEvery validates less often, or more': 'val-interval',
    '--aug-splits takes no --reprob': 'resplit',
    'a learning rate for what has no scale: use a splitter': 'layer-decay-no-opt-scale',
}

def not_taken():
    "Each flag that timm's scripts take and this one does not, with the reason"
    return {o: why for why,names in left_out.items() for o in names.split()}

def parser():
    end = 'Flags of timm bits and timm that are left out:\n' + '\n'.join(f"  {why}: {' '.join('--'+o for o in names.split())}" for why,names in left_out.items())
    p = argparse.ArgumentParser(description=__doc__, epilog=end, formatter_class=argparse.RawDescriptionHelpFormatter)
    add,group = p.add_argument,p.add_argument_group
    def flag(name, help): add(name, action='store_true', help=help)
    def value(name, default, help, **kwargs): add(name, type=type(default), default=default, help=f'{help} (default: {default})', **kwargs)
    def maybe(name, kind, help, **kwargs): add(name, type=kind, default=None, help=help, **kwargs)
    def chapter(title): nonlocal add; add = group(title).add_argument

    chapter('where it trains')
    add('--form', choices=('tpu','distributed','sharded'), default='tpu', help='one core; all cores, each with all parameters; all cores, with parameters spread over them'); maybe('--cores', int, 'default: all, one with --form tpu')

    chapter('data')
    add('data_dir', nargs='?', metavar='DIR', help='folder with a folder for each of --train-split and --val-split, and in it one for each class'); maybe('--data-dir', str, 'the same', dest='data_dir_flag')
    value('--dataset', 'digits', "without DIR: 'digits' (scikit-learn's), 'synthetic' (noise), or one of timm's with samples by number, such as torch/cifar10"); value('--samples', 128, 'of noise')
    value('--train-split', 'train', 'name'); value('--val-split', 'validation', 'name'); flag('--dataset-download', 'where it can be'); value('--class-map', '', 'file of names and numbers of classes')
    add('-j', '--workers', type=int, default=4, help='processes that load data (default: 4)')
    add('-b', '--batch-size', type=int, default=128, help='samples of a step on a core (default: 128)'); add('-vb', '--validation-batch-size', type=int, help='default: as -b')

    chapter('model')
    value('--model', 'resnet50', "one of timm's"); flag('--pretrained', 'begin with its weights'); value('--initial-checkpoint', '', 'begin with those of this file'); maybe('--num-classes', int, "default: those of the data, or the model's")
    maybe('--gp', str, 'global pooling'); maybe('--img-size', int, "side of the pictures; default: the model's"); maybe('--in-chans', int, 'channels of the pictures'); maybe('--input-size', int, 'channels, height, width', nargs=3)
    maybe('--crop-pct', float, 'part of a picture that is validated'); maybe('--mean', float, 'of the pixels', nargs='+'); maybe('--std', float, 'of the pixels', nargs='+'); value('--interpolation', '', 'of pictures to validate')
    add('--model-kwargs', nargs='*', default={}, action=ParseKwargs, help='name=value, for timm.create_model'); maybe('--head-init-scale', float, 'of the weights of the head'); maybe('--head-init-bias', float, 'value')
    value('--drop', 0., 'dropout'); maybe('--drop-path', float, 'stochastic depth'); maybe('--drop-connect', float, 'old name of --drop-path'); maybe('--drop-block', float, 'rate')
    maybe('--bn-momentum', float, 'of BatchNorm'); maybe('--bn-eps', float, 'of BatchNorm'); flag('--sync-bn', 'BatchNorm by the batch of all cores'); flag('--split-bn', 'norms of their own for each of --aug-splits')
    add('--dist-bn', choices=('reduce','broadcast',''), default='reduce', help="without --sync-bn: validate with the mean of the cores' statistics, or with the first core's (default: reduce)")
    flag('--grad-checkpointing', 'with --form sharded: compute activations again in the backward pass')
    flag('--amp', 'compute in bfloat16'); add('--amp-dtype', choices=('bfloat16','float16'), default='bfloat16', help="float16 is bfloat16 too, as a TPU has it")

    chapter('optimizer')
    value('--opt', 'sgd', "name in timm's factory"); maybe('--opt-eps', float, 'its eps'); maybe('--opt-betas', float, 'its betas', nargs='+'); value('--momentum', .9, 'of the optimizer')
    add('--opt-kwargs', nargs='*', default={}, action=ParseKwargs, help='name=value, for it'); value('--weight-decay', 2e-5, 'not for biases, norms and what the model names'); value('--grad-accum-steps', 1, 'batches of a step')
    maybe('--clip-grad', float, 'no clipping without it'); add('--clip-mode', choices=('norm','value','agc'), default='norm', help='how'); maybe('--layer-decay', float, 'of the rate of a layer, the part that the one before it has')
    value('--layer-decay-min-scale', 0., 'the least part of the rate that a layer has')
    flag('--model-ema', 'validate and save averaged weights'); value('--model-ema-decay', .9998, 'of the average'); flag('--model-ema-warmup', 'begin with a smaller one')

    chapter('schedule')
    add('--sched', choices=('cosine','tanh','step','multistep','plateau','poly','none'), default='cosine', help='of the learning rate'); flag('--sched-on-updates', 'change it after each step, not after each epoch')
    maybe('--lr', float, 'the rate of the head; without it, by --lr-base'); value('--lr-base', .1, 'for steps of --lr-base-size samples'); value('--lr-base-size', 256, 'samples')
    add('--lr-base-scale', choices=('linear','sqrt',''), default='', help='default: sqrt for Adam and its kin'); maybe('--lr-noise', float, 'parts of the training with noise', nargs='+'); value('--lr-noise-pct', .67, 'its limit')
    value('--lr-noise-std', 1., 'its deviation'); value('--lr-cycle-mul', 1., 'length of a cycle, to that of the one before it'); value('--lr-cycle-decay', .5, 'of the rate from cycle to cycle'); value('--lr-cycle-limit', 1, 'cycles')
    value('--lr-k-decay', 1., 'for cosine and poly'); value('--warmup-lr', 1e-5, 'where the rate begins'); value('--min-lr', 0., 'where it ends'); value('--epochs', 300, 'of training')
    add('--decay-milestones', type=int, nargs='+', default=[90, 180, 270], help='epochs, for multistep'); value('--decay-epochs', 90., 'for step'); value('--warmup-epochs', 5, 'with a rate that rises')
    flag('--warmup-prefix', 'the schedule begins after them'); value('--cooldown-epochs', 0, 'at the end, with --min-lr'); value('--patience-epochs', 10, 'for plateau'); add('--decay-rate', '--dr', type=float, default=.1, help='for step, multistep and plateau')

    chapter('augmentation and loss')
    flag('--no-aug', 'none'); maybe('--train-crop-mode', str, 'rrc, rkrc or rkrr'); maybe('--scale', float, 'of a random crop (default: .08 1)', nargs='+'); maybe('--ratio', float, 'of its sides (default: .75 1.33)', nargs='+')
    value('--hflip', .5, 'part that is flipped'); value('--vflip', 0., 'part that is flipped'); value('--color-jitter', .4, 'factor, where there is no --aa'); maybe('--color-jitter-prob', float, 'part'); value('--grayscale-prob', 0., 'part')
    value('--gaussian-blur-prob', 0., 'part'); maybe('--aa', str, 'RandAugment, AutoAugment or AugMix, as rand-m9-mstd0.5, original or augmix-m3-w3'); value('--train-interpolation', 'random', 'of pictures to train with')
    value('--aug-repeats', 0, 'times that a picture is in an epoch'); value('--aug-splits', 0, 'views of a picture, 0 or at least 2: one as it is, the others by --aa'); flag('--jsd-loss', 'one answer to all of them')
    value('--reprob', 0., 'part in which a rectangle is erased'); value('--remode', 'pixel', 'const, rand or pixel'); value('--recount', 1, 'rectangles')
    value('--mixup', 0., 'alpha'); value('--cutmix', 0., 'alpha'); maybe('--cutmix-minmax', float, 'least and largest part', nargs='+'); value('--mixup-prob', 1., 'part of the batches that is mixed')
    value('--mixup-switch-prob', .5, 'part of those that --cutmix has, if --mixup is there too'); add('--mixup-mode', choices=('batch','pair','elem'), default='batch', help='what has a ratio of its own')
    value('--mixup-off-epoch', 0, 'the first that is not mixed; 0: none'); value('--smoothing', .1, 'of labels'); flag('--bce-loss', 'binary cross-entropy'); flag('--bce-sum', 'its sum over classes'); maybe('--bce-target-thresh', float, 'targets above it are 1')
    maybe('--bce-pos-weight', float, 'weight')

    chapter('results')
    value('--seed', 42, 'of all draws'); value('--output', 'output', 'folder'); value('--experiment', '', 'a folder in it'); add('--resume', nargs='?', const='', metavar='PATH', help='go on with what is in --output, or with the checkpoints in PATH')
    value('--recovery-interval', 0, 'steps between two checkpoints; 0: one after each epoch'); value('--checkpoint-hist', 10, 'checkpoints that are kept'); add('--eval-metric', choices=tuple(metric_names), default='top1', help='by which weights are the best (default: top1)')
    flag('--log-wandb', 'to Weights & Biases'); value('--wandb-project', '', 'name'); add('--wandb-tags', nargs='+', default=[], help='names')
    add('-c', '--config', metavar='FILE', help='YAML file of flags, as timm writes it; those of the command line win')
    return p

def parse(args=None):
    "Flags of the command line, of `--config` and defaults, checked"
    p = parser()
    a = p.parse_args(args)
    if a.config:
        given,known = yaml.safe_load(Path(a.config).read_text()),vars(a)
        ignored = [k for k in given if k not in known]
        if ignored: print(f"{a.config}: not taken, see the end of --help: {', '.join(ignored)}", flush=True)
        p.set_defaults(**{k: v for k,v in given.items() if k in known and k!='config'})
        a = p.parse_args(args)
    a.data_dir = a.data_dir or a.data_dir_flag
    if a.aug_splits and (a.aug_splits<2 or not a.aa): p.error('--aug-splits: at least 2, with --aa to make them')
    if (a.jsd_loss or a.split_bn) and not a.aug_splits: p.error('--jsd-loss and --split-bn need --aug-splits')
    if a.aug_splits and (mixes(a) or a.reprob or a.grad_accum_steps>1): p.error('--aug-splits goes with neither --mixup, --cutmix, --reprob nor --grad-accum-steps')
    if a.form=='tpu' and a.cores not in (None, 1): p.error('--form tpu trains on one core; --form distributed or sharded on several')
    if a.grad_checkpointing and a.form!='sharded': p.error('--grad-checkpointing needs --form sharded')
    if mixes(a) and a.batch_size%2: p.error(f"timm mixes a batch with itself the other way round, so -b must be even. Got {a.batch_size}.")
    a.cores = 1 if a.form=='tpu' else a.cores or n_cores()
    if a.experiment: a.output = str(Path(a.output)/a.experiment)
    return a

def train(a):
    "A Learner, trained"
    Path(a.output).mkdir(parents=True, exist_ok=True)
    learn = get_learner(a)
    rates,wd = learn.splitter.lr(learn.model, base_lr(a)),learn.splitter.wd(learn.model, a.weight_decay)
    scheduled = a.sched!='none'
    epochs = timm_scheduler(a, rates, len(learn.dls.train))[-1] if scheduled else a.epochs
    print(f'{a.model}: {sum(o.numel() for o in learn.model.parameters()):,} parameters in {len(rates)} groups, rates up to {rates[-1]:.3g}, steps of {a.batch_size*a.cores*a.grad_accum_steps} samples', flush=True)
    learn.fit(epochs, rates, wd=wd, cbs=get_cbs(a, rates if scheduled else None))
    return learn

def main(args=None):
    learn = train(parse(args))
    loss,acc,_ = learn.validate()
    print(f"Done: {acc:.2%} of {len(learn.dls.valid_ds)} pictures right; weights in {learn.path/learn.model_dir/'model_best.pth'}", flush=True)

if __name__=='__main__': main()
