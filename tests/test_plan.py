"The plan, and what depth costs, against programs that are really compiled for eight virtual cores."
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
import pytest
import fresh
from fresh import repo

sys.path.insert(0, str(repo/'benchmarks'))
from depth import run

pytestmark = pytest.mark.slow

shallow,deep = [(4,'plain'), (4,'grad_ckpt'), (4,'scan')],[(8,'plain'), (8,'scan')]

def forked(cmd, env, **kwargs):
    "As `subprocess.run`; its settings are read when the device starts, so a fork will do"
    return fresh.run(*cmd[1:], cold=False, CPU_NUM_DEVICES=None, **{k: env[k] for k in ('XLA_FLAGS','PT_XLA_DEBUG_LEVEL','PT_XLA_DEBUG_FILE')})

@lru_cache(None)
def compiled(cases=(*shallow,)):
    "{(blocks, mode): what was measured}"
    def one(case): return run(forked, depth=case[0], mode=case[1], dim=64, bs=64, opt='Adam', mesh=dict(fsdp=8))
    with ThreadPoolExecutor(2) as pool: return dict(zip(cases, pool.map(one, cases)))

def planned(depth, mode):
    from fastai_xla.aot import plan_training
    from fastai_xla.sharding import make_mesh
    from fastai_xla.models import mean_vit
    return plan_training(mean_vit(64, 4, depth, 8, img_size=64, num_classes=4), make_mesh(fsdp=8), 64, (3,64,64), **({} if mode=='plain' else {mode: True}))

def test_parameters_are_exact_and_temporary_memory_is_near():
    "Parameters and optimizer state to the byte; temporary memory between 0.6 and 1.5 times the compiler's, and in the same order but for the loop. All train alike"
    for case,r in compiled().items():
        p = planned(*case)
        assert (p.memory['parameters'],p.nbytes)==tuple(r['params']), case
        assert p.memory['optimizer state']==r['state'][0]<=(1/8+.05)*r['state'][1], case
        temp = p.total-sum(p.memory[k] for k in ('parameters','optimizer state','batch'))
        assert .6<temp/r['temp']<1.5, (case, temp, r['temp'])
    plain,ckpt,loop = (compiled()[4,o]['temp'] for o in ('plain','grad_ckpt','scan'))
    losses = [r['loss'] for r in compiled().values()]
    assert loop<ckpt<.75*plain and max(losses)-min(losses)<1e-5 and {r['compiles'] for r in compiled().values()}<={1,2}

def test_a_loop_holds_one_block():
    "What grows with depth is the optimizer, and the stacking of parameters"
    both = {**compiled(), **compiled((*deep,))}
    def growth(mode, what): return both[8,mode][what]-both[4,mode][what]
    assert growth('scan', 'products')==0<growth('plain', 'products')
    assert growth('scan', 'instructions')<.7*growth('plain', 'instructions')
