"The table of benchmarks/faithful.py: a few of its cases in every form, and what it says of results that differ"
import sys
import numpy as np

from fresh import repo, run
sys.path.insert(0, str(repo/'benchmarks'))
from faithful import cell

import pytest

pytestmark = pytest.mark.slow

def outcome(reasons=(), tol=1e-4, **runs):
    return dict(case='a case', tol=tol, reasons=dict(reasons), runs={k: {('losses',): np.array(v)} for k,v in (runs or {'': [1.,2.]}).items()})

def test_what_a_cell_says():
    ref = outcome()
    assert cell('pool', ref, outcome())==('equal, 0e+00', True)
    assert cell('pool', ref, outcome(**{'': [1.,2.1]}))==('**differs**: 5e-02 in losses', False)
    assert cell('pool', ref, outcome(**{'': [1.]}))[1] is False and cell('pool', ref, outcome(**{'': [1.,np.nan]}))[1] is False
    assert cell('pool', ref, dict(case='a case', error='ValueError: no'))==('**ValueError: no**', False) and cell('pool', ref, None)[1] is False
    assert cell('pool', outcome(dict(pool='by design')), outcome(**{'': [1.,2.1]}))==('5e-02 in losses: by design', True)

def test_a_reason_is_for_draws_alone():
    def drawn(without, draws, **kwargs): return outcome(kwargs, **{'without draws': without, '': draws})
    ref = drawn([1.], [2.], pool='own draws')
    assert cell('pool', ref, drawn([1.], [3.]))==('equal without draws, 0e+00; own draws', True)
    assert cell('pool', ref, drawn([2.], [2.]))[1] is False and cell('tpu', ref, drawn([1.], [3.]))[1] is False

def test_cases_in_every_form():
    res = run(repo/'benchmarks'/'faithful.py', '--cases', 'tabular', 'collab', 'weighted_loader', '--cores', 2, '--verbose')
    assert res.returncode==0, f'{res.stdout}\n{res.stderr}'
    rows = [[o.strip() for o in l.strip('|').split('|')] for l in res.stdout.splitlines() if l.startswith('|')]
    assert rows[0]==['case','plain','`to_tpu`','2 cores','pool of 2','sharded of 2'] and [r[0] for r in rows[2:]]==['tabular','collab','weighted loader']
    assert all(c.startswith('equal, ') for r in rows[2:] for c in r[2:]), res.stdout
