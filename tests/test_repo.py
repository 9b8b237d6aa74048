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
import fresh, messages, platforms, readme, house
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

here = House(root, nbdev['lib_path'], nbdev['nbs_path'])
api = here.notebooks
shown = [p for o in ('guide','tutorials','platforms') for p in sorted((nbs/o).glob('*.ipynb'))]
everything = api + [nbs/'index.ipynb'] + shown
def by_hand(): return [Path('__init__.py'), Path('__main__.py'), Path('all.py'), *(Path(o)/'__init__.py' for o in here.chapters)]

# ---- notebooks and modules

@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    "A copy of the repository whose modules are exported anew from its notebooks, which are then cleaned"
    new = tmp_path_factory.mktemp('exported')
    for o in ('pyproject.toml',): shutil.copy(root/o, new)
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

def test_guide_and_tutorials_are_executed():
    for path in shown:
        cells = [o for o in code(load(path)) if src(o).strip()]
        assert not cells or any(o['outputs'] for o in cells), f'{path.name} is stored without having been run: make tutorials'

@pytest.mark.parametrize('path', [o for o in shown if o.parent.name!='guide' or o.stem=='quickstart'], ids=lambda o: o.name)
def test_opens_elsewhere(path):
    "The links at the top are those of this notebook, and say what to install"
    top,at = '\n'.join(map(src, load(path)['cells'][:2])), f'{repo_url.split("github.com/")[1]}/blob/main/{path.relative_to(root)}'
    for o in (f'(https://colab.research.google.com/github/{at})', f'(https://kaggle.com/kernels/welcome?src=https://github.com/{at})', f'pip install git+{repo_url}`'): assert o in top

def test_cells():
    for path in everything: check_cells(path)

def check_cells(path):
    nb = load(path)
    ids = [o.get('id') for o in nb['cells']]
    assert all(ids) and len(ids)==len(set(ids)), path
    outputs = [p for o in code(nb) for p in o['outputs']]
    assert not [o for o in outputs if o['output_type']=='error'], path
    assert not re.search(r'/(home|root|Users|work)/', json.dumps(nb)), 'a path of the machine that ran it'
    assert re.match(r'# .+', src(nb['cells'][0])), path

def test_api_notebooks_say_what_they_are():
    for o in api: assert re.match(r'# .+\n\n> .+', src(load(o)['cells'][0])), f'{o.name} has no title and summary'

# ---- the rules of the house

@pytest.mark.parametrize('rule', house.rules)
def test_rule(rule):
    offences = house.rules[rule](here)
    assert not offences, f'{rule}: {len(offences)}\n' + '\n'.join(offences)

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
    "They are there, small, and the badges say what pyproject.toml says"
    text = (root/'README.md').read_text(encoding='utf-8')
    files = [root/o for o in re.findall(r'!\[[^]]*\]\(([^)]+)\)', text)]
    assert len(files)==3 and all(o.stat().st_size<60_000 for o in files)
    assert {o.name for o in files}=={'eight_cores.png', *readme.badges()}
    for k,v in readme.badges().items(): assert (nbs/'images'/k).read_text()==v, 'run `make nbs`'
    assert '>3.10 to 3.13</text>' in readme.badge('python', '3.10 to 3.13') and len(text.encode())<10_000, 'a first screen and a page: more belongs into nbs/guide'

# ---- the words of the pages for users

pages = [nbs/o for o in ('index.ipynb', 'troubleshooting.ipynb', 'benchmarks.ipynb')] + shown
coined = re.compile('|'.join((r'\b(?:com(?:es?|ing)|came|goe?s?|bring|travels?) home\b', r'\b(?:lent|lends?|lending)\b', r'\bg[ia]ven? back\b|\bgives back\b', r'\brooms?\b',
    r'\bmend(?:s|ed|ing)?\b', r'\bits like\b', r'\bnot so (?:are|is)\b', 'so-manyth', 'gone on with', r'\b(?:run|runs|ran) again without tracing|steps? that (?:is|are) run again',
    r'\b(?:all|every step) traced\b', r'\bchills?\b', r'\b(?:which|each|three|other|both|two|one) forms?\b')), re.I)

def prose(path):
    "The text of a page: markdown without code and addresses"
    text = path.read_text(encoding='utf-8') if path.suffix=='.md' else '\n\n'.join(src(o) for o in load(path)['cells'] if o['cell_type']=='markdown')
    return re.sub(r'```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+', ' ', text, flags=re.S)

@pytest.mark.parametrize('path', [*pages, root/'README.md', root/'CHANGELOG.md', root/'CONTRIBUTING.md'], ids=lambda o: o.name)
def test_words(path):
    "Pages use the field's words: replayed, copied back, patched, module, strategy, fix, resume"
    found = [m[0] for m in coined.finditer(prose(path))]
    assert not found, f'{path.name}: {found}'

def shown_texts():
    "What users read of the package, and where: messages, and the docstrings and comments on parameters of modules and public names"
    for path in sorted(lib.rglob('[a-z]*.py')):
        tree,lines = ast.parse(path.read_text(encoding='utf-8')),path.read_text(encoding='utf-8').splitlines()
        texts = [t for t,_ in messages.messages(path)]+[ast.get_docstring(tree) or '']
        for o in ast.walk(tree):
            if not isinstance(o, (ast.FunctionDef, ast.ClassDef)) or o.name[0]=='_': continue
            texts += [ast.get_docstring(o) or '', *(l.partition(' # ')[2] for l in lines[o.lineno:o.body[0].lineno-1])]
        yield path.relative_to(root),re.sub('`[^`]*`', '', '\n\n'.join(texts))

def test_words_of_messages_and_docstrings():
    found = [f'{path}: {m[0]}' for path,text in shown_texts() for m in coined.finditer(text)]
    assert not found, found

def test_words_that_are_coined():
    for o in ('what it learned comes home', 'it is lent', 'which mends it', 'a room', 'in all three forms', 'and gone on with', 'was run again without tracing'): assert coined.search(o), o
    for o in ('the format', 'run the cell again', 'performance', 'recommended', 'the Learner is copied back'): assert not coined.search(o), o

def test_pages_say_whom_they_are_for():
    for o in shown: assert '\n> For ' in src(load(o)['cells'][0]), f'{o.name}: its summary says what it is for and for whom: "> For ..."'

def test_map():
    "CONTRIBUTING's map has every chapter; modules that it and *How a fit runs* name are there"
    text = (root/'CONTRIBUTING.md').read_text(encoding='utf-8')
    listed = re.findall(r'^\| `(\w+)` \|', text, re.M)
    assert {*listed} == {*here.chapters, 'cli'}, {*listed} ^ {*here.chapters, 'cli'}
    text += '\n'.join(map(src, load(nbs/'guide'/'how_a_fit_runs.ipynb')['cells']))
    named = {f'{a}.{b}' for a,b in re.findall(r'`(\w+)\.(\w+)`', text) if a in here.chapters}
    assert len(named)>10 and named <= {o.name for o in here.rooms}, named - {o.name for o in here.rooms}

def test_install_cells():
    "Notebooks that offer to be opened elsewhere install the package there, before they use it; their pictures have addresses that are found there"
    for path in [o for o in shown if 'colab.research.google.com' in '\n'.join(map(src, load(o)['cells'][:2]))]:
        first = [src(o) for o in code(load(path))]
        at = next(i for i,o in enumerate(first) if 'pip install' in o)
        assert not any('fastai' in o for o in first[:at]) and 'git+'+repo_url in first[at], path.name
        assert not re.findall(r'!\[[^]]*\]\((?!https://)', '\n'.join(src(o) for o in load(path)['cells'] if o['cell_type']=='markdown')), path.name

# ---- metadata

def test_version():
    assert importlib.import_module(lib.name).__version__ == version(name)
    assert re.search(r'^## (\S+)', (root/'CHANGELOG.md').read_text(), re.M)[1] == version(name)

def test_one_home_of_metadata():
    "pyproject.toml; setup.py has the packages alone, and settings.ini a name"
    assert project['dynamic']==['version'] and pyproject['tool']['setuptools']['dynamic']['version']['attr']==f'{lib.name}.__version__'
    ini = ConfigParser()
    ini.read(root/'settings.ini', encoding='utf-8')
    assert dict(ini['DEFAULT'])=={'lib_name': name} and not ini.sections()
    call, = [o for o in ast.walk(ast.parse((root/'setup.py').read_text())) if isinstance(o, ast.Call) and getattr(o.func, 'id', '')=='setup']
    assert {o.arg for o in call.keywords}=={'packages','package_dir'}

def test_installed_metadata():
    got = {(canonicalize_name(r.name), str(r.specifier), frozenset(r.extras)) for r in map(Requirement, requires(name))}
    wanted = [Requirement(o) for k in (project['dependencies'], *project['optional-dependencies'].values()) for o in k]
    assert got == {(canonicalize_name(r.name), str(r.specifier), frozenset(r.extras)) for r in wanted}
    assert metadata(name)['Requires-Python'] == project['requires-python'] and project['license']=='Apache-2.0'

def test_console_script():
    script, = [o for o in entry_points(group='console_scripts') if o.name=='fastai-xla']
    assert project['scripts'][script.name]==script.value and callable(script.load())

def test_what_is_imported_is_required():
    "Packages that a module imports, by their names on PyPI; those that an extra brings are imported where they are used"
    dists,extra = dict(google='protobuf', plum='plum-dispatch'),{r.name for e in ('xla','torch_tpu','stream','compile') for r in reqs(e)}
    found = {}
    for path in lib.rglob('*.py'):
        for o in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            names = [a.name for a in o.names] if isinstance(o, ast.Import) else [o.module] if isinstance(o, ast.ImportFrom) and not o.level else []
            found.update({dists.get(nm.split('.')[0], nm.split('.')[0]): path.name for nm in names})
    missing = {k: v for k,v in found.items() if k not in sys.stdlib_module_names and k!=lib.name and k not in extra and k not in {r.name for r in reqs()}}
    assert not missing, f'imported, and not in dependencies: {missing}'

def test_every_dependency_is_bounded():
    for r in reqs(): assert {o.operator for o in r.specifier} == {'>=', '<'}, f'{r} needs a lower and an upper bound'

def test_torch_and_torch_xla_resolve_to_a_pair():
    pairs = [{r.name: r for r in reqs(k)} for k in ('xla','tpu','dev','bench')]
    assert {str(o[k].specifier) for o in pairs for k in ('torch','torch_xla')} == {'<2.10,>=2.8'} and len({str(o['torch_xla'].marker) for o in pairs})==1

def test_an_environment_keeps_its_stack():
    "The package itself asks for no stack, and for a torch of either; each extra brings one alone, and none a libtpu that is not known, or that takes back what Kaggle or Colab has"
    by = {k: {r.name: r for r in reqs(k)} for k in ('', *project['optional-dependencies'])}
    assert not {'torch_xla','torch_tpu','libtpu'} & by[''].keys() and all(by['']['torch'].specifier.contains(o) for o in ('2.8.0','2.9.1','2.11.0','2.15.0'))
    assert [{'torch_xla','torch_tpu'} & by[k].keys() for k in ('xla','tpu','torch_tpu','compile','stream')] == [{'torch_xla'}, {'torch_xla'}, {'torch_tpu'}, set(), set()]
    assert by['torch_tpu']['torch'].specifier.contains('2.13.0') and not by['torch_tpu']['torch'].specifier.contains('2.9.1')
    assert {str(by[k]['libtpu'].specifier) for k in ('tpu','compile','dev')} == {str(SpecifierSet(libtpu_versions))}
    for where,(_,pins) in platforms.platforms.items():
        for nm,v in platforms.parse_pins('\n'.join(pins)).items():
            for extra,found in by.items():
                if nm in found and extra!='torch_tpu': assert found[nm].specifier.contains(v), f'fastai_xla[{extra}] would change {nm} {v} on {where}: {found[nm]}'

def test_verdicts_on_what_an_extra_resolves_to():
    had = dict(torch='2.8.0', torch_xla='2.8.0', libtpu='0.0.17')
    assert platforms.judge(had, dict(torch='2.8.0'), 'stream')==('unchanged', True)
    assert platforms.judge(had, dict(torch='2.9.1', libtpu='0.0.21'), 'tpu')==('changed: torch, libtpu', False)
    assert platforms.judge({}, dict(torch='2.9.1', torch_xla='2.8.1'), 'xla')==('no pair', False)
    assert platforms.judge({}, dict(torch='2.9.1', torch_xla='2.9.0'), 'xla')==('fits', True)
    assert platforms.judge(had, dict(torch='2.13.0', torch_tpu='0.2.0'), 'torch_tpu')[1]
    assert platforms.parse_pins('torch-xla==2.9.0\n    # via x\nlibtpu==0.0.21.1 ; a\nfsspec[http]==2025.5\n')==dict(torch_xla='2.9.0', libtpu='0.0.21.1', fsspec='2025.5')

@pytest.mark.parametrize('system,machine,python,wanted', [('linux','x86_64','3.11',True), ('linux','x86_64','3.14',False),
    ('linux','aarch64','3.11',False), ('darwin','arm64','3.11',False), ('win32','AMD64','3.11',False)])
def test_torch_xla_is_asked_for_where_it_exists(system, machine, python, wanted):
    env = dict(sys_platform=system, platform_machine=machine, python_version=python, extra='')
    r, = [o for o in reqs('xla') if o.name=='torch_xla']
    assert r.marker.evaluate(env) == wanted

def test_oldest_constraints():
    low = {r.name: Version(s.version) for r in reqs()+reqs('dev') for s in r.specifier if s.operator=='>='}
    oldest = [Requirement(o) for o in (root/'constraints-oldest.txt').read_text().splitlines() if o and not o.startswith('#')]
    assert {r.name for r in reqs()} <= {r.name for r in oldest}
    for r in oldest: assert str(r.specifier).startswith('==') and Version(str(r.specifier)[2:]) == low[r.name], f'{r} is not the lower bound'

def test_installed_versions_are_admitted():
    for r in reqs():
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

def test_workflows_call_targets_that_exist():
    targets = re.search(r'^\.PHONY: (.+)', (root/'Makefile').read_text(), re.M)[1].split()
    for path in sorted((root/'.github/workflows').glob('*')):
        text = path.read_text()
        listed = ' '.join(re.findall(r'\btarget: \[?([^]}\n]+)', text)).replace(',', ' ').split()
        called = re.findall(r'\bmake (\S+)', text.replace('${{ matrix.target }}', listed[0] if listed else '')) + listed
        assert called and {*called}<={*targets}, f'{path.name}: {called}'

def test_report_of_a_tpu():
    "The notebook that measures a TPU sends its report to the issue template that asks for it"
    text = (root/'.github/ISSUE_TEMPLATE/tpu_report.yml').read_text()
    asked, = re.findall(r'blob/main/(nbs/\S+\.ipynb)', text)
    assert 'issues/new?template=tpu_report.yml' in '\n'.join(map(src, load(root/asked)['cells']))

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

@pytest.mark.slow
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

def test_runner_takes_a_level(tmp_path):
    files = dict(both='import pytest\n@pytest.mark.slow\ndef test_1(): pass\ndef test_2(): pass', quick='def test_3(): pass')
    for level,n in dict(test=2, slow=1, all=3).items(): assert f'{n} passed, 0 failed' in run_tests(tmp_path, f'--level={level}', **files).stdout.splitlines()[-1]

@pytest.mark.slow
def test_runner_sees_processes_that_die_hang_or_collect_nothing(tmp_path):
    files = dict(died='import os\ndef test_1(): os.abort()', hung='import time\ndef test_2(): time.sleep(99)', empty='')
    res = run_tests(tmp_path, '--timeout=10', **files)
    assert res.returncode==1 and '0 passed, 0 failed, 3 error' in res.stdout.splitlines()[-1] and 'no end after 10 s' in res.stdout

def test_promises():
    "Each has a test, in the target that the table says"
    table = (root/'CONTRIBUTING.md').read_text().split('## What users are promised')[1].split('\n## ')[0]
    quick,slow,_ = table.split('| **`make ')
    def tests(text): return re.findall(r'`((?:torch_tpu/)?test_\w+\.py)::(\w+)`', text)
    for file,name in tests(table):
        text = (root/'tests'/file).read_text()
        assert f'def {name}(' in text, name
        marks = text.split(f'def {name}(')[0].rpartition('\n\n')[2]
        always = 'pytestmark = pytest.mark.slow' in text or any(o.strip() in ('@slow','@pytest.mark.slow') for o in marks.splitlines())
        assert always==((file,name) in tests(slow)), name
