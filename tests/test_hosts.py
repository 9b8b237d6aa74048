"""Two hosts, as torchrun starts a script on each: equal to plain fastai in one process, and what becomes of the others when one fails or dies.

A host here is an agent of torchrun with a working directory, temporary folders and caches of its own (`start_host`); it shares a network and one folder with the other."""
import os, signal, sys, time
from pathlib import Path
import pytest, torch
from fastai_xla.virtual_cores.processes import outer_address
from torchrun import start_host
from forks import address
from fresh import free_port, repo
from test_distributed import close, learner

pytestmark = pytest.mark.slow

tests = repo/'tests'
per_host = 2

def until(f, told, seconds=120):
    "Return when `f()` is true; `told()` says what was seen instead"
    end = time.monotonic()+seconds
    while not f():
        assert time.monotonic()<end, told()
        time.sleep(.05)

class Host:
    "An agent of torchrun with what it starts"
    def __init__(self, i, at, folder, script, *args, by=(), **options):
        address() # its processes are forks
        self.home,self.args,self.options = folder/f'host{i}',(i, at, folder, script, *args),dict(options, by=by) # `by`: what runs the script
        self.home.mkdir(exist_ok=True)
        self.out = open(self.home/'out', 'w+')
        self.agent = start_host(i, 2, per_host, [sys.executable, *by, script, *args], '%s:%d'%at, self.home/'work', self.home/'tmp', self.out, **options)

    def die(self):
        "As when the power fails"
        self.agent.send_signal(signal.SIGKILL)
        self.agent.wait()

    def end(self, seconds=200):
        "The exit code"
        try: return self.agent.wait(seconds)
        finally: self.agent.poll() is None and self.die()

    def text(self): return (self.home/'out').read_text()
    def wait_for_text(self, s): until(lambda: s in self.text(), self.text)

# ---- a training is that of one process

phases = '''
from fastai.vision.all import *
from fastai.callback.all import *

def phases(learn, also=()):
    "What the suite compares"
    with learn.no_bar(), learn.no_logging():
        set_seed(7)
        lrs = learn.lr_find(num_it=6, show_plot=False) and [*map(float, learn.recorder.losses)]
        set_seed(7)
        learn.fit_one_cycle(2, .02, cbs=[SaveModelCallback(fname='best'), *also])
        losses,values = [*map(float, learn.recorder.losses)],learn.recorder.values
        learn.load('best')
        preds = learn.get_preds(with_loss=True)
        return [lrs, losses, values, *preds, list(learn.validate()), *[p.detach().cpu() for p in learn.model.parameters()]]
'''

start = '''
import os, sys, time
from fastai.vision.all import *
from fastai_xla.all import *
from inside import *
from test_distributed import learner
shared = Path(sys.argv[1])

def train(run, cbs=None):
    "Two epochs, with checkpoints; what they end in"
    learn = learner(bs=2, cbs=cbs).to_tpu_distributed()
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2, .02, cbs=resume_from(shared/run, every=2))
    if is_main(): torch.save(([*map(float, learn.recorder.losses)], learn.recorder.values, [p.detach().cpu() for p in learn.model.parameters()]), shared/f'{run}.pt')
'''

compared = '''
from fastai_xla.virtual_cores import use_virtual_cores
from fastai_xla.virtual_cores.processes import RankError, Ranks
use_virtual_cores()
''' + start + phases + '''
with main_first():
    before = {int(o.suffix[1:]) for o in shared.glob('came.*')}
    (shared/f'came.{rank()}').touch()
res = phases(learner(bs=2).to_tpu_distributed(), [CSVLogger()])
who = dict(rank=rank(), n=world_size(), host=xr.host_index(), local=xr.local_ordinal(), here=xr.local_device_count(), process=xr.process_index(), before=before, environ='RANK' in os.environ)
torch.save((who, res), shared/f'{rank()}.pt')
train('unbroken')
try: train(Path('run').absolute())
except ValueError as e: (shared/f'{rank()}.own').write_text(str(e))
barrier()
if rank()==world_size()-1: raise ValueError('boom')
try: barrier()
except RankError as e:
    (shared/f'{rank()}.error').write_text(f'{e.rank} {e}')
    Ranks.now.end(e) # as where it is raised at once: a rank that waits for this one is told
    while xr.host_index()==0 and len([*shared.glob('*.error')])<xr.local_device_count(): time.sleep(.05) # each is to see who was first
    raise
'''

dying = start + '''
import psutil

class Dies(Callback):
    "The last rank, in the first epoch; and in the second its host"
    def after_batch(self):
        if self.training and rank()==world_size()-1 and self.train_iter in (3,self.n_iter+3): self.die(shared/('first' if self.train_iter==3 else 'now'))
    def die(self, told):
        if told.exists(): return
        told.touch()
        if told.name=='first': os._exit(3)
        time.sleep(1000)

train('broken', Dies())
(shared/f'{rank()}.at').write_text(' '.join(sorted({o.laddr.ip.removeprefix('::ffff:') for o in psutil.Process().net_connections() if o.status=='ESTABLISHED'})))
'''

def flat(o): return torch.cat([torch.as_tensor(x, dtype=torch.float).flatten() for x in (o if isinstance(o, (list,tuple)) else [o])] or [torch.zeros(0)])

@pytest.fixture(scope='module')
def shared(tmp_path_factory): return tmp_path_factory.mktemp('shared')

def test_two_hosts_are_as_one_process(shared, tmp_path, monkeypatch):
    "lr_find, losses, metrics, weights, predictions; files are written by the main rank alone; an error is told with its rank"
    n,file,at = 2*per_host,shared/'train.py',(outer_address(), free_port())
    file.write_text(compared)
    monkeypatch.syspath_prepend(tests)
    hosts = [Host(i, at, tmp_path, file, shared) for i in range(2)]
    ends = [o.end() for o in hosts]
    exec(phases, scope := {})
    one = scope['phases'](learner(bs=2*n))
    seen = [torch.load(shared/f'{r}.pt', weights_only=False) for r in range(n)]
    for r,(who,res) in enumerate(seen):
        before = who.pop('before')
        assert before=={0: set(), per_host: {0}}.get(r, before) and (r in (0,per_host) or {0,per_host}<=before), (r, before)
        assert who==dict(rank=r, n=n, host=r//per_host, local=r%per_host, here=per_host, process=r, environ=False)
        for x,y in zip(one, res): close(flat(x), flat(y), 1e-5)
        assert all(torch.equal(flat(x), flat(y)) for x,y in zip(res, seen[0][1]))
    files = [sorted(str(o.relative_to(h.home/'work')) for o in (h.home/'work').rglob('*') if o.is_file()) for h in hosts]
    assert [[o for o in f if not o.startswith('caches/')] for f in files]==[['history.csv', 'models/best.pth'], []]
    for r in range(n):
        blind = str([*range(per_host, n)])
        assert f'is not seen by the ranks {blind}: name a folder that all hosts share' in (shared/f'{r}.own').read_text()
    for r in range(per_host):
        told = f'Rank {r} waits in all_gather on dim 0 of uint8[1, 4096] for rank {n-1}, which raised ValueError: boom'
        assert (shared/f'{r}.error').read_text()==f'{n-1} {told}'
    assert ends==[1,1] and 'ValueError: boom' in hosts[1].text()

def same_end(a, b):
    "Losses, what the table said but for the time, weights: bit for bit"
    (losses,values,ps),(losses2,values2,ps2) = a,b
    assert losses==losses2 and [[*o] for o in values]==[[*o] for o in values2] and all(torch.equal(p, q) for p,q in zip(ps, ps2))

def test_a_rank_dies_and_then_a_host(shared, tmp_path, monkeypatch):
    """torchrun starts all anew in the same store; the other host soon ends what it runs; when the dead one is back all goes on to what would have been.
    Its ranks meet at the address that other machines see. A busy machine may need restarts more: the ranks of the other host can miss a dead one before their agent hears of it"""
    monkeypatch.setenv('TORCH_DISABLE_SHARE_RDZV_TCP_STORE', '1') # or torch's agent does not let a new one in: 2.8 and 2.9 keep the address of the first round
    at,script = (outer_address(), free_port()),shared/'dying.py'
    script.write_text(dying)
    a,b = (Host(i, at, tmp_path, script, shared, by=['-m','fastai_xla','launch'], max_restarts=4, rdzv_conf='keep_alive_interval=1,keep_alive_max_attempt=5') for i in range(2))
    until((shared/'now').exists, a.text)
    b.die()
    start = time.monotonic()
    a.wait_for_text('which does not answer: it has died')
    assert time.monotonic()-start<60 and 'Resuming' in a.text() and not (shared/'broken.pt').exists()
    b = Host(*b.args, **b.options)
    assert [o.end() for o in (a,b)]==[0,0], a.text()
    unbroken,broken = (torch.load(shared/f'{o}.pt', weights_only=False) for o in ('unbroken','broken'))
    assert len(unbroken[0])==2*(90//(2*2*per_host)+1)
    same_end(unbroken, broken)
    assert {(shared/f'{r}.at').read_text() for r in range(2*per_host)}=={at[0]}
