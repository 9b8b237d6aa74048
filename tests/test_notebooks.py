"""Each notebook runs from top to bottom in a process of its own; a failure shows the cell and its traceback. Those that export modules run without a kernel
(see cells.py), those that users run have one (see kernels.py)."""
import subprocess
from pathlib import Path

import nbformat, pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import kernels
from cells import not_run, slow
from forks import Forked

nbs = Path(__file__).parent.parent/'nbs'
modules = sorted(nbs.glob('[0-9]*.ipynb'))
pages = sorted({*nbs.glob('*.ipynb'), *nbs.glob('guide/*.ipynb'), *nbs.glob('tutorials/*.ipynb')}-{*modules})
name_of = lambda o: str(o.relative_to(nbs))

class Cells(Forked): kind = 'cells'

def run_module(path, folder, *flags, timeout=600):
    "Run the cells of `path` in `folder`: exit code and what was printed"
    p = Cells([str(Path(__file__).parent/'cells.py'), str(path), *flags], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try: return p.communicate(timeout=timeout)[0],p.returncode
    finally: p.kill()

def execute(nb, folder, timeout=600):
    "Run the cells of `nb` in `folder`"
    NotebookClient(nb, kernel_manager_class=kernels.Manager, kernel_name='python3', timeout=timeout, startup_timeout=120,
        resources={'metadata': {'path': str(folder)}}).execute()

@pytest.fixture(autouse=True)
def environ(monkeypatch):
    monkeypatch.setenv('IN_TEST', '1')  # the cell that exports the notebook does nothing

@pytest.mark.parametrize('path', modules, ids=name_of)
def test_module_runs(path, tmp_path):
    out,code = run_module(path, tmp_path)
    assert code==0, out

@pytest.mark.slow
@pytest.mark.parametrize('path', [o for o in modules if slow.search(''.join(''.join(c['source'])+'\n' for c in nbformat.read(o, as_version=4).cells))], ids=name_of)
def test_module_with_slow_cells_runs(path, tmp_path):
    out,code = run_module(path, tmp_path, '--slow')
    assert code==0, out

def test_failure_in_a_module_is_shown(tmp_path):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in ('x = 6', '#| eval: false\n1/0', 'assert x*7==41, "not 41"')])
    nbformat.write(nb, tmp_path/'a.ipynb')
    out,code = run_module(tmp_path/'a.ipynb', tmp_path)
    assert code==1 and 'Cell 2:\nassert x*7==41' in out and 'not 41' in out and 'ZeroDivisionError' not in out

def _takes_long(o): return o.parent.name=='tutorials' or o.stem in ('recipes','hosts')

@pytest.mark.parametrize('path', [pytest.param(o, marks=pytest.mark.slow) if _takes_long(o) else o for o in pages], ids=name_of)
def test_page_runs(path, tmp_path):
    nb = nbformat.read(path, as_version=4)
    nb.cells = [o for o in nb.cells if not (o.cell_type=='code' and (not_run.search(o.source) or slow.search(o.source)))]
    execute(nb, tmp_path)
    assert all(o.execution_count for o in nb.cells if o.cell_type=='code' and o.source.strip())

def test_failure_in_a_page_is_shown(tmp_path):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in ('x = 6', 'assert x*7==41, "not 41"')])
    with pytest.raises(CellExecutionError, match='(?s)assert x\\*7==41.*AssertionError.*not 41'): execute(nb, tmp_path)
