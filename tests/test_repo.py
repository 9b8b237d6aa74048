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
import readme

ini = ConfigParser(delimiters=['='], interpolation=None)
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
pyproject = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))
lib, nbs = root/cfg['lib_path'], root/cfg['nbs_path']
pythons = [f'3.{o}' for o in range(int(cfg['min_python'][2:]), int(cfg['max_python'][2:])+1)]

def lines(key): return [o.strip() for o in cfg[key].splitlines() if o.strip()]
def reqs(key): return [Requirement(o) for o in lines(key)]
def load(path): return json.loads(path.read_text(encoding='utf-8'))
def src(cell): return ''.join(cell['source'])
def code(nb): return [o for o in nb['cells'] if o['cell_type']=='code']
def run(*args, **kw): return subprocess.run([*map(str, args)], capture_output=True, text=True, **kw)

api = sorted(nbs.glob('[0-9][0-9]_*.ipynb'))
everything = api + [nbs/'index.ipynb'] + sorted(nbs.glob('tutorials/*.ipynb'))
def default_exp(path): return re.search(r'^#\|\s*default_exp\s+(\S+)', '\n'.join(map(src, code(load(path)))), re.M)[1]
number = {default_exp(o): int(o.name[:2]) for o in api}

# ---- notebooks and modules

@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    "A copy of the repository whose modules are exported anew from its notebooks, which are then cleaned"
    new = tmp_path_factory.mktemp('exported')
    for o in ('settings.ini', 'pyproject.toml'): shutil.copy(root/o, new)
    shutil.copytree(nbs, new/nbs.name, ignore=shutil.ignore_patterns('.*'))
    (new/lib.name).mkdir()
    for o in ('__init__.py', 'all.py'): shutil.copy(lib/o, new/lib.name)
    env = {k:v for k,v in os.environ.items() if k!='IN_TEST'}
    for cmd in ('export', 'clean'):
        res = run(Path(sys.executable).parent/f'nbdev-{cmd}', cwd=new, env=env)
        assert not res.returncode, res.stdout+res.stderr
    return new

def test_modules_are_those_of_the_notebooks(exported):
    new, old = [{o.name for o in d.glob('*.py')} for d in (exported/lib.name, lib)]
    assert new == old == {f'{o}.py' for o in number} | {'__init__.py', '_modidx.py', 'all.py'}
    for o in new-{'_modidx.py'}: assert (exported/lib.name/o).read_text() == (lib/o).read_text(), f'run `make nbs`: {o} differs from its notebook'

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

def test_tutorials_are_executed():
    for path in sorted(nbs.glob('tutorials/*.ipynb')):
        cells = [o for o in code(load(path)) if src(o).strip()]
        assert any(o['outputs'] for o in cells), f'{path.name} is stored without having been run: make tutorials'

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

def imported(path):
    "Modules of the package that the module at `path` imports, by name"
    from_ = [o for o in ast.walk(ast.parse(path.read_text(encoding='utf-8'))) if isinstance(o, ast.ImportFrom)]
    near = [n for o in from_ if o.level==1 for n in ([o.module] if o.module else [a.name for a in o.names])]
    return near + [o.module.split('.')[1] for o in from_ if not o.level and o.module.startswith(f'{lib.name}.')]

@pytest.mark.parametrize('name', number)
def test_modules_import_only_earlier_ones(name):
    later = [o for o in imported(lib/f'{name}.py') if number[o]>=number[name]]
    assert not later, f'{name} ({number[name]:02}) imports {later}'

apart = {'cli'}  # a command

def test_all_imports_every_module_in_order():
    wanted = [o for o in sorted(number, key=number.get) if o not in apart]
    assert imported(lib/'all.py') == wanted, 'a module is imported by all.py, in the order of the notebooks, or named in `apart`'
    public = importlib.import_module(f'{lib.name}.all')
    for o in imported(lib/'all.py'):
        mod = importlib.import_module(f'{lib.name}.{o}')
        for nm in mod.__all__: assert getattr(public, nm) is getattr(mod, nm), f'{nm} of {o} is hidden by a later module'

def test_readme_is_the_rendered_index():
    assert (root/'README.md').read_text(encoding='utf-8') == readme.render(nbs/'index.ipynb'), 'run `make nbs`'

def test_readme_rendering(tmp_path):
    cells = [('markdown', '# T'), ('code', '#| hide\n1'), ('code', '#| echo: true\nx = 1\nx'), ('code', '')]
    (tmp_path/'n.ipynb').write_text(json.dumps(dict(cells=[dict(cell_type=t, source=[s]) for t,s in cells])))
    assert readme.render(tmp_path/'n.ipynb') == '# T\n\n```python\nx = 1\nx\n```\n'

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
