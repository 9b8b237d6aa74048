"The table of benchmarks/faithful.py: a few of its cases in every form"
import pytest
from fresh import repo, run

@pytest.mark.slow
def test_cases_in_every_form():
    res = run(repo/'benchmarks'/'faithful.py', '--cases', 'tabular', 'collab', 'weighted_loader', '--cores', 2, '--verbose')
    assert res.returncode==0, f'{res.stdout}\n{res.stderr}'
    rows = [[o.strip() for o in l.strip('|').split('|')] for l in res.stdout.splitlines() if l.startswith('|')]
    assert rows[0]==['case','plain','`to_tpu`','2 cores','pool of 2','sharded of 2'] and [r[0] for r in rows[2:]]==['tabular','collab','weighted loader']
    assert all(c.startswith('equal, ') for r in rows[2:] for c in r[2:]), res.stdout
