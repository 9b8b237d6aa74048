"Compiled graphs in a folder: what the next process makes of them, and the error when it is too late"
import re, pytest
from fresh import run, run_ok

CODE = """
from fastai.test_utils import synth_learner
from fastai.basics import *
from fastai_xla.all import *
import sys
from fastai_xla.runtime.device import met
set_seed(1)
learn = getattr(synth_learner(n_trn=4), sys.argv[2])(cache=sys.argv[1])
with learn.no_bar(): learn.fit(1)
getattr(learn, sys.argv[2])(cache=sys.argv[1])
print('seen', xla_counts().compiles, xla_counts().cached, met.counter_value('PersistentCacheDeserializeFailure') or 0, float(learn.recorder.losses[-1]))
"""

def train(folder, to):
    "Compiled, loaded and not loadable graphs, the last loss, and all that was printed"
    res = run('-c', CODE, folder, to, CPU_NUM_DEVICES=None if to=='to_tpu' else '2')
    assert res.returncode==0, res.stderr
    *ns,loss = res.stdout.split('seen ')[1].split()
    return (*map(int, ns),float(loss),res.stdout+res.stderr)

@pytest.mark.parametrize('to', ['to_tpu', 'to_tpu_distributed'])
def test_a_second_process(tmp_path, to):
    "Graphs are written. XLA:CPU cannot load them, says so, and compiles as ever; where it can, the same assertions hold"
    compiles,cached,failed,loss,_ = train(tmp_path/'cache', to)
    files = {o.name for o in (tmp_path/'cache').iterdir()}
    assert compiles>=3 and cached==failed==0 and len(files)>=compiles-1
    compiles2,cached2,failed2,loss2,said = train(tmp_path/'cache', to)
    assert compiles2+cached2>=compiles and cached2+failed2>=compiles-1 and loss2==loss
    assert {o.name for o in (tmp_path/'cache').iterdir()}==files
    if failed2: assert re.search(r'and \d+ in the compile cache could not be loaded', said)
    else: assert re.search(r'loaded from the compile cache', said)

def test_too_late(tmp_path):
    out = run_ok(f"""
        from fastai.test_utils import synth_learner
        from fastai_xla.all import *
        learn = synth_learner(n_trn=4).to_tpu()
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        try: learn.to_tpu(cache={str(tmp_path)!r})
        except RuntimeError as e: print(e)""")
    assert f'the compile cache cannot become {tmp_path} any more: restart Python' in out
