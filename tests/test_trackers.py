"""What shows or logs a training is told the same in each form as in plain fastai: W&B and TensorBoard with their defaults, CSV files,
graphs, and a callback that notes every event. `python test_trackers.py <form>` trains in this form and prints what each was told."""
import json, os, struct, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np, pytest

from fresh import run

pytestmark = pytest.mark.slow

N,FORMS = 2,('cores','pool','tpu','sharded')

# ---- in the processes

if __name__=='__main__':
    os.environ.update(WANDB_MODE='offline', WANDB_SILENT='true', MPLBACKEND='Agg')
    import wandb
    if sys.argv[1]=='sharded': import fastai_xla.all # before W&B's callback, in the other forms after
    from fastai.vision.all import *
    from fastai.callback.all import *
    from fastai.callback.tensorboard import TensorBoardCallback
    from contextlib import redirect_stdout
    from io import StringIO
    from fastai.callback.wandb import WandbCallback
    from fastai_xla.all import *
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from wandb.proto.wandb_internal_pb2 import Record

    class Notes(CSVLogger):
        "Every event, with the numbers that a tracker reads at it"
        order = Recorder.order+1
        def __init__(self): self.seen = []
        def before_fit(self): self.at('before_fit')
        def after_fit(self): self.at('after_fit')
        def at(self, name):
            batch = dict(iter=self.iter, n_iter=self.n_iter, training=self.training) if name in ('before_batch','after_batch') else {}
            if name=='after_batch' and self.training:
                assert all(type(o).__module__.split('.')[0] in ('torch','fastai') and o.device.type=='cpu' for o in (self.loss, self.smooth_loss))
                batch.update(loss=float(self.loss), smooth=float(self.smooth_loss), n=len(self.xb[0]))
                batch.update(hypers=[[h[k] for k in ('lr','mom')] for h in self.opt.hypers])
            if name=='after_epoch': batch.update(log=[float(o) for o in self.recorder.log[:-1]])
            self.seen.append([name, self.train_iter, batch])
    def _at(name): return lambda self: self.at(name)
    for o in '''before_epoch before_train before_batch after_pred after_loss before_backward after_backward before_step after_step
        after_batch after_train before_validate after_validate after_epoch'''.split(): setattr(Notes, o, _at(o))

    def get_learner(form, cbs):
        per = N if form in ('cores','pool') else 1 # training batches are of each core, and validation's whole, but in one process
        set_seed(1) # also for the order of the samples
        rng = np.random.RandomState(0)
        ims = [rng.randint(0, 255, (8,8,3)).astype(np.uint8) for _ in range(36)]
        db = DataBlock((ImageBlock, CategoryBlock), get_x=lambda i: ims[i], get_y=lambda i: 'ab'[i%2], splitter=IndexSplitter(range(16, 36)))
        dls = db.dataloaders(range(36), bs=8//per, val_bs=2 if form=='cores' else 4, num_workers=0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(4, 2))
        meter = TPUMeter(show=False)
        learn = Learner(dls, model, metrics=[accuracy, *meter.metrics('samples')], splitter=lambda m: [params(m[:2]), params(m[2:])], cbs=[meter, *L(cbs)])
        to = dict(plain=noop, tpu=Learner.to_tpu, cores=partial(Learner.to_tpu_distributed, n_cores=N),
            pool=partial(Learner.to_tpu_distributed, n_cores=N, processes=True), sharded=partial(Learner.to_tpu_sharded, fsdp=N))
        return to[form](learn)

    def fit(learn): learn.fit_one_cycle(2, slice(1e-3, 1e-2))

    def notes(form):
        with redirect_stdout(StringIO()): fit(learn := get_learner(form, [Notes(), CSVLogger(), ShowGraphCallback()]))
        csv = [l.split(',')[:-1] for l in Path('history.csv').read_text().splitlines()]
        return dict(seen=learn.notes.seen, csv=csv, graph=learn.show_graph.nb_batches, lrs=learn.recorder.lrs)

    def tensorboard(form):
        fit(get_learner(form, TensorBoardCallback('logs')))
        acc = EventAccumulator('logs', size_guidance=dict(scalars=0)).Reload()
        scalars = {t: sorted({(o.step, round(o.value, 9)) for o in acc.Scalars(t)}) for t in acc.Tags()['scalars']}
        return dict(scalars=scalars, images={t: [o.step for o in acc.Images(t)] for t in acc.Tags()['images']}, graph=acc.Tags()['graph'])

    def records(file):
        "The records of an offline run: a log of LevelDB, after 7 bytes"
        b,at,rec = file.read_bytes(),7,b''
        while at+7<=len(b):
            n,kind = struct.unpack('<HB', b[at+4:at+7])
            if not kind:
                at += 32768-at%32768 # the rest of a block
                continue
            rec += b[at+7:at+7+n]
            at += 7+n
            if kind not in (1,4): continue # not the last piece
            yield Record.FromString(rec)
            rec = b''

    def history(folder):
        "What an offline run has written: rows of its history"
        rows = [r.history.item for r in records(next(Path(folder).glob('*.wandb'))) if r.HasField('history')]
        return [{'.'.join(o.nested_key) or o.key: json.loads(o.value_json) for o in row} for row in rows]

    def weights_and_biases(form):
        run = wandb.init(project='p')
        fit(get_learner(form, [WandbCallback(), Callback(after_pred=lambda self: time.sleep(.02))]))
        folder = Path(run.dir).parent
        wandb.finish()
        wandb.teardown() # its process writes the rest
        return history(folder)

    def main(form):
        res = {}
        for f in (notes, tensorboard, weights_and_biases):
            with TemporaryDirectory() as d:
                os.chdir(d)
                res[f'{form} {f.__name__}'] = f(form)
                os.chdir('/')
        print(json.dumps(res))

    main(sys.argv[1])
    sys.exit()

# ---- the tests

@pytest.fixture(scope='module')
def told():
    # not forks, which would share the folder that W&B makes for media as it is imported
    with ThreadPoolExecutor(2) as pool: procs = [*pool.map(lambda o: run(__file__, o, cold=True, CPU_NUM_DEVICES=str(N)), ('plain', *FORMS))]
    for p in procs: assert p.returncode==0 and 'was not able' not in p.stdout, f'{p.stdout[-2000:]}\n{p.stderr[-6000:]}'
    return {k: v for p in procs for k,v in json.loads(p.stdout.splitlines()[-1]).items()}

def same(a, b, at=''):
    "Assert that two nests are the same, numbers to five digits"
    if isinstance(a, dict):
        assert a.keys()==b.keys(), f'{at}: {a.keys()^b.keys()}'
        for k in a: same(a[k], b[k], f'{at}.{k}')
    elif isinstance(a, list):
        assert len(a)==len(b), f'{at}: {len(b)} instead of {len(a)}'
        for i,(x,y) in enumerate(zip(a, b)): same(x, y, f'{at}[{i}]')
    elif isinstance(a, (int,float)) and not isinstance(a, bool): np.testing.assert_allclose(b, a, rtol=1e-4, atol=2e-5, err_msg=at)
    else: assert a==b, f'{at}: {b!r} instead of {a!r}'

@pytest.mark.parametrize('form', FORMS)
def test_told(told, form):
    "Every event and number; TensorBoard and W&B with their defaults (fastai's callback fails in plain fastai without the patch of `init_args`)"
    notes,board,bias = [[told[f'{o} {k}'] for o in ('plain',form)] for k in ('notes','tensorboard','weights_and_biases')]
    plain,got = notes
    assert len(plain['seen'])==2+2*(6+2*8+5*4) and plain['csv'][0]==['epoch','train_loss','valid_loss','accuracy','samples'], 'two epochs of 2 and 5 batches'
    same(*[[o['seen'], [[float(v) for v in r] for r in o['csv'][1:]], o['graph'], o['lrs']] for o in notes])
    plain,got = board
    assert plain['graph'] and [*plain['images'].values()]==[[2,4]] and {'train_loss','valid_loss','accuracy','samples','lr_0','lr_1'} <= plain['scalars'].keys()
    same(plain, got)
    plain,got = bias
    assert [k in o for o in plain for k in ('raw_loss','valid_loss')]==[True,False,True,True]*2 and {'lr_0','mom_1'} <= plain[0].keys()
    assert any(k.startswith('Prediction_Samples') for k in plain[-1])
    same([sorted(o) for o in plain], [sorted(o) for o in got])
    same(*[[{k: v for k,v in o.items() if not k.startswith(('_','train_samples','Prediction'))} for o in rows] for rows in bias])
    assert all(0<o['train_samples_per_sec']<8/.02 for rows in bias for o in rows if 'train_samples_per_sec' in o), 'a batch of 8 takes 20 ms'

