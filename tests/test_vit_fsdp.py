"The large example, small: trained on eight virtual cores, killed, and resumed."
import os, re, signal, subprocess
from shutil import rmtree
import pytest
from fastai_xla.checkpoint.storage import CheckpointManager
from forks import Forked
from fresh import repo, run

pytestmark = pytest.mark.slow

size = '--image_size 28 --embed_dim 64 --num_heads 4 --num_blocks 4 --num_classes 4 --batch_size 16 --num_epochs 3 --warmup_steps 4 --lr 3e-3'.split()
args = [repo/'examples'/'vit_fsdp.py', '--fake_data', '--fake_samples', 64, '--num_workers', 0, '--ckpt_epoch_interval', 1, '--test_epoch_interval', 1, '--log_step_interval', 4, *size]
env = dict(PJRT_DEVICE='CPU', CPU_NUM_DEVICES=None, PYTHONPATH=str(repo))

def train(folder, *flags):
    res = run(*args, '--ckpt_dir', folder, *flags, timeout=600, **env)
    assert res.returncode==0, res.stderr
    return res.stdout

def killed_in_epoch_2(folder, *flags):
    "Start a training, and kill it at its first step of epoch 2; once more if what is written beside it after epoch 1 was not whole by then"
    full = {k: v for k,v in {**os.environ, **env}.items() if v is not None}
    for _ in range(5):
        p = Forked([*args, '--ckpt_dir', folder, *flags], env=full, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in p.stdout:
            if line.startswith('epoch 2 step'): break
        p.send_signal(signal.SIGKILL)
        assert p.wait()==-signal.SIGKILL
        if CheckpointManager(folder/'checkpoints').names(): return
        rmtree(folder)

def epoch(out, n): return [float(o) for o in re.findall(r' ([\d.]+)(?:,|$)', re.search(rf'^epoch {n}: (train_loss .*)$', out, re.M)[1])]

def test_killed_and_resumed(tmp_path):
    out = train(tmp_path/'whole', '--scan', '--keep_ckpts', 3)
    n,n_core = (int(o.replace(',', '')) for o in re.search(r'^([\d,]+) parameters, ([\d,]+) on each of 8 cores \(replica=1, fsdp=8\); 4 steps', out, re.M).groups())
    assert [len(epoch(out, i)) for i in (1, 2, 3)]==[3,3,3]
    assert n_core<(1/8+.05)*n and epoch(out, 3)[1]<epoch(out, 1)[1]
    lrs = [float(o) for o in re.findall(r' lr: (\S+),', out)]
    assert lrs[:2]==[0,.00225] and 0<lrs[-1]<.0002
    killed_in_epoch_2(tmp_path/'cut', '--scan', '--test_epoch_interval', '3')
    again = train(tmp_path/'cut', '--scan', '--test_epoch_interval', 3)
    assert '(replica=1, fsdp=8); 4 steps' in again
    assert 'epoch 1 step' not in again and 'epoch 1 step' in out
    assert [len(epoch(again, i)) for i in (2, 3)]==[1,3]
    for i in (2, 3): assert max(abs(a-b) for a,b in zip(epoch(out, i), epoch(again, i)))<2e-6
    from_2 = train(tmp_path/'whole', '--resume_epoch', 2)
    assert 'epoch 2 step' not in from_2 and len(epoch(from_2, 3))==3 and max(abs(a-b) for a,b in zip(epoch(out, 3), epoch(from_2, 3)))<2e-6
    plain = train(tmp_path/'plain', '--run_without_fsdp', '--no_grad_ckpt', '--max_steps', 5)
    assert re.search(r'^([\d,]+) parameters, \1 on each', plain, re.M) and 'epoch 3' not in plain
    assert len(epoch(plain, 1))==3 and max(abs(a-b) for a,b in zip(epoch(out, 1), epoch(plain, 1)))<1e-4
    res = run(*args, '--ckpt_dir', tmp_path/'whole', '--no_resume', **env)
    assert res.returncode and 'FileExistsError' in res.stderr

def test_flags_of_the_wrapper_and_one_block(tmp_path):
    "`--flatten_parameters` and `--no_reshard_after_forward` are the original's, and change nothing here"
    small = '--num_blocks', 2, '--num_epochs', 1, '--fsdp', 2
    spmd = train(tmp_path/'spmd', *small)
    two = train(tmp_path/'two', *small, '--mark_step_after_forward', '--flatten_parameters', '--no_reshard_after_forward')
    assert max(abs(a-b) for a,b in zip(epoch(spmd, 1), epoch(two, 1)))<1e-5
    one = train(tmp_path/'one', '--num_blocks', 1, '--num_epochs', 1)
    assert 'One block has no neighbour like it' in one and len(epoch(one, 1))==3

def test_sizes_that_cannot_be(tmp_path):
    for flags,msg in ((('--batch_size', 0), '--batch_size: it must be a whole number, at least 1. Got'), (('--num_blocks', 0), '--num_blocks: it must be'),
                      (('--num_blocks', 1, '--scan'), '--scan needs --num_blocks 2 or more'),
                      (('--batch_size', 128), '--batch_size 128 is larger than the training set of 64 samples')):
        res = run(*args, '--ckpt_dir', tmp_path, *flags, **env)
        assert res.returncode and msg in res.stderr and 'Traceback' not in res.stderr, res.stderr

