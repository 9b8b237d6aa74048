"`undo_patches` leaves fastai, torch and timm as they were before the package was imported, `apply_patches` makes them ours again."
import ast, importlib, pkgutil, sys
from types import ModuleType

from fresh import repo, run
from house import House, patched

house = House(repo)
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
    for o in filter(is_watched, dict.fromkeys(names)):
        try: importlib.import_module(o)
        except ImportError: pass # a tracker that is not installed, or a function of a module

def snapshot():
    "Every attribute of every module and class of `watched`: {id: (its name, owner, {attribute: value})}"
    res,todo = {},[(name, o) for name,o in [*sys.modules.items()] if isinstance(o, ModuleType) and is_watched(name)]
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
    res = [(new[k][1], f'{name}.{a}', was.get(a, missing), new[k][2].get(a, missing)) for k,(name,_,was) in old.items() if k in new
        for a in sorted({*was, *new[k][2]}, key=str)]
    return [o for o in res if o[2] is not o[3] and not is_addition(*o)]

def is_addition(owner, name, v0, v1):
    "Is this a name that was not there before: a method that the package gives to Learner, a module that has been imported meanwhile, or what `warnings` notes?"
    from fastai.learner import Learner
    if v0 is not missing: return False
    if name.endswith('.__warningregistry__') or isinstance(v1, ModuleType): return True
    f = getattr(v1, 'fget', None) or getattr(v1, '__func__', None) or v1
    return owner is Learner and name.split('.')[-1] in {o.name for o in patched(house)} and str(f.__module__).split('.')[0]=='fastai_xla'

def told(diffs): return '\n'.join(f'{name}: {str(v0)[:90]} -> {str(v1)[:90]}' for _,name,v0,v1 in diffs)

def check():
    "In a process that has not imported the package"
    load_everything()
    before = snapshot()
    import fastai_xla.all
    from fastai_xla.patches import apply_patches, patches_in_force, undo_patches
    for o in house.rooms: importlib.import_module(f'fastai_xla.{o.name}')
    ours = snapshot()
    replaced,strangers = differences(before, ours),[o for o in patches_in_force() if id(o.owner) not in before]
    assert replaced and not strangers, f'not among what is compared, add their packages to `watched`: {strangers}'
    unsaid = [o for o in replaced if (id(o[0]), o[1].split('.')[-1]) not in {(id(p.owner), p.name) for p in patches_in_force()}]
    assert not unsaid, f'replaced, but no Patch says so:\n{told(unsaid)}'
    for _ in range(2): undo_patches()
    left = differences(before, snapshot())
    assert not left and not patches_in_force(), f'still replaced after undo_patches:\n{told(left)}'
    for _ in range(2): apply_patches()
    diffs = differences(ours, snapshot())
    assert not diffs, f'not as it was when the package had been imported:\n{told(diffs)}'

def test_everything_is_undone_and_applied_again():
    res = run(__file__, PYTHONPATH=str(repo))
    assert not res.returncode, res.stderr

if __name__=='__main__': check()
