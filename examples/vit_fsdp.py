"""PyTorch/XLA's ViT-10B FSDP example for a fastai Learner: a vision transformer of ten billion parameters, spread over all cores.

On a TPU, with ImageNet's train/ and val/ in a folder (or with `--fake_data`):

    python examples/vit_fsdp.py --data_dir imagenet-1k --ckpt_dir ckpts --bf16 --scan --batch_size 1024

A size for eight virtual cores:

    python examples/vit_fsdp.py --fake_data --fake_samples 256 --ckpt_dir ckpts --image_size 28 --embed_dim 64 --num_heads 4 --num_blocks 4 --num_classes 8 --batch_size 32 --num_epochs 3 --warmup_steps 8

Flags are those of https://github.com/ronghanghu/vit_10b_fsdp_example, and the defaults are the same model and hyperparameters. What XLA's partitioner decides (`--no_reshard_after_forward`, `--flatten_parameters`) and
what is always so here (`--shard_on_cpu`: each parameter is made on the host and sent to its cores in pieces) has no flag. A training that was killed goes on at its newest checkpoint when the same command is run again;
`--resume_epoch 20` goes back to the one after epoch 20, and puts those after it into another folder.
"""
import argparse, math, time
from fastai.vision.all import *
from fastai_xla.all import *

class FakeImages:
    "Noise whose brightness tells the class; the same at each reading"
    def __init__(self, n, size, n_classes): self.n,self.size,self.n_classes = n,size,n_classes
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i>=self.n: raise IndexError(i)
        x = torch.randn(3, self.size, self.size, generator=torch.Generator().manual_seed(i))
        return TensorImage(x+4*(i%self.n_classes)/self.n_classes-2),TensorCategory(i%self.n_classes)

def get_dls(a):
    if a.fake_data:
        train,valid = [FakeImages(n, a.image_size, a.num_classes) for n in (a.fake_samples, max(a.batch_size, a.fake_samples//25))]
        return DataLoaders(TfmdDL(train, bs=a.batch_size, shuffle=True, drop_last=True, num_workers=a.num_workers), TfmdDL(valid, bs=a.batch_size, num_workers=a.num_workers))
    return ImageDataLoaders.from_folder(a.data_dir, train='train', valid='val', bs=a.batch_size, num_workers=a.num_workers, item_tfms=RandomResizedCrop(a.image_size, min_scale=.08),
                                        batch_tfms=[Flip(), Normalize.from_stats(*imagenet_stats)])

def get_model(a):
    "The model without its values, which are made on its cores"
    return mean_vit(a.embed_dim, a.num_heads, a.num_blocks, a.patch_size, img_size=a.image_size, mlp_ratio=a.mlp_ratio, num_classes=a.num_classes,
                    pos_drop_rate=a.pos_dropout, proj_drop_rate=a.mlp_dropout, attn_drop_rate=a.att_dropout)

def warmup_cosine(lr, warmup, steps):
    "`lr` as a function of the part of the training that is done: up in a line for `warmup` of `steps`, then down in a cosine"
    def _at(pos):
        step = round(pos*steps)
        return lr*(step/warmup if step<warmup else (1+math.cos(math.pi*(step-warmup)/max(1, steps-warmup)))/2)
    return _at

class LogSteps(Callback):
    "Print each `every` steps; stop after `max_steps`"
    order = 60 # after the Recorder
    def __init__(self, every, max_steps): self.every,self.max_steps,self.start,self.last = every,max_steps,None,None
    def after_batch(self):
        if not self.training: return
        if self.start is None: self.start = self.train_iter
        if self.train_iter==self.start+1: self.since,self.last = time.time(),self.train_iter # the first step compiles
        if self.train_iter==self.start or self.train_iter%self.every==0: self.say()
        if self.max_steps and self.train_iter>=self.max_steps: raise CancelFitException
    def say(self):
        n = self.train_iter-self.last if self.last else 0
        speed = f', sec/iter: {(time.time()-self.since)/n:.4f}' if n else ''
        print(f"epoch {self.epoch+1} step {self.iter+1}, lr: {self.opt.hypers[-1]['lr']:.6f}, loss: {float(self.smooth_loss):.4f}{speed}", flush=True)

class ValidateEvery(Callback):
    "Validate each `every` epochs, and after the last"
    order = -60 # before the model is prepared
    def __init__(self, every): self.every = every
    def before_validate(self):
        if (self.epoch+1)%self.every and self.epoch+1<self.n_epoch: raise CancelValidException

class LogEpochs(Callback):
    "The losses and metrics of each epoch, as a line"
    order = 60
    def after_epoch(self): print(f"epoch {self.epoch+1}: " + ', '.join(f'{k} {v:.6f}' for k,v in zip(self.recorder.metric_names[1:-1], self.recorder.log[1:-1]) if v is not None), flush=True)

def get_learner(a):
    set_seed(a.seed)
    dls = get_dls(a)
    opt = partial(Adam, mom=.9, sqr_mom=.999, eps=1e-8, decouple_wd=True)
    cbs = [LogSteps(a.log_step_interval, a.max_steps), ValidateEvery(a.test_epoch_interval), LogEpochs(), *([GradientClip(a.clip_grad_norm)] if a.clip_grad_norm>0 else [])]
    learn = Learner(dls, get_model(a), CrossEntropyLossFlat(), opt_func=opt, metrics=accuracy, wd=a.weight_decay, wd_bn_bias=True, cbs=cbs, path=a.ckpt_dir)
    if a.bf16: learn.to_bf16()
    return learn.to_tpu_sharded(fsdp=1 if a.run_without_fsdp else a.fsdp, grad_ckpt=a.grad_ckpt, scan=a.scan, mark_step=a.mark_step)

def go_back(folder, epoch, steps):
    "Make the checkpoint after `epoch` the newest in `folder`"
    names = sorted(o.name for o in folder.glob('fit*'))
    name = f'fit00-epoch{epoch-1:04}-batch{steps:07}'
    if name not in names: raise FileNotFoundError(f"{folder} has no checkpoint after epoch {epoch}, but {', '.join(names) or 'none'}: choose another `--resume_epoch`, or more `--keep_ckpts`.")
    aside = folder.with_name(f'{folder.name}_after_{epoch}')
    aside.mkdir(exist_ok=True)
    for o in names[names.index(name)+1:]: shutil.move(folder/o, aside/o)

def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    def add(name, default, help=None): p.add_argument(f'--{name}', type=type(default) if default is not None else int, default=default, help=help)
    def flag(name, help=None, **kwargs): p.add_argument(f'--{name}', help=help, **{'action': 'store_true', **kwargs})
    add('data_dir', 'imagenet-1k', 'folder with train/ and val/'); flag('fake_data'); add('fake_samples', 1281167); add('num_workers', 4)
    add('ckpt_dir', 'vit_fsdp', 'checkpoints; a training goes on from the newest'); flag('no_resume', 'start anew, and refuse a folder with checkpoints')
    add('resume_epoch', 0, 'go on after this epoch instead; 0: from the newest'); add('keep_ckpts', 2, 'number of checkpoints that are kept')
    add('ckpt_epoch_interval', 10); add('test_epoch_interval', 10); add('log_step_interval', 20)
    for k,v in dict(image_size=224, patch_size=14, embed_dim=5120, num_heads=32, num_blocks=32, mlp_ratio=4., pos_dropout=0., att_dropout=0., mlp_dropout=0., num_classes=1000).items(): add(k, v)
    for k,v in dict(batch_size=1024, num_epochs=300, lr=1e-3, weight_decay=.1, clip_grad_norm=1., warmup_steps=10000, seed=42).items(): add(k, v)
    add('max_steps', 0, 'stop after so many; 0: no limit')
    flag('grad_ckpt', 'on by default'); flag('no_grad_ckpt', dest='grad_ckpt', action='store_false'); p.set_defaults(grad_ckpt=True)
    flag('scan', 'one loop for all blocks'); flag('mark_step', 'a program for each block'); flag('bf16'); flag('run_without_fsdp', 'each core has all parameters'); add('fsdp', None, 'cores over which the parameters are spread; default: all')
    return p

def main(args=None):
    a = parser().parse_args(args)
    learn = get_learner(a)
    steps = len(learn.dls.train)
    n = sum(p.numel() for p in learn.model.parameters())
    print(f'{n:,} parameters, {learn.sharding.device_nbytes//4:,} on each of {learn.tpu_sharded_trainer.mesh.n} cores ({learn.tpu_sharded_trainer.mesh}); {steps} steps an epoch', flush=True)
    folder = Path(a.ckpt_dir)/'checkpoints'
    if a.resume_epoch: go_back(folder, a.resume_epoch, steps)
    cbs = [ParamScheduler({'lr': warmup_cosine(a.lr, a.warmup_steps, steps*a.num_epochs)}), TPUCheckpoint(folder, every=steps*a.ckpt_epoch_interval, keep=a.keep_ckpts, resume=not a.no_resume)]
    with learn.no_bar(),learn.no_logging(): learn.fit(a.num_epochs, a.lr, cbs=cbs)
    print('training completed', flush=True)
    return learn

if __name__=='__main__': main()
