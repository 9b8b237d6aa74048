"""Programs that TorchTPU runs for a training step with fastai's Adam: as torch_tpu comes, and by `learn.to_tpu()`.

Counted by torch_tpu's own counters on its device over the CPU, after two epochs: `make test-tpu-backend`, then
.venv-torch-tpu/bin/python benchmarks/torch_tpu_programs.py [MODEL ...]
"""
import os, sys, warnings
from contextlib import contextmanager
from pathlib import Path
os.environ['TIMM_FUSED_ATTN'] = '0' # a kernel that only a TPU has
sys.path.insert(0, str(Path(__file__).parent.parent/'tests'))
from parity_models import *
from fastai_xla.all import *
from fastai_xla.torch_tpu.device import tpu_counts

def resnet(): return vision_learner(image_dls(32), resnet18, pretrained=False, metrics=accuracy)
def mlp():
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    dls = DataLoaders(*[TfmdDL(list(zip(o, o[:,:3].argmax(1))), bs=8, num_workers=0) for o in (x[:40], x[40:])])
    return Learner(dls, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
MODELS = dict(mlp=mlp, cnn=cnn, resnet18=resnet, vit=vit, tabular=tabular, awd_lstm=text)

@contextmanager
def compiled_runs():
    "A context that yields a list with an item for each run of a compiled model's programs, which torch_tpu does not count"
    from torch_tpu._internal.compile.torch_tpu_compiled_executable import TorchTpuCompiledExecutable as Executable
    res,stock = [],Executable.__call__
    def counted(self, *args, **kwargs):
        res.append(self)
        return stock(self, *args, **kwargs)
    Executable.__call__ = counted
    try: yield res
    finally: Executable.__call__ = stock

class Programs(Callback):
    "Counts compilations and runs of the training steps of each epoch"
    order = 100
    def before_fit(self): self.epochs = []
    def before_train(self): self.start,self.n,self.n_compiled = tpu_counts(),0,len(self.runs)
    def after_batch(self): self.n += self.training
    def after_train(self):
        c = tpu_counts()-self.start
        self.epochs.append((c.compiles, (c.executions + len(self.runs)-self.n_compiled)/self.n))

def by_to_tpu(make, **kwargs):
    "Programs a step, and compilations, in the third epoch"
    with compiled_runs() as runs:
        learn = make().to_tpu(**kwargs)
        learn.add_cb(cb := Programs())
        cb.runs = runs
        with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(3, 1e-3)
    return cb.epochs[-1][1],cb.epochs[-1][0]

def as_it_comes(make):
    "The same step by hand, operation by operation"
    learn = make()
    learn.model.to('tpu')
    learn.create_opt()
    b = to_device(learn.dls.one_batch(), torch.device('tpu'))
    for _ in range(4):
        start = tpu_counts()
        pred = learn.model(*b[:-1])
        learn.loss_func(pred[0] if isinstance(pred, tuple) else pred, b[-1]).backward()
        learn.opt.step()
        learn.opt.zero_grad()
        c = tpu_counts()-start
    return c.executions,c.compiles

def main(names):
    warnings.filterwarnings('ignore')
    print('| model | torch_tpu as it comes | `to_tpu(replay=False)` | `to_tpu()` |\n|---|---|---|---|')
    for name in names or MODELS:
        res = [as_it_comes(MODELS[name]), by_to_tpu(MODELS[name], replay=False), by_to_tpu(MODELS[name])]
        print(f"| {name} | {' | '.join(f'{n:g}'+f' ({c} compiled)'*bool(c) for n,c in res)} |", flush=True)

if __name__ == '__main__': main(sys.argv[1:])
