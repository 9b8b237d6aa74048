"""Sharded checkpoints, and training that was killed and goes on. Cases run in groups, each in a fresh process: `python test_checkpoint.py <group>`."""
import os, signal, sys, time
from functools import partial
from pathlib import Path

import pytest
from forks import Forked
from fresh import packages_without, repo, run, run_ok

FLAGS = dict(PJRT_DEVICE='CPU', CPU_NUM_DEVICES=None, MPLBACKEND='Agg')
every = 3

# ---- in the processes

def names():
    from types import SimpleNamespace
    import fastai.basics, fastai.callback.all, fastai_xla.all, parity_models
    return SimpleNamespace(**{k: v for m in (fastai.basics, fastai.callback.all, fastai_xla.all, parity_models) for k,v in vars(m).items() if not k.startswith('_')})

def learner(l, place, cbs=()):
    "With draws everywhere: of samples, of their order, on the device; with buffers, groups and metrics of the training set"
    l.set_seed(1)
    x = l.torch.randn(77, 16, generator=l.torch.Generator().manual_seed(0))
    samples = list(zip(x, x[:,:4].argmax(1)))
    torch,random,L,params = l.torch,l.random,l.L,l.params
    class Noise(l.ItemTransform):
        def encodes(self, o): return o[0]+torch.randn(16)*.1+random.random(), o[1]
    dls = l.DataLoaders(l.TfmdDL(samples[:64], bs=8, shuffle=True, after_item=Noise()), l.TfmdDL(samples[64:], bs=8))
    model = l.nn.Sequential(l.nn.Sequential(l.nn.Linear(16,64,bias=False), l.nn.BatchNorm1d(64), l.nn.ReLU(), l.nn.Dropout(.5)), l.nn.Linear(64,4))
    learn = l.Learner(dls, model, loss_func=l.CrossEntropyLossFlat(), path=Path('.'), metrics=[l.accuracy, l.F1Score(average='macro')],
                      splitter=lambda m: L(m[0], m[1]).map(params), cbs=cbs)
    learn.recorder.train_metrics = True
    return place(learn)

def train(l, place, cbs=()):
    "Three fits: frozen, whole, and with accumulation and, but in replicas that are threads and share a random state, MixUp"
    learn = learner(l, place, cbs)
    l.set_seed(3)
    with learn.no_bar(), learn.no_logging():
        learn.fine_tune(2, 1e-2, freeze_epochs=1)
        learn.fit_one_cycle(2, 1e-2, cbs=[l.GradientAccumulation(16), *([] if hasattr(learn, 'tpu_pool_trainer') else [l.MixUp()])])
    return outcome(l, learn)

def outcome(l, learn):
    rec = learn.recorder
    return l.to_host([dict(learn.model.state_dict()), learn.opt.state_dict()['state'], [dict(h) for h in learn.opt.hypers], list(map(float, rec.losses)), list(rec.values), list(rec.lrs),
                      list(rec.iters), [p.requires_grad for p in learn.model.parameters()], learn.train_iter, l.torch.rand(2)])

def equal(l, a, b, tol=0):
    a,b = l.leaves(a),l.leaves(b)
    assert a.keys()==b.keys()
    far = {k: abs(a[k]-b[k]).max(initial=0) for k in a if not abs(a[k]-b[k]).max(initial=0)<=tol}
    assert not far, far

def dying(l, at, how):
    "A callback that calls `how` at batch `at`, of training and validation"
    batches = iter(range(1, at+1))
    class Dies(l.Callback):
        order,replayable = 2000,True # as a kill from outside, it changes no step
        def __init__(self): self.count = lambda: next(batches, None)
        def after_batch(self):
            if self.count()==at: how()
    return Dies()

def killed():
    raise KeyboardInterrupt

def again(l, place, at, how=killed, exc=KeyboardInterrupt, **kwargs):
    "What comes out when a training dies at batch `at` and runs again; and the checkpoints that it left"
    l.shutil.rmtree('run', ignore_errors=True)
    with pytest.raises(exc): train(l, place, [l.TPUCheckpoint('run', **{**dict(every=every), **kwargs}), dying(l, at, how)])
    left = sorted(os.listdir('run')) if Path('run').exists() else []
    l.set_seed(at)
    return train(l, place, [l.resume_from('run', **{**dict(every=every), **kwargs})]),left

def one():
    "Killed in the first epoch, in validation, after an epoch, and in the last fit, between steps; then by signals"
    l = names()
    place = lambda o: o.to_tpu()
    plain = train(l, place)
    equal(l, plain, train(l, place, [l.resume_from('whole', every=every)]))
    assert sorted(os.listdir('whole'))==['fit02-epoch0001-batch0000008', 'fit03-epoch0000-batch0000000']
    equal(l, plain, train(l, place, [l.resume_from('whole', every=every)])), 'what is done is not done again'
    for at,newest in ((2,None), (5,'fit00-epoch0000-batch0000003'), (10,'fit00-epoch0000-batch0000006'), (13,'fit01-epoch0000-batch0000003'), (37,'fit02-epoch0000-batch0000006')):
        res,left = again(l, place, at)
        assert left[-1:]==([newest] if newest else [])
        equal(l, plain, res)
    l.shutil.rmtree('run')
    for at in (4, 5, 14, 3):
        with pytest.raises(KeyboardInterrupt): train(l, place, [l.resume_from('run', every=1), dying(l, at, killed)])
    equal(l, plain, train(l, place, [l.resume_from('run', every=1)])), 'several deaths in a row'
    term = lambda: os.kill(os.getpid(), signal.SIGTERM)
    for at,newest in ((5,'fit00-epoch0000-batch0000006'), (9,'fit00-epoch0000-batch0000008')):
        res,left = again(l, place, at, term, SystemExit)
        assert left[-1]==newest
        equal(l, plain, res)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

def by_epoch():
    "One each epoch; Ctrl-C in the middle of one; the newest alone is kept"
    l = names()
    place = lambda o: o.to_tpu()
    plain = train(l, place)
    res,left = again(l, place, 25, lambda: os.kill(os.getpid(), signal.SIGINT), keep=1, every=None)
    assert left==['fit01-epoch0001-batch0000006']
    equal(l, plain, res)
    res,left = again(l, place, 25, keep=1, every=None)
    assert left==['fit01-epoch0001-batch0000000']
    equal(l, plain, res)

def waiting():
    "Gradients that wait for a step at the end of an epoch and of a fit"
    l = names()
    def f(cbs=()):
        learn = learner(l, lambda o: o.to_tpu(), cbs)
        l.set_seed(3)
        with learn.no_bar(), learn.no_logging():
            for n in (1,2): learn.fit(n, 1e-2, cbs=l.GradientAccumulation(24))
        return outcome(l, learn)
    plain = f()
    for at,newest in ((12,'fit01-epoch0000-batch0000000'), (24,'fit01-epoch0001-batch0000000')):
        l.shutil.rmtree('run', ignore_errors=True)
        with pytest.raises(KeyboardInterrupt): f([l.TPUCheckpoint('run'), dying(l, at, killed)])
        assert sorted(os.listdir('run'))[-1]==newest
        equal(l, plain, f([l.resume_from('run')]))

def slow():
    "A checkpoint that is being written when training fails is there afterwards"
    l = names()
    class Fails(l.Callback):
        order = 2000
        def after_batch(self):
            if self.training and self.train_iter==5: raise ZeroDivisionError('the session ended')
    cb = l.TPUCheckpoint('slow', every=4)
    write,cb._write = cb._write,lambda *args: (time.sleep(.5), write(*args))
    learn = learner(l, lambda o: o.to_tpu(), [cb, Fails()])
    with learn.no_bar(),learn.no_logging(),pytest.raises(ZeroDivisionError): learn.fit(1, 1e-2)
    assert sorted(os.listdir('slow'))==['fit00-epoch0000-batch0000004']

def texts():
    "The hidden state of an RNN and the order of texts that go on from batch to batch"
    l = names()
    def f(cbs=()):
        learn = l.text(cbs=cbs).to_tpu()
        l.set_seed(3)
        with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
        return outcome(l, learn)
    n = len(l.text().dls.train)
    plain = f()
    with pytest.raises(KeyboardInterrupt): f([l.TPUCheckpoint('run', every=2), dying(l, n+len(l.text().dls.valid)+3, killed)])
    assert sorted(os.listdir('run'))[-1].startswith('fit00-epoch0001')
    equal(l, plain, f([l.resume_from('run', every=2)]))

def settings():
    "What the user has written counts as it is now, or is an error"
    sys.path.insert(0, str(repo/'benchmarks'))
    import settings
    want = {'nothing': 'went on', 'learning rate': 'went on, said', 'more epochs': 'went on, said', 'MixUp by another alpha': 'went on, said', 'MixUp dropped': 'went on, said',
        'optimizer': 'error', 'smaller bs': 'error', 'larger bs': 'error', 'larger bs, strict=False': 'went on, said', "a callback's argument": 'went on, said'}
    res = {name: (what, said) for name,what,said in settings.table(want)}
    assert {k: v[0] for k,v in res.items()}==want, res
    assert 'schedule.lr 0.01 at most -> 0.001 at most' in res['learning rate'][1] and 'use the same data and batch size' in res['larger bs'][1]

def sharded():
    "Killed on four cores, gone on there, and on one"
    l = names()
    place = lambda o: o.to_tpu_sharded(replica=2, fsdp=2, rules=[('', 'fsdp', 1)])
    plain = train(l, place)
    for at in (5,37):
        res,left = again(l, place, at)
        equal(l, plain, res)
    with pytest.raises(KeyboardInterrupt): train(l, place, [l.TPUCheckpoint('other', every=every), dying(l, 25, killed)])
    equal(l, plain, train(l, lambda o: o.to_tpu_sharded(fsdp=1), [l.resume_from('other')]), 1e-4)

def formats():
    "Written on four cores, read by torch alone and by plain fastai"
    l = names()
    for name,kw in dict(Adam={}, AdamW=dict(opt_func=partial(l.OptimWrapper, opt=l.torch.optim.AdamW)), ranger=dict(opt_func=l.ranger), SGD=dict(opt_func=partial(l.SGD, mom=0.))).items():
        def mk():
            learn = learner(l, lambda o: o)
            learn.opt_func = kw.get('opt_func', l.Adam)
            learn.create_opt()
            return learn
        a = mk().to_tpu_sharded(replica=2, fsdp=2)
        a.freeze()
        with a.no_bar(), a.no_logging(): a.fit(1, 1e-2)
        a.save_sharded(name)
        a.save(f'{name}_stock')
        want = l.torch.load(f'models/{name}_stock.pth', weights_only=False)
        for place in (lambda o: o, lambda o: o.to_tpu_sharded(fsdp=4)):
            b = place(mk()).load_sharded(name)
            equal(l, want, l.to_host(dict(model=dict(b.model.state_dict()), opt=b.opt.state_dict())))
            b.save_sharded(f'{name}_2')
            equal(l, want, l.to_host(dict(model=dict(b.model.state_dict()), opt=mk().load_sharded(f'{name}_2').opt.state_dict())))

def pool():
    "A replica that dies, and one that is told to stop"
    l = names()
    place = lambda o: o.to_tpu_distributed(n_cores=2)
    plain = train(l, place)
    res,left = again(l, place, 4, lambda: time.sleep(1) or 1/0, l.LaunchError)
    assert left[-1]=='fit00-epoch0000-batch0000003'
    equal(l, plain, res)
    rank = l.rank
    def press():
        if rank()==0: os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(1)
    res,left = again(l, place, 8, press, l.LaunchInterrupt)
    assert left[-1].startswith('fit01-epoch0000') and not left[-1].endswith('0')
    equal(l, plain, res)
    res,left = again(l, place, 13, lambda: time.sleep(1) or 1/0, l.LaunchError, every=None)
    assert left[-1]=='fit01-epoch0001-batch0000000'
    equal(l, plain, res)

def replica(rank, cbs, at):
    "A script's part on one rank, which dies at batch `at`"
    l = names()
    if at and rank==1: cbs = [*cbs, dying(l, at, lambda: time.sleep(1) or 1/0)]
    for r in (1, 0): # they are threads here, and draw from one random state
        if rank==r: learn = learner(l, lambda o: o, cbs)
        l.barrier()
    learn.to_tpu_distributed()
    with learn.no_bar(), learn.no_logging():
        learn.freeze()
        learn.fit_one_cycle(2, 1e-2)
        learn.unfreeze()
        learn.fit(1, 1e-3)
    return outcome(l, learn) if rank==0 else None

def ranks():
    "A script that launches its own replicas, of which one dies"
    l = names()
    def go(*cbs, at=None): return l.tpu_launch(replica, cbs, at, n_cores=2)[0]
    plain = go()
    for at,newest in ((5,'fit00-epoch0000-batch0000003'), (9,'fit00-epoch0001-batch0000002')):
        l.shutil.rmtree('run', ignore_errors=True)
        with pytest.raises(l.LaunchError): go(l.TPUCheckpoint('run', every=every), at=at)
        assert sorted(os.listdir('run'))[-1]==newest
        equal(l, plain, go(l.resume_from('run', every=every)))

def script(folder):
    "A training to be killed from outside"
    os.chdir(folder)
    l = names()
    n = int(os.environ.get('STEPS', 10**6))
    def wait():
        Path('ready').touch()
        time.sleep(60)
    res = train(l, lambda o: o.to_tpu(), [l.resume_from('run', every=2), dying(l, n, wait)])
    l.torch.save(res, 'res.pth')

def main(group, *args):
    from tempfile import TemporaryDirectory
    if args: return globals()[group](*args)
    for o in group.split(','):
        with TemporaryDirectory() as d:
            os.chdir(d)
            globals()[o]()

# ---- tests

@pytest.mark.parametrize('group', ['one,by_epoch,waiting,slow,texts,settings','sharded,formats','pool,ranks'])
def test_group(group):
    res = run(__file__, group, **FLAGS)
    assert res.returncode==0, f'exit {res.returncode}\n{res.stdout}\n{res.stderr}'

def test_killed_from_outside(tmp_path):
    "by SIGKILL, while it writes or computes"
    import torch
    from parity_models import leaves
    folders = [tmp_path/o for o in ('whole','killed')]
    for o in folders: o.mkdir()
    def start(folder, **env): return Forked([__file__, 'script', folder], env={k: v for k,v in {**os.environ, **FLAGS, **env}.items() if v is not None})
    whole,p = start(folders[0]),start(folders[1], STEPS='21')
    while not (folders[1]/'ready').exists() and p.poll() is None: time.sleep(.1)
    p.kill()
    assert p.wait()==-signal.SIGKILL and not (folders[1]/'res.pth').exists() and list((folders[1]/'run').iterdir())
    (folders[1]/'ready').unlink()
    assert start(folders[1]).wait()==0 and whole.wait()==0 and not (folders[1]/'ready').exists()
    a,b = (leaves(torch.load(o/'res.pth', weights_only=False)) for o in folders)
    assert a.keys()==b.keys() and all((a[k]==b[k]).all() for k in a)

def test_read_without_torch_xla(tmp_path):
    "by torch alone, whose file plain fastai loads, and by `load_sharded`"
    code = """
    import torch
    from fastai.basics import *
    from fastai_xla.all import *
    def learner():
        set_seed(1)
        dls = DataLoaders(*[DataLoader([(torch.randn(4), torch.zeros(1)) for _ in range(8)], bs=4) for _ in range(2)])
        return Learner(dls, nn.Linear(4,1), loss_func=MSELossFlat(), path='.')
    learn = learner()
    """
    run_ok(code + """
    learn.to_tpu_sharded(fsdp=4, rules=[('', 'fsdp', 1)])
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    learn.save_sharded('m')
    learn.save('stock')
    """, cwd=tmp_path, **FLAGS)
    (tmp_path/'packages').mkdir()
    without = dict(PYTHONPATH=packages_without(tmp_path/'packages', 'torch_xla'), **FLAGS)
    run_ok("""
    import torch, torch.distributed.checkpoint as dcp
    reader = dcp.HuggingFaceStorageReader('models/m')
    sd = {k: torch.zeros(m.size, dtype=m.properties.dtype) for k,m in reader.read_metadata().state_dict_metadata.items() if k.startswith('model.')}
    dcp.load(sd, storage_reader=reader, no_dist=True)
    torch.save({k.removeprefix('model.'): v for k,v in sd.items()}, 'models/c.pth')
    """, '-S', '-W', 'ignore', cwd=tmp_path, **without)
    run_ok(code + """
    assert not xla_available()
    want = learn.load('stock')
    for o,has_opt in ((learner().load('c', with_opt=False), False), (learner().load_sharded('m'), True)):
        for p,q in zip(want.model.parameters(), o.model.parameters()):
            assert torch.equal(p, q)
            assert not has_opt or want.opt.state[p].keys()==o.opt.state[q].keys() and torch.equal(want.opt.state[p]['sqr_avg'], o.opt.state[q]['sqr_avg'])
    """, '-S', cwd=tmp_path, **without)

@pytest.mark.parametrize('to', ['to_tpu()','to_tpu_distributed(n_cores=2)'])
def test_the_bar_of_a_training_that_goes_on(to):
    "In an epoch that is not the first, which fastprogress must have seen"
    out = run_ok(f"""
        from fastai.basics import *
        from fastai.test_utils import synth_learner
        from fastai_xla.all import *
        class Ends(Callback):
            def before_epoch(self):
                if self.epoch==2: raise RuntimeError('the session ended')
        for ends in ([Ends()], []):
            learn = synth_learner(n_trn=4).{to}
            try: learn.fit(3, cbs=[resume_from('run'), *ends])
            except RuntimeError: pass
        assert len(learn.recorder.values)==3""", **FLAGS)
    assert 'Going on at epoch 2' in out

if __name__=='__main__': main(*sys.argv[1:])
