"""What a changed setting does to a training that goes on: a table of the setting, and of what was said or raised.

A Learner dies at the 5th of 8 batches of its 2nd epoch and goes on with one thing changed. `python benchmarks/settings.py` prints the table.
"""
import os, re, shutil, sys, tempfile, warnings
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
for k,v in dict(OMP_NUM_THREADS='1', PJRT_DEVICE='CPU', XLA_FLAGS='--xla_backend_optimization_level=0', MPLBACKEND='Agg').items(): os.environ.setdefault(k, v)

import torch
from fastai.basics import *
from fastai.callback.all import *
from fastai_xla.all import *

class Noise(ItemTransform):
    def __init__(self, by=.1): self.by = by
    def encodes(self, o): return o[0]+torch.randn(16)*self.by,o[1]

class Shift(Transform):
    def __init__(self, by=.1): self.by = by
    def encodes(self, x:TensorBase): return x+self.by
    def encodes(self, x:TensorCategory): return x

class Tells(Callback):
    "Notes what it was made with, and what training makes of it"
    order = 2000
    def __init__(self, note='a'): self.note,self.n = note,0
    def after_batch(self): self.n += self.training

class Dies(Callback):
    order,on = 3000,False
    def after_batch(self):
        if Dies.on and self.training and self.epoch==1 and self.iter==4: raise KeyboardInterrupt

def train(path, dies=False, bs=8, n=64, shuffle=True, noise=.1, shift=.1, opt_func=Adam, lr=1e-2, wd=None, epochs=3, cbs=(), note='a', place='to_tpu',
    fit='fit_one_cycle', split=1, width=8, loss=None, **kwargs):
    "Train a small Learner, with checkpoints in `path`"
    Dies.on = dies
    set_seed(1)
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(0))
    samples = list(zip(map(TensorBase, x), map(TensorCategory, x[:,:4].argmax(1))))
    dls = DataLoaders(TfmdDL(samples[:n], bs=bs, shuffle=shuffle, after_item=Noise(noise), after_batch=Shift(shift)), TfmdDL(samples[80:], bs=8))
    model = nn.Sequential(nn.Linear(16,width), nn.ReLU(), nn.Linear(width,4))
    learn = Learner(dls, model, loss_func=loss or CrossEntropyLossFlat(), opt_func=opt_func, path=path, splitter=lambda m: L(m[:1], m[1:]).map(params)[:2] if split==2 else params(m),
        cbs=[resume_from(path, every=1, asynchronous=False), Tells(note), *cbs, Dies()])
    getattr(learn, place)(**kwargs)
    set_seed(3)
    with learn.no_bar(),learn.no_logging(): getattr(learn, fit)(epochs, lr, wd=wd)
    return learn

cases = {
    'nothing': {}, 'learning rate': dict(lr=1e-3), 'weight decay': dict(wd=.1), 'another schedule': dict(fit='fit_flat_cos'), 'no schedule': dict(fit='fit'),
    'more epochs': dict(epochs=5), 'fewer epochs, still to come': dict(epochs=2), 'fewer epochs than done': dict(epochs=1),
    "a callback's argument": dict(note='b'), 'patience': dict(cbs=[EarlyStoppingCallback(patience=9)]), 'clip norm': dict(cbs=[GradientClip(.1)]),
    'MixUp added': dict(cbs=[MixUp()]), 'MixUp dropped': dict(_was=dict(cbs=[MixUp()])), 'MixUp by another alpha': dict(_was=dict(cbs=[MixUp()]), cbs=[MixUp(.8)]),
    'accumulation': dict(cbs=[GradientAccumulation(16)]), 'item transform': dict(noise=.3), 'batch transform': dict(shift=.3),
    'loss function': dict(loss=LabelSmoothingCrossEntropyFlat()),
    'optimizer': dict(opt_func=SGD), "torch's optimizer": dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), 'groups': dict(split=2),
    'smaller bs': dict(bs=4), 'larger bs': dict(bs=32),
    'fewer samples': dict(n=40), 'no shuffle': dict(shuffle=False), 'width of the model': dict(width=16), 'to_tpu_sharded': dict(place='to_tpu_sharded', fsdp=4),
}
cases['patience']['_was'] = dict(cbs=[EarlyStoppingCallback(patience=8)])
cases['clip norm']['_was'] = dict(cbs=[GradientClip(1.)])

def case(path, _was=None, **now):
    "What a run with the settings `now` says, after one with `_was` has died"
    with redirect_stdout(StringIO()):
        try: train(path, dies=True, **(_was or {}))
        except KeyboardInterrupt: pass
    return go_on(path, now)

def go_on(path, now):
    out = StringIO()
    try:
        with redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            learn = train(path, **now)
    except Exception as e: return 'error',re.sub(r'\S*/(?=fit\d)', '', f'{e}'.split('\n')[-1])
    assert learn.tells.note==now.get('note', 'a') and learn.tells.n>=8, (learn.tells.note, learn.tells.n)
    assert learn.epoch+1==now.get('epochs', 3)
    said = [o for o in out.getvalue().splitlines() if o.startswith('Resuming with changed')]
    lrs = f"lr {max(learn.recorder.lrs[13:]):.3g} at most from there" if 'lr' in now or 'fit' in now else ''
    return 'went on'+(', said' if said else ''),'; '.join([*(o.partition(': ')[2] for o in said), lrs]).strip('; ')

def forked(path, _was=None, **now):
    "`case` for settings that need a process of their own"
    import subprocess
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import settings; print('RESULT', repr(settings.go_on({str(path)!r}, {now!r})))"
    train_first = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import settings; settings.train({str(path)!r}, dies=True)"
    subprocess.run([sys.executable, '-c', train_first], capture_output=True)
    res = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    return eval(res.stdout.partition('RESULT ')[2])

def table(only=None):
    "The table of all cases, or of those named"
    rows = []
    with tempfile.TemporaryDirectory() as d:
        for i,(name,kw) in enumerate(cases.items()):
            if only and name not in only: continue
            res = (forked if kw.get('place') else case)(Path(d)/str(i), **kw)
            rows.append((name, *res))
            print(f'{name:28} {res[0]:14} {res[1][:200]}', flush=True)
    return rows

if __name__=='__main__': table(sys.argv[1:])
