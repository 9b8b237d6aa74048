"`to_tpu_distributed` from a notebook's process: every method trains on the cores of a pool, and the state comes home."
import os, re, signal, threading, time
import pytest
from forks import of_pools
from fresh import run_ok
from fastai.vision.all import *
from fastai.callback.all import *
from fastai_xla.all import *
from fastai_xla.runtime.ranks import rank
for o in [o for o in globals() if o.startswith('test')]: del globals()[o]  # fastai's, which pytest would collect
from fastai_xla.launch import get_pool, LaunchError
from fastai_xla.runtime import xla_counts
from fastai_xla.runtime.device import runtime_started

N,B = 2,8

def items(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    return [(a,b) for a,b in zip(x, (x.sum(1)>0).long())]

def learner(bs=B, n=90, n_valid=37, cbs=None, metrics=None, drop_last=False, model=None, **kwargs):
    "On a pool, `bs` is that of one core"
    set_seed(5)
    dls = DataLoaders(TfmdDL(items(n), bs=bs, shuffle=True, drop_last=drop_last, num_workers=0), TfmdDL(items(n_valid, 1), bs=B, num_workers=0))
    set_seed(5)
    model = model or nn.Sequential(nn.Linear(4,8), nn.ReLU(), nn.Linear(8,2))
    return Learner(dls, model, CrossEntropyLossFlat(), lr=.01, metrics=metrics or [accuracy, F1Score()], cbs=cbs,
                   splitter=lambda m: L(m[0], m[2]).map(params) if len(m)==3 else [params(m)], **kwargs)

def pair(**kwargs):
    "Plain fastai with the batch size of all cores, and the same on the cores"
    return learner(bs=N*B, **kwargs),learner(**kwargs).to_tpu_distributed(n_cores=N, processes=True)

def close(a, b, tol=2e-6): assert torch.allclose(torch.as_tensor(a, dtype=torch.float), torch.as_tensor(b, dtype=torch.float), atol=tol), (a,b)

def same_state(a, b, tol=2e-6):
    "Weights, optimizer and Recorder"
    for p,q in zip(a.model.parameters(), b.model.parameters()): close(p, q, tol)
    for p,q in zip(a.opt.all_params(), b.opt.all_params()):
        sa,sb = a.opt.state[p[0]],b.opt.state[q[0]]
        assert sa.keys()==sb.keys() and sa
        for k in sa: close(sa[k], sb[k], tol)
    assert [*map(dict, a.opt.hypers)]==[*map(dict, b.opt.hypers)]
    ra,rb = a.recorder,b.recorder
    close([*map(float, ra.losses)], [*map(float, rb.losses)], tol*5)
    for x,y in ((ra.lrs, rb.lrs), ([*map(list, ra.values)], [*map(list, rb.values)])): close(x, y, tol*5)
    assert (ra.iters, ra.metric_names, a.epoch, a.n_epoch)==(rb.iters, rb.metric_names, b.epoch, b.n_epoch)

def both(f, a, b):
    "`f` of both Learners, from the same random state"
    res = []
    for o in (a,b):
        set_seed(7)
        res.append(f(o))
    return res

def test_fits_go_on_where_the_last_ended():
    "each phase on ranks, and all that the next one depends on at home: weights, optimizer, what is frozen, the random state"
    a,b = pair()
    model,ps = b.model,list(b.model.parameters())
    with a.no_bar(), b.no_bar(): both(lambda o: [o.fit_one_cycle(1, slice(1e-3, .02)), o.freeze(), o.fit(1), o.unfreeze(), o.fit_flat_cos(1, wd=.1)], a, b)
    same_state(a, b)
    assert b.model is model and all(p is q and p.device.type=='cpu' for p,q in zip(ps, b.model.parameters()))
    assert [p.requires_grad for p in ps]==[True]*4 and b.opt.frozen_idx==a.opt.frozen_idx
    assert not runtime_started(), 'the notebook itself must not take the cores'

def test_lr_find():
    a,b = pair()
    ra,rb = both(lambda o: o.lr_find(suggest_funcs=(minimum, steep, valley, slide), num_it=60), a, b)
    close(ra, rb, 1e-5)
    assert len(a.recorder.losses)==len(b.recorder.losses) and not list((b.path/b.model_dir).glob('tmp*'))
    for p,q in zip(a.model.parameters(), b.model.parameters()): close(p, q, 0)
    both(lambda o: o.fit(1), a, b)
    same_state(a, b)

def right_of_pairs(inp, targ): return (inp[:,1]>inp[:,0]).eq(targ).float().mean()

def test_validate_and_predictions():
    a,b = pair(metrics=[accuracy, F1Score(), RocAucBinary(), Perplexity(), right_of_pairs])
    close(*both(lambda o: o.validate(), a, b))
    assert len(b.recorder.log)==len(a.recorder.log)
    for kw in (dict(with_input=True, with_loss=True, with_decoded=True), dict(ds_idx=0), dict(dl=a.dls.test_dl(items(21, 3)), act=noop)):
        for x,y in zip(*both(lambda o: o.get_preds(**kw), a, b)):
            assert x.shape==y.shape and x.dtype==y.dtype
            close(x, y)

class Counts(Callback):
    "A user's callback"
    order = Recorder.order+1
    def __init__(self): self.epochs,self.batches,self.model_seen = [],0,None
    def after_batch(self): self.batches += self.training
    def after_epoch(self):
        self.epochs.append(self.recorder.values[-1][1])
        self.model_seen,self.at = self.learn.model,self.learn
        print(f'<{rank()}>')

def test_callbacks_come_home(capfd):
    cbs = [Counts(), SaveModelCallback(fname='best'), EarlyStoppingCallback(patience=1, min_delta=10.), ReduceLROnPlateau(patience=1)]
    a,b = learner(bs=N*B, cbs=[Counts(), SaveModelCallback(fname='one'), EarlyStoppingCallback(patience=1, min_delta=10.), ReduceLROnPlateau(patience=1)]),learner(cbs=cbs)
    b.to_tpu_distributed(n_cores=N, processes=True)
    both(lambda o: o.fit(4), a, b)
    same_state(a, b)
    assert b.counts is cbs[0] and b.counts.batches==a.counts.batches and b.counts.model_seen is b.model and b.counts.at is b
    close(b.counts.epochs, a.counts.epochs)
    for n,k in (('save_model','best'), ('early_stopping','wait'), ('early_stopping','best'), ('reduce_lr_on_plateau','wait')): close(getattr(getattr(a,n),k), getattr(getattr(b,n),k))
    assert len(b.recorder.values)==len(a.recorder.values)==2, 'both stopped early'
    out = capfd.readouterr().out
    assert out.count('<0>')==2*len(a.recorder.values) and '<1>' not in out
    assert [o.name for o in b.cbs if type(o).__module__.startswith('fastai_xla')]==['tpu_pool_trainer']
    assert not [k for k,v in vars(b).items() if type(v).__module__.startswith('fastai_xla') and k!='tpu_pool_trainer']
    close(b.load('best').model[0].weight, a.load('one').model[0].weight)

def test_what_is_shown_is_shown_once(capfd):
    a,b = learner(bs=N*B, cbs=[CSVLogger('a.csv'), ShowGraphCallback()]),learner(cbs=[CSVLogger('b.csv'), ShowGraphCallback()])
    both(lambda o: o.to_tpu_distributed(n_cores=N, processes=True) and o.fit(2) if o is b else o.fit(2), a, b)
    rows = [[l.split(',')[:-1] for l in Path(f).read_text().splitlines()] for f in ('a.csv','b.csv')]
    assert len(rows[0])==len(rows[1])==3 and rows[0][0]==rows[1][0]
    for x,y in zip(rows[0][1:], rows[1][1:]): close([*map(float, x)], [*map(float, y)], 1e-5)
    out = capfd.readouterr().out
    assert out.count('train_loss')==2 and len(re.findall(r'^[01] +\d\.\d+', re.sub('.*\r', '', out), re.M))==4
    assert b.show_graph.nb_batches==a.show_graph.nb_batches and b.logger is print and not hasattr(b.progress, 'mbar')

def test_mixed_precision():
    b = learner().to_tpu_distributed(n_cores=N, processes=True).to_fp16()
    b.fit(2)
    first,again = b.recorder.values[-1],b.validate()
    close(first[1:], again, 0)
    b.remove_cbs(MixedPrecision)
    assert 0<abs(b.validate()[0]-again[0])<1e-2, 'bfloat16, not float32'
    assert b.model[0].weight.dtype==torch.float32

def test_one_batch_is_done_here():
    b = learner(n_valid=B).to_tpu_distributed(n_cores=N, processes=True)
    b.fit(1)
    want = b.model(torch.stack([o[0] for o in items(B, 1)])).softmax(1)
    with get_pool(N)._busy: close(b.get_preds()[0], want)

def test_interpretation_and_tta():
    set_seed(1)
    x = np.random.RandomState(0).randint(0, 255, (40,12,12,3)).astype(np.uint8)
    dls = DataBlock((ImageBlock,CategoryBlock), get_items=lambda s: list(range(40)), get_x=lambda i: PILImage.create(x[i]), get_y=lambda i: 'ab'[i%2],
                    splitter=IndexSplitter(range(20,40)), batch_tfms=[Flip(), Normalize.from_stats([.5]*3,[.5]*3)]).dataloaders(None, bs=4, num_workers=0)
    b = Learner(dls, nn.Sequential(ConvLayer(3,4,stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(4,2)), metrics=accuracy).to_tpu_distributed(n_cores=N, processes=True)
    b.fit(1)
    preds,targs = b.tta(n=2)
    assert preds.shape==(20,2) and list(targs)==[i%2 for i in range(20)]
    interp = ClassificationInterpretation.from_learner(b)
    assert interp.confusion_matrix().sum()==20 and abs(float((interp.confusion_matrix().diagonal().sum()/20)-b.recorder.values[-1][-1]))<1e-6
    interp.plot_confusion_matrix()
    b.show_results()
    name,_,probs = b.predict(x[3])
    close(probs, b.get_preds(dl=b.dls.test_dl([3]*5))[0][0], 1e-5)
    b.export('e.pkl')
    close(load_learner(b.path/'e.pkl').predict(x[3])[2], probs)

class Exports(Callback):
    order,run_valid = 200,False
    def after_batch(self):
        if self.train_iter==2: self.learn.export('within.pkl')

def test_export_in_a_batch_of_a_fit(tmp_path):
    "The weights as they are then, whole, and nothing of ours; training goes on"
    def mk(name, bs):
        learn = learner(cbs=Exports(), path=tmp_path/name)
        x,y = zip(*items(90))
        learn.dls = Datasets(list(range(90)), [[lambda i: x[i]], [lambda i: y[i]]], splits=(range(70), range(70,90))).dataloaders(bs=bs, num_workers=0)
        learn.path.mkdir()
        return learn
    plain,cores = mk('plain', N*B),mk('cores', B).to_tpu_distributed(n_cores=N, processes=True)
    want,got = (o.path/'within.pkl' for o in (plain, cores))
    for o in (plain, cores):
        set_seed(7)
        o.fit(1)
    assert b'xla' not in got.read_bytes()
    for a,b in zip(*(load_learner(o).model.parameters() for o in (want, got))): close(a, b)
    for a,b in zip(plain.model.parameters(), cores.model.parameters()): close(a, b)

def test_a_second_fit_compiles_nothing():
    b = learner().to_tpu_distributed(n_cores=N, processes=True)
    for _ in range(2): b.fit_one_cycle(1, .01)
    pool = get_pool(N)
    before = pool.run(lambda rank: xla_counts().compiles)
    b.fit_one_cycle(1, .01)
    assert pool.run(lambda rank: xla_counts().compiles)==before

def test_two_learners_share_the_pool():
    b,c = (learner().to_tpu_distributed(n_cores=N, processes=True) for _ in range(2))
    b.fit(1)
    pids = [p.pid for p in get_pool(N)._procs.procs]
    c.fit(1)
    assert [p.pid for p in get_pool(N)._procs.procs]==pids
    b.detach_tpu_distributed()
    assert get_pool(N).is_open and not hasattr(b, 'tpu_pool_trainer')
    c.validate()

class Fails(Callback):
    def after_batch(self):
        if self.training and self.epoch==1 and rank()==1: raise ValueError('no such thing')

def test_the_error_of_a_rank_is_seen_and_nothing_is_lost():
    b = learner(cbs=Fails()).to_tpu_distributed(n_cores=N, processes=True)
    before = [p.clone() for p in b.model.parameters()]
    with pytest.raises(LaunchError, match='no such thing') as e: b.fit(2)
    assert e.value.rank==1 and b.logger is print
    for p,q in zip(before, b.model.parameters()): close(p, q, 0)
    assert not of_pools()
    b.remove_cbs(Fails)
    b.fit(1)
    assert len(b.recorder.values)==1

class Slow(Callback):
    def after_batch(self): time.sleep(.05)

def test_ctrl_c_keeps_what_was_reached():
    b = learner(cbs=Slow()).to_tpu_distributed(n_cores=N, processes=True)
    b.fit(1)
    before,pids = [p.clone() for p in b.model.parameters()],[p.pid for p in get_pool(N)._procs.procs]
    def interrupt():
        while not 3<len(b.recorder.losses)<600: time.sleep(.05)
        os.kill(os.getpid(), signal.SIGINT)
    b.recorder.losses.clear()
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt): b.fit(100)
    n = len(b.recorder.losses)
    assert 0<n<600 and not all(torch.equal(p, q) for p,q in zip(before, b.model.parameters()))
    assert b.opt.state[next(b.model.parameters())]['step']==n+6, 'optimizer and weights are of the same moment'
    assert [p.pid for p in get_pool(N)._procs.procs]==pids, 'the replicas live on'
    b.remove_cbs(Slow)
    b.fit(1)

def test_after_to_tpu_the_cores_are_taken():
    out = run_ok("""
        from fastai.test_utils import synth_learner
        from fastai_xla.all import *
        learn = synth_learner().to_tpu()
        try: learn.detach_tpu().to_tpu_distributed(n_cores=2, processes=True)
        except RuntimeError as e: print(e)""")
    assert 'uses the XLA device, by `to_tpu`' in out and 'restart Python' in out

def test_ctx_and_detach_leave_nothing():
    b = learner()
    with b.tpu_distributed_ctx(n_cores=N, processes=True): b.fit(1)
    assert not hasattr(b, 'tpu_pool_trainer')
    w = b.model[0].weight.clone()
    b.fit(1)
    assert not torch.equal(w, b.model[0].weight)
