"""`undo_patches` leaves fastai, torch and timm as they were before the package was imported, `apply_patches` makes them ours again.

The cases run in one fresh process, in their order: `python test_undo.py undo`. `python test_undo.py plain` trains with fastai alone.
"""
import ast, importlib, inspect, json, pkgutil, sys
from functools import partial
from itertools import count
from types import ModuleType, SimpleNamespace

import pytest
from cases import Groups
from fresh import repo, run
from house import House, patched

groups = Groups(__file__, lambda: dict(PYTHONPATH=str(repo), PJRT_DEVICE='CPU', CPU_NUM_DEVICES=None))
case = groups.case
seen = SimpleNamespace() # what one case leaves for the next
house = House(repo)

# ---- what there is

watched = 'fastai','fastcore','fasttransform','fastprogress','torch','torchvision','torch_xla','timm','plum','cloudpickle'
def is_watched(name): return name.split('.')[0] in watched

def load_everything():
    "Import fastai, timm, torch, torch_xla, and each module of theirs that the package imports somewhere"
    names = ['fastai.vision.all','fastai.text.all','fastai.tabular.all','fastai.collab','timm','torch','torch_xla']
    import fastai.callback
    names += [f'fastai.callback.{o.name}' for o in pkgutil.iter_modules(fastai.callback.__path__)]
    for path in house.modules.values():
        for o in ast.walk(house.tree(path)):
            if isinstance(o, ast.Import): names += [a.name for a in o.names]
            elif isinstance(o, ast.ImportFrom) and not o.level: names += [o.module, *(f'{o.module}.{a.name}' for a in o.names)]
    for o in dict.fromkeys(names):
        if not is_watched(o): continue
        try: importlib.import_module(o)
        except ImportError: pass # a tracker that is not installed, or a function of a module

def snapshot():
    "Every attribute of every module and class of `watched`: {(owner, its name): {attribute: value}}"
    res,todo = {},[]
    for name,mod in [*sys.modules.items()]:
        if isinstance(mod, ModuleType) and is_watched(name): todo.append((name, mod))
    while todo:
        name,o = todo.pop()
        if id(o) in res: continue
        res[id(o)] = name,o,dict(vars(o))
        todo += [(f'{v.__module__}.{v.__qualname__}', v) for v in vars(o).values()
                 if isinstance(v, type) and isinstance(v.__module__, str) and is_watched(v.__module__)]
    return res

missing = object()
def differences(old, new):
    "What differs between two snapshots, in things that both have: owner, attribute, value before, value after"
    return [(new[k][1], f'{name}.{a}', v0, v1) for k,(name,_,was) in old.items() if k in new for a in sorted({*was, *new[k][2]}, key=str)
            if (v0 := was.get(a, missing)) is not (v1 := new[k][2].get(a, missing))]

def is_ours(o):
    "Is the function or property `o` defined in the package?"
    o = getattr(o, 'fget', None) or getattr(o, '__func__', None) or o
    return str(getattr(o, '__module__', '')).split('.')[0]=='fastai_xla'

def is_addition(owner, name, v0, v1):
    "Is this a name that was not there before: a method that the package gives to Learner, a module that has been imported meanwhile, or what `warnings` notes?"
    from fastai.learner import Learner
    if v0 is not missing: return False
    if name.endswith('.__warningregistry__'): return True
    return owner is Learner and name.split('.')[-1] in {o.name for o in patched(house)} and is_ours(v1) or isinstance(v1, ModuleType)

def told(diffs): return '\n'.join(f'{name}: {str(v0)[:90]} -> {str(v1)[:90]}' for _,name,v0,v1 in diffs)

# ---- what is trained

def train(prepare=None):
    "Losses and weights of a small Learner with convolutions, BatchNorm, momentum, a scheduled learning rate and clipped gradients"
    import torch
    from fastai.vision.all import Adam, CrossEntropyLossFlat, DataLoaders, GradientClip, Learner, set_seed
    from torch import nn
    set_seed(1)
    xs,ys = torch.randn(40, 3, 8, 8),torch.randint(0, 4, (40,))
    dls = DataLoaders.from_dsets([*zip(xs[:32], ys[:32])], [*zip(xs[32:], ys[32:])], bs=8, num_workers=0, shuffle=False, device=torch.device('cpu'))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=partial(Adam, eps=1e-3), cbs=GradientClip(0.5))
    if prepare: prepare(learn)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2, 1e-2)
    weights = [v for o in learn.model.state_dict().values() for v in o.detach().cpu().float().flatten().tolist()]
    return dict(values=[[float(v) for v in o] for o in learn.recorder.values], losses=[float(o) for o in learn.recorder.losses], weights=weights)

def furthest(a, b):
    "The largest difference of two outcomes of `train`"
    flat = [[v for o in (*r['values'], r['losses'], r['weights']) for v in o] for r in (a, b)]
    assert len(flat[0])==len(flat[1])
    return max(abs(x-y) for x,y in zip(*flat))

# ---- cases

@case('undo')
def everything_is_the_original_again():
    load_everything()
    seen.before = snapshot()
    import fastai_xla.all
    from fastai_xla.patches import patches_in_force, undo_patches
    for o in house.rooms: importlib.import_module(f'fastai_xla.{o.name}')
    seen.ours = snapshot()
    replaced = [o for o in differences(seen.before, seen.ours) if not is_addition(*o)]
    strangers = [o for o in patches_in_force() if id(o.owner) not in seen.before]
    assert replaced and not strangers, f'not among what is compared, add their packages to `watched`: {strangers}'
    unsaid = [o for o in replaced if (id(o[0]), o[1].split('.')[-1]) not in {(id(p.owner), p.name) for p in patches_in_force()}]
    undo_patches()
    left = [o for o in differences(seen.before, snapshot()) if not is_addition(*o)]
    assert not left, f'still replaced after undo_patches:\n{told(left)}'
    assert not unsaid, f'replaced, but no Patch says so:\n{told(unsaid)}'
    assert not patches_in_force()

@case('undo')
def undone_once_more_is_no_change():
    from fastai_xla.patches import undo_patches
    undo_patches()
    before = snapshot()
    undo_patches()
    diffs = differences(before, snapshot())
    assert not diffs, told(diffs)

@case('undo')
def every_replacement_is_ours_again():
    from fastai_xla.patches import apply_patches
    for _ in range(2):
        apply_patches()
        diffs = differences(seen.ours, snapshot())
        assert not diffs, f'not as it was when the package had been imported:\n{told(diffs)}'

@case('undo')
def trains_as_fastai_alone():
    from fastai_xla.all import xla_device
    xla_device() # before any backward on the CPU
    res = run(__file__, 'plain')
    assert not res.returncode, res.stderr
    plain = json.loads(res.stdout.splitlines()[-1])
    got = train(lambda learn: learn.to_tpu())
    print('largest difference to the CPU', furthest(plain, got), file=sys.stderr)
    assert furthest(plain, got)<1e-5

class Dummy:
    "Has one function of its own, and inherits another"
    def f(self): return ['original']
class Child(Dummy): pass

@case('undo')
def stacked_patches_are_undone_last_to_first():
    import fastai_xla.patches as pub
    registry = importlib.import_module('fastai_xla.patches.registry') if hasattr(pub, '__path__') else pub
    replaces = getattr(registry, 'replaces', None) or registry._replaces
    def over(owner, name, f):
        needed = [p for p in [*inspect.signature(replaces).parameters.values()][2:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        f.__qualname__ = f'stacked_{next(number)}' # one function replaces itself when its cell is run again
        return replaces(owner, name, **{p.name: 'of this test' for p in needed})(f)
    original,number = vars(Dummy)['f'],count()
    for o in ('first','second','third'): over(Dummy, 'f', lambda old, self, o=o: old(self)+[o])
    over(Child, 'f', lambda old, self: old(self)+['child'])
    over(Dummy, 'g', lambda old, self: old)
    for _ in range(2):
        assert Dummy().f()==['original','first','second','third'] and Child().f()==Dummy().f()+['child'] and Dummy().g() is None
        pub.undo_patches()
        assert vars(Dummy)['f'] is original, f'{Dummy().f()} is left'
        assert 'f' not in vars(Child) and not hasattr(Dummy, 'g')
        pub.apply_patches()

@pytest.mark.parametrize('name', [o for _,o in groups.names])
def test_undo(name): groups.check('undo', name)

if __name__=='__main__':
    if sys.argv[1]=='plain': print(json.dumps(train()))
    else: groups.main(*sys.argv[1:])
