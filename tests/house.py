"""The rules of the package, each a function from a checkout (`House`) to a list of offences, in words: where, what, and the remedy.

A room is a notebook and the module that it exports; a chapter is a package of rooms. A module directly in the package is a chapter of its own.
"""
import ast, importlib, json, re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

LINE,NAMES = 160,90 # most characters of a line, most names that `from fastai_xla.all import *` brings

def load(path): return json.loads(path.read_text(encoding='utf-8'))
def src(cell): return ''.join(cell['source'])
def code(nb): return [o for o in nb['cells'] if o['cell_type']=='code']
def is_private(name): return name.startswith('_') and not name.startswith('__')
def tail(node): return node.attr if isinstance(node, ast.Attribute) else getattr(node, 'id', None)

@dataclass
class Room:
    number:int # Of the notebook
    name:str # Of the module in the package, 'train.optimizer'
    nb:Path
    path:Path # Of the module

class House:
    "A checkout at `root`: notebooks, modules, and the scripts that use them"
    def __init__(self, root, lib='fastai_xla', nbs='nbs'):
        self.root,self.lib,self.package = Path(root),lib,Path(root)/lib
        self.notebooks = sorted((self.root/nbs).glob('[0-9]*_*.ipynb'))
        self.scripts = [p for o in ('benchmarks','examples') for p in sorted((self.root/o).rglob('*.py'))]
        named = [(*o.stem.split('_', 1), o) for o in self.notebooks]
        self.rooms = [Room(int(n), nm, o, self.package.joinpath(*nm.split('.')).with_suffix('.py')) for n,nm,o in named]
        self.numbers,self.chapters = {o.name: o.number for o in self.rooms},{}
        for o in self.rooms:
            if '.' in o.name: self.chapters.setdefault(o.name.split('.')[0], []).append(o)

    @cached_property
    def modules(self):
        "Every module of the package by name, '' for the package itself, without nbdev's index"
        paths = [o for o in sorted(self.package.rglob('*.py')) if o.name!='_modidx.py']
        return {'.'.join(o.relative_to(self.package).with_suffix('').parts).removesuffix('__init__').rstrip('.'): o for o in paths}

    def number(self, module):
        "Of a room; the highest of a chapter's; just below the last room for `all`, which only that one (`cli`) imports; -1 for the package itself; None if there is no such module"
        if module in ('','_modidx'): return -1
        if module in self.numbers: return self.numbers[module]
        if module in self.chapters: return max(o.number for o in self.chapters[module])
        return max(self.numbers.values())-1 if module in self.modules else None
    def where(self, path, line=None): return str(path.relative_to(self.root)) + (f':{line}' if line else '')
    def tree(self, path): return ast.parse(path.read_text(encoding='utf-8'), str(path))
    def chapter_of(self, path): return path.relative_to(self.package).parts[0].removesuffix('.py') if path.is_relative_to(self.package) else None

    def imports(self, path):
        "Each import from the package in the file at `path`: line, module, member of it (None for the module itself)"
        for o in ast.walk(self.tree(path)):
            if isinstance(o, ast.Import): found = [(a.name.split('.'), None) for a in o.names]
            elif isinstance(o, ast.ImportFrom):
                base = [self.lib, *path.relative_to(self.package).parts[:-o.level]] if o.level else []
                found = [([*base, *(o.module or '').split('.')], a.name) for a in o.names]
            else: continue
            for parts,member in found:
                if parts[0]!=self.lib: continue
                module = '.'.join(filter(None, parts[1:]))
                if f'{module}.{member}'.lstrip('.') in self.modules: module,member = f'{module}.{member}'.lstrip('.'),None
                yield SimpleNamespace(line=o.lineno, module=module, member=member)

def patched(house):
    "The functions that fastcore's `patch` adds to a class: path, line, class, name"
    for path in house.modules.values():
        for o in ast.walk(house.tree(path)):
            for d in getattr(o, 'decorator_list', ()):
                f = d.func if isinstance(d, ast.Call) else d
                if tail(f) not in ('patch','patch_property','patch_to'): continue
                cls = d.args[0] if tail(f)=='patch_to' else o.args.args[0].annotation
                yield SimpleNamespace(path=path, line=o.lineno, cls=ast.unparse(cls), name=o.name)

rules = {}
def rule(f):
    rules[f.__name__] = f
    return f

@rule
def numbers(house):
    "A notebook's number is its own, with three digits, and its name is that of its module"
    for o in house.rooms:
        exp = re.search(r'^#\|\s*default_exp\s+(\S+)', '\n'.join(map(src, code(load(o.nb)))), re.M)
        if not exp or exp[1]!=o.name: yield f'{house.where(o.nb)}: it exports {exp and exp[1]}; name the notebook {o.number}_{exp and exp[1]}.ipynb'
        if [p.number for p in house.rooms].count(o.number)>1 or not re.match(r'\d{3}_', o.nb.name): yield f'{house.where(o.nb)}: give it a number of three digits of its own'

@rule
def order(house):
    "A room imports only rooms of lower numbers; from a chapter's package, as if it were the chapter's highest room"
    for room in house.rooms:
        for o in house.imports(room.path):
            n,at = house.number(o.module),house.where(room.path, o.line)
            if n is None: yield f'{at}: there is no {house.lib}.{o.module}; name a room, or the package of a chapter'
            elif n>=room.number: yield f'{at}: room {room.number} imports {o.module} ({n}); move what both need to a lower room'

@rule
def privates(house):
    "No private name of a chapter is imported in another chapter, a benchmark or an example"
    for path in [*house.modules.values(), *house.scripts]:
        for o in house.imports(path):
            if o.member and is_private(o.member) and o.module.split('.')[0]!=house.chapter_of(path):
                yield f'{house.where(path, o.line)}: {o.member} is private to {o.module}; give it a public name, or use one'

@rule
def patches(house):
    "What is replaced for the whole process stands in patches/ (and is listed and undone there: test_undo.py); `patch` adds new names to Learner alone"
    for path in house.modules.values():
        if house.chapter_of(path)=='patches': continue
        for o in ast.walk(house.tree(path)):
            if isinstance(o, ast.Call) and tail(o.func) in ('replaces','Patch'):
                yield f'{house.where(path, o.lineno)}: {ast.unparse(o)[:60]} replaces for the whole process; move it to patches/, or lend it through Loans'
    for o in patched(house):
        if o.cls!='Learner' and house.chapter_of(o.path)!='patches':
            yield f'{house.where(o.path, o.line)}: @patch adds {o.name} to {o.cls}; only Learner gets new names, write a function'

@rule
def line_length(house):
    "A line of a module has at most 160 characters"
    for path in house.modules.values():
        for i,o in enumerate(path.read_text(encoding='utf-8').splitlines(), 1):
            if len(o)>LINE: yield f'{house.where(path, i)}: a line of {len(o)} characters, at most {LINE}; break it'

@rule
def public_names(house):
    "Each chapter's `__all__` names what users call; `all.py` has those of every chapter, at most 90, and none is private"
    mods = {o: importlib.import_module(f'{house.lib}.{o}') for o in ('all', *house.chapters, *house.numbers)}
    listed = [nm for c in house.chapters for nm in mods[c].__all__]
    face = {k for k in vars(mods['all']) if not k.startswith('_')}
    if face!={*listed}: yield f"{house.lib}/all.py: it has other names than the chapters' __all__: {sorted(face^{*listed})}"
    if len(listed)>NAMES: yield f'{house.lib}/all.py: {len(listed)} names, at most {NAMES}; leave out what users do not call'
    for o in house.numbers:
        for nm in mods[o].__all__:
            if is_private(nm): yield f'{house.lib}.{o}: {nm} is private and in __all__; export it by #| exporti'

@rule
def documented(house):
    "What users call has a docstring"
    names = {nm for c in house.chapters for nm in importlib.import_module(f'{house.lib}.{c}').__all__} | {o.name for o in patched(house)}
    for path in house.modules.values():
        for o in house.tree(path).body:
            if isinstance(o, (ast.FunctionDef, ast.ClassDef)) and o.name in names and not ast.get_docstring(o): yield f'{house.where(path, o.lineno)}: {o.name} has no docstring'
