"timm's families on XLA: the rows of benchmarks/timm_families.py"
import json
import pytest
from fresh import repo, run_ok

@pytest.fixture(scope='module')
def rows():
    code = "import json; from timm_families import row; print(json.dumps({o: row(o) for o in ('vit','nfnet','resnet','eva02')}))"
    return json.loads(run_ok(code, PYTHONPATH=f"{repo}:{repo/'benchmarks'}", timeout=600).splitlines()[-1])

def test_they_learn_compile_in_two_steps_at_most_and_stay_on_the_device(rows):
    for o,r in rows.items():
        assert r['losses'][-1]<r['losses'][0], (o, r['losses'])
        assert (r['step1'],r['later'],r['reads'],r['fallbacks'])==(1,0,0,'none') and r['step2']<=1, (o, r)

def test_a_large_model_passes_through_the_host_in_pieces():
    "200 million parameters, 814 MB; the largest tensor has 17"
    code = """
    import ctypes, psutil, torch
    from fastai_xla.models import materialize, mean_vit
    def used():
        ctypes.CDLL('libc.so.6').malloc_trim(0) # what is free goes back to the system
        return psutil.Process().memory_info().rss/1e6
    model,seen = mean_vit(1024, 16, 16),{}
    before = used()
    def place(name, t):
        seen[name] = t.nbytes,used()-before
        return torch.zeros(())
    materialize(model, place)
    print(sum(n for n,_ in seen.values())//10**6, max(o for _,o in seen.values())<100)
    """
    assert run_ok(code)=='813 True'
