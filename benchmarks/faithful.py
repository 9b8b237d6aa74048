"""Fastai workloads as its course and tutorials have them, in plain fastai on the CPU and in each form of fastai_xla: what differs, as a markdown table.

    python benchmarks/faithful.py                                        # every case in every form
    python benchmarks/faithful.py --cases unet gan --forms cores         # some
    python benchmarks/faithful.py --cores 2                              # on 2 cores instead of 4

The cases stand in faithful_cases.py, which runs as `__main__` in a process for each form, as a notebook does. A batch has the same samples
in each form: on cores of one process, and on a pool with a process for each, which has `sync_bn=True`, a core gets its share of it. Losses,
metrics, predictions in their order, weights and texts are compared. A cell says `equal`, with the largest difference, relative to the largest
value of its kind where that is above 1; or the reason why it is not; then the case is compared without its cause too: without draws, where
cores draw for themselves. The exit status is 1 if a cell is neither equal nor explained.
"""
import os, pickle, subprocess, sys, time
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
import numpy as np

FORMS = dict(plain='plain', tpu='`to_tpu`', cores='{} cores', pool='pool of {}', sharded='sharded of {}')
here = Path(__file__).resolve().parent

# ---- run

def _records(file):
    "What a process has written so far: the names of its cases, then an outcome for each"
    res = []
    with open(file, 'rb') as f:
        while True:
            try: res.append(pickle.load(f))
            except (EOFError, pickle.UnpicklingError): return res

def run_form(form, cores, cases, folder):
    "{case: outcome}; a process that dies is followed by another, for the cases after the one that it died of"
    res,out,env = {},Path(folder)/f'{form}.pkl',{**os.environ, 'PJRT_DEVICE': 'CPU', 'OMP_NUM_THREADS': '1', 'MPLBACKEND': 'Agg'}
    if form!='plain': env.update(CPU_NUM_DEVICES=str(1 if form=='tpu' else cores), XLA_FLAGS='--xla_backend_optimization_level=0') # compiles faster
    while True:
        p = subprocess.run([sys.executable, here/'faithful_cases.py', form, str(cores), out, *cases], cwd=folder, env=env, capture_output=True, text=True)
        names,*done = _records(out) if out.exists() else [cases]
        res.update({o['case']: o for o in done})
        if p.returncode==0: return res
        if len(done)==len(names): raise RuntimeError(f'{form}: exit {p.returncode}\n{p.stdout}\n{p.stderr}')
        dead,cases = names[len(done)],names[len(done)+1:]
        res[dead] = dict(case=dead, error=f'the process died with code {p.returncode}', trace=p.stderr[-3000:])
        if not cases: return res

# ---- compare

def _size(ref): return {g: max([1., *[np.abs(a).max(initial=0) for k,a in ref.items() if k[0]==g and a.dtype.kind=='f']]) for g in {k[0] for k in ref}}

def distance(ref, got):
    "The largest difference of numbers, where it is, and what else differs, in words"
    if ref.keys()!=got.keys(): return np.inf,'',f"only in one: {sorted(map(str, ref.keys()^got.keys()))[:3]}"
    worst,at,size = 0.,'',_size(ref)
    for k,a in ref.items():
        b = got[k]
        if a.shape!=b.shape: return np.inf,k,f'{".".join(k)}: shape {b.shape} instead of {a.shape}'
        if a.dtype.kind!='f':
            if (a!=b).any(): return np.inf,k,f'{".".join(k)}: {b[a!=b].ravel()[:1]} instead of {a[a!=b].ravel()[:1]}'
            continue
        if (np.isfinite(a)!=np.isfinite(b)).any(): return np.inf,k,f'{".".join(k)}: not finite'
        d = np.abs(np.where(np.isfinite(a), a-b, 0)).max(initial=0)/size[k[0]]
        if d>worst: worst,at = d,k
    return worst,at,''

def _verdict(ref, got, tol):
    d,at,words = distance(ref, got)
    return not words and d<=tol, words or f'{d:.0e}'+(f' in {".".join(at)}' if d>tol else '')

def cell(form, ref, got):
    "What the table says of one case in one form, and whether all is well"
    if got is None or 'error' in got: return f"**{(got or {}).get('error', 'was not run')}**",False
    if 'error' in ref: return 'nothing to compare with',False
    reason,runs,tol = ref['reasons'].get(form),[*ref['runs']],ref['tol']
    ok,text = zip(*[_verdict(ref['runs'][o], got['runs'][o], tol) for o in runs])
    if all(ok): return f'equal, {text[-1]}',True
    if reason and len(runs)>1 and ok[0]: return f'equal {runs[0]}, {text[0]}; {reason}',True
    if reason and len(runs)==1: return f'{text[0]}: {reason}',True
    return f"**differs**: {'; '.join(f'{r} {t}'.strip() for r,t,o in zip(runs, text, ok) if not o)}",False

# ---- the table

def line(cells): return f"| {' | '.join(cells)} |"

def _plain(o):
    if 'error' in o: return f"**{o['error']}**"
    return f"{sum(a.size for r in o['runs'].values() for a in r.values()):,} values"

def main(cases, forms, cores, verbose):
    start = time.time()
    with TemporaryDirectory() as d, ThreadPoolExecutor(2) as pool:
        todo = {f: pool.submit(run_form, f, cores, cases, d) for f in ('plain', *[f for f in forms if f!='plain'])}
        res = {f: o.result() for f,o in todo.items()}
    others,bad = [f for f in res if f!='plain'],0
    print(line(['case', *[FORMS[f].format(cores) for f in res]]), line(['---']*(len(res)+1)), sep='\n')
    for name,ref in res['plain'].items():
        cells,ok = zip(*[cell(f, ref, res[f].get(name)) for f in others]) if others else ((), ())
        bad += not all(ok) or 'error' in ref
        print(line([name, _plain(ref), *cells]), flush=True)
    if verbose:
        for f,os_ in res.items():
            for o in os_.values(): print(f"\n{f} {o['case']}: {o.get('seconds', 0):.1f} s", o.get('trace', ''))
    print(f"\n{time.time()-start:.0f} s. " + (f"{bad} cases are neither equal nor explained." if bad else "Every cell is equal or explained."))
    return int(bad>0)

if __name__=='__main__':
    p = ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--cases', nargs='*', default=[], help='Names of cases; all of them without')
    p.add_argument('--forms', nargs='*', default=[*FORMS], choices=[*FORMS])
    p.add_argument('--cores', type=int, default=4, help='Cores of the forms with several')
    p.add_argument('--verbose', action='store_true', help='Times and tracebacks too')
    sys.exit(main(**vars(p.parse_args())))
