"A rank that hangs ends the run, which says where every rank is; one that is slow does not."
import os, re, signal, threading, time
import pytest
from fastai.basics import Callback, set_seed
from fastai.test_utils import synth_learner
from fastai_xla.all import get_pool, LaunchError, post, rank, resume_from, TPUPool, Watchdog
from test_pool import Processes

SHORT = .05 # minutes

class Sleeps(Callback):
    def after_step(self):
        if rank()==1 and self.epoch==1: time.sleep(600)

def test_a_callback_that_sleeps(tmp_path):
    "The error says which rank, in which batch, and who waits for it in what; a checkpoint is there, and the training goes on from it"
    def go(*cbs, **kwargs):
        set_seed(1)
        learn = synth_learner(n_trn=4, cbs=[*cbs, resume_from(tmp_path/'run')]).to_tpu_distributed(n_cores=2, **kwargs)
        with learn.no_bar(), learn.no_logging(): learn.fit(2)
        return learn
    with pytest.raises(LaunchError) as e: go(Sleeps(), watchdog=SHORT)
    said = str(e.value)
    assert e.value.rank==1 and 'Nothing has moved on the cores for 0.05 minutes' in said
    assert re.search(r'^Rank 1, epoch 1, training batch 0: is in after_step, .*test_watchdog.py:\d+: .*time.sleep\(600\)$', said, re.M), said
    assert re.search(r'^Rank 0, epoch 1, training batch \d+: waits in \w+ .* for rank 1$', said, re.M), said
    assert 'Stack of rank 0' in said and 'one_batch' in said
    assert len([*(tmp_path/'run').glob('fit*')])==1 and not get_pool(2).is_open
    assert len(go(Sleeps.__base__()).recorder.values)==2

class Late(Callback):
    "Late for a step that the ranks run again"
    replayable = True
    def __init__(self, seconds): self.seconds = seconds
    def after_batch(self):
        if rank()==1 and self.training and self.iter==8: time.sleep(self.seconds)

@pytest.mark.parametrize('late', [2.5, 600])
def test_late_for_a_step_that_is_run_again(late):
    "The others are seen to wait for it; if it does not come, that is what the error says"
    learn = synth_learner(n_trn=24, cbs=Late(late)).to_tpu_distributed(n_cores=2, watchdog=SHORT)
    with learn.no_bar(), learn.no_logging():
        if late<SHORT*60:
            learn.fit(1)
            assert learn.replay.n_replayed==10 and not learn.replay.why, learn.replay
        else:
            with pytest.raises(LaunchError, match=r'(?s)Rank 0, epoch 0, training batch 9: waits in the run of \d collectives for rank 1') as e: learn.fit(1)
            assert e.value.rank==1 and not get_pool(2).is_open

def tells(rank, n):
    for i in range(n):
        time.sleep(.5)
        post(i)

def computes(rank, n):
    "As a compiler does: in one line, and without a message"
    until = time.process_time()+n
    return sum(sum(range(10**6)) for _ in iter(lambda: time.process_time()<until, False))

def test_slow_is_not_stuck():
    with TPUPool(2) as pool:
        pool.run(computes, 1.3*60*SHORT, watch=Watchdog(SHORT))
        pool.run(tells, 8, watch=Watchdog(SHORT))
        seen = pool.run(lambda r: os.getpid())[0]
        os.kill(seen, signal.SIGSTOP)
        with pytest.raises(LaunchError, match=f'(?s)minutes.*The process {seen} of ranks 0, 1 is stopped, as SIGSTOP does it') as e: pool.run(tells, 4, watch=Watchdog(SHORT))
        assert e.value.rank is None and not pool.is_open

def both(rank, path):
    (path/str(rank)).touch()
    while not (path/'go').exists(): time.sleep(.05)

def test_a_rank_that_was_stopped(tmp_path):
    "by SIGSTOP in the middle of a run, with a process for each rank; its last stack is known"
    with Processes(2, tmp_path) as pool:
        pids = pool.run(lambda r: os.getpid())
        def stop():
            while not (tmp_path/'1').exists(): time.sleep(.05)
            time.sleep(1.5)
            os.kill(pids[1], signal.SIGSTOP)
        threading.Thread(target=stop).start()
        with pytest.raises(LaunchError) as e: pool.run(both, tmp_path, watch=Watchdog(SHORT))
    said = str(e.value)
    assert e.value.rank==1 and f'The process {pids[1]} of rank 1 is stopped, as SIGSTOP does it.' in said
    assert re.search(r'^Rank 1: was stopped where it is in both, .*test_watchdog.py', said, re.M) and re.search('^Rank 0: is in both', said, re.M), said
