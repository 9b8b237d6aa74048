"Checkpoints that are damaged, malicious, shared, in object storage, on a full disk; and steps that do not wait for them."
import os, resource, signal, socket, subprocess, sys, threading, time, warnings
from functools import partial
from pathlib import Path

import pytest, torch
sys.path.insert(0, str(Path(__file__).parent.parent/'benchmarks'))
import checkpoints as bench
from fresh import free_port
from fastai.basics import Callback
from fastai.callback.tracker import TerminateOnNaNCallback
from fastai_xla.all import *
from fastai_xla.checkpoint.writer import CheckpointError

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
    good,learn = CheckpointStore(trained/'run').folders()[-1],bench.learner().to_tpu()
    for name,f in bench.attacks().items():
        _,loaded,resumed,ran = bench.try_attack(f, good, learn, tmp_path)
        assert not ran and not loaded.startswith('bare') and not resumed.startswith('bare'), (name, loaded, resumed)
    assert not (tmp_path/'executed').exists()

def write_old(learn, folder, mark):
    "In the format before this one, with a `progress.pkl` that would make the folder `mark`"
    import json, pickle, torch.distributed.checkpoint as dcp
    dcp.save(to_host(learner_state(learn)), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder/'progress.pkl').write_bytes(pickle.dumps([bench.Payload(mark)]))
    (folder/'position.json').write_text(json.dumps(dict(fit=0, epoch=1, batch=0, trained=False, run_id='a', n_ranks=1)))

def test_old_checkpoints(tmp_path, capsys):
    "have metadata and progress as pickles: who trusts them reads model and optimizer, or begins with the weights; no training goes on from them"
    a,run = fit(),tmp_path/'run'
    old = run/'fit00-epoch0001-batch0000000'
    write_old(a, old, tmp_path/'executed')
    def begin(f, **kwargs):
        learn = bench.learner('.', f(**kwargs)).to_tpu()
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 0.)
        return learn
    new = partial(resume_from, tmp_path/'new')
    for f in (lambda: bench.learner().load_sharded(old), lambda: begin(partial(resume_from, run)), lambda: begin(new, init_from=run), lambda: begin(new, init_from=old)):
        with pytest.raises(DamagedCheckpoint, match='`allow_pickle=True` reads it'): f()
    b = bench.learner().load_sharded(old, allow_pickle=True)
    assert equal(a, b) and all(torch.equal(a.opt.state[p]['sqr_avg'].cpu(), b.opt.state[q]['sqr_avg']) for p,q in zip(a.model.parameters(), b.model.parameters()))
    with pytest.raises(DamagedCheckpoint, match=r'of an earlier version, from which only the weights go on: `resume_from\(.*, init_from=.*, allow_pickle=True\)` begins'):
        begin(partial(resume_from, run, allow_pickle=True))
    for i,path in enumerate((run, old)):
        assert equal(a, begin(partial(resume_from, tmp_path/f'new{i}', init_from=path, allow_pickle=True)))
        assert f'Starting with the weights of {old}' in capsys.readouterr().out
    assert not (tmp_path/'executed').exists()

# ---- where

def killed_and_resumed(path, every=2):
    "A training that was killed and goes on at `path` is the one that was not"
    whole = fit()
    with pytest.raises(KeyboardInterrupt): fit([TPUCheckpoint(path, every=every), At(5, die)])
    store = CheckpointStore(path)
    assert store.names()==['fit00-epoch0000-batch0000002', 'fit00-epoch0000-batch0000004']
    assert equal(whole, fit(resume_from(path, every=every)))
    return store

@pytest.mark.parametrize('kind', ['memory','file'])
def test_file_systems(kind, tmp_path): killed_and_resumed({'memory': 'memory://bucket/run', 'file': f'file://{tmp_path}/run'}[kind])

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
    "Killed and resumed; a checkpoint that has no manifest, and one that is changed, are passed over; a sharded one; the lease"
    store = killed_and_resumed('s3://bucket/run')
    (older,newest),root = store.names()[-2:],'bucket/run'
    s3.pipe_file(f'{root}/{newest}/index.json', b'{}')
    capsys.readouterr()
    assert CheckpointStore('s3://bucket/run').newest().position.name==older
    assert capsys.readouterr().out.startswith(f'Passed over the checkpoint {newest}: index.json has 2 bytes of ')
    s3.rm(f'{root}/{older}/manifest.json')
    with pytest.raises(DamagedCheckpoint, match='manifest.json is missing'): CheckpointStore('s3://bucket/run').newest()
    a,b = fit(),fit(epochs=2)
    b.load_sharded(a.save_sharded('s3://bucket/m'))
    assert equal(a, b)
    with Lease(place_at('s3://bucket/other')):
        with pytest.raises(InUse, match=f'is in use by process {os.getpid()} on'): fit(TPUCheckpoint('s3://bucket/other'))

# ---- who writes

def test_two_processes(tmp_path):
    "The second one says who is there; when that one is killed, its lease is taken over"
    code = f"import time; from fastai_xla.storage.lease import Lease; from fastai_xla.storage.files import place_at\nLease(place_at({str(tmp_path/'run')!r})).__enter__()\nprint('held', flush=True); time.sleep(600)"
    p = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
    try:
        assert p.stdout.readline().strip()=='held'
        with pytest.raises(InUse, match=f'process {p.pid} on {socket.gethostname()}'): fit(TPUCheckpoint(tmp_path/'run'))
    finally:
        p.kill()
        p.wait()
    fit(TPUCheckpoint(tmp_path/'run'))
    assert not (tmp_path/'run/.lease.json').exists()

def test_taken_over(tmp_path):
    "Who has lost the folder to another process writes nothing more"
    def lose(): place_at(tmp_path/'run').write('.lease.json', b'{"host": "other", "pid": 1, "token": "theirs"}')
    with pytest.raises(CheckpointError, match='was taken over by process 1 on other'): fit([TPUCheckpoint(tmp_path/'run', every=2, on_error='warn'), At(3, lose)])
    assert CheckpointStore(tmp_path/'run').names()==['fit00-epoch0000-batch0000002']

# ---- when it is written

def slow(cb, gate, written):
    "Have the writes of `cb` wait for `gate`"
    write = cb._write
    def wait(pos, *args):
        assert gate.wait(60)
        write(pos, *args)
        written.append(pos.batch)
    cb._write = wait
    return cb

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
    for name in CheckpointStore(tmp_path/'sync').names():
        a,b = bench.learner(),bench.learner()
        for o,run in ((a,'sync'), (b,'run')): load_state(o, tmp_path/run/name)
        assert equal(a, b), name

def test_a_queue_is_said(tmp_path, capsys):
    gate,written = threading.Event(),[]
    threading.Timer(1, gate.set).start()
    fit(slow(TPUCheckpoint(tmp_path/'run', every=1), gate, written))
    assert capsys.readouterr().out.count('training waits for that')==1 and written==[1,2,3,4,5,6,7,8,0]

# ---- what cannot be written

def full():
    "As on a full disk: files end after some bytes"
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

@pytest.fixture
def room():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)

@pytest.mark.parametrize('on_error', ['raise','warn'])
def test_disk_full(tmp_path, room, on_error):
    cb = TPUCheckpoint(tmp_path/'run', every=2, on_error=on_error)
    def fill():
        cb.background.join()
        full()
    cbs = [cb, At(3, fill)]
    if on_error=='raise':
        with pytest.raises(CheckpointError, match='could not be written.*The newest good one is fit00-epoch0000-batch0000002'): fit(cbs, width=512)
    else:
        with pytest.warns(UserWarning, match='could not be written.*Training goes on'): fit(cbs, width=512)
    assert CheckpointStore(tmp_path/'run').newest().position.batch==2

def test_said_at_the_start(tmp_path):
    (tmp_path/'file').touch()
    began = []
    with pytest.raises(OSError, match='No checkpoint can be written to'): fit([TPUCheckpoint(tmp_path/'file/run'), At(1, lambda: began.append(1))])
    assert not began

# ---- which stay

def test_best_and_every(tmp_path):
    cb = TPUCheckpoint(tmp_path/'run', keep=1, keep_best=1, keep_every=3, monitor='accuracy')
    learn = fit(cb, epochs=8)
    names,acc = cb.store.names(),[o[2] for o in learn.recorder.values]
    infos = {o: cb.store.info(o) for o in names}
    assert {o.number for o in infos.values()}>={3,6,8} and any(o.metric==max(acc) for o in infos.values()) and len(names)<=4

def test_weights_with_nan(tmp_path, capsys):
    "are never the newest"
    def spoil(): learn.model[0].weight.data.fill_(float('nan'))
    learn = bench.learner('.', [TPUCheckpoint(tmp_path/'run', every=2), At(3, spoil)]).to_tpu()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)
    assert CheckpointStore(tmp_path/'run').names()==['fit00-epoch0000-batch0000002']
    assert 'fit00-epoch0000-batch0000004 is not written: model.0.weight is not finite' in capsys.readouterr().out

def test_ended_by_nan(tmp_path, capsys):
    "A fit that TerminateOnNaNCallback ends is not done: it goes on from the state before"
    def spoil(): learn.model[0].weight.data.fill_(float('nan'))
    learn = bench.learner('.', [TPUCheckpoint(tmp_path/'run', every=2), TerminateOnNaNCallback(), At(3, spoil)]).to_tpu()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)
    assert CheckpointStore(tmp_path/'run').names()==['fit00-epoch0000-batch0000002']
    assert 'TerminateOnNaNCallback ended this fit early' in capsys.readouterr().out
    assert equal(fit([resume_from(tmp_path/'run', every=2), TerminateOnNaNCallback()]), fit())

def test_resume_from_another_folder(tmp_path):
    "Where `path` has nothing yet; the other folder stays as it is"
    with pytest.raises(KeyboardInterrupt): fit([TPUCheckpoint(tmp_path/'a', every=2), At(5, die)])
    def go(): return fit(TPUCheckpoint(tmp_path/'b', every=2, resume_from=tmp_path/'a'))
    whole,left = fit(),CheckpointStore(tmp_path/'a').names()
    for _ in range(2): assert equal(go(), whole)
    assert CheckpointStore(tmp_path/'a').names()==left and CheckpointStore(tmp_path/'b').names()[-1].startswith('fit01')
