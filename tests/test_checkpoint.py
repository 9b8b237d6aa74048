"""Sharded checkpoints, and training that was killed and goes on. Cases run in groups, each in a fresh process: `python test_checkpoint.py <group>`."""
import os, signal, sys, time
from pathlib import Path

import pytest
from forks import Forked
from fresh import packages_without, run, run_ok

FLAGS = dict(PJRT_DEVICE='CPU', CPU_NUM_DEVICES=None, MPLBACKEND='Agg')
every = 3

# ---- in the processes

def names():
    from types import SimpleNamespace
    import fastai.basics, fastai.callback.all, fastai_xla.all, fastai_xla.runtime, parity_models
    return SimpleNamespace(**{k: v for m in (fastai.basics, fastai.callback.all, fastai_xla.all, fastai_xla.runtime, parity_models) for k,v in vars(m).items() if not k.startswith('_')})

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
    "Three fits: frozen, whole, and with accumulation and MixUp, which draws on the host on each rank"
    learn = learner(l, place, cbs)
    l.set_seed(3)
    with learn.no_bar(), learn.no_logging():
        learn.fine_tune(2, 1e-2, freeze_epochs=1)
        learn.fit_one_cycle(2, 1e-2, cbs=[l.GradientAccumulation(16), l.MixUp()])
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
        order = 2000
        def __init__(self): self.count = lambda: next(batches, None)
        def after_batch(self):
            if self.count()==at: how()
    return Dies()

def killed(): raise KeyboardInterrupt
def sends(sig): return lambda: os.kill(os.getpid(), sig)

def left(folder='run'): return sorted(o for o in os.listdir(folder) if o[0]!='.') if Path(folder).exists() else []

def dies(l, place, at, how=killed, exc=KeyboardInterrupt, **kwargs):
    "A training that resumes in the folder `run` and dies at its batch `at`; returns the newest checkpoint that it leaves"
    with pytest.raises(exc): train(l, place, [l.resume_from('run', **{'every': every, **kwargs}), dying(l, at, how)])
    l.set_seed(at) # the next one has another random state at its start
    return ['', *left()][-1]

def one():
    "One training on one core that dies seven times: before a checkpoint, in an epoch, in validation, in the next fit, by signals, between steps; and that is run again when it is done"
    l = names()
    place = lambda o: o.to_tpu()
    plain = train(l, place)
    assert dies(l, place, 2)==''
    assert dies(l, place, 5)=='fit00-epoch0000-batch0000003'
    assert dies(l, place, 7)=='fit00-epoch0000-batch0000006', 'the second batch of validation'
    assert dies(l, place, 7)=='fit01-epoch0000-batch0000003', 'two batches, two of validation, three of the next fit'
    assert dies(l, place, 2, sends(signal.SIGTERM), SystemExit)=='fit01-epoch0000-batch0000006'
    assert dies(l, place, 3, sends(signal.SIGINT))=='fit01-epoch0001-batch0000000', 'a signal in validation waits for its end'
    assert dies(l, place, 16)=='fit02-epoch0000-batch0000006', 'an epoch, six of the last fit'
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    equal(l, plain, train(l, place, [l.resume_from('run', every=every)]))
    assert left()==['fit02-epoch0001-batch0000008', 'fit03-epoch0000-batch0000000']
    equal(l, plain, train(l, place, [l.resume_from('run', every=every), dying(l, 1, killed)])), 'what is done is not done again'

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
        l.shutil.rmtree('waits', ignore_errors=True)
        with pytest.raises(KeyboardInterrupt): f([l.TPUCheckpoint('waits'), dying(l, at, killed)])
        assert left('waits')[-1]==newest
        equal(l, plain, f([l.resume_from('waits')]))

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
    with pytest.raises(KeyboardInterrupt): f([l.TPUCheckpoint('texts', every=2), dying(l, n+len(l.text().dls.valid)+3, killed)])
    assert left('texts')[-1].startswith('fit00-epoch0001')
    equal(l, plain, f([l.resume_from('texts', every=2)]))

def cores():
    "Dies on two cores of one process, and resumes there"
    l = names()
    place = lambda o: o.to_tpu_distributed(n_cores=2)
    plain = train(l, place)
    assert dies(l, place, 5)=='fit00-epoch0000-batch0000003'
    dies(l, place, 20)
    with pytest.raises(ValueError, match='use as many cores'): train(l, lambda o: o.to_tpu_distributed(n_cores=1), [l.resume_from('run')])
    equal(l, plain, train(l, place, [l.resume_from('run', every=every)]))

def sharded():
    "Dies on four cores, resumes there, and on one"
    l = names()
    place = lambda o: o.to_tpu_sharded(replica=2, fsdp=2, rules=[('', 'fsdp', 1)])
    plain = train(l, place)
    dies(l, place, 5)
    dies(l, place, 20)
    l.shutil.copytree('run', 'other')
    equal(l, plain, train(l, place, [l.resume_from('run', every=every)]))
    equal(l, plain, train(l, lambda o: o.to_tpu_sharded(fsdp=1), [l.resume_from('other')]), 1e-4)

def pool():
    "A replica that dies, and a pool that is told to stop; at the end of a fit the Learner has the best weights"
    l = names()
    place = lambda o: o.to_tpu_distributed(n_cores=2, processes=True)
    plain = train(l, place)
    assert dies(l, place, 4, lambda: time.sleep(1) or 1/0, l.LaunchError)=='fit00-epoch0000-batch0000003'
    rank = l.rank
    def press():
        if rank()==0: os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(1)
    newest = dies(l, place, 6, press, SystemExit)
    assert newest.startswith('fit01-epoch0000') and not newest.endswith('0')
    equal(l, plain, train(l, place, [l.resume_from('run', every=every)]))
    class Worse(l.Callback):
        "The second epoch goes uphill"
        order,run_valid = -5,False
        def before_step(self):
            if self.epoch: self.opt.set_hypers(lr=1.)
    learn = learner(l, place, [l.resume_from('best', load_best=True, keep=1), Worse()])
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, 1e-2)
        first,second = [o[3] for o in learn.recorder.values]
        assert first<second and abs(learn.validate()[0]-first)<1e-5, (first, second)

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

def main(groups, *args):
    from tempfile import TemporaryDirectory
    if groups=='script': return script(*args)
    for o in groups.split(','):
        with TemporaryDirectory() as d:
            os.chdir(d)
            name,*which = o.split(':')
            globals()[name](*which)

# ---- tests

slow = pytest.mark.slow

@pytest.mark.parametrize('groups', ['one,waiting', 'cores', *(pytest.param(o, marks=slow) for o in ('texts','pool','sharded'))])
def test_group(groups):
    res = run(__file__, groups, **FLAGS)
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

@slow
def test_read_without_torch_xla(tmp_path):
    "by plain fastai, and by `load_sharded`; that torch alone reads the shards is in the notebook of checkpoint.model"
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
    run_ok(code + """
    assert not xla_available()
    want = learn.load('stock')
    got = learner().load_sharded('m')
    for p,q in zip(want.model.parameters(), got.model.parameters()):
        assert torch.equal(p, q) and want.opt.state[p].keys()==got.opt.state[q].keys() and torch.equal(want.opt.state[p]['sqr_avg'], got.opt.state[q]['sqr_avg'])
    """, '-S', cwd=tmp_path, **without)

@pytest.mark.parametrize('to', ['to_tpu()', pytest.param('to_tpu_distributed(n_cores=2, processes=True)', marks=slow)])
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
    assert 'Resuming at epoch 2' in out

if __name__=='__main__': main(*sys.argv[1:])
