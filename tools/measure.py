"""What a checkout's house is like, in numbers: python tools/measure.py [folder] [other folder], side by side; --style groups chkstyle's findings

chkstyle is the linter of the package fastaistyle (pip install fastaistyle); --chkstyle=/path/to/it where it is in another environment.
"""
import argparse, re, shutil, subprocess, sys, tempfile
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent/'tests'))
from house import House, asserted, code, is_exported, is_private, load, n_filled, private_imports, rules, src

def sizes(h):
    "Non-blank lines of each room"
    return {o.name: n_filled(o.path.read_text(encoding='utf-8').splitlines()) for o in h.rooms}

def n_private(h):
    "Different private names that rooms import from other rooms, such imports, and those of them that cross packages (benchmarks and examples too)"
    names = [(r, o.module, o.member) for r in h.rooms for o in h.imports(r.path) if o.member and is_private(o.member)]
    across = [o for o in private_imports(h) if o[2].split('.')[0]!=h.chapter_of(o[0])]
    return len({o[1:] for o in names}),len(names),len(across)

def shares(h):
    """Of each room's exported cells, how many have an assertion within the next four cells, markdown included, and how many there are.

    As fastcore is counted: 'cells' are all exported ones, imports too, and any assertion counts; 'defs', as the rule in tests/house.py,
    those that define a function or class, and an assertion counts in an example alone.
    """
    res = {}
    for o in h.rooms:
        cells,assertion = load(o.nb)['cells'],re.compile(r'\btest_\w+\(|\bassert\b')
        every = [any(assertion.search(src(c)) for c in cells[i+1:i+5] if c['cell_type']=='code')
                 for i,c in enumerate(cells) if c['cell_type']=='code' and is_exported(src(c))]
        res[o.name] = dict(cells=every, defs=[ok for _,ok in asserted(load(o.nb))])
    return res

def share(h, kind): return (lambda v: f'{sum(v)/max(len(v), 1):.1%} of {len(v)}')([ok for o in shares(h).values() for ok in o[kind]])

def findings(h, chkstyle):
    "chkstyle's findings in the notebooks, (rule, place, what) each; None without chkstyle"
    if not chkstyle: return
    with tempfile.TemporaryDirectory() as d:
        nbs = shutil.copytree(h.nbs, f'{d}/nbs')
        for o in Path(nbs).rglob('*.ipynb'): o.write_text(o.read_text().replace('#| exporti\\n', '#| export\\n')) # which it takes for examples
        out = subprocess.run([chkstyle, '--show-rule', nbs], capture_output=True, text=True).stdout
    return [(m[2], m[1].split('/nbs/')[-1], m[3]) for m in re.finditer(r'^# (\S+?):? \[([\w-]+)\] (.*?)(?: \(hint.*)?$', out, re.M)]

def per_1000(h, found):
    "Findings per 1000 non-blank lines of the numbered notebooks' code"
    if found is None: return 'not installed'
    n = sum(n_filled(src(c).splitlines()) for o in h.notebooks for c in code(load(o)))
    return f'{1000*len(found)/n:.1f} ({len(found)} in {n})'

def table(h, chkstyle):
    lines,(names,imports,across),facts = sizes(h),n_private(h),h.facts
    patches = facts.get('patches')
    big = sorted(lines, key=lines.get)[::-1][:3]
    low = sorted(((sum(v['defs'])/len(v['defs']), k) for k,v in shares(h).items() if v['defs']))[:4]
    return {'rooms': len(lines),
        'lines of a room, median': f'{median(lines.values()):.0f}',
        'largest rooms': ', '.join(f'{o} {lines[o]}' for o in big),
        'rooms over 200 lines': sum(v>200 for v in lines.values()),
        'private names of other rooms (imports of them)': f'{names} ({imports})',
        'private names across packages, scripts too': across,
        'replacements at import': len(patches) if patches is not None else facts['error'],
        'of these outside patches': sum(not o['origin'].split('.')[0]=='patches' for o in patches or []),
        'of these on classes of callbacks or modules': sum(o['kind'] is not None for o in patches or []),
        'chkstyle findings per 1000 lines': per_1000(h, findings(h, chkstyle)),
        'exported cells asserted within 4 cells': share(h, 'cells'),
        'those that define something': share(h, 'defs'),
        'rooms with the lowest share': ', '.join(f'{k} {v:.0%}' for v,k in low),
        'offences against the rules': ', '.join(f'{k} {len(f(h))}' for k,f in rules.items())}

def style(h, chkstyle, n=2):
    "Findings by kind, the most frequent first, with `n` examples"
    by = defaultdict(list)
    for rule,at,what in findings(h, chkstyle) or []: by[rule].append(f'{at}: {what}')
    return '\n'.join('\n'.join([f'{len(v):4} {k}', *(f'       {o}' for o in v[::max(1, len(v)//n)][:n])])
                     for k,v in sorted(by.items(), key=lambda o: -len(o[1])))

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('folders', nargs='*', type=Path, default=[Path(__file__).parent.parent], help='checkouts (default: this one)')
    ap.add_argument('--style', action='store_true', help="list chkstyle's findings by kind")
    ap.add_argument('--chkstyle', default=shutil.which('chkstyle', path=str(Path(sys.executable).parent)) or shutil.which('chkstyle'))
    a = ap.parse_args()
    houses = [House(o.resolve()) for o in a.folders]
    tables = [table(o, a.chkstyle) for o in houses]
    for k in tables[0]: print(f'| {k} | ' + ' | '.join(str(o[k]) for o in tables) + ' |')
    for o in houses if a.style else []: print(f'\n{o.root}\n{style(o, a.chkstyle)}')

if __name__=='__main__': main()
