"Each notebook runs from top to bottom in a kernel, so a process, of its own; a failure shows the cell and its traceback."
import re
from pathlib import Path

import nbformat, pytest
from nbclient import NotebookClient

nbs = Path(__file__).parent.parent/'nbs'
notebooks = sorted(nbs.glob('*.ipynb')) + sorted(nbs.glob('tutorials/*.ipynb'))
not_run = re.compile(r'^#\|\s*(eval:\s*false|notest|tpu|slow)\b', re.M)

@pytest.mark.parametrize('path', notebooks, ids=[str(o.relative_to(nbs)) for o in notebooks])
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv('IN_TEST', '1')  # the cell that exports the notebook does nothing
    monkeypatch.setenv('XLA_FLAGS', '--xla_backend_optimization_level=0')  # compiles three times as fast
    nb = nbformat.read(path, as_version=4)
    nb.cells = [o for o in nb.cells if not (o.cell_type=='code' and not_run.search(o.source))]
    NotebookClient(nb, timeout=600, startup_timeout=120, kernel_name='python3', resources={'metadata': {'path': str(tmp_path)}}).execute()
    assert all(o.execution_count for o in nb.cells if o.cell_type=='code' and o.source.strip())

def test_failure_is_shown(tmp_path):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell('x = 6'), nbformat.v4.new_code_cell('assert x*7==41, "not 41"')])
    nbformat.write(nb, tmp_path/'bad.ipynb')
    with pytest.raises(Exception, match='(?s)assert x\\*7==41.*AssertionError.*not 41'): NotebookClient(nb, timeout=60).execute()
