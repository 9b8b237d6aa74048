"""Every family of programs through the TPU's own compiler, at full effort. Estimates for described chips: nothing runs on a TPU.

    python benchmarks/compile_all.py               # all of tests/compile_families.py
    python benchmarks/compile_all.py --fast unet   # some, for errors and memory only
"""
import argparse, sys, time, warnings
from pathlib import Path
warnings.filterwarnings('ignore')
sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'tests'))
from fastai_xla.all import *
from fastai_xla.runtime.doctor import size_text
from compile_families import FAMILIES

def line(cells): return f"| {' | '.join(map(str, cells))} |"

def row(name, fast):
    "What the compiler says of the training step of one family"
    make,chips,form,options = FAMILIES[name]
    start = time.time()
    try: r = make().compile_for(chips, form, fast=fast, **options)
    except Exception as e: return [name, chips, f'{type(e).__name__}: {str(e).splitlines()[0]}', *['']*5]
    step = r.programs['train']
    what = ', '.join(f'{n} {k}' for k,n in step.collectives.most_common()) or 'none'
    return [name, chips, 'fits' if r.fits else 'DOES NOT FIT', f'{time.time()-start:.0f}', size_text(step.memory.total), f'{step.cycles/1e6:.3f}', sum(step.unknown.values()), what]

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('names', nargs='*', help=f'one or more of {", ".join(FAMILIES)}')
    p.add_argument('--fast', action='store_true', help='compile in a fifth of the time; cycles are then too many')
    a = p.parse_args()
    for o in a.names:
        if o not in FAMILIES: p.error(f'there is no family {o!r}: choose of {", ".join(FAMILIES)}')
    head = ['family', 'slice', 'result', 'seconds', 'memory of a device', 'million cycles, estimated', 'without an estimate', 'collectives']
    print(line(head), line(['---']*len(head)), sep='\n')
    rows = []
    for name in a.names or FAMILIES:
        rows.append(row(name, a.fast))
        print(line(rows[-1]), flush=True)
    sys.exit(not all(o[2]=='fits' for o in rows))

if __name__ == '__main__': main()
