"""Run the guide, the tutorials and the notebooks for platforms from top to bottom and store their outputs, without warnings and what else names
the machine; says how long each took: `make tutorials`."""
import re, sys, tempfile, time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

nbs = Path(__file__).parent.parent/'nbs'

def shown(o): return o.get('name')!='stderr' and o.get('data', {}).get('text/html', 'x')!=''

def run(path):
    nb = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder: NotebookClient(nb, timeout=900, kernel_name='python3', resources={'metadata': {'path': folder}}).execute()
    for c in nb.cells:
        c.metadata.pop('execution', None)
        if c.cell_type!='code': continue
        c.outputs = [o for o in c.outputs if shown(o)]
        for o in c.outputs: o.update({k: re.sub(rf'{folder}/|/tmp/ipykernel_\d+/(?=\d+\.py)', '', o[k]) for k in ('text',) if k in o})
    nbformat.write(nb, path)

if __name__ == '__main__':
    seconds = {}
    for path in map(Path, sys.argv[1:] or [p for o in ('guide','tutorials','platforms') for p in sorted((nbs/o).glob('*.ipynb'))]):
        start = time.monotonic()
        run(path)
        seconds[f'{path.parent.name}/{path.stem}'] = time.monotonic()-start
        print(f'{path}: {time.monotonic()-start:.0f} s', flush=True)
    print('\n| notebook | seconds |\n|---|---|', *[f'| {k} | {v:.0f} |' for k,v in {**seconds, 'all': sum(seconds.values())}.items()], sep='\n')
