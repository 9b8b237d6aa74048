"""PyTorch/XLA's ViT-10B FSDP example for a fastai Learner: a vision transformer of ten billion parameters, spread over all cores.

On a TPU, with ImageNet's train/ and val/ in a folder (or with `--fake_data`):

    python examples/vit_fsdp.py --data_dir imagenet-1k --ckpt_dir ckpts --bf16 --scan --batch_size 1024

On a slice of several hosts the same command runs on each, with a folder for checkpoints that all of them reach; `--batch_size` counts the samples of all. See the guide's page on several hosts for the walk to a v5e-32, and for what
of it has been run. A size for eight virtual cores:

    python examples/vit_fsdp.py --fake_data --fake_samples 256 --ckpt_dir ckpts --image_size 28 --embed_dim 64 --num_heads 4 --num_blocks 4 --num_classes 8 --batch_size 32 --num_epochs 3 --warmup_steps 8

Flags are those of https://github.com/ronghanghu/vit_10b_fsdp_example, and the defaults are the same model and hyperparameters. One process runs all cores and XLA's partitioner decides when parameters are gathered and
freed, so `--flatten_parameters`, `--reshard_after_forward` and `--no_reshard_after_forward`, by which the original tells torch_xla's wrapper that, are taken and change nothing. `--shard_on_cpu` is always so: each parameter is made on the host and sent to its cores in pieces. A training that was killed goes on at its newest checkpoint when the same command is run
again; `--resume_epoch 20` goes back to the one after epoch 20, and puts those after it into another folder.
"""
import argparse, math, time
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.runtime.device import torch_xla
from fastai_xla.runtime.ranks import barrier

class FakeImages:
    "Noise whose brightness tells the class; the same at each reading"
    def __init__(self, n, size, n_classes): self.n,self.size,self.n_classes = n,size,n_classes
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i>=self.n: raise IndexError(i)
        x = torch.randn(3, self.size, self.size, generator=torch.Generator().manual_seed(i))
        return TensorImage(x+4*(i%self.n_classes)/self.n_classes-2),TensorCategory(i%self.n_classes)

def get_dls(a, bs):
    "Batches of `bs` samples"
    if a.fake_data:
        train,valid = [FakeImages(n, a.image_size, a.num_classes) for n in (a.fake_samples, max(a.batch_size, a.fake_samples//25))]
        return DataLoaders(TfmdDL(train, bs=bs, shuffle=True, drop_last=True, num_workers=a.num_workers), TfmdDL(valid, bs=bs, num_workers=a.num_workers))
    return ImageDataLoaders.from_folder(a.data_dir, train='train', valid='val', bs=bs, num_workers=a.num_workers, item_tfms=RandomResizedCrop(a.image_size, min_scale=.08),
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

def say(text):
    "Print on the first host alone"
    if is_main(): print(text, flush=True)

class LogSteps(Callback):
    "Print each `every` steps; stop after `max_steps`"
    order = 60 # after the Recorder
    def __init__(self, every, max_steps): self.every,self.max_steps,self.start = every,max_steps,None
    def before_train(self): self.restart()
    def restart(self): self.since,self.n = time.time(),0
    def after_batch(self):
        if not self.training: return
        self.n += 1
        self.start = self.start or self.train_iter
        compiles = self.train_iter<=self.start+1
        if self.train_iter==self.start or self.train_iter%self.every==0: self.say(timed=not compiles)
        if compiles: self.restart()
        if self.max_steps and self.train_iter>=self.max_steps: raise CancelFitException
    def say(self, timed):
        "The speed is that of the steps since the last line, or since this epoch's training began: validation is none of it"
        loss = float(self.smooth_loss) # waits for the device
        speed = f', sec/iter: {(time.time()-self.since)/self.n:.4f}' if timed else ''
        self.restart()
        say(f"epoch {self.epoch+1} step {self.iter+1}, lr: {self.opt.hypers[-1]['lr']:.6f}, loss: {loss:.4f}{speed}")

class CutAfterForward(Callback):
    "Two programs for a step, one for the forward pass, one for the rest: for models so large that one does not compile"
    def after_loss(self):
        if self.training: torch_xla.sync()

class ValidateEvery(Callback):
    "Validate each `every` epochs, and after the last"
    order = -60 # before the model is prepared
    def __init__(self, every): self.every = every
    def before_validate(self):
        if (self.epoch+1)%self.every and self.epoch+1<self.n_epoch: raise CancelValidException

class LogEpochs(Callback):
    "The losses and metrics of each epoch, as a line"
    order = 60
    def after_epoch(self): say(f"epoch {self.epoch+1}: " + ', '.join(f'{k} {v:.6f}' for k,v in zip(self.recorder.metric_names[1:-1], self.recorder.log[1:-1]) if v is not None))

def get_learner(a):
    set_seed(a.seed)
    dls = get_dls(a, a.batch_size)
    if not len(dls.train): raise SystemExit(f'--batch_size {a.batch_size} is larger than the training set of {len(dls.train_ds)} samples: there is no step to take')
    opt = partial(Adam, mom=.9, sqr_mom=.999, eps=1e-8, decouple_wd=True)
    cbs = [LogSteps(a.log_step_interval, a.max_steps), ValidateEvery(a.test_epoch_interval), LogEpochs(), *([CutAfterForward()] if a.mark_step_after_forward else []), *([GradientClip(a.clip_grad_norm)] if a.clip_grad_norm>0 else [])]
    learn = Learner(dls, get_model(a), CrossEntropyLossFlat(), opt_func=opt, metrics=accuracy, wd=a.weight_decay, wd_bn_bias=True, cbs=cbs, path=a.ckpt_dir)
    if a.bf16: learn.to_bf16()
    if a.grad_ckpt and a.num_blocks==1: print('One block has no neighbour like it: trained without gradient checkpointing', flush=True)
    return learn.to_tpu_sharded(fsdp=1 if a.run_without_fsdp else a.fsdp, grad_ckpt=a.grad_ckpt and a.num_blocks>1, scan=a.scan)

def describe(learn, a, steps):
    n = sum(p.numel() for p in learn.model.parameters())
    mesh = learn.tpu_sharded_trainer.mesh
    of = f' of {mesh.n_hosts} hosts' if mesh.n_hosts>1 else ''
    say(f'{n:,} parameters, {learn.sharding.device_nbytes//4:,} on each of {mesh.n} cores ({mesh}){of}; {steps} steps an epoch')

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
    def count(text):
        if text.isdecimal() and int(text): return int(text)
        raise argparse.ArgumentTypeError(f'it must be a whole number, at least 1. Got {text!r}')
    may_be_0 = 'num_workers','resume_epoch','warmup_steps','seed','max_steps'
    def add(name, default, help=None):
        kind = count if not isinstance(default, (str,float)) and name not in may_be_0 else type(default)
        p.add_argument(f'--{name}', type=kind, default=default, help=help)
    def flag(name, help=None, **kwargs): p.add_argument(f'--{name}', help=help, **{'action': 'store_true', **kwargs})
    add('data_dir', 'imagenet-1k', 'folder with train/ and val/'); flag('fake_data'); add('fake_samples', 1281167); add('num_workers', 4)
    add('ckpt_dir', 'vit_fsdp', 'checkpoints; a training goes on from the newest'); flag('no_resume', 'start anew, and refuse a folder with checkpoints')
    add('resume_epoch', 0, 'go on after this epoch instead; 0: from the newest'); add('keep_ckpts', 2, 'number of checkpoints that are kept')
    add('ckpt_epoch_interval', 10); add('test_epoch_interval', 10); add('log_step_interval', 20)
    for k,v in dict(image_size=224, patch_size=14, embed_dim=5120, num_heads=32, num_blocks=32, mlp_ratio=4., pos_dropout=0., att_dropout=0., mlp_dropout=0., num_classes=1000).items(): add(k, v)
    for k,v in dict(batch_size=1024, num_epochs=300, lr=1e-3, weight_decay=.1, clip_grad_norm=1., warmup_steps=10000, seed=42).items(): add(k, v)
    add('max_steps', 0, 'stop after so many; 0: no limit')
    flag('grad_ckpt', 'on by default'); flag('no_grad_ckpt', dest='grad_ckpt', action='store_false'); p.set_defaults(grad_ckpt=True)
    for o in ('flatten_parameters','reshard_after_forward','no_reshard_after_forward'): flag(o, 'changes nothing: XLA decides when parameters are gathered and freed')
    flag('shard_on_cpu', 'always so')
    flag('scan', 'one loop for all blocks'); flag('mark_step_after_forward', 'a program for the forward pass, and one for the rest of the step'); flag('bf16'); flag('run_without_fsdp', 'each core has all parameters'); add('fsdp', None, 'cores over which the parameters are spread; default: all')
    return p

def main(args=None):
    p = parser()
    a = p.parse_args(args)
    if a.num_blocks==1 and a.scan: p.error('--scan needs --num_blocks 2 or more')
    learn = get_learner(a)
    steps = len(learn.dls.train)
    describe(learn, a, steps)
    folder = Path(a.ckpt_dir)/'checkpoints'
    if a.resume_epoch:
        if is_main(): go_back(folder, a.resume_epoch, steps)
        barrier()
    cbs = [ParamScheduler({'lr': warmup_cosine(a.lr, a.warmup_steps, steps*a.num_epochs)}), TPUCheckpoint(folder, every=steps*a.ckpt_epoch_interval, keep=a.keep_ckpts, resume=not a.no_resume)]
    with learn.no_bar(),learn.no_logging(): learn.fit(a.num_epochs, a.lr, cbs=cbs)
    say('training completed')
    return learn

if __name__=='__main__': main()
