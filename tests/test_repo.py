"Notebooks, modules, README, metadata, Makefile and the scripts in tools/ agree with each other."
import ast, importlib, json, os, re, shutil, subprocess, sys
from configparser import ConfigParser
from importlib.metadata import entry_points, metadata, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

try: import tomllib
except ImportError: import tomli as tomllib

root = Path(__file__).parent.parent
sys.path.insert(0, str(root/'tools'))
import fresh, readme, house
from house import House, code, load, src

ini = ConfigParser(delimiters=['='], interpolation=None)
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
pyproject = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))
lib, nbs = root/cfg['lib_path'], root/cfg['nbs_path']
pythons = [f'3.{o}' for o in range(int(cfg['min_python'][2:]), int(cfg['max_python'][2:])+1)]

def lines(key): return [o.strip() for o in cfg[key].splitlines() if o.strip()]
def reqs(key): return [Requirement(o) for o in lines(key)]
def run(*args, **kw): return subprocess.run([*map(str, args)], capture_output=True, text=True, **kw)

here = House(root, cfg['lib_path'], cfg['nbs_path'])
api = here.notebooks
shown = [p for o in ('guide','tutorials','platforms') for p in sorted((nbs/o).glob('*.ipynb'))]
everything = api + [nbs/'index.ipynb'] + shown
def by_hand(): return [Path('__init__.py'), Path('__main__.py'), Path('all.py'), *(Path(o)/'__init__.py' for o in here.chapters)]

# ---- notebooks and modules

@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    "A copy of the repository whose modules are exported anew from its notebooks, which are then cleaned"
    new = tmp_path_factory.mktemp('exported')
    for o in ('settings.ini', 'pyproject.toml'): shutil.copy(root/o, new)
    shutil.copytree(nbs, new/nbs.name, ignore=shutil.ignore_patterns('.*'))
    for o in by_hand():
        (new/lib.name/o).parent.mkdir(exist_ok=True)
        shutil.copy(lib/o, new/lib.name/o)
    env = {k:v for k,v in os.environ.items() if k!='IN_TEST'}
    for cmd in ('export', 'clean'):
        res = run(Path(sys.executable).parent/f'nbdev-{cmd}', cwd=new, env=env)
        assert not res.returncode, res.stdout+res.stderr
    return new

def test_modules_are_those_of_the_notebooks(exported):
    new, old = [{o.relative_to(d) for o in d.rglob('*.py')} for d in (exported/lib.name, lib)]
    assert new == old == {o.path.relative_to(lib) for o in here.rooms} | {*by_hand(), Path('_modidx.py')}
    for o in new-{Path('_modidx.py')}:
        assert (exported/lib.name/o).read_text() == (lib/o).read_text(), f'run `make nbs`: {o} differs from its notebook'

def modidx(folder):
    "Settings and symbols of a module index, without modules that have none (nbdev versions differ in listing those)"
    d = {}
    exec((folder/'_modidx.py').read_text(), d)
    return d['d']['settings'], {k:v for k,v in d['d']['syms'].items() if v}

def test_module_index(exported): assert modidx(exported/lib.name) == modidx(lib)

def test_notebooks_are_clean(exported):
    for o in everything: assert load(exported/o.relative_to(root)) == load(o), f'run `make nbs`: {o.name} is not as nbdev-clean leaves it'

@pytest.mark.parametrize('path', api+[nbs/'index.ipynb'], ids=lambda o: o.name)
def test_api_notebooks_have_no_outputs(path):
    assert not [o['id'] for o in code(load(path)) if o['outputs'] or o['execution_count']]

def test_guide_and_tutorials_are_executed():
    for path in shown:
        cells = [o for o in code(load(path)) if src(o).strip()]
        assert not cells or any(o['outputs'] for o in cells), f'{path.name} is stored without having been run: make tutorials'

@pytest.mark.parametrize('path', [o for o in shown if o.parent.name!='guide' or o.stem=='quickstart'], ids=lambda o: o.name)
def test_opens_elsewhere(path):
    "The links at the top are those of this notebook, and say what to install"
    top,at = '\n'.join(map(src, load(path)['cells'][:2])), f'{cfg["git_url"].split("github.com/")[1]}/blob/main/{path.relative_to(root)}'
    for o in (f'(https://colab.research.google.com/github/{at})', f'(https://kaggle.com/kernels/welcome?src=https://github.com/{at})', f'pip install git+{cfg["git_url"]}`'): assert o in top

@pytest.mark.parametrize('path', everything, ids=lambda o: o.name)
def test_cells(path):
    nb = load(path)
    ids = [o.get('id') for o in nb['cells']]
    assert all(ids) and len(ids)==len(set(ids))
    outputs = [p for o in code(nb) for p in o['outputs']]
    assert not [o for o in outputs if o['output_type']=='error']
    assert not re.search(r'/(home|root|Users|work)/', json.dumps(nb)), 'a path of the machine that ran it'
    assert re.match(r'# .+', src(nb['cells'][0]))

def test_api_notebooks_say_what_they_are():
    for o in api: assert re.match(r'# .+\n\n> .+', src(load(o)['cells'][0])), f'{o.name} has no title and summary'

# ---- the rules of the house, on the package and on small ones with a fault each

@pytest.mark.parametrize('rule', house.rules)
def test_rule(rule):
    offences = house.rules[rule](here)
    assert not offences, f'{rule}: {len(offences)}\n' + '\n'.join(offences)

def room(*cells):
    "Sources of a notebook's cells: prose before what is exported"
    return [c for o in cells for c in ((['Why.', f'#| export\n{o[1:]}'] if o[0]=='>' else [o]))]

small = {'00_runtime.device': room('>def xla_device(): return 1\ndef _guess(): return 2', 'test_eq(xla_device(), 1)'),
    '01_runtime.ranks': room('>from fastai_xla.runtime.device import xla_device, _guess', '>def rank(): return xla_device()-1', 'test_eq(rank(), 0)'),
    '10_patches.registry': room(""">from types import SimpleNamespace
import string
_patches = []
def replaces(owner, name, versions, why):
    "Decorator"
    def _inner(f):
        _patches.append(SimpleNamespace(owner=owner, name=name, new=f))
        return f
    return _inner""", '>@replaces(string, "capwords", "3.10", "why")\ndef _capwords(old, s): return s', 'assert _patches'),
    '43_train.optimizer': room('>import torch\nfrom fastai_xla.runtime import rank, xla_device', """>class Step:
    "A step"
    n:int = 0
def step(): return rank()""", 'test_eq(step(), 0)'),
    '99_cli': room('>from fastai_xla.all import *\ndef main(): return step()', 'test_eq(main(), 0)')}

def small_house(folder, change=None, files=None):
    "A package of the rooms in `small`, some of which `change` and hand-written `files` replace"
    (folder/'nbs').mkdir()
    lib,names,imports = folder/'fastai_xla',{},[]
    for k,cells in {**small, **(change or {})}.items():
        exp = k[3:]
        if cells[0].startswith('default_exp '): exp,cells = cells[0].split()[1],cells[1:]
        typed = [('markdown', '# T\n\n> S'), ('code', f'#| default_exp {exp}'), *(('markdown' if o=='Why.' else 'code', o) for o in cells)]
        nb = dict(cells=[dict(cell_type=t, id=f'c{i}', source=[o]) for i,(t,o) in enumerate(typed)])
        (folder/'nbs'/f'{k}.ipynb').write_text(json.dumps(nb))
        text = '\n\n# %% cell\n'.join(o.split('\n', 1)[1] for o in cells if o.startswith('#| export'))
        public = re.findall(r'^(?:def|class) ([a-z]\w*)', text, re.M|re.I)
        path = lib.joinpath(*exp.split('.')).with_suffix('.py')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'__all__ = {public}\n{text}\n')
        if '.' in exp:
            chapter,name = exp.split('.')
            names.setdefault(chapter, []).append((name, public))
            imports.append(f'from .{exp} import *')
    for chapter,found in names.items():
        text = '\n'.join(f'from .{o} import *' for o,_ in found) + f'\n__all__ = {[p for _,ps in found for p in ps]}\n'
        (lib/chapter/'__init__.py').write_text(text)
    (lib/'__init__.py').write_text('__version__ = "1"\n')
    (lib/'all.py').write_text('\n'.join(imports)+'\n')
    for name,text in (files or {}).items():
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        (folder/name).write_text(text)
    return House(folder)

def with_cells(name, *cells): return {name: small[name] + room(*cells)}

def test_rules_of_a_good_house(tmp_path):
    good = with_cells('01_runtime.ranks', '>def xla(): pass', 'Why.', 'Why.', 'test_eq(1, 1)')
    files = {'benchmarks/b.py': 'from fastai_xla.all import *\nimport fastai_xla.train.optimizer as o\nprint(o.__name__, o.Step._x)'}
    h = small_house(tmp_path, good, files)
    for name,f in house.rules.items(): assert f(h) == [], name

opt,ranks = '43_train.optimizer','01_runtime.ranks'
def later(text): return with_cells(ranks, f'>{text}', 'test_eq(1, 1)')
def outside(text): return with_cells(opt, f'>{text}', 'test_eq(1, 1)')
def in_patches(text): return with_cells('10_patches.registry', f'>{text}', 'test_eq(1, 1)')
faults = [
    ('numbers', {'43_train.other': ['#| export\nx = 1']}, {}, r'43_train\.other\.ipynb: 43_train\.optimizer\.ipynb has the number 43 too'),
    ('numbers', {'445_train.other': ['default_exp train.other', '#| export\nx = 1']}, {}, r'445_train\.other\.ipynb: its number has 3 digits, 00 has 2'),
    ('numbers', {'44_train.other': ['default_exp train.another', '#| export\nx = 1']},
        {}, 'exports train.another; name the notebook 44_train.another.ipynb'),
    ('numbers', {'50_runtime.other': ['#| export\nx = 1']}, {}, r'50_runtime\.other\.ipynb: 43_train.* stands between it and 01_runtime.*; the rooms of a chapter follow'),
    ('order', later('from fastai_xla.train.optimizer import step'), {}, r'ranks\.py:\d+: room 01 imports train\.optimizer \(43\)'),
    ('order', later('def f():\n    from ..train import step'), {}, r'ranks\.py:\d+: room 01 imports train \(43\)'),
    ('order', later('from ..train import optimizer'), {}, r'room 01 imports train\.optimizer \(43\)'),
    ('order', later('def f(): import fastai_xla.train.optimizer as o'), {}, r'room 01 imports train\.optimizer'),
    ('order', later('import importlib\ndef f(): importlib.import_module("fastai_xla.train.optimizer")'), {}, r'room 01 imports train\.optimizer'),
    ('order', later('from . import xla_device'), {}, r'room 01 imports runtime \(01\)'),
    ('order', later('from fastai_xla.all import *'), {}, r'room 01 imports all \(98\)'),
    ('order', later('def f():\n    from .nowhere import x'), {}, r'there is no fastai_xla\.runtime\.nowhere'),
    ('privates', outside('from fastai_xla.runtime.device import _guess'), {}, r'optimizer\.py:\d+: _guess is private to runtime\.device'),
    ('privates', outside('from ..runtime import device as d\ndef f(): return d._guess()'),
        {}, r'optimizer\.py:\d+: _guess is private to runtime\.device'),
    ('privates', outside('import fastai_xla.runtime.device\ndef f(): return fastai_xla.runtime.device._guess()'),
        {}, '_guess is private to runtime.device'),
    ('privates', outside('import fastai_xla.runtime.device as d\ndef f(): return getattr(d, "_guess")'), {}, '_guess is private to runtime.device'),
    ('privates',
        {}, {'benchmarks/b.py': 'def f():\n    from fastai_xla.train.optimizer import _x'}, r'benchmarks/b\.py:2: _x is private to train\.optimizer'),
    ('privates', {}, {'examples/deep/e.py': 'import fastai_xla.train as t\nt._x = 1'}, r'examples/deep/e\.py:2: _x is private to train'),
    ('patches', outside('from fastai_xla.patches import replaces\n@replaces(torch, "a", "2", "w")\ndef f(): pass'),
        {}, r"optimizer\.py:\d+: replaces\(torch"),
    ('patches', outside('def f(): return registry.Patch(torch.Tensor, "to", f)'), {}, r'Patch\(torch\.Tensor'),
    ('patches', outside('torch.nn.Linear.forward = lambda self, x: x'),
        {}, r'optimizer\.py:\d+: torch\.nn\.Linear\.forward = .* changes another package'),
    ('patches', outside('for o in (torch.Tensor,): setattr(o, "x", 1)'), {}, 'setattr.* changes another package'),
    ('patches', outside('from os import *\nif True: environ["a"] = "b"'), {}, 'environ.* changes another package'),
    ('patches', outside('from torch import nn\nL = nn.Linear\nclass A:\n    L.x += 1'), {}, 'L.x .* changes another package'),
    ('patches', outside('from fastcore.all import patch\n@patch\ndef new(self:torch.Tensor): pass'), {}, '@patch adds new to torch.Tensor'),
    ('replacements', in_patches('for i in range(48): replaces(string, f"n{i}", "", "")(_capwords)'),
        {}, '49 replacements for the whole process, at most 48'),
    ('replacements', in_patches('import torch\n@replaces(torch.nn.Linear, "forward", "", "")\ndef _f(): pass'),
        {}, r'torch\.nn\.\S*\.Linear\.forward is replaced on a class of Modules'),
    ('replacements', in_patches('from fastai.learner import Recorder\n@replaces(Recorder, "before_fit", "", "")\ndef _f(): pass'),
        {}, 'Recorder.before_fit is replaced on a class of Callbacks'),
    ('replacements', outside('from fastai.learner import Learner\nfrom fastcore.all import patch\n@patch\ndef fit(self:Learner): pass'),
        {}, r'optimizer\.py:\d+: Learner had a fit before'),
    ('replacements', outside('import nosuchmodule'), {}, "cannot be imported: ModuleNotFoundError: No module named 'nosuchmodule'"),
    ('sizes', outside('\n'.join(f'a{i} = 1' for i in range(51))), {}, r'43_train\.optimizer\.ipynb#c\d+: a cell of 51 lines'),
    ('sizes', with_cells(opt, *[o for _ in range(5) for o in ('>'+'\n'.join(f'a{i} = 1' for i in range(40)), '1')]),
        {}, r'optimizer\.py: 2\d\d lines, at most 200'),
    ('sizes', outside('class Big:\n' + '\n'.join(f'    a{i} = 1' for i in range(100))), {}, r'optimizer\.py:\d+: class Big of 101 lines'),
    ('sizes', outside('x = "' + 'a'*160 + '"'), {}, r'optimizer\.py:\d+: a line of 166 characters'),
    ('public_names',
        {}, {'fastai_xla/train/__init__.py': 'from .optimizer import Step'}, r'train/__init__\.py: step is public in a room but not here'),
    ('public_names',
        {}, {'fastai_xla/train/__init__.py': 'from .optimizer import *\n__all__ = ["Step"]'}, r'train/__init__\.py: step is public in a room but not here'),
    ('public_names',
        {}, {'fastai_xla/train/__init__.py': 'from .optimizer import *\nx = 1\n__all__ = ["Step", "step", "x"]'}, 'x is public here but in no room'),
    ('public_names',
        {}, {'fastai_xla/train/__init__.py': 'from .optimizer import *\nstep = 1\n__all__ = ["Step", "step"]'}, r'step is not that of train\.optimizer'),
    ('public_names', {'44_train.more': room('>def step(): pass', 'test_eq(1, 1)')}, {}, r'all\.py: step of train\.optimizer is missing or hidden'),
    ('public_names',
        {}, {'fastai_xla/all.py': 'from .runtime import *\nfrom .patches import *'}, r'all\.py: it imports .*in the order of the notebooks'),
    ('public_names',
        {}, {'fastai_xla/all.py': 'from .patches import *\nfrom .runtime import *\nfrom .train import *'}, r'all\.py: it imports .*in the order of the notebooks'),
    ('public_names', {}, {'fastai_xla/other/x.py': ''}, r'fastai_xla/other: no __init__\.py'),
    ('examples', {opt: ['#| export\ndef step(): pass', *['1']*4, 'test_eq(1, 1)']}, {}, r'optimizer\.ipynb: 1 of 1 cells .* give examples to c2'),
    ('examples', with_cells(opt, '>def other(): assert True', '>def more(): pass'),
        {}, r'nbs: 75\.0% of the cells .* train\.optimizer#c\d+, train\.optimizer#c\d+'),
]

@pytest.mark.parametrize('rule,change,files,caught', faults, ids=[f'{o[0]}-{i}' for i,o in enumerate(faults)])
def test_rule_catches(tmp_path, rule, change, files, caught):
    offences = house.rules[rule](small_house(tmp_path, change, files))
    assert [o for o in offences if re.search(caught, o)], f'{caught!r} is not in {offences}'

def test_chapters_may_be_imported_whole(tmp_path):
    whole = ''.join(f'from .{o} import *\n' for o in ('runtime','patches','train'))
    h = small_house(tmp_path, files={'fastai_xla/all.py': whole, 'fastai_xla/train/__init__.py': 'from .optimizer import *'})
    assert house.rules['public_names'](h) == []

# ---- README

def test_all_hides_nothing_of_fastai():
    "`from fastai_xla.all import *` after fastai's own leaves every name that fastai gave"
    code = """
import fastai.vision.all, fastai.text.all, fastai.tabular.all, fastai.collab, fastai_xla.all as ours
theirs = {k: v for m in (fastai.vision.all, fastai.text.all, fastai.tabular.all, fastai.collab) for k,v in vars(m).items()}
print([k for k,v in vars(ours).items() if not k.startswith('_') and k in theirs and theirs[k] is not v])"""
    res = fresh.run('-c', code, cwd=root)
    assert res.returncode==0 and res.stdout.splitlines()[-1]=='[]', res.stdout+res.stderr

def test_readme_is_the_rendered_index():
    assert (root/'README.md').read_text(encoding='utf-8') == readme.render(nbs/'index.ipynb'), 'run `make nbs`'

def test_readme_rendering(tmp_path):
    cells = [('markdown', '# T'), ('code', '#| hide\n1'), ('code', '#| echo: true\nx = 1\nx'), ('code', '')]
    (tmp_path/'n.ipynb').write_text(json.dumps(dict(cells=[dict(cell_type=t, source=[s]) for t,s in cells])))
    assert readme.render(tmp_path/'n.ipynb') == '# T\n\n```python\nx = 1\nx\n```\n'

def test_pictures_of_readme():
    "They are there, small, and the badges say what settings.ini says"
    text = (root/'README.md').read_text(encoding='utf-8')
    files = [root/o for o in re.findall(r'!\[[^]]*\]\(([^)]+)\)', text)]
    assert len(files)==3 and all(o.stat().st_size<60_000 for o in files)
    assert {o.name for o in files}=={'eight_cores.png', *readme.badges()}
    for k,v in readme.badges().items(): assert (nbs/'images'/k).read_text()==v, 'run `make nbs`'
    assert '>3.10 to 3.13</text>' in readme.badge('python', '3.10 to 3.13') and len(text.encode())<8_000, 'a first screen and a page: more belongs into nbs/guide'

# ---- metadata

def test_version():
    assert importlib.import_module(lib.name).__version__ == cfg['version'] == version(cfg['dist_name'])
    assert re.search(r'^## (\S+)', (root/'CHANGELOG.md').read_text(), re.M)[1] == cfg['version']

def test_pyproject():
    urls, nbdev = pyproject['project']['urls'], pyproject['tool']['nbdev']
    assert urls == dict(Repository=cfg['git_url'], Documentation=cfg['doc_host']+cfg['doc_baseurl'])
    assert pyproject['project']['name'] == cfg['dist_name'] and cfg['git_url'].endswith(f"/{cfg['repo']}")
    assert (nbdev['lib_path'], nbdev['nbs_path'], nbdev['doc_path']) == (cfg['lib_path'], cfg['nbs_path'], cfg['doc_path'])
    assert set(pyproject['project']) - {'name', 'dynamic', 'urls'} == set(), 'metadata lives in settings.ini'

def test_installed_metadata():
    got = {(canonicalize_name(r.name), str(r.specifier), frozenset(r.extras)) for r in map(Requirement, requires(cfg['dist_name']))}
    wanted = [r for k in ('', 'tpu_', 'stream_', 'dev_', 'bench_', 'docs_') for r in reqs(f'{k}requirements')]
    assert got == {(canonicalize_name(r.name), str(r.specifier), frozenset(r.extras)) for r in wanted}
    meta = metadata(cfg['dist_name'])
    assert meta['Requires-Python'] == f">={cfg['min_python']}" and meta['License'] == cfg['license'] == 'Apache-2.0'

def test_console_script():
    script, = [o for o in entry_points(group='console_scripts') if o.name=='fastai-xla']
    assert f'{script.name}={script.value}' in lines('console_scripts') and callable(script.load())

def test_every_dependency_is_bounded():
    for r in reqs('requirements'): assert {o.operator for o in r.specifier} == {'>=', '<'}, f'{r} needs a lower and an upper bound'

def test_torch_and_torch_xla_resolve_to_a_pair():
    by = {r.name: r for r in reqs('requirements') + reqs('tpu_requirements')}
    assert by['torch'].specifier == by['torch_xla'].specifier
    tpu, = reqs('tpu_requirements')
    assert tpu.extras=={'tpu'} and all(r.specifier==tpu.specifier and r.marker==tpu.marker for r in reqs('requirements') if r.name=='torch_xla')

@pytest.mark.parametrize('system,machine,python,wanted', [('linux','x86_64','3.11',True), ('linux','x86_64','3.14',False),
    ('linux','aarch64','3.11',False), ('darwin','arm64','3.11',False), ('win32','AMD64','3.11',False)])
def test_torch_xla_is_asked_for_where_it_exists(system, machine, python, wanted):
    env = dict(sys_platform=system, platform_machine=machine, python_version=python, extra='')
    r, = [o for o in reqs('requirements') if o.name=='torch_xla']
    assert r.marker.evaluate(env) == wanted

def test_oldest_constraints():
    low = {r.name: Version(s.version) for r in reqs('requirements')+reqs('dev_requirements') for s in r.specifier if s.operator=='>='}
    oldest = [Requirement(o) for o in (root/'constraints-oldest.txt').read_text().splitlines() if o and not o.startswith('#')]
    assert {r.name for r in reqs('requirements')} <= {r.name for r in oldest}
    for r in oldest: assert str(r.specifier).startswith('==') and Version(str(r.specifier)[2:]) == low[r.name], f'{r} is not the lower bound'

def test_installed_versions_are_admitted():
    for r in reqs('requirements'):
        if not r.marker or r.marker.evaluate(): assert r.specifier.contains(version(r.name)), f'{r}, found {version(r.name)}'

def test_pythons_are_the_same_everywhere():
    workflow = (root/'.github/workflows/test.yaml').read_text()
    assert re.search(r'python: \[(.+)\]', workflow)[1] == ', '.join(f"'{o}'" for o in pythons)
    assert re.findall(r'\bpython(3\.\d+)', re.search(r'^CANDIDATES.*', (root/'Makefile').read_text(), re.M)[0]) == pythons[::-1]
    assert f"(3,{pythons[0][2:]}) <= sys.version_info[:2] <= (3,{pythons[-1][2:]})" in (root/'tools/find_python.sh').read_text()
    assert f'Python {pythons[0]} to {pythons[-1]}' in (root/'README.md').read_text()

def test_license():
    text = (root/'LICENSE').read_text()
    assert 'Apache License' in text and 'Version 2.0, January 2004' in text and 'END OF TERMS AND CONDITIONS' in text

# ---- Makefile and tools

def test_make_help_lists_every_target():
    targets = re.search(r'^\.PHONY: (.+)', (root/'Makefile').read_text(), re.M)[1].split()
    res = run('make', '-s', 'help', cwd=root)
    assert set(re.findall(r'^make (\S+)', res.stdout, re.M)) == set(targets) - {'help'}, res.stderr

def fake(folder, name, text):
    "An executable `name` in `folder` that runs shell `text`"
    (folder/name).write_text(f'#!/bin/sh\n{text}\n')
    (folder/name).chmod(0o755)
    return folder/name

def test_find_python(tmp_path):
    broken = fake(tmp_path, 'broken', 'echo "command not found" >&2; exit 127')
    old = fake(tmp_path, 'old', 'printf 3.8.1; exit 1')
    res = run(root/'tools/find_python.sh', broken, old, 'no-such-python', sys.executable)
    assert res.returncode==0 and Path(res.stdout.strip()) == Path(sys.executable)
    res = run(root/'tools/find_python.sh', broken, old)
    assert res.returncode==1 and not res.stdout
    for o in ('broken(does not run)', 'old(3.8.1)', 'python3-venv', 'make PYTHON='): assert o in res.stderr

def test_install_mends_an_interrupted_environment(tmp_path):
    venv = tmp_path/'venv'
    def install(*args): return run(root/'tools/install.sh', venv, sys.executable, *args)
    res = install('--help')  # pip does nothing and succeeds
    assert res.returncode==0 and f'Making {venv}' in res.stdout and 'several GB' in res.stdout
    (venv/'kept').touch()
    assert 'Making' not in install('--help').stdout and (venv/'kept').exists()
    (venv/'.installing').touch()  # what a killed run leaves behind
    assert 'Making' in install('--help').stdout and not (venv/'kept').exists() and not (venv/'.installing').exists()
    res = install('--no-index', 'no-such-package')
    assert res.returncode and 'pip could not install: --no-index no-such-package' in res.stderr and not (venv/'.installing').exists()

def run_tests(tmp_path, *args, **files):
    for name,text in files.items(): (tmp_path/f'test_{name}.py').write_text(text)
    return run(sys.executable, root/'tools/run_tests.py', *args, *sorted(tmp_path.glob('test_*.py')))

def test_runner_counts(tmp_path):
    res = run_tests(tmp_path, good='def test_1(): pass\ndef test_2(): pass', bad='def test_3(): assert 1==2')
    assert res.returncode==1 and 'assert 1==2' in res.stdout
    assert re.search(r'^===== 2 passed, 1 failed in \d+s =====$', res.stdout.splitlines()[-1])

def test_runner_passes(tmp_path):
    res = run_tests(tmp_path, good='def test_1(): pass')
    assert res.returncode==0 and '1 passed, 0 failed' in res.stdout.splitlines()[-1]

def test_runner_sees_processes_that_die_hang_or_collect_nothing(tmp_path):
    files = dict(died='import os\ndef test_1(): os.abort()', hung='import time\ndef test_2(): time.sleep(99)', empty='')
    res = run_tests(tmp_path, '--timeout=10', **files)
    assert res.returncode==1 and '0 passed, 0 failed, 3 error' in res.stdout.splitlines()[-1] and 'no end after 10 s' in res.stdout
