"""A signal to a whole process group, as `timeout`, Slurm and a terminal send it, while DataLoader workers are alive: the training ends with a checkpoint.
So it does when Google's metadata server says that the machine is about to be taken away."""
import os, signal, subprocess, threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import pytest
from forks import Forked

script = '''
import sys, time
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
'''.replace('import sys', 'import multiprocessing, sys')

@pytest.mark.parametrize('kind', ['fastai','torch'])
@pytest.mark.parametrize('sig', ['SIGTERM','SIGINT'])
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

@contextmanager
def metadata_server():
    "Answers as Google's does: at once if `last_etag` is not that of what it has to say, else when that changes. Yields its address, and what changes an answer"
    said,changed = {'preempted': 'FALSE', 'maintenance-event': 'NONE'},threading.Condition()
    class Metadata(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'
        def log_message(self, *args): pass
        def do_GET(self):
            assert self.headers['Metadata-Flavor']=='Google' and 'wait_for_change=true' in self.path
            key,etag = self.path.removeprefix('/computeMetadata/v1/instance/').split('?')[0],self.path.split('last_etag=')[1]
            with changed: changed.wait_for(lambda: said[key]!=etag)
            self.send_response(200)
            for k,v in {'Metadata-Flavor': 'Google', 'ETag': said[key], 'Content-Length': len(said[key])}.items(): self.send_header(k, str(v))
            self.end_headers()
            self.wfile.write(said[key].encode())
    def say(key, value):
        with changed:
            said[key] = value
            changed.notify_all()
    server = ThreadingHTTPServer(('127.0.0.1', 0), Metadata)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try: yield f'127.0.0.1:{server.server_port}',say
    finally: server.shutdown()

long = '''
import sys, time
from fastai.basics import *
from fastai.test_utils import synth_learner
from fastai_xla.all import *
from fastai_xla.runtime import rank
form,folder = sys.argv[1:]
class Tell(Callback):
    def after_batch(self):
        if self.training and self.iter==2 and not rank(): print('trains', flush=True)
        time.sleep(.01)
learn = synth_learner(n_trn=10000, cbs=[Tell(), resume_from(folder)])
learn = learn.to_tpu_distributed(n_cores=2, processes=True) if form=='pool' else learn.to_tpu()
with learn.no_bar(), learn.no_logging(): learn.fit(1)
'''

@pytest.mark.parametrize('form,notice', [('to_tpu', ('preempted','TRUE')), ('pool', ('maintenance-event','TERMINATE_ON_HOST_MAINTENANCE'))])
def test_a_machine_that_is_taken_away(form, notice, tmp_path):
    with metadata_server() as (host,say):
        p = Forked(['-c', long, form, tmp_path/'run'], env={**os.environ, 'GCE_METADATA_HOST': host}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        assert 'trains\n' in p.stdout
        say(*notice)
        out,err = p.communicate(timeout=120)
    assert p.returncode==143 and f'This machine is about to be stopped: its {" is ".join(notice)}' in out, (out, err)
    assert [o.name for o in (tmp_path/'run').iterdir() if 'batch' in o.name]

def test_no_metadata_server(tmp_path):
    "is no error, and the training ends as it would"
    code = long.replace('10000', '4').replace('learn.fit(1)', 'learn.fit(2)')
    p = Forked(['-c', code, 'to_tpu', tmp_path/'run'], env={**os.environ, 'GCE_METADATA_HOST': '127.0.0.1:9'}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    out,err = p.communicate(timeout=120)
    assert p.returncode==0 and not err, (out, err)
