"""A signal to a whole process group, as `timeout`, Slurm and a terminal send it, while DataLoader workers are alive: the training ends with a checkpoint."""
import os, signal, subprocess
import pytest
from forks import Forked

script = '''
import multiprocessing, sys, time
from fastai.basics import *
from fastai_xla.all import *
kind,folder = sys.argv[1:]
class Data:
    def __len__(self): return 4000
    def __getitem__(self, i):
        time.sleep(.01)
        return torch.full((4,), i/4000),torch.zeros(1)
make = DataLoader if kind=='fastai' else torch.utils.data.DataLoader
dls = DataLoaders(*[make(Data(), batch_size=4, num_workers=2) for _ in range(2)])
class Tell(Callback):
    def after_batch(self):
        if self.iter==2: print('workers', *[o.pid for o in multiprocessing.active_children()], flush=True)
learn = Learner(dls, nn.Linear(4,1), MSELossFlat(), cbs=[Tell(), resume_from(folder)]).to_tpu()
with learn.no_bar(), learn.no_logging(): learn.fit(1)
'''

@pytest.mark.parametrize('kind,sig', [('fastai','SIGTERM'), ('torch','SIGINT')])
def test_signal_to_the_group(kind, sig, tmp_path):
    p = Forked(['-c', script, kind, tmp_path/'run'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    workers = next(o for o in p.stdout if o.startswith('workers')).split()[1:]
    assert len(workers)==2 and os.getpgid(int(workers[0]))==p.pid
    os.killpg(p.pid, getattr(signal, sig))
    out,err = p.communicate(timeout=120)
    assert 'DataLoader worker' not in err and p.returncode==(143 if sig=='SIGTERM' else 1), err
    assert (f'Stopped by {sig}' in out+err) and [o.name for o in (tmp_path/'run').iterdir() if 'batch' in o.name]
    assert not any(os.path.exists(f'/proc/{o}') for o in workers)

launched = '''
import sys, time
from fastai.basics import *
from fastai_xla.all import *
class Slow(Callback):
    def after_batch(self):
        if self.training: time.sleep(.1)
        if is_main() and self.iter==2: print('begun', flush=True)
def train(rank, folder):
    x = torch.arange(256.).view(64,4).sin()
    dls = DataLoaders(*[TfmdDL(list(zip(x, x[:,:1])), bs=4, num_workers=0) for _ in range(2)])
    model = nn.Linear(4,1)
    for p in model.parameters(): nn.init.zeros_(p)
    learn = Learner(dls, model, MSELossFlat(), cbs=[Slow(), resume_from(folder)]).to_tpu_distributed()
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    return [float(o) for o in learn.recorder.losses]
if __name__=='__main__': print(tpu_launch(train, sys.argv[1], n_cores=2)[0])
'''

@pytest.mark.parametrize('sig', ['SIGTERM','SIGINT'])
def test_signal_to_a_launched_script(sig, tmp_path):
    "All ranks stop after the same batch, with a checkpoint; run again, it goes on"
    (tmp_path/'train.py').write_text(launched)
    def start(folder): return Forked([tmp_path/'train.py', tmp_path/folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    p = start('run')
    assert next(o for o in p.stdout if o.startswith('begun'))
    os.kill(p.pid, getattr(signal, sig))
    out,err = p.communicate(timeout=120)
    assert p.returncode==(143 if sig=='SIGTERM' else 1) and 'LaunchError' not in err and ('LaunchInterrupt' in err if sig=='SIGINT' else not 'Traceback' in err), err
    assert 'Stopped by a signal; the newest checkpoint is' in out and [o.name for o in (tmp_path/'run').iterdir() if 'batch' in o.name]
    if sig=='SIGINT': return # what goes on is the same
    again,whole = [start(o).communicate(timeout=120)[0].splitlines() for o in ('run','other')]
    assert any('Resuming' in o for o in again) and again[-1]==whole[-1]!=''
