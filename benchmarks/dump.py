"""XLA's own account of the graphs that it compiles: asked by an environment variable, before the runtime starts, it writes each graph to a folder,
with the memory for arguments, results and temporary buffers, a donated argument counted once.

    XLA_FLAGS='--xla_dump_to=/tmp/dump --xla_dump_hlo_as_text' python train.py
"""
import re
from pathlib import Path
from typing import NamedTuple

class Graph(NamedTuple):
    "A graph that XLA has compiled"
    number:int # In the order of compiling
    instructions:int # Size of the graph as it came to XLA
    donated:int # Arguments whose memory may become that of a result
    nbytes:int|None # Memory for arguments, results and temporary buffers; None where XLA does not tell

def _graph(f):
    text,report = f.read_text(),next(f.parent.glob(f"{f.name.split('.before_')[0]}.*memory-usage-report.txt"), None)
    nbytes = re.search(r'Total bytes used: (\d+)', report.read_text()) if report else None
    donors = re.search(r'buffer_donor=\{(.*?) \}[,\n]', text.split('\n', 1)[0])
    number,instructions = int(re.search(r'module_(\d+)', f.name)[1]),len(re.findall(r'^ +(?:ROOT )?\S+ = ', text, re.M))
    return Graph(number, instructions, donors[1].count('(') if donors else 0, nbytes and int(nbytes[1]))

def read_dump(folder):
    "The graphs in `folder`, in the order of compiling"
    return sorted(map(_graph, Path(folder).glob('module_*before_optimizations.txt')))

def training_graph(graphs):
    "The graph of a usual step: the last that is at least half as large as the largest"
    most = max(o.instructions for o in graphs)
    return [o for o in graphs if o.instructions>=most/2][-1]
