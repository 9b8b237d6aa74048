"Run the cells of a notebook in this process, as its `__main__`, without a kernel: `python cells.py notebook`. A failure shows the cell and its traceback."
import json, re, sys

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

not_run = re.compile(r'^#\|\s*(eval:\s*false|notest|tpu|slow)\b', re.M)

def code_cells(path):
    "Number and text of the cells that tests run"
    cells = json.load(open(path))['cells']
    return [(i, s) for i,c in enumerate(cells) if c['cell_type']=='code' and not not_run.search(s := ''.join(c['source']))]

class ZMQInteractiveShell(InteractiveShell): "By this name libraries know a notebook"

def main(path):
    import __main__
    shell = ZMQInteractiveShell.instance(user_module=__main__, user_ns=vars(__main__), config=Config(HistoryManager=dict(enabled=False), InteractiveShell=dict(colors='nocolor')))
    shell.showtraceback = lambda *args, **kwargs: None # it is printed below, once
    for i,source in code_cells(path):
        res = shell.run_cell(source)
        if error := res.error_before_exec or res.error_in_exec:
            text = shell.InteractiveTB.stb2text(shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__))
            sys.exit(f'Cell {i}:\n{source}\n\n{text}')

if __name__=='__main__': main(sys.argv[1])
