"Tar shards and other streams on replicas that are threads of this process: equal numbers of batches, each sample once, order by the seed, errors that are seen."
import os
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0') # compiles three times as fast; read when the runtime starts
import re
import fsspec, pytest, webdataset
from fsspec.implementations.memory import MemoryFileSystem
from fastai_xla.virtual_cores import run_replicas, use_virtual_cores
use_virtual_cores(2)
from synth import *
from fresh import repo, run

# ---- shards in an object store

class Bucket(MemoryFileSystem):
    "Object storage: each reader of a file has a place of its own in it"
    protocol,store,pseudo_dirs,read = 'bucket',{},[''],[]
    def _open(self, path, mode='rb', **kwargs):
        if mode!='rb': return super()._open(path, mode, **kwargs)
        self.read.append(path)
        return io.BytesIO(self.cat_file(path))

fsspec.register_implementation('bucket', Bucket)

def numbers(b): return torch.frombuffer(bytearray(b), dtype=torch.float32).clone()

def write(name, items, first=0):
    with fsspec.open(f'bucket://{name}.tar', 'wb') as f, webdataset.TarWriter(f) as out:
        for i,(x,y) in enumerate(items, first): out.write({'__key__': f'{i:05d}', 'x': x.numpy().tobytes(), 'cls': str(int(y))})
    return len(items)

def shards(n, name, sizes=(7,0,30,11,3,25), seed=0, **kwargs):
    "`n` samples in shards of unequal sizes, the last of which takes what is left; input 0 is the number of the sample"
    items = [(torch.cat([tensor([float(i)]), x[1:]]), y) for i,(x,y) in enumerate(vectors(n, seed=seed))]
    starts = np.cumsum([0,*sizes]).clip(max=n)
    ends = [*starts[1:], n]
    got = [write(f'{name}-{k:02d}', items[a:b], a) for k,(a,b) in enumerate(zip(starts, ends))]
    return TarShards(f'bucket://{name}-{{00..{len(got)-1:02d}}}.tar', dict(x=numbers, cls=int), got, **kwargs)

def tar_dls(n_trn=101, n_val=45, bs=4, num_workers=0, **kwargs):
    return DataLoaders(TarDL(shards(n_trn, 'trn', **kwargs), bs=bs, shuffle=True, drop_last=True, num_workers=num_workers),
                       TarDL(shards(n_val, 'val', seed=1, **kwargs), bs=bs, num_workers=num_workers))

def ids(dl): return [[int(i) for i in b[0][:,0]] for b in dl]

def flat(bs): return [o for b in bs for o in b]

def test_sizes_are_counted():
    s = shards(101, 'trn')
    assert shard_sizes(s.urls)==s.sizes and sum(s.sizes)==101 and 0 in s.sizes

def test_the_seed_decides_and_workers_do_not():
    def epochs(num_workers, device):
        set_seed(3)
        dl = tar_dls(num_workers=num_workers, window=10).train
        return [ids(XLADL(dl, DEVICE, prefetch=num_workers+1) if device else dl) for _ in range(2)]
    want = epochs(0, False)
    assert want[0]!=want[1] and all(len(e)==25 and len(set(flat(e)))==100 for e in want)
    for nw in (0,1,2): assert epochs(nw, True)==want

# ---- on replicas

def on_ranks(num_workers=0, **kwargs):
    "What each of two ranks gets of two epochs of training and one of validation"
    def f(r):
        trn,val = [ShardedDL(dl, xla_device(), train=t, pad=not t) for dl,t in ((dls[r].train,True), (dls[r].valid,False))]
        return [ids(trn), ids(trn)], [ids([val.trim(b)])[0] for b in val], (len(trn), len(val))
    dls = []
    for _ in range(2):
        set_seed(3)
        dls.append(tar_dls(num_workers=num_workers, **kwargs))
    set_seed(7)
    return run_replicas(f)

@pytest.mark.parametrize('num_workers', [0, 2])
def test_shares_of_ranks(num_workers):
    (trn,val,n),(trn2,val2,n2) = on_ranks(num_workers, window=10)
    for a,b in zip(trn, trn2):
        assert [len(o) for o in a]==[len(o) for o in b]==[4]*n[0]
        assert not set(flat(a))&set(flat(b)) and len(set(flat(a)))+len(set(flat(b)))==96
    assert trn[0]!=trn[1]
    assert sorted(flat(val)+flat(val2))==list(range(45)) and (len(val),len(val2))==(n[1],n2[1])==(6,6)

def test_each_rank_reads_its_own_part():
    "With as many ranks as lanes and shards of one size, no shard is read by both"
    s = shards(64, 'even', sizes=(16,16,16), lanes=2)
    Bucket.read.clear()
    got = run_replicas(lambda r: flat(ids(ShardedDL(TarDL(s, bs=4, num_workers=0), xla_device(), train=True))))
    assert sorted(flat(got))==list(range(64)) and sorted(Bucket.read)==sorted(s.urls)

def test_training_on_replicas_is_exact():
    def mk():
        set_seed(42)
        return Learner(tar_dls(window=10), mlp(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
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

def test_a_pipeline_of_webdataset_itself():
    "Any IterableDataset can be shared, at the price that each rank reads it all"
    urls = shards(101, 'trn').urls
    def make(s): return numbers(s['x']),int(s['cls'])
    def f(r):
        dls = [TfmdDL(webdataset.DataPipeline(webdataset.SimpleShardList(urls), opened, webdataset.tariterators.tar_file_expander,
                      webdataset.tariterators.group_by_keys, webdataset.map(make)), bs=4, n=101, num_workers=0) for _ in range(2)]
        return [ids(ShardedDL(dl, xla_device(), train=t)) for dl,t in zip(dls, (True,False))]
    def opened(src):
        for s in src: yield dict(s, stream=fsspec.open(s['url'], 'rb').open())
    (trn,val),(trn2,val2) = run_replicas(f)
    assert [len(o) for o in trn]==[len(o) for o in trn2]==[4]*12 and sorted(flat(trn)+flat(trn2))==list(range(96))
    assert sorted(flat(val)+flat(val2))==list(range(101))

# ---- what goes wrong

@pytest.mark.parametrize('num_workers', [0, 2])
def test_a_shard_that_breaks_off_in_training(num_workers):
    dls = tar_dls(num_workers=num_workers)
    fs,url = fsspec.filesystem('bucket'),'bucket://trn-05.tar'
    whole = fs.cat_file(url)
    fs.pipe_file(url, whole[:len(whole)//2])
    learn = Learner(dls, mlp(), loss_func=CrossEntropyLossFlat()).to_tpu()
    with learn.no_bar(), pytest.raises(Exception, match='trn-05.tar'): learn.fit(1)
    fs.pipe_file(url, whole)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert len(learn.recorder.values)==1 and not [t for t in threading.enumerate() if t.name=='XLADL']

def test_a_sample_that_cannot_be_decoded():
    s = shards(20, 'odd', sizes=(5,5))
    s.tfms = dict(x=numbers, cls=lambda b: 1/0)
    with pytest.raises(ValueError, match=r'Sample 00000 of bucket://odd-00.tar: ZeroDivisionError') as e: list(XLADL(TarDL(s, bs=4, num_workers=0), DEVICE))
    assert isinstance(e.value.__cause__, ZeroDivisionError)

# ---- the example, on a pool of cores

def test_the_example(tmp_path):
    res = run(repo/'examples'/'stream_digits.py', '--epochs', '2', '--cores', '2', '--out', tmp_path)
    assert res.returncode==0, res.stderr
    acc,n,in_order = re.search(r'Done: ([\d.]+)% of (\d+) .* cores, (\d+) predictions', res.stdout).groups()
    assert float(acc)>90 and n==in_order=='360'
    assert len(list((tmp_path/'shards').glob('*.tar')))==19
