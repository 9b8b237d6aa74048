"Run the cells of a notebook in this process, as its `__main__`, without a kernel: `python cells.py notebook [--slow]`, which runs slow cells too. A failure shows the cell and its traceback."
import json, re, sys

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

not_run,slow = [re.compile(rf'^#\|\s*({o})\b', re.M) for o in (r'eval:\s*false|notest|tpu', 'slow')]

def code_cells(path, slow_too=False):
    "Number and text of the cells that tests run"
    cells = [(i, ''.join(c['source'])) for i,c in enumerate(json.load(open(path))['cells']) if c['cell_type']=='code']
    return [(i, s) for i,s in cells if not not_run.search(s) and (slow_too or not slow.search(s))]

class ZMQInteractiveShell(InteractiveShell): "By this name libraries know a notebook"

def main(path, *flags):
    import __main__
    shell = ZMQInteractiveShell.instance(user_module=__main__, user_ns=vars(__main__), config=Config(HistoryManager=dict(enabled=False), InteractiveShell=dict(colors='nocolor')))
    shell.showtraceback = lambda *args, **kwargs: None # it is printed below, once
    for i,source in code_cells(path, '--slow' in flags):
        res = shell.run_cell(source)
        if error := res.error_before_exec or res.error_in_exec:
            text = shell.InteractiveTB.stb2text(shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__))
            sys.exit(f'Cell {i}:\n{source}\n\n{text}')

if __name__=='__main__': main(*sys.argv[1:])
