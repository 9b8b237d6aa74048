"Notebooks, modules, README, metadata, Makefile and the scripts in tools/ agree with each other."
import ast, importlib, json, os, re, shutil, subprocess, sys
from configparser import ConfigParser
from importlib.metadata import entry_points, metadata, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

try: import tomllib
except ImportError: import tomli as tomllib

root = Path(__file__).parent.parent
sys.path.insert(0, str(root/'tools'))
import fresh, messages, platforms, readme, run_tests, house
from fastai_xla.aot.libtpu import libtpu_versions
from house import House, code, load, src

pyproject = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))
project,nbdev = pyproject['project'],pyproject['tool']['nbdev']
name,repo_url = project['name'],project['urls']['Repository']
lib, nbs = root/nbdev['lib_path'], root/nbdev['nbs_path']
pythons = [o.rpartition(' ')[2] for o in project['classifiers'] if re.search(r'Python :: 3\.\d+$', o)]

def reqs(extra=''):
    "What the package requires, or an extra, in which the package's own extras stand for what they have"
    res = [Requirement(o) for o in (project['optional-dependencies'][extra] if extra else project['dependencies'])]
    return [q for r in res for q in ([q for e in sorted(r.extras) for q in reqs(e)] if r.name==name else [r])]
def run(*args, **kw): return subprocess.run([*map(str, args)], capture_output=True, text=True, **kw)
def read(path): return (root/path).read_text(encoding='utf-8')

here = House(root)
shown = [p for o in ('guide','tutorials','platforms') for p in sorted((nbs/o).glob('*.ipynb'))]
everything = here.notebooks + [nbs/'index.ipynb'] + shown
def by_hand(): return [Path('__init__.py'), Path('__main__.py'), Path('all.py'), *(Path(o)/'__init__.py' for o in here.chapters)]

# ---- notebooks and modules

def test_exported_and_clean(tmp_path):
    "Modules and their index are those that the notebooks export, and the notebooks are as nbdev-clean leaves them"
    shutil.copy(root/'pyproject.toml', tmp_path)
    shutil.copytree(nbs, tmp_path/nbs.name, ignore=shutil.ignore_patterns('.*'))
    for o in by_hand():
        (tmp_path/lib.name/o).parent.mkdir(exist_ok=True)
        shutil.copy(lib/o, tmp_path/lib.name/o)
    for cmd in ('export', 'clean'):
        res = run(Path(sys.executable).parent/f'nbdev-{cmd}', cwd=tmp_path, env={k:v for k,v in os.environ.items() if k!='IN_TEST'})
        assert not res.returncode, res.stdout+res.stderr
    new,old = [{o.relative_to(d): o.read_text() for o in d.rglob('*.py') if o.name!='_modidx.py'} for d in (tmp_path/lib.name, lib)]
    assert new.keys()==old.keys()=={o.path.relative_to(lib) for o in here.rooms} | {*by_hand()}
    assert not (bad := [str(o) for o in old if new[o]!=old[o]]), f'run `make nbs`: these differ from their notebooks: {bad}'
    def index(d): # without modules that have no symbols: nbdev versions differ in listing those
        exec((d/lib.name/'_modidx.py').read_text(), res := {})
        return res['d']['settings'], {k: v for k,v in res['d']['syms'].items() if v}
    assert index(tmp_path)==index(root)
    for o in everything: assert load(tmp_path/o.relative_to(root))==load(o), f'run `make nbs`: {o.name} is not as nbdev-clean leaves it'

def test_cells():
    for path in everything:
        cells = load(path)['cells']
        ids,outputs = [o.get('id') for o in cells],[p for o in code(load(path)) for p in o['outputs']]
        assert all(ids) and len(ids)==len(set(ids)) and not [o for o in outputs if o['output_type']=='error'], path
        assert not re.search(r'/(home|root|Users|work)/', json.dumps(cells)), f'{path}: a path of the machine that ran it'
        assert re.match(r'# .+\n\n> .+' if path in here.notebooks else r'# .+', src(cells[0])), f'{path.name} has no title and summary'

def test_pages_for_users():
    "They were executed and say whom they are for; those to be opened elsewhere have links to themselves, and install the package before they use it"
    for path in shown:
        cells = load(path)['cells']
        first,top = [o for o in code(load(path)) if src(o).strip()],'\n'.join(map(src, cells[:2]))
        assert not first or any(o['outputs'] for o in first), f'{path.name} is stored without having been run: make tutorials'
        assert '\n> For ' in top, f'{path.name}: its summary says what it is for and for whom: "> For ..."'
        if path.parent.name=='guide' and path.stem!='quickstart': continue
        at = f'{repo_url.split("github.com/")[1]}/blob/main/{path.relative_to(root)}'
        for o in (f'(https://colab.research.google.com/github/{at})', f'(https://kaggle.com/kernels/welcome?src=https://github.com/{at})', f'pip install git+{repo_url}`'):
            assert o in top, path.name
        i = next(i for i,o in enumerate(first) if 'pip install' in src(o))
        assert 'git+'+repo_url in src(first[i]) and not any('fastai' in src(o) for o in first[:i]), path.name
        assert not re.findall(r'!\[[^]]*\]\((?!https://)', '\n'.join(src(o) for o in cells if o['cell_type']=='markdown')), path.name

@pytest.mark.parametrize('rule', house.rules)
def test_rule(rule):
    offences = [*house.rules[rule](here)]
    assert not offences, f'{rule}: {len(offences)}\n' + '\n'.join(offences)

def test_all_hides_nothing_of_fastai():
    "`from fastai_xla.all import *` after fastai's own leaves every name that fastai gave"
    code = """
import fastai.vision.all, fastai.text.all, fastai.tabular.all, fastai.collab, fastai_xla.all as ours
theirs = {k: v for m in (fastai.vision.all, fastai.text.all, fastai.tabular.all, fastai.collab) for k,v in vars(m).items()}
print([k for k,v in vars(ours).items() if not k.startswith('_') and k in theirs and theirs[k] is not v])"""
    res = fresh.run('-c', code, cwd=root)
    assert res.returncode==0 and res.stdout.splitlines()[-1]=='[]', res.stdout+res.stderr

# ---- README and the words of pages

def test_readme_is_the_rendered_index():
    "and short; its pictures are there and small, and the badges say what pyproject.toml says"
    text = read('README.md')
    assert text==readme.render(nbs/'index.ipynb'), 'run `make nbs`'
    files = [root/o for o in re.findall(r'!\[[^]]*\]\(([^)]+)\)', text)]
    assert {o.name for o in files}=={'eight_cores.png', *readme.badges()} and all(o.stat().st_size<60_000 for o in files)
    for k,v in readme.badges().items(): assert (nbs/'images'/k).read_text()==v, 'run `make nbs`'
    assert len(text.encode())<10_000, 'a first screen and a page: more belongs into nbs/guide'

coined = re.compile('|'.join((r'\b(?:com(?:es?|ing)|came|goe?s?|bring|travels?) home\b', r'\b(?:lent|lends?|lending)\b', r'\bg[ia]ven? back\b|\bgives back\b', r'\brooms?\b',
    r'\bmend(?:s|ed|ing)?\b', r'\bits like\b', r'\bnot so (?:are|is)\b', 'so-manyth', 'gone on with', r'\b(?:run|runs|ran) again without tracing|steps? that (?:is|are) run again',
    r'\b(?:all|every step) traced\b', r'\bchills?\b', r'\b(?:which|each|three|other|both|two|one) forms?\b')), re.I)

def texts():
    "What users read: pages without code and addresses; messages, docstrings and comments on arguments of public names"
    for path in [nbs/f'{o}.ipynb' for o in ('index','troubleshooting','benchmarks')] + shown + [root/f'{o}.md' for o in ('README','CHANGELOG','CONTRIBUTING')]:
        text = read(path) if path.suffix=='.md' else '\n\n'.join(src(o) for o in load(path)['cells'] if o['cell_type']=='markdown')
        yield path.name,re.sub(r'```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+', ' ', text, flags=re.S)
    for path in sorted(lib.rglob('[a-z]*.py')):
        tree,lines = ast.parse(read(path)),read(path).splitlines()
        found = [t for t,_ in messages.messages(path)]+[ast.get_docstring(tree) or '']
        for o in ast.walk(tree):
            if not isinstance(o, (ast.FunctionDef, ast.ClassDef)) or o.name[0]=='_': continue
            found += [ast.get_docstring(o) or '', *(l.partition(' # ')[2] for l in lines[o.lineno:o.body[0].lineno-1])]
        yield path.relative_to(root),re.sub('`[^`]*`', '', '\n\n'.join(found))

def test_words():
    "The field's words: replayed, copied back, patched, module, strategy, fix, resume"
    found = [f'{path}: {m[0]}' for path,text in texts() for m in coined.finditer(text)]
    assert not found, found

def test_map():
    "CONTRIBUTING's map has every chapter; modules that it and *How a fit runs* name are there"
    text = read('CONTRIBUTING.md')
    listed = re.findall(r'^\| `(\w+)` \|', text, re.M)
    assert {*listed} == {*here.chapters, 'cli'}, {*listed} ^ {*here.chapters, 'cli'}
    text += '\n'.join(map(src, load(nbs/'guide'/'how_a_fit_runs.ipynb')['cells']))
    named = {f'{a}.{b}' for a,b in re.findall(r'`(\w+)\.(\w+)`', text) if a in here.chapters}
    assert len(named)>10 and named <= {o.name for o in here.rooms}, named - {o.name for o in here.rooms}

def test_promises():
    "Each has a test, in the target that the table says"
    table = read('CONTRIBUTING.md').split('## What users are promised')[1].split('\n## ')[0]
    quick,slow,_ = table.split('| **`make ')
    def tests(text): return re.findall(r'`((?:torch_tpu/)?test_\w+\.py)::(\w+)`', text)
    for file,test in tests(table):
        text = read(f'tests/{file}')
        assert f'def {test}(' in text, test
        marks = text.split(f'def {test}(')[0].rpartition('\n\n')[2]
        always = 'pytestmark = pytest.mark.slow' in text or any(o.strip() in ('@slow','@pytest.mark.slow') for o in marks.splitlines())
        assert always==((file,test) in tests(slow)), test

# ---- metadata

def test_one_home_of_metadata():
    "pyproject.toml; setup.py has the packages alone, and settings.ini a name; what is installed says the same, and so do CHANGELOG and CITATION"
    import yaml
    assert importlib.import_module(lib.name).__version__ == version(name) == re.search(r'^## (\S+)', read('CHANGELOG.md'), re.M)[1]
    assert project['dynamic']==['version'] and pyproject['tool']['setuptools']['dynamic']['version']['attr']==f'{lib.name}.__version__'
    ini = ConfigParser()
    ini.read(root/'settings.ini', encoding='utf-8')
    assert dict(ini['DEFAULT'])=={'lib_name': name} and not ini.sections()
    call, = [o for o in ast.walk(ast.parse(read('setup.py'))) if isinstance(o, ast.Call) and getattr(o.func, 'id', '')=='setup']
    assert {o.arg for o in call.keywords}=={'packages','package_dir'}
    def facts(rs): return {(canonicalize_name(r.name), str(r.specifier), frozenset(r.extras)) for r in map(Requirement, rs)}
    assert facts(requires(name)) == facts(o for k in (project['dependencies'], *project['optional-dependencies'].values()) for o in k)
    assert metadata(name)['Requires-Python'] == project['requires-python'] and project['license']=='Apache-2.0' and 'Apache License' in read('LICENSE')
    script, = [o for o in entry_points(group='console_scripts') if o.name=='fastai-xla']
    assert project['scripts'][script.name]==script.value and callable(script.load())
    cff = yaml.safe_load(read('CITATION.cff'))
    assert cff['version'] == version(name) and cff['license'] == 'Apache-2.0' and {'cff-version','message','title','authors'} <= cff.keys()

def test_what_is_imported_is_required():
    "Packages that a module imports, by their names on PyPI; those that an extra brings are imported where they are used"
    dists,extra = dict(google='protobuf', plum='plum-dispatch'),{r.name for e in ('xla','torch_tpu','stream','compile') for r in reqs(e)}
    found = {}
    for path in lib.rglob('*.py'):
        for o in ast.walk(ast.parse(read(path))):
            names = [a.name for a in o.names] if isinstance(o, ast.Import) else [o.module] if isinstance(o, ast.ImportFrom) and not o.level else []
            found.update({dists.get(nm.split('.')[0], nm.split('.')[0]): path.name for nm in names})
    missing = {k: v for k,v in found.items() if k not in sys.stdlib_module_names and k!=lib.name and k not in extra and k not in {r.name for r in reqs()}}
    assert not missing, f'imported, and not in dependencies: {missing}'

def test_bounds():
    "Every dependency has a lower and an upper one, which what is installed obeys; the oldest that are tested are the lower bounds"
    for r in reqs():
        assert {o.operator for o in r.specifier} == {'>=', '<'}, f'{r} needs a lower and an upper bound'
        assert r.marker and not r.marker.evaluate() or r.specifier.contains(version(r.name)), f'{r}, found {version(r.name)}'
    low = {r.name: Version(s.version) for r in reqs()+reqs('dev') for s in r.specifier if s.operator=='>='}
    oldest = [Requirement(o) for o in read('constraints-oldest.txt').splitlines() if o and not o.startswith('#')]
    assert {r.name for r in reqs()} <= {r.name for r in oldest}
    for r in oldest: assert str(r.specifier).startswith('==') and Version(str(r.specifier)[2:]) == low[r.name], f'{r} is not the lower bound'

def test_an_environment_keeps_its_stack():
    "The package itself asks for no stack, and for a torch of either; each extra brings one alone, torch and torch_xla as a pair, and no libtpu that is not known, or that takes back what Kaggle or Colab has"
    by = {k: {r.name: r for r in reqs(k)} for k in ('', *project['optional-dependencies'])}
    assert {str(by[k][o].specifier) for o in ('torch','torch_xla') for k in ('xla','tpu','dev','bench')} == {'<2.10,>=2.8'}
    assert not {'torch_xla','torch_tpu','libtpu'} & by[''].keys() and all(by['']['torch'].specifier.contains(o) for o in ('2.8.0','2.9.1','2.11.0','2.15.0'))
    assert [{'torch_xla','torch_tpu'} & by[k].keys() for k in ('xla','tpu','torch_tpu','compile','stream')] == [{'torch_xla'}, {'torch_xla'}, {'torch_tpu'}, set(), set()]
    assert by['torch_tpu']['torch'].specifier.contains('2.13.0') and not by['torch_tpu']['torch'].specifier.contains('2.9.1')
    assert {str(by[k]['libtpu'].specifier) for k in ('tpu','compile','dev')} == {str(SpecifierSet(libtpu_versions))}
    for where,(_,pins) in platforms.platforms.items():
        for nm,v in platforms.parse_pins('\n'.join(pins)).items():
            for extra,found in by.items():
                if nm in found and extra!='torch_tpu': assert found[nm].specifier.contains(v), f'fastai_xla[{extra}] would change {nm} {v} on {where}: {found[nm]}'
    for env,wanted in ((('linux','x86_64','3.11'),True), (('linux','x86_64','3.14'),False), (('linux','aarch64','3.11'),False), (('darwin','arm64','3.11'),False)):
        assert by['xla']['torch_xla'].marker.evaluate(dict(zip(('sys_platform','platform_machine','python_version'), env), extra=''))==wanted, env

def test_pythons_are_the_same_everywhere():
    assert re.search(r'python: \[(.+)\]', read('.github/workflows/test.yaml'))[1] == ', '.join(f"'{o}'" for o in pythons)
    assert re.findall(r'\bpython(3\.\d+)', re.search(r'^CANDIDATES.*', read('Makefile'), re.M)[0]) == pythons[::-1]
    assert f"(3,{pythons[0][2:]}) <= sys.version_info[:2] <= (3,{pythons[-1][2:]})" in read('tools/find_python.sh')
    assert f'Python {pythons[0]} to {pythons[-1]}' in read('README.md')

# ---- Makefile and tools

def test_targets():
    "`make help` lists every one, and workflows call those that exist"
    targets = {*re.search(r'^\.PHONY: (.+)', read('Makefile'), re.M)[1].split()}
    res = run('make', '-s', 'help', cwd=root)
    assert set(re.findall(r'^make (\S+)', res.stdout, re.M)) == targets - {'help'}, res.stderr
    for path in sorted((root/'.github/workflows').glob('*')):
        text = path.read_text()
        listed = ' '.join(re.findall(r'\btarget: \[?([^]}\n]+)', text)).replace(',', ' ').split()
        called = re.findall(r'\bmake (\S+)', text.replace('${{ matrix.target }}', listed[0] if listed else '')) + listed
        assert called and {*called}<=targets, f'{path.name}: {called}'

def test_report_of_a_tpu():
    "The notebook that measures a TPU sends its report to the issue template that asks for it"
    asked, = re.findall(r'blob/main/(nbs/\S+\.ipynb)', read('.github/ISSUE_TEMPLATE/tpu_report.yml'))
    assert 'issues/new?template=tpu_report.yml' in '\n'.join(map(src, load(root/asked)['cells']))

def test_find_python(tmp_path):
    def fake(nm, text):
        (tmp_path/nm).write_text(f'#!/bin/sh\n{text}\n')
        (tmp_path/nm).chmod(0o755)
        return tmp_path/nm
    bad = fake('broken', 'echo "command not found" >&2; exit 127'),fake('old', 'printf 3.8.1; exit 1')
    res = run(root/'tools/find_python.sh', *bad, 'no-such-python', sys.executable)
    assert res.returncode==0 and Path(res.stdout.strip()) == Path(sys.executable)
    res = run(root/'tools/find_python.sh', *bad)
    assert res.returncode==1 and not res.stdout and all(o in res.stderr for o in ('broken(does not run)', 'old(3.8.1)', 'python3-venv', 'make PYTHON='))

@pytest.mark.slow
def test_install_repairs_an_interrupted_environment(tmp_path):
    venv = tmp_path/'venv'
    def install(*args): return run(root/'tools/install.sh', venv, sys.executable, *args)
    assert f'Making {venv}' in install('--help').stdout # pip does nothing and succeeds
    (venv/'kept').touch()
    assert 'Making' not in install('--help').stdout and (venv/'kept').exists()
    (venv/'.installing').touch()  # what a killed run leaves behind
    assert 'Making' in install('--help').stdout and not (venv/'kept').exists() and not (venv/'.installing').exists()

def test_first_look_has_its_files():
    "`make test-fast` runs files by their names"
    assert all((root/'tests'/f'test_{o}.py').exists() for o in run_tests.FAST), run_tests.FAST

FILES = dict(good='import pytest\n@pytest.mark.slow\ndef test_1(): pass\ndef test_2(): pass', bad='def test_3(): assert 1==2',
    died='import os, pytest\n@pytest.mark.slow\ndef test_4(): os.abort()', hung='import time, pytest\n@pytest.mark.slow\ndef test_5(): time.sleep(99)')

@pytest.mark.parametrize('level,said', [('test','1 passed, 1 failed in'), pytest.param('all', '2 passed, 1 failed, 2 error in', marks=pytest.mark.slow)])
def test_runner(tmp_path, level, said):
    "It counts what passes and fails, and sees processes that die or hang; a level takes some"
    for nm,text in FILES.items(): (tmp_path/f'test_{nm}.py').write_text(text)
    res = run(sys.executable, root/'tools/run_tests.py', f'--level={level}', '--timeout=10', *sorted(tmp_path.glob('test_*.py')))
    assert res.returncode==1 and 'assert 1==2' in res.stdout and f'===== {said}' in res.stdout.splitlines()[-1], res.stdout
