"""What the extras resolve to on each Python, and the environments of Kaggle and Colab.

    python tools/platforms.py table               resolve each extra, in empty environments and beside what Kaggle and Colab have installed, and the pip lines of errors (needs uv)
    python tools/platforms.py make kaggle FOLDER  the environment of Kaggle, and this package installed into it as a user does
    python tools/platforms.py check FOLDER        run doctor, the digits on one core and on two, and the platform's notebook in it

The table is Markdown; its command fails if an extra changes an installed pair, or resolves to one that does not fit.
"""
import argparse, os, re, shutil, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

root = Path(__file__).parent.parent
pythons = '3.10','3.11','3.12','3.13'
extras = '','xla','tpu','compile','stream','torch_tpu'
stack = 'torch','torch_xla','libtpu','torch_tpu'
# What the images had installed when they were looked at, in August 2026
platforms = dict(
    kaggle=('3.12', ('torch==2.8.0','torchvision==0.23.0','torch_xla==2.8.0','libtpu==0.0.17')),
    colab=('3.13', ('torch==2.9.0','torchvision==0.24.0','torch_xla==2.9.0','libtpu==0.0.21.1','fastai==2.8.8','fastcore==2.2.12')))
beside = 'numpy','pandas','matplotlib','scikit-learn','ipykernel','nbclient' # what their notebooks use besides

def find_uv():
    "uv's path"
    found = shutil.which('uv', path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get('PATH', '')]))
    return found or sys.exit('uv is not installed: pip install uv')

def say(*args, **kwargs): print(*args, flush=True, **kwargs)

# ---- extras

def parse_pins(text):
    "Versions by name, from requirements with =="
    return {k.lower().replace('-', '_'): v for k,v in re.findall(r'^([\w-]+)(?:\[.*\])?==([^\s;]+)', text, re.M)}

def resolve(python, extra, installed=(), more=(), own=True):
    "Versions that `pip install fastai_xla[extra] MORE...` ends with, where `installed` stay if they can; or the reason why there are none"
    with tempfile.TemporaryDirectory() as tmp:
        out,also = Path(tmp)/'out.txt',Path(tmp)/'also.in'
        out.write_text('\n'.join(installed)+'\n') # what it holds is preferred, as what is installed is by pip
        also.write_text('\n'.join(more)+'\n')
        cmd = [find_uv(), 'pip', 'compile', *([root/'pyproject.toml'] if own else []), also, '--python-version', python, '--python-platform', 'x86_64-manylinux_2_31', '--no-header', '--no-annotate', '-q', '-o', out]
        res = subprocess.run([*map(str, cmd), *(['--extra', extra.replace('_', '-')] if extra else [])], capture_output=True, text=True)
        return (None,res.stderr.strip()) if res.returncode else (parse_pins(out.read_text()),'')

def minor(v): return '.'.join(v.split('.')[:2])

def judge(had, got, extra):
    "What became of the stack that was there, `had`, and whether that is right"
    changed = [k for k in stack if k in had and got.get(k, had[k])!=had[k]]
    now = {**had, **got}
    if extra=='torch_tpu': return ('no stack: there is no torch_tpu for this Python' if 'torch_tpu' not in now else 'another stack' if changed else 'fits'),True
    if changed: return f"changed: {', '.join(changed)}",False
    if 'torch_xla' in now and minor(now['torch'])!=minor(now['torch_xla']): return 'no pair',False
    return ('unchanged' if had else 'fits' if 'torch_xla' in now else 'no stack'),True

def row(case):
    "Python, what is installed, extra, versions, verdict, whether it is right"
    python,name,installed,extra = case
    had,(got,why) = parse_pins('\n'.join(installed)),resolve(python, extra, installed)
    if got is None: return python,name,extra,had,f'none: {why.splitlines()[-1].strip() if why else ""}',False
    return python,name,extra,{**had, **got},*judge(had, got, extra)

def cases():
    "Each extra on each Python, in an empty environment and beside what a platform with this Python has"
    return [(python,name,pins,extra) for python in pythons for name,pins in [('nothing',()), *[(k,pins) for k,(p,pins) in platforms.items() if p==python]] for extra in extras]

# ---- the lines that errors name

def remedies():
    "Errors of the guarded import and of the TPU's compiler: what was found, and the pip lines that they name"
    from fastai_xla.aot.libtpu import libtpu_versions
    from fastai_xla.runtime.device import _pair_problem
    for torch,xla in (('2.8.0',None), ('2.9.0',None), ('2.15.0',None), ('2.9.0','2.8.1'), ('2.8.0','2.9.0'), ('2.15.0','2.9.0')):
        for line in re.findall(r"pip install ((?:'[^']+' ?|torchvision ?)+)", str(_pair_problem(torch, xla))): yield f"torch {torch}, {f'torch_xla {xla}' if xla else 'no torch_xla'}",line.strip()
    yield 'another libtpu',f"'libtpu{libtpu_versions}'"
    yield 'no libtpu',"'fastai_xla[compile]'"

def remedy(case):
    "Python, what was found, line, verdict, whether it is right"
    python,(found,line) = case
    parts = [o.strip("'") for o in re.findall(r"'[^']+'|\S+", line)]
    own = next((o for o in parts if o.startswith('fastai_xla')), '')
    had = dict(re.findall(r'(torch) (\S+?)(?:,|$)', found))
    vision = {o.split('==')[1]: pins[1] for pins in (o for _,o in platforms.values()) for o in pins[:1]} # that goes with a torch
    pins = [f'{k}=={v}' for k,v in had.items()] + [vision[v] for v in had.values() if v in vision]
    got,why = resolve(python, own.partition('[')[2].rstrip(']'), pins, [o for o in parts if o!=own], bool(own))
    if got: got = {**had, **got}
    if got is None: return python,found,line,f'none: {why.splitlines()[-1].strip()}',False
    verdict,right = judge({}, got, '') if 'torch_xla' in got else ('fits' if 'libtpu' in got else 'nothing of it','libtpu' in got)
    return python,found,line,f"{verdict}: {', '.join(f'{k} {got[k]}' for k in stack if k in got)}",right

def print_table(columns, rows):
    "Print (Python, cells, whether it is right) as Markdown, with the Pythons that have the same cells in one row; returns whether all is right"
    found = {}
    for python,*cells,ok in rows: found.setdefault((*cells, ok), []).append(python)
    say('| '+' | '.join(('Python', *columns))+' |', '|'+'---|'*(1+len(columns)), sep='\n')
    for (*cells,verdict,ok),ps in found.items(): say('| '+' | '.join((', '.join(ps), *cells, verdict if ok else f'**{verdict}**'))+' |')
    return all(ok for *_,ok in found)

def in_parallel(f, cases): return ThreadPoolExecutor(4).map(f, cases)

def table():
    "Print what extras resolve to; returns whether all is right"
    rows = ((python,name,extra,*[vs.get(k, '') for k in stack],verdict,ok) for python,name,extra,vs,verdict,ok in in_parallel(row, cases()))
    return print_table(('installed','extra',*stack,'the pair'), rows)

def remedy_table():
    "Print what the pip lines of errors resolve to; returns whether each does"
    say()
    return print_table(('found','pip install','resolves to'), in_parallel(remedy, [(p,o) for p in pythons for o in remedies()]))

# ---- environments

def find_python(version):
    "A Python of `version`, by its name, by pyenv's folders or by uv"
    for o in [f'python{version}', *sorted(map(str, Path.home().glob(f'.pyenv/versions/{version}.*/bin/python')))]:
        res = subprocess.run([o, '-c', 'import sys; print(*sys.version_info[:2], sep=".")'], capture_output=True, text=True) if shutil.which(o) else None
        if res and res.stdout.strip()==version: return o
    return version # uv looks for one, and may fetch it

def make(name, folder):
    "The environment of a platform, with this package; what the platform had must still be there"
    python,pins = platforms[name]
    env = {**os.environ, 'UV_HTTP_TIMEOUT': '180'}
    def uv(*args): subprocess.run([find_uv(), *map(str, args)], check=True, env=env)
    if not (folder/'bin/python').exists(): uv('venv', '-q', '--seed', '--python', find_python(python), folder)
    here = ['pip', 'install', '-q', '--python', folder/'bin/python']
    uv(*here, *pins, *beside)
    uv(*here, '-e', f'{root}[xla]')
    listed = subprocess.run([find_uv(), 'pip', 'freeze', '--python', str(folder/'bin/python')], capture_output=True, text=True, check=True).stdout
    got,had = parse_pins(listed),parse_pins('\n'.join(pins))
    changed = {k: f'{v} became {got.get(k)}' for k,v in had.items() if got.get(k)!=v}
    if changed: sys.exit(f"Installing fastai_xla[xla] beside what {name} has changed it: {changed}")
    (folder/'platform').write_text(name)
    say(f"{name}: Python {python}, {', '.join(pins)}, all as they were after `pip install fastai_xla[xla]`")

def check(folder):
    "Run what a user runs first"
    name,python = (folder/'platform').read_text(),str(folder/'bin/python')
    env = {**os.environ, 'PJRT_DEVICE': 'CPU', 'OMP_NUM_THREADS': '1', 'MPLBACKEND': 'agg'}
    env.pop('PYTHONPATH', None)
    with tempfile.TemporaryDirectory() as tmp:
        def run(what, *args, wants='', **more):
            res = subprocess.run([python, *map(str, args)], capture_output=True, text=True, cwd=tmp, env={**env, **more})
            line = next((o for o in reversed(res.stdout.splitlines()) if wants and re.search(wants, o)), None)
            if res.returncode or wants and line is None: sys.exit(f'{name}, {what}: failed with exit code {res.returncode}\n{res.stdout}\n{res.stderr}')
            say(f"{name}, {what}: {(line or 'ok').strip()}")
        run('doctor', '-m', 'fastai_xla', 'doctor', wants='torch_xla')
        digits = root/'examples/digits.py'
        for n in (1, 2): run(f'digits on {n} core{"s" if n>1 else ""}', digits, '--cores', n, wants='accuracy|%', CPU_NUM_DEVICES=str(n))
        nb = root/f'nbs/platforms/{name}.ipynb'
        run('its notebook', '-c', notebook, nb, root, wants='cells')

notebook = """
import nbformat, sys
from nbclient import NotebookClient
nb = nbformat.read(sys.argv[1], 4)
NotebookClient(nb, timeout=1200, kernel_name='python3', resources={'metadata': {'path': '.'}}).execute()
print(sum(c.cell_type=='code' for c in nb.cells), 'cells ran')
"""

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest='what', required=True)
    sub.add_parser('table')
    for o in ('make','check'):
        q = sub.add_parser(o)
        if o=='make': q.add_argument('name', choices=platforms)
        q.add_argument('folder', type=Path)
    a = p.parse_args()
    if a.what=='table': sys.exit(0 if all([table(), remedy_table()]) else 1)
    make(a.name, a.folder.resolve()) if a.what=='make' else check(a.folder.resolve())
