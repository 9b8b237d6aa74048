"""Two hosts, as torchrun starts a script on each: equal to plain fastai in one process, and what becomes of the others when one fails or dies.

A host here is an agent of torchrun with a working directory, a home, temporary folders and caches of its own; it shares a network and one folder with the other.
`make test-processes` runs four processes on each, `make test` two."""
import os, socket, sys, time
import psutil, pytest, torch
from forks import address, Forked
from fresh import free_port, repo
from shape import processes
from test_distributed import close, learner

tests = repo/'tests'
per_host = 4 if processes else 2

def is_open(port):
    with socket.socket() as s: return s.connect_ex(('127.0.0.1', port))==0

def until(f, told, seconds=120):
    "Return when `f()` is true; `told()` says what was seen instead"
    end = time.monotonic()+seconds
    while not f():
        assert time.monotonic()<end, told()
        time.sleep(.05)

class Host:
    "An agent of torchrun with what it starts"
    def __init__(self, i, port, folder, script, *args, by=(), **options):
        self.home = folder/f'host{i}'
        for o in ('work','tmp'): (self.home/o).mkdir(parents=True, exist_ok=True)
        self.args,self.options = (i, port, folder, script, *args),dict(options, by=by) # `by`: what runs the script
        env = dict(os.environ, FORKS=address(), HOME=self.home, TMPDIR=self.home/'tmp', XDG_CACHE_HOME=self.home/'cache', TORCH_HOME=self.home/'torch', FASTAI_HOME=self.home/'fastai',
            PYTHONPATH=os.pathsep.join([str(tests), os.environ.get('PYTHONPATH', str(repo))]))
        options = [f'--{k.replace("_","-")}={v}' for k,v in dict(nnodes=2, nproc_per_node=per_host, rdzv_backend='c10d', rdzv_id='run', rdzv_endpoint=f'127.0.0.1:{port}', **options).items()]
        self.out = open(self.home/'out', 'w+')
        self.agent = Forked(['-m', 'torch.distributed.run', '--no-python', *options, sys.executable, tests/'forked_worker.py', *by, script, *args],
            env={k: str(v) for k,v in env.items() if k not in ('CPU_NUM_DEVICES','CPU_NUM_PROCESSES')}, cwd=self.home/'work', stdout=self.out, stderr=self.out)

    def die(self):
        "As when the power fails"
        for o in [*psutil.Process(self.agent.pid).children(recursive=True), psutil.Process(self.agent.pid)]: o.kill()

    def end(self, seconds=200):
        "The exit code, and what was printed"
        try: code = self.agent.wait(seconds)
        finally: self.agent.poll() is None and self.die()
        return code,self.text()

    def text(self): return (self.home/'out').read_text()
    def wait_for_text(self, s): until(lambda: s in self.text(), self.text)

class Hosts:
    "Two hosts, in `folder`, that share what is in `folder/shared`"
    def __init__(self, folder):
        self.folder,self.shared = folder,folder/'shared'
        self.shared.mkdir()

    def start(self, script, *args, **options):
        port,file = free_port(),self.shared/'train.py'
        file.write_text(script)
        first = Host(0, port, self.folder, file, self.shared, *args, **options)
        until(lambda: is_open(port), first.text) # else the other one may take the port, and the store where agents meet dies with it
        return first,Host(1, port, self.folder, file, self.shared, *args, **options)

    def again(self, host): return Host(*host.args, **host.options)
    def run(self, *args, **options): return [o.end() for o in self.start(*args, **options)]

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
from test_distributed import learner
shared = Path(sys.argv[1])

def train(run, cbs=None):
    "Two epochs, with checkpoints; what they end in"
    learn = learner(bs=2, cbs=cbs).to_tpu_distributed()
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2, .02, cbs=resume_from(shared/run, every=2))
    if is_main(): torch.save(([*map(float, learn.recorder.losses)], learn.recorder.values, [p.detach().cpu() for p in learn.model.parameters()]), shared/f'{run}.pt')
'''

compared = start + phases + '''
use_virtual_cores(processes=True)
with main_first():
    before = {int(o.suffix[1:]) for o in shared.glob('came.*')}
    (shared/f'came.{rank()}').touch()
res = phases(learner(bs=2).to_tpu_distributed(), [CSVLogger()])
who = dict(rank=rank(), n=world_size(), host=xr.host_index(), local=xr.local_ordinal(), here=xr.local_device_count(), process=xr.process_index(), before=before, environ='RANK' in os.environ)
torch.save((who, res), shared/f'{rank()}.pt')
train('unbroken')
try: train(Path.home()/'run')
except ValueError as e: (shared/f'{rank()}.own').write_text(str(e))
barrier()
if rank()==world_size()-1: raise ValueError('boom')
try: barrier()
except ReplicaError as e:
    (shared/f'{rank()}.error').write_text(f'{e.rank} {e}')
    while xr.host_index()==0 and len([*shared.glob('*.error')])<xr.local_device_count(): time.sleep(.05) # each is to see who was first
    raise
'''

dying = start + '''
from fastai_xla.virtual_cores.hosts import Pulse
Pulse.every,Pulse.silence = .2,5.

class Dies(Callback):
    "The last rank, at first; and when torchrun has started all anew, its host"
    def after_batch(self):
        i = int(os.environ['TORCHELASTIC_RESTART_COUNT'])
        if not self.training or rank()<world_size()-1 or i>1 or self.train_iter!=(3,self.n_iter+3)[i]: return
        if i==0: os._exit(3)
        (shared/'now').touch()
        time.sleep(1000)

train('broken', Dies() if sys.argv[2]=='dies' else None)
'''

def flat(o): return torch.cat([torch.as_tensor(x, dtype=torch.float).flatten() for x in (o if isinstance(o, (list,tuple)) else [o])] or [torch.zeros(0)])

@pytest.fixture(scope='module')
def two(tmp_path_factory): return Hosts(tmp_path_factory.mktemp('hosts'))

def test_two_hosts_are_as_one_process(two):
    "lr_find, losses, metrics, weights, predictions; files are written by the main rank alone; an error is told with its rank and host"
    n,ends = 2*per_host,two.run(compared, by=['-m','fastai_xla','launch'])
    exec(phases, scope := {})
    one = scope['phases'](learner(bs=2*n))
    seen = [torch.load(two.shared/f'{r}.pt', weights_only=False) for r in range(n)]
    for r,(who,res) in enumerate(seen):
        before = who.pop('before')
        assert before=={0: set(), per_host: {0}}.get(r, before) and (r in (0,per_host) or {0,per_host}<=before), (r, before)
        assert who==dict(rank=r, n=n, host=r//per_host, local=r%per_host, here=per_host, process=r, environ=False)
        for x,y in zip(one, res): close(flat(x), flat(y), 1e-5)
        assert all(torch.equal(flat(x), flat(y)) for x,y in zip(res, seen[0][1]))
    files = [sorted(o.name for o in (two.folder/f'host{i}'/'work').rglob('*') if o.is_file()) for i in range(2)]
    assert files==[['best.pth','history.csv'], []]
    for r in range(n):
        blind = str([*range(per_host, n)])
        assert f'is not seen by the ranks {blind}: name a folder that all hosts share' in (two.shared/f'{r}.own').read_text()
    for r in range(per_host):
        told = f'Replica {r} waits in all_gather on dim 0 of uint8[1, 4096] for replica {n-1} on host 1 ({socket.gethostname()}), which raised ValueError: boom'
        assert (two.shared/f'{r}.error').read_text()==f'{n-1} {told}'
    assert all(code for code,_ in ends) and 'ValueError: boom' in ends[1][1]

def same_end(a, b):
    "Losses, what the table said but for the time, weights: bit for bit"
    (losses,values,ps),(losses2,values2,ps2) = a,b
    assert losses==losses2 and [[*o] for o in values]==[[*o] for o in values2] and all(torch.equal(p, q) for p,q in zip(ps, ps2))

def test_a_rank_dies_and_then_a_host(two, monkeypatch):
    "torchrun starts all anew in the same store; the other host soon ends what it runs, with the name of the dead one; when that is back all goes on to what would have been"
    monkeypatch.setenv('TORCH_DISABLE_SHARE_RDZV_TCP_STORE', '1') # or torch's agent does not let a new one in: 2.8 and 2.9 keep the address of the first round
    a,b = two.start(dying, 'dies', max_restarts=1, rdzv_conf='keep_alive_interval=1,keep_alive_max_attempt=5')
    until((two.shared/'now').exists, a.text)
    b.die()
    start = time.monotonic()
    a.wait_for_text(f'on host 1 ({socket.gethostname()}), which is silent: it or its host has died')
    assert time.monotonic()-start<60 and 'Going on' in a.text() and not (two.shared/'broken.pt').exists()
    b = two.again(b)
    assert [o.end()[0] for o in (a,b)]==[0,0], a.text()
    unbroken,broken = (torch.load(two.shared/f'{o}.pt', weights_only=False) for o in ('unbroken','broken'))
    assert len(unbroken[0])==2*(90//(2*2*per_host)+1)
    same_end(unbroken, broken)
