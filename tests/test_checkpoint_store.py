"Checkpoints that are damaged, malicious, shared, in object storage, on a full disk; and steps that do not wait for them."
import os, resource, socket, subprocess, sys, threading, time
from pathlib import Path

import pytest, torch
sys.path.insert(0, str(Path(__file__).parent.parent/'benchmarks'))
import checkpoints as bench
from fastai_xla.checkpoint import storage
from forks import Forked
from fresh import free_port
from fastai.basics import Callback
from fastai.callback.tracker import TerminateOnNaNCallback
from fastai_xla.all import *
from fastai_xla.checkpoint.storage import CheckpointDir, CheckpointManager, folder_lock, InUse, Position

def fit(cbs=(), epochs=1, width=64):
    learn = bench.learner('.', cbs, width).to_tpu()
    with learn.no_bar(), learn.no_logging(): learn.fit(epochs, 1e-2)
    return learn

def weights(learn): return [p.detach().cpu() for p in learn.model.parameters()]
def equal(a, b): return all(torch.equal(p, q) for p,q in zip(weights(a), weights(b)))

class At(Callback):
    "Calls `f` after training batch `n`"
    order = 2000
    def __init__(self, n, f): self.n,self.f = n,f
    def after_batch(self):
        if self.training and self.train_iter==self.n: self.f()

def die(): raise KeyboardInterrupt

# ---- what is read

@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    bench.make('to_tpu', folder)
    return folder

def test_damages(trained):
    "Any of them is said in a line, and the checkpoint before it is used; the whole table is `benchmarks/checkpoints.py damage`"
    res = bench.attack_all(trained/'run', only=25)
    assert sum(res.values())==25 and {o for _,o in res}=={'fell back'}, res

def test_nothing_is_executed(trained, tmp_path):
    good,learn = CheckpointManager(trained/'run').newest(),bench.learner().to_tpu()
    for name,f in bench.attacks().items():
        _,loaded,resumed,ran = bench.try_attack(f, good, learn, tmp_path)
        assert not ran and not loaded.startswith('bare') and not resumed.startswith('bare'), (name, loaded, resumed)
        assert 'loaded'!=resumed, name
    assert not (tmp_path/'executed').exists()

# ---- where

def killed_and_resumed(path, every=2):
    "A training that was killed and resumes at `path` is the one that was not"
    whole = fit()
    with pytest.raises(KeyboardInterrupt): fit([TPUCheckpoint(path, every=every), At(5, die)])
    manager = CheckpointManager(path)
    assert manager.names()==['fit00-epoch0000-batch0000002', 'fit00-epoch0000-batch0000004']
    assert equal(whole, fit(resume_from(path, every=every)))
    return manager

@pytest.fixture
def s3(monkeypatch):
    "An object server, and a bucket in it"
    import s3fs
    url = f'http://127.0.0.1:{(port := free_port())}'
    p = subprocess.Popen([sys.executable, '-m', 'moto.server', '-p', str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for k,v in dict(AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID='a', AWS_SECRET_ACCESS_KEY='b', AWS_DEFAULT_REGION='us-east-1').items(): monkeypatch.setenv(k, v)
    try:
        for _ in range(200):
            with socket.socket() as s:
                if not s.connect_ex(('127.0.0.1', port)): break
            time.sleep(.1)
        fs = s3fs.S3FileSystem(skip_instance_cache=True)
        fs.mkdir('bucket')
        yield fs
    finally:
        p.terminate()
        p.wait()

def test_object_storage(s3, capsys):
    "Killed and resumed; a checkpoint that has no manifest, and one that is changed, are passed over; a sharded one; the lock"
    manager = killed_and_resumed('s3://bucket/run')
    (older,newest),root = manager.names()[-2:],'bucket/run'
    (file,) = [o for o in s3.ls(f'{root}/{newest}') if 'state.' in o]
    s3.pipe_file(file, b'{}')
    capsys.readouterr()
    assert CheckpointManager('s3://bucket/run').newest().position.name==older
    assert f'{newest} cannot be used: state.pt has 2 bytes of ' in capsys.readouterr().out
    s3.rm(f'{root}/{older}/manifest.json')
    with pytest.raises(DamagedCheckpoint, match='manifest.json is missing'): CheckpointManager('s3://bucket/run').newest()
    a,b = fit(),fit(epochs=2)
    b.load_sharded(a.save_sharded('s3://bucket/m'))
    assert equal(a, b)
    with folder_lock(CheckpointDir('s3://bucket/other')) as check:
        check()
        fit(TPUCheckpoint('s3://bucket/other'))
        with pytest.raises(InUse, match='was taken over by'): check()

@pytest.mark.parametrize('where', ['disk','memory'])
def test_killed_in_a_write(where, tmp_path, monkeypatch):
    "At each of the calls by which a checkpoint is written: the version before is there, or the new one, and the next write works"
    path = tmp_path/'run' if where=='disk' else 'memory://bucket/killed'
    place = CheckpointDir(path)
    def write(text):
        with place.replacing('m') as d:
            for o in 'ab': (d/o).write_text(text)
    class Killed(BaseException): pass
    left = [0]
    def counted(owner, name):
        f = getattr(owner, name)
        def g(*args, **kwargs):
            left[0] -= 1
            if not left[0]: raise Killed
            return f(*args, **kwargs)
        monkeypatch.setattr(owner, name, g)
    import fsspec.implementations.memory as memory
    for o in ('replace','makedirs','fsync'): counted(os, o)
    for o in ('replace','write_bytes','mkdir'): counted(Path, o)
    for o in ('put_file','pipe_file','rm','find'): counted(memory.MemoryFileSystem, o)
    write('old')
    for n in range(1, 99):
        left[0] = n
        try: write('new')
        except Killed: done = False
        else: done = True
        left[0] = 0
        seen = {o.read_text() for o in place.open('m').files.values()}
        assert seen=={'new'} if done else seen in ({'old'}, {'new'}), n
        write('old')
        if done: break
    assert n>(9 if where=='disk' else 5), n
    assert len(list(Path(path/'m').iterdir()))==3 and len(list(path.iterdir()))==1 if where=='disk' else True
    seen = set()
    for n in range(1, 99): # the first checkpoint of a training
        manager = CheckpointManager(f'{path}{n}')
        def save(): manager._write(Position(0, 1), lambda d: (d/'a').write_text('first'), None, {})
        left[0] = n
        try: save()
        except Killed: done = False
        else: done = True
        left[0] = 0
        seen.add(manager.newest() is not None) # and no error says that there are only damaged ones
        save()
        assert manager.newest().files['a'].read_text()=='first'
        if done: break
    assert n>3 and seen=={False,True}

# ---- who writes

def test_two_processes(tmp_path, monkeypatch):
    "The second one says who is there; when that one is killed, its lock is free"
    code = f"""import time; from fastai_xla.checkpoint.storage import *
with folder_lock(CheckpointDir({str(tmp_path/'run')!r})):
    print('held', flush=True); time.sleep(600)"""
    p = Forked(['-c', code], env=dict(os.environ), stdout=subprocess.PIPE, text=True)
    try:
        assert p.stdout.readline().strip()=='held'
        monkeypatch.setattr(storage, '_lock_wait', .5) # seconds
        with pytest.raises(InUse, match=f'process {p.pid} on {socket.gethostname()}'): fit(TPUCheckpoint(tmp_path/'run'))
    finally:
        p.kill()
        p.wait()
    fit(TPUCheckpoint(tmp_path/'run'))
    assert not (tmp_path/'run/.owner.json').exists()

def test_taken_over():
    "Who has lost the folder to another process writes nothing more; on a disk the kernel sees to it"
    place = CheckpointDir('memory://bucket/taken')
    def lose(): place.write('.owner.json', b'{"host": "other", "pid": 1, "token": "theirs"}')
    with pytest.raises(CheckpointError, match='was taken over by process 1 on other'): fit([TPUCheckpoint(place.path, every=2), At(3, lose)])
    assert CheckpointManager(place.path).names()==['fit00-epoch0000-batch0000002']

# ---- when it is written

def slow(cb, gate, written):
    "Have the writes of `cb` wait for `gate`"
    write = cb.manager._write
    def wait(pos, *args):
        assert gate.wait(60)
        write(pos, *args)
        written.append(pos.batch)
    cb.manager._write = wait
    return cb

def test_what_is_being_written_when_training_fails(tmp_path):
    "is there afterwards"
    gate,written = threading.Event(),[]
    threading.Timer(.5, gate.set).start()
    def fail(): raise ZeroDivisionError('the session ended')
    with pytest.raises(ZeroDivisionError): fit([slow(TPUCheckpoint(tmp_path/'run', every=4), gate, written), At(5, fail)])
    assert CheckpointManager(tmp_path/'run').names()==['fit00-epoch0000-batch0000004']

def test_a_step_does_not_wait(tmp_path):
    "Training goes on while a checkpoint is written, and what is written is of when it was due"
    gate,written,seen = threading.Event(),[],[]
    cb = slow(TPUCheckpoint(tmp_path/'run', every=4, keep=9), gate, written)
    def look():
        seen.append(list(written))
        gate.set()
    fit([cb, At(6, look)])
    assert seen==[[]] and written[0]==4
    sync = fit(TPUCheckpoint(tmp_path/'sync', every=4, keep=9, asynchronous=False))
    for name in CheckpointManager(tmp_path/'sync').names():
        a,b = bench.learner(),bench.learner()
        for o,run in ((a,'sync'), (b,'run')): load_state(o, tmp_path/run/name)
        assert equal(a, b), name

def test_a_queue_is_said(tmp_path, capsys):
    gate,written = threading.Event(),[]
    fit([slow(TPUCheckpoint(tmp_path/'run', every=1), gate, written), At(1, threading.Timer(1, gate.set).start)])
    assert capsys.readouterr().out.count('Training waited ')==1 and written==[1,2,3,4,5,6,7,8,0]

# ---- what cannot be written

def test_disk_full(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    cb = TPUCheckpoint(tmp_path/'run', every=2)
    def fill():
        cb.manager.finish()
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1])) # as on a full disk: files end after some bytes
    try:
        with pytest.raises(CheckpointError, match='could not be written.*The newest good one is fit00-epoch0000-batch0000002'): fit([cb, At(3, fill)], width=512)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert CheckpointManager(tmp_path/'run').newest().position.batch==2

def test_weights_with_nan(tmp_path, capsys):
    "are never the newest; a fit that TerminateOnNaNCallback ends is not done: it goes on from the state before"
    def spoil(): learn.model[0].weight.data.fill_(float('nan'))
    for cbs,said in (([], 'fit00-epoch0000-batch0000004 is not written: model.0.weight is not finite'), ([TerminateOnNaNCallback()], 'This fit ended early, in epoch 0 of 1')):
        run = tmp_path/f'run{len(cbs)}'
        learn = bench.learner('.', [TPUCheckpoint(run, every=2), *cbs, At(3, spoil)]).to_tpu()
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)
        assert CheckpointManager(run).names()==['fit00-epoch0000-batch0000002'] and said in capsys.readouterr().out
    assert equal(fit([resume_from(run, every=2), TerminateOnNaNCallback()]), fit())

def test_resume_from_another_folder(tmp_path):
    "Where `path` has nothing yet; the other folder stays as it is"
    with pytest.raises(KeyboardInterrupt): fit([TPUCheckpoint(tmp_path/'a', every=2), At(5, die)])
    def go(): return fit(TPUCheckpoint(tmp_path/'b', every=2, resume_from=tmp_path/'a'))
    whole,left = fit(),CheckpointManager(tmp_path/'a').names()
    for _ in range(2): assert equal(go(), whole)
    assert CheckpointManager(tmp_path/'a').names()==left and CheckpointManager(tmp_path/'b').names()[-1].startswith('fit01')
