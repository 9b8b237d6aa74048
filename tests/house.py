"""The rules of the package's house, each a function from a checkout (`House`) to a list of offences, in words: where, what, and the remedy.

A room is a notebook and the module that it exports; a chapter is a package of rooms. A module directly in the package is a chapter of its own.
"""
import ast, builtins, json, re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

from fresh import run

LINE,NAMES = 160,90 # most characters of a line, most names that `from fastai_xla.all import *` brings

def load(path): return json.loads(path.read_text(encoding='utf-8'))
def src(cell): return ''.join(cell['source'])
def code(nb): return [o for o in nb['cells'] if o['cell_type']=='code']
def default_exp(path):
    "The module that the notebook at `path` says it exports"
    found = re.search(r'^#\|\s*default_exp\s+(\S+)', '\n'.join(map(src, code(load(path)))), re.M)
    return found and found[1]
def is_exported(text): return bool(re.search(r'^#\|\s*exporti?s?\b', text, re.M))
def parse(text):
    "The tree of `text`, None if it is not Python alone (such as a cell with a magic)"
    try: return ast.parse(text)
    except SyntaxError: return None
def is_private(name): return name.startswith('_') and not (name.startswith('__') and name.endswith('__'))
def dotted(node):
    "['a','b','c'] for the expression `a.b.c`, None for any other"
    if isinstance(node, ast.Name): return [node.id]
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)): return [*base, node.attr]
def tail(node): return (node.attr if isinstance(node, ast.Attribute) else getattr(node, 'id', None))

@dataclass
class Room:
    number:int # Of the notebook
    name:str # Of the module in the package, 'train.optimizer'
    nb:Path
    path:Path # Of the module
    @property
    def chapter(self): return self.name.split('.')[0]

class House:
    "A checkout at `root` with the notebooks in `nbs`, the package `lib`, and the scripts that use it"
    def __init__(self, root, lib='fastai_xla', nbs='nbs', scripts=('benchmarks','examples')):
        self.root,self.lib,self.nbs = Path(root),lib,Path(root)/nbs
        self.package = self.root/lib
        self.scripts = [p for o in scripts for p in sorted((self.root/o).rglob('*.py'))]

    @cached_property
    def notebooks(self): return sorted(self.nbs.glob('[0-9]*_*.ipynb'))
    @cached_property
    def rooms(self):
        "In the order of their numbers"
        named = [(int(o.name.split('_')[0]), default_exp(o), o) for o in self.notebooks]
        return [Room(n, nm, o, self.package.joinpath(*nm.split('.')).with_suffix('.py')) for n,nm,o in sorted(named, key=lambda o: o[0]) if nm]
    @cached_property
    def modules(self):
        "Every module of the package by name, '' for the package itself, without nbdev's index"
        res = {}
        for o in sorted(self.package.rglob('*.py')):
            parts = o.relative_to(self.package).with_suffix('').parts
            if parts!=('_modidx',): res['.'.join(parts[:-1] if parts[-1]=='__init__' else parts)] = o
        return res
    @cached_property
    def chapters(self):
        "The rooms of each chapter that is a package"
        res = {}
        for o in self.rooms:
            if '.' in o.name: res.setdefault(o.chapter, []).append(o)
        return res
    @cached_property
    def numbers(self): return {o.name: o.number for o in self.rooms}

    def number(self, module):
        "Of a room; the highest of a chapter's; just below the last room for `all`, which only that one (`cli`) imports; -1 for the package itself; None if there is no such module"
        if module in ('','_modidx'): return -1
        if module in self.numbers: return self.numbers[module]
        if module in self.chapters: return max(o.number for o in self.chapters[module])
        return max(self.numbers.values())-1 if module in self.modules else None
    def where(self, path, line=None): return str(path.relative_to(self.root)) + (f':{line}' if line else '')
    def tree(self, path): return ast.parse(path.read_text(encoding='utf-8'), str(path))
    def chapter_of(self, path):
        "The chapter that the module at `path` is of; '' for the package's own `__init__.py`, None for a script"
        if not path.is_relative_to(self.package): return None
        first = path.relative_to(self.package).parts[0]
        return '' if first=='__init__.py' else first.removesuffix('.py')

    def imports(self, path):
        "Each import of a module of the package in the file at `path`: line, module, member of it (None for the module itself), name it is bound to"
        res,tree = [],self.tree(path)
        here = list(path.relative_to(self.package).parts[:-1]) if path.is_relative_to(self.package) else None
        def add(node, module, member=None, bound=None): res.append(SimpleNamespace(line=node.lineno, module=module, member=member, bound=bound))
        for o in ast.walk(tree):
            if isinstance(o, ast.Import):
                for a in o.names:
                    if a.name.split('.')[0]!=self.lib: continue
                    if a.asname: add(o, a.name[len(self.lib)+1:], bound=a.asname)
                    else:
                        add(o, '', bound=self.lib)
                        if a.name!=self.lib: add(o, a.name[len(self.lib)+1:])
            elif isinstance(o, ast.ImportFrom):
                mod = o.module.split('.') if o.module else []
                if o.level:
                    if here is None: continue
                    base = here[:len(here)-o.level+1] + mod
                elif mod and mod[0]==self.lib: base = mod[1:]
                else: continue
                for a in o.names:
                    sub = '.'.join([*base, a.name])
                    if sub in self.modules: add(o, sub, bound=a.asname or a.name)
                    else: add(o, '.'.join(base), a.name, a.asname or a.name)
            elif isinstance(o, ast.Call) and tail(o.func) in ('import_module','__import__') and o.args and isinstance(o.args[0], ast.Constant):
                name = o.args[0].value
                if isinstance(name, str) and name.startswith(f'{self.lib}.'): add(o, name[len(self.lib)+1:])
        return res

    @cached_property
    def facts(self):
        "What a fresh process that imports every module finds; `error` if it could not"
        about = dict(lib=self.lib, rooms=[o.name for o in self.rooms], chapters=[*self.chapters], patched=[o.name for o in patched(self)])
        res = run('-c', _find_facts, json.dumps(about), cwd=self.root, PYTHONPATH=str(self.root))
        return json.loads(res.stdout.splitlines()[-1]) if not res.returncode else dict(error=res.stderr.strip().splitlines()[-1])

_find_facts = '''
import functools, importlib, json, sys
about = json.loads(sys.argv[1])
lib,taken = about['lib'],[]
if about['patched']:
    import fastai.vision.all, fastai.text.all, fastai.tabular.all, fastai.callback.wandb
    from fastai.learner import Learner
    taken = [o for o in about['patched'] if hasattr(Learner, o)]
everything = importlib.import_module(f'{lib}.all')
rooms,chapters = [{o: importlib.import_module(f'{lib}.{o}') for o in about[k]} for k in ('rooms','chapters')]
public = {k: list(getattr(m, '__all__', [])) for k,m in rooms.items()}
face = [k for k in vars(everything) if not k.startswith('_')]

registry = rooms.get('patches.registry') or rooms.get('patches')
found = list(getattr(registry, '_patches', None) or registry.patches_in_force()) if registry else []
bases = [getattr(sys.modules.get(m), nm, None) for m,nm in (('fastai.callback.core','Callback'), ('torch.nn','Module'))]
def kind(o):
    return next((b.__name__ for b in bases if b and isinstance(o, type) and o is not b and issubclass(o, b)), None)
def origin(f):
    "The module of the package that wrote what takes the place"
    inner = [c.cell_contents for c in getattr(f, '__closure__', None) or () if callable(c.cell_contents)]
    for o in [*inner, f]:
        while isinstance(o, functools.partial): o = o.func
        m = getattr(o, '__globals__', {}).get('__name__', '')
        if m.startswith(f'{lib}.') and m!=registry.__name__: return m[len(lib)+1:]
    return registry.__name__[len(lib)+1:]
patches = [dict(owner=f"{getattr(p.owner, '__module__', '')}.{p.owner.__qualname__}" if isinstance(p.owner, type) else p.owner.__name__,
                name=p.name, kind=kind(p.owner), origin=origin(p.new)) for p in found]
print(json.dumps(dict(public=public, chapters={k: getattr(m, '__all__', None) for k,m in chapters.items()}, face=face, patches=patches, taken=taken)))
'''

# ---- the rules

rules = {}
def rule(f):
    rules[f.__name__] = f
    return f

@rule
def numbers(house):
    "A notebook's number is its own and as long as the others', its name is that of its module, and the rooms of a chapter follow each other"
    res,seen,last,before = [],{},{},None
    for o in house.notebooks:
        at,(n,name),exp = house.where(o),o.stem.split('_', 1),default_exp(o)
        if n in seen: res.append(f'{at}: {seen[n]} has the number {n} too; give it one of its own')
        if seen and len(n)!=len(first := next(iter(seen))): res.append(f'{at}: its number has {len(n)} digits, {first} has {len(first)}; let files stand in the order of their numbers')
        seen.setdefault(n, o.name)
        if exp!=name: res.append(f'{at}: it exports {exp}; name the notebook {n}_{exp}.ipynb, or let default_exp be {name}')
        chapter = exp and '.' in exp and exp.split('.')[0]
        if chapter and chapter in last and before!=last[chapter]: res.append(f"{at}: {before} stands between it and {last[chapter]}; the rooms of a chapter follow each other")
        before = o.name
        if chapter: last[chapter] = o.name
    return res

@rule
def order(house):
    "A room imports only rooms of lower numbers; from a chapter's package, as if it were the chapter's highest room"
    res = []
    for room in house.rooms:
        for o in house.imports(room.path):
            n,at = house.number(o.module),house.where(room.path, o.line)
            if n is None: res.append(f'{at}: there is no {house.lib}.{o.module}; name a room, or the package of a chapter')
            elif n>=room.number: res.append(f'{at}: room {room.number:02} imports {o.module} ({n:02}); move what both need to a lower room')
    return res

def private_imports(house):
    "Private names of one module of the package that another file imports or reads: path, line, module, name"
    for path in [*house.modules.values(), *house.scripts]:
        bound = {}
        for o in house.imports(path):
            if o.bound and o.member is None: bound[o.bound] = o.module
            names = [p for p in o.module.split('.') if is_private(p)] + ([o.member] if o.member and is_private(o.member) else [])
            for nm in names: yield path,o.line,o.module,nm
        for o in ast.walk(house.tree(path)):
            base,name = (o.value,o.attr) if isinstance(o, ast.Attribute) else (None,None)
            if isinstance(o, ast.Call) and tail(o.func) in ('getattr','setattr') and len(o.args)>1 and isinstance(o.args[1], ast.Constant):
                base,name = o.args[0],str(o.args[1].value)
            if base is None or not is_private(name) or not (chain := dotted(base)) or chain[0] not in bound: continue
            module = '.'.join([*filter(None, [bound[chain[0]]]), *chain[1:]])
            if module in house.modules: yield path,o.lineno,module,name

@rule
def privates(house):
    "No private name of a chapter is imported or read in another chapter, a benchmark or an example"
    return [f'{house.where(path, line)}: {name} is private to {module}; give it a public name, or use one'
            for path,line,module,name in private_imports(house) if module.split('.')[0]!=house.chapter_of(path)]

_functions = ast.FunctionDef,ast.AsyncFunctionDef,ast.Lambda
def on_import(tree):
    "Every node that runs when the module is imported: not the bodies of functions"
    for o in ast.iter_child_nodes(tree):
        yield o
        if not isinstance(o, _functions): yield from on_import(o)
        else: yield from (n for d in getattr(o, 'decorator_list', []) for n in (d, *on_import(d)))

def _names(target): return [o.id for o in ast.walk(target) if isinstance(o, ast.Name)]
def foreign_names(house, tree, nodes):
    "A test of whether a name is a module or class of another package, by the imports and plain assignments of a module"
    res,own,star = set(),set(dir(builtins)),False
    for o in nodes:
        if isinstance(o, ast.ImportFrom) or isinstance(o, ast.Import):
            ours = isinstance(o, ast.ImportFrom) and (o.level or o.module.split('.')[0]==house.lib)
            names = [(a.asname or a.name) if isinstance(o, ast.ImportFrom) else (a.asname or a.name.split('.')[0]) for a in o.names]
            star = star or ('*' in names and not ours)
            (own if ours or names==[house.lib] else res).update(names)
        elif isinstance(o, (*_functions, ast.ClassDef)) and hasattr(o, 'name'): own.add(o.name)
    def is_foreign(nm): return nm in res or (star and nm not in own)
    def refers(o):
        if isinstance(o, (ast.Tuple, ast.List, ast.Set)): return any(map(refers, o.elts))
        if isinstance(o, ast.Starred): return refers(o.value)
        if isinstance(o, ast.Call) and tail(o.func)=='getattr' and o.args: return refers(o.args[0])
        return bool((c := dotted(o)) and is_foreign(c[0]))
    for o in nodes:
        if isinstance(o, ast.Assign): pairs = [(t, o.value) for t in o.targets]
        else: pairs = [(o.target, o.iter)] if isinstance(o, (ast.For, ast.comprehension)) else []
        for t,v in pairs:
            names = _names(t) if isinstance(t, (ast.Name, ast.Tuple, ast.List)) else []
            (res if refers(v) else own).update(names)
    return refers

def _changed(o):
    "What a statement assigns to, deletes, or changes by setattr: expressions for the changed object"
    if isinstance(o, (ast.Assign, ast.Delete)): targets = o.targets
    else: targets = [o.target] if isinstance(o, ast.AugAssign) or isinstance(o, ast.AnnAssign) and o.value else []
    flat = [e for t in targets for e in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
    res = [t.value for t in flat if isinstance(t, (ast.Attribute, ast.Subscript))]
    return res + ([o.args[0]] if isinstance(o, ast.Call) and tail(o.func) in ('setattr','delattr') and o.args else [])

def patched(house):
    "The functions that fastcore's `patch` adds to a class: path, line, class, name"
    res = []
    for path in house.modules.values():
        for o in ast.walk(house.tree(path)):
            if not isinstance(o, _functions[:2]): continue
            for d in o.decorator_list:
                f = d.func if isinstance(d, ast.Call) else d
                if tail(f) in ('patch','patch_property'): cls = o.args.args[0].annotation if o.args.args else None
                elif tail(f)=='patch_to' and d.args: cls = d.args[0]
                else: continue
                res.append(SimpleNamespace(path=path, line=o.lineno, cls=ast.unparse(cls) if cls else '?', name=o.name))
    return res

@rule
def patches(house):
    "Whatever is replaced for the whole process is a `Patch`, stands in patches/, and is written there; `patch` adds new names to Learner alone"
    res = []
    for path in [o for o in house.modules.values() if house.chapter_of(o)!='patches']:
        tree = house.tree(path)
        nodes = [*on_import(tree)]
        refers = foreign_names(house, tree, nodes)
        for o in ast.walk(tree):
            if isinstance(o, ast.Call) and tail(o.func) in ('replaces','_replaces','Patch'):
                call = f'{tail(o.func)}({ast.unparse(o.args[0]) if o.args else ""}...)'
                res.append(f'{house.where(path, o.lineno)}: {call} replaces for the whole process; move it to patches/, or lend it through Loans')
        for o in nodes:
            for t in _changed(o):
                what = ast.unparse(o).splitlines()[0][:60]
                if refers(t): res.append(f'{house.where(path, o.lineno)}: {what} changes another package when it is imported; '
                                         'make it a Patch in patches/, or lend it through Loans')
    for o in patched(house):
        if o.cls!='Learner' and house.chapter_of(o.path)!='patches':
            res.append(f'{house.where(o.path, o.line)}: @patch adds {o.name} to {o.cls}; only Learner gets new names, write a function')
    return res

@rule
def replacements(house):
    "No replacement for the whole process is on a class of callbacks or modules; `patch` replaces nothing"
    facts = house.facts
    if 'error' in facts: return [f"{house.lib}: it cannot be imported: {facts['error']}"]
    found,res = facts['patches'],[]
    for o in found:
        at = f"{house.lib}/{o['origin'].replace('.','/')}.py"
        if o['kind']: res.append(f"{at}: {o['owner']}.{o['name']} is replaced on a class of {o['kind']}s; lend it to one object through Loans")
    by = {o.name: o for o in patched(house)}
    return res + [f'{house.where(by[o].path, by[o].line)}: Learner had a {o} before; give the method another name, or make it a Patch'
                  for o in facts['taken']]

@rule
def line_length(house):
    "A line of a module has at most 160 characters"
    return [f'{house.where(path, i)}: a line of {len(o)} characters, at most {LINE}; break it'
            for path in house.modules.values() for i,o in enumerate(path.read_text(encoding='utf-8').splitlines(), 1) if len(o)>LINE]

@rule
def public_names(house):
    "Each chapter's `__all__` names what users call; `all.py` has those of every chapter, at most 90, and none is private"
    facts = house.facts
    if 'error' in facts: return [f"{house.lib}: it cannot be imported: {facts['error']}"]
    res = [f'{house.where(house.package/c/"__init__.py")}: no __all__; list the names that users call' for c,names in facts['chapters'].items() if names is None]
    listed = [nm for names in facts['chapters'].values() for nm in names or ()]
    if {*facts['face']}!={*listed}: res.append(f"{house.lib}/all.py: it has other names than the chapters' __all__: {sorted({*facts['face']}^{*listed})}")
    if len(listed)>NAMES: res.append(f'{house.lib}/all.py: {len(listed)} names, at most {NAMES}; leave out what users do not call')
    return res + [f'{house.lib}.{k}: {nm} is private and in __all__; export it by #| exporti' for k,v in facts['public'].items() for nm in v if is_private(nm)]
