"Shards of tar and TFRecord files in an object store and over HTTP, on replicas that are threads of this process: equal numbers of batches, each sample once, order by the seed, errors that say what to do."
import re, socket
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
import fsspec, pytest, webdataset
from tensorboard.summary.writer.record_writer import RecordWriter
from threads import run_replicas, use_virtual_cores
use_virtual_cores(2)
from fastai_xla.data.shards import _example
from synth import *
from fresh import repo, run
from fastai_xla.distributed.loader import ShardedDL
from fastai_xla.runtime.ranks import rank

# ---- a server, and shards on it or in an object store

class Handler(SimpleHTTPRequestHandler):
    "Serves a folder, without ranges; hangs up in the middle of a file as often as `cut` says"
    read,cut,lock = [],{},threading.Lock()
    def log_message(self, *args): pass
    def do_GET(self):
        self.read.append(self.path[1:])
        super().do_GET()
    def copyfile(self, source, out):
        name = self.path[1:]
        with self.lock: self.cut[name] = (left := self.cut.get(name, 0)) - 1
        if left<=0: return super().copyfile(source, out)
        b = source.read()
        out.write(b[:len(b)//2])

class Store:
    "Where shards are: `memory://`, or a folder behind a real server"
    def __init__(self, folder):
        self.server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Handler, directory=folder))
        self.folder,self.http,self.memory = Path(folder),f'http://127.0.0.1:{self.server.server_port}',fsspec.filesystem('memory')
        fsspec.filesystem('http') # whose thread stays
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
    def put(self, where, name, b):
        if where=='memory': self.memory.pipe_file(f'memory://{name}', b)
        else: (self.folder/name).write_bytes(b)
    def url(self, where, name): return f"{'memory:/' if where=='memory' else self.http}/{name}"

@pytest.fixture(autouse=True, scope='module')
def store(tmp_path_factory):
    globals()['STORE'] = Store(tmp_path_factory.mktemp('served'))
    yield
    STORE.server.shutdown()
    STORE.server.server_close()

def numbers(b): return torch.frombuffer(bytearray(b), dtype=torch.float32).clone()

def tar(items, first):
    f = io.BytesIO()
    with webdataset.TarWriter(f) as out:
        for i,(x,y) in enumerate(items, first): out.write({'__key__': f'{i:05d}', 'x': x.numpy().tobytes(), 'cls': str(int(y))})
    return f.getvalue()

def tfrec(items, first):
    f = io.BytesIO()
    for x,y in items:
        ex = _example()()
        ex.features.feature['x'].float_list.value.extend(x.tolist())
        ex.features.feature['cls'].int64_list.value.append(int(y))
        RecordWriter(f).write(ex.SerializeToString())
    return f.getvalue()

KINDS = dict(tar=(TarShards, tar, dict(x=numbers, cls=int)), tfrec=(TFRecordShards, tfrec, dict(x=tensor, cls=int)))
PLACES = [('tar','memory'), ('tar','http'), ('tfrec','http')]

def shards(n, name, kind='tar', where='memory', sizes=(7,0,30,11,3,25), seed=0, **kwargs):
    "`n` samples in shards of unequal sizes, the last of which takes what is left; input 0 is the number of the sample"
    items = [(torch.cat([tensor([float(i)]), x[1:]]), y) for i,(x,y) in enumerate(vectors(n, seed=seed))]
    starts,(cls,write,tfms) = np.cumsum([0,*sizes]).clip(max=n),KINDS[kind]
    ends = [*starts[1:], n]
    for k,(a,b) in enumerate(zip(starts, ends)): STORE.put(where, f'{name}-{k:02d}.{kind}', write(items[a:b], a))
    return cls(STORE.url(where, f'{name}-{{00..{len(ends)-1:02d}}}.{kind}'), tfms, [int(b-a) for a,b in zip(starts, ends)], **kwargs)

def stream_dls(n_trn=101, n_val=45, bs=4, num_workers=0, **kwargs):
    return DataLoaders(StreamDL(shards(n_trn, 'trn', **kwargs), bs=bs, shuffle=True, drop_last=True, num_workers=num_workers),
                       StreamDL(shards(n_val, 'val', seed=1, **kwargs), bs=bs, num_workers=num_workers))

def ids(dl): return [[int(i) for i in b[0][:,0]] for b in dl]

def flat(bs): return [o for b in bs for o in b]

@pytest.mark.parametrize('kind,where', PLACES)
def test_the_seed_decides_and_workers_do_not(kind, where):
    s = shards(101, 'trn', kind, where)
    assert s.count(s.urls)==s.sizes and sum(s.sizes)==101 and 0 in s.sizes
    def epochs(num_workers, device):
        set_seed(3)
        dl = stream_dls(num_workers=num_workers, window=10, kind=kind, where=where).train
        return [ids(XLADL(dl, DEVICE, prefetch=num_workers+1) if device else dl) for _ in range(2)]
    want = epochs(0, False)
    assert want[0]!=want[1] and all(len(e)==25 and len(set(flat(e)))==100 for e in want)
    for nw in (0,2): assert epochs(nw, True)==want

# ---- on replicas

def on_ranks(num_workers=0, **kwargs):
    "What each of two ranks gets of two epochs of training and one of validation"
    def f(r):
        trn,val = [ShardedDL(dl, xla_device(), train=t, pad=not t) for dl,t in ((dls[r].train,True), (dls[r].valid,False))]
        return [ids(trn), ids(trn)], [ids([val.trim(b)])[0] for b in val], (len(trn), len(val))
    dls = []
    for _ in range(2):
        set_seed(3)
        dls.append(stream_dls(num_workers=num_workers, **kwargs))
    set_seed(7)
    return run_replicas(f)

@pytest.mark.parametrize('kind,where,num_workers', [('tar','memory',0), ('tar','http',2), ('tfrec','http',2)])
def test_shares_of_ranks(kind, where, num_workers):
    "Over ranks and their workers"
    (trn,val,n),(trn2,val2,n2) = on_ranks(num_workers, window=10, kind=kind, where=where)
    for a,b in zip(trn, trn2):
        assert [len(o) for o in a]==[len(o) for o in b]==[4]*n[0]
        assert not set(flat(a))&set(flat(b)) and len(set(flat(a)))+len(set(flat(b)))==96
    assert trn[0]!=trn[1]
    assert sorted(flat(val)+flat(val2))==list(range(45)) and (len(val),len(val2))==(n[1],n2[1])==(6,6)

@pytest.mark.parametrize('kind', KINDS)
def test_each_rank_reads_its_own_part(kind):
    "With as many ranks as lanes and shards of one size, each shard is fetched once, by one of them"
    s = shards(64, 'even', kind, 'http', sizes=(16,16,16), lanes=2)
    Handler.read.clear()
    got = run_replicas(lambda r: flat(ids(ShardedDL(StreamDL(s, bs=4, num_workers=0), xla_device(), train=True))))
    assert sorted(flat(got))==list(range(64)) and sorted(Handler.read)==sorted(o.rpartition('/')[2] for o in s.urls)

def test_training_on_replicas_is_exact():
    def mk():
        set_seed(42)
        return Learner(stream_dls(window=10), mlp(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    def f(r):
        learn = learns[r].to_tpu_distributed()
        with learn.no_bar(), learn.no_logging():
            learn.fit(1, 1e-2)
            return learn.validate(), learn.get_preds(), to_host(dict(learn.model.state_dict()))
    learns = [mk() for _ in range(2)]
    set_seed(7)
    a,b = run_replicas(f)
    plain = mk()
    plain.model.load_state_dict(a[2])
    with plain.no_bar(): want = list(plain.validate()), plain.get_preds()
    for got in (a,b):
        close(want[0], list(got[0]))
        close(want[1], got[1])
    assert a[1][1].tolist()==[int(y) for _,y in vectors(45, seed=1)]                        # in the order of the shards

# ---- what goes wrong

def cut_off(s):
    f = STORE.folder/'bad-02.tar'
    f.write_bytes(f.read_bytes()[:8000])
def missing(s): (STORE.folder/'bad-02.tar').unlink()
def hung_up(s): Handler.cut['bad-02.tar'] = 99
def unreachable(s):
    with socket.socket() as free: # and closed again
        free.bind(('127.0.0.1', 0))
        s.urls[2] = s.urls[2].replace(str(STORE.server.server_port), str(free.getsockname()[1]))

WRONG = [(cut_off, OSError, r'cannot be read beyond its first \d+ samples.*write or copy it anew'), (missing, FileNotFoundError, 'There is no shard.*check the address'),
         (hung_up, OSError, r'cannot be read beyond its first \d+ samples .ClientPayloadError'), (unreachable, OSError, 'cannot be opened .*check the address, the network')]

@pytest.mark.parametrize('spoil,exc,told', WRONG, ids=lambda o: getattr(o, '__name__', ''))
def test_what_is_said_of_a_shard(spoil, exc, told):
    s = shards(64, 'bad', where='http', sizes=(7,0,30))
    spoil(s)
    with nothing_left(), pytest.raises(exc, match=f'(?s){told}') as e: list(XLADL(StreamDL(s, bs=4, num_workers=2), DEVICE))
    assert 'bad-02.tar' in str(e.value)
    assert s[6][0][0]==6 and s[63][0][0]==63, 'the other shards are as they were'

@pytest.mark.parametrize('kind,num_workers', [('tar',2), ('tfrec',0)])
def test_a_connection_that_breaks_is_made_again(kind, num_workers):
    dl = StreamDL(shards(64, 'flaky', kind, 'http', sizes=(7,0,30), window=5), bs=4, shuffle=True, num_workers=num_workers)
    Handler.cut.update({f'flaky-02.{kind}': 1, f'flaky-03.{kind}': 1})
    assert sorted(flat(ids(XLADL(dl, DEVICE))))==list(range(64))
    assert all(Handler.cut[f'flaky-{i}.{kind}']<0 for i in ('02','03'))

def test_a_shard_that_breaks_off_in_training():
    dls = stream_dls(num_workers=2)
    whole = STORE.memory.cat_file('trn-05.tar')
    STORE.put('memory', 'trn-05.tar', whole[:len(whole)//2])
    learn = Learner(dls, mlp(), loss_func=CrossEntropyLossFlat()).to_tpu()
    with learn.no_bar(), pytest.raises(OSError, match='trn-05.tar cannot be read'): learn.fit(1)
    STORE.put('memory', 'trn-05.tar', whole)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert len(learn.recorder.values)==1 and not [t for t in threading.enumerate() if t.name=='XLADL']

def test_a_sample_that_cannot_be_decoded():
    s = shards(20, 'odd', sizes=(5,5))
    s.tfms = dict(x=numbers, cls=lambda b: 1/0)
    with pytest.raises(ValueError, match=r'Sample 00000 of memory://odd-00.tar: ZeroDivisionError') as e: list(XLADL(StreamDL(s, bs=4, num_workers=0), DEVICE))
    assert isinstance(e.value.__cause__, ZeroDivisionError)

# ---- the example, on a pool of cores

@pytest.mark.slow
def test_the_example(tmp_path):
    res = run(repo/'examples'/'stream_digits.py', '--epochs', '2', '--cores', '2', '--out', tmp_path)
    assert res.returncode==0, res.stderr
    acc,n,in_order = re.search(r'Done: ([\d.]+)% of (\d+) .* cores, (\d+) predictions', res.stdout).groups()
    assert float(acc)>90 and n==in_order=='360'
    assert len(list((tmp_path/'shards').glob('*.tar')))==19
