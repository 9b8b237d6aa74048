"A rank that hangs ends the run, which says where every rank is; one that is slow does not."
import os, re, signal, threading, time
import pytest
from fastai.basics import Callback, set_seed
from fastai.test_utils import synth_learner
from fastai_xla.all import get_pool, LaunchError, resume_from, TPUPool
from fastai_xla.launch.worker import post
from fastai_xla.launch.launcher import Watchdog
from fastai_xla.runtime.ranks import rank

pytestmark = pytest.mark.slow

SHORT = .05 # minutes

class Sleeps(Callback):
    def after_step(self):
        if rank()==1 and self.epoch==1: time.sleep(600)

def test_a_callback_that_sleeps(tmp_path):
    "The error has the stack of each rank: one sleeps, the other waits in a collective; a checkpoint is there, and the training goes on from it"
    def go(*cbs, **kwargs):
        set_seed(1)
        learn = synth_learner(n_trn=4, cbs=[*cbs, resume_from(tmp_path/'run')]).to_tpu_distributed(n_cores=2, processes=True, **kwargs)
        with learn.no_bar(), learn.no_logging(): learn.fit(2)
        return learn
    with pytest.raises(LaunchError) as e: go(Sleeps(), watchdog=SHORT)
    said = str(e.value)
    assert 'Nothing has moved on the cores for 0.05 minutes' in said
    first,second = re.split('^Rank 1:$', said, flags=re.M)
    assert 'Rank 0:' in first and 'in exchange' in first and 'in one_batch' in first and re.search(r'test_watchdog.py", line \d+ in after_step', second), said
    assert len([*(tmp_path/'run').glob('fit*')])==1 and not get_pool(2).is_open
    assert len(go(Sleeps.__base__()).recorder.values)==2

def tells(rank, n):
    for i in range(n):
        time.sleep(.5)
        post(i)

def computes(rank, n):
    "As a compiler does: in one line, and without a message"
    until = time.process_time()+n
    return sum(sum(range(10**6)) for _ in iter(lambda: time.process_time()<until, False))

def both(rank, path):
    (path/str(rank)).touch()
    while not (path/'go').exists(): time.sleep(.05)

def test_slow_is_not_stuck(tmp_path):
    "A rank that SIGSTOP has stopped does not answer; the others give their stacks"
    with TPUPool(2) as pool:
        pool.run(computes, 1.3*60*SHORT, watch=Watchdog(SHORT))
        pool.run(tells, 8, watch=Watchdog(SHORT))
        pids = pool.run(lambda r: os.getpid())
        def stop():
            while not (tmp_path/'1').exists(): time.sleep(.05)
            time.sleep(.5)
            os.kill(pids[1], signal.SIGSTOP)
        threading.Thread(target=stop).start()
        with pytest.raises(LaunchError) as e: pool.run(both, tmp_path, watch=Watchdog(SHORT))
        said = str(e.value)
        assert 'Rank 1:\nIt does not answer.' in said
        assert re.search(r'Rank 0:\n(?s:.*)test_watchdog.py", line \d+ in both', said) and not pool.is_open, said
