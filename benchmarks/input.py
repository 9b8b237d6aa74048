"""The input side in four tables: batch transforms on the device, compilations per epoch, reading for several cores, and reading while the device works.

    python benchmarks/input.py                # all four
    python benchmarks/input.py learners       # one of: transforms learners cores overlap

The counts do not depend on the machine; the times do.
"""
import multiprocessing, os, resource, shutil, statistics, subprocess, sys, tempfile, time, warnings
from pathlib import Path
warnings.filterwarnings('ignore')
sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'tests'))
os.environ.setdefault('PJRT_DEVICE', 'CPU')
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0') # compiles three times as fast; read when the runtime starts
from text_models import *
from PIL import Image

def table(head, rows):
    print(f"\n| {' | '.join(head)} |\n|{'---|'*len(head)}")
    for r in rows(): print(f"| {' | '.join(map(str, r))} |", flush=True)
    print(flush=True)

def transforms():
    from test_augment import table
    for name,d,c in table(): yield f'`{name}`', sum(c.fallbacks.values()), c.reads, c.compiles, f'{max(d):.0e}'

# ---- small Learners of each type

@seeded
def vision():
    dls = image_dls(24, batch_tfms=[*aug_transforms(), Normalize.from_stats(*imagenet_stats)])
    return Learner(dls, cnn().model, metrics=accuracy)

@seeded
def segmentation():
    xs,_ = images(53, 32)
    db = DataBlock((ImageBlock, MaskBlock(codes=['dark','light'])), get_x=lambda i: xs[i], get_y=lambda i: PILMask.create((xs[i][...,0]>128).astype(np.uint8)),
                   splitter=IndexSplitter(range(40, 53)), batch_tfms=[*aug_transforms(), Normalize.from_stats(*imagenet_stats)])
    body = nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 16, stride=2), ConvLayer(16, 16, stride=2))
    return Learner(db.dataloaders(range(53), bs=8, num_workers=0), models.unet.DynamicUnet(body, 2, (32,32)), metrics=[foreground_acc, Dice()])

def _target(i):
    "A picture with one bright square, the square's centre and its box"
    rng = np.random.RandomState(i)
    x,y,r = rng.randint(8, 24, 2).tolist()+[rng.randint(3, 8)]
    im = rng.randint(0, 90, (32,32,3)).astype(np.uint8)
    im[y-r:y+r,x-r:x+r] = 220
    return im,[[x,y]],[[x-r,y-r,x+r,y+r]]

def _conv(n_out): return nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 16, stride=2), nn.AdaptiveAvgPool2d(2), Flatten(), nn.Linear(64, n_out))

_augs = dict(batch_tfms=[*aug_transforms(), Normalize.from_stats(*imagenet_stats)], splitter=IndexSplitter(range(40, 53)), get_x=lambda i: _target(i)[0])

@seeded
def points():
    db = DataBlock((ImageBlock, PointBlock), get_y=lambda i: TensorPoint.create(_target(i)[1], img_size=(32,32)), **_augs)
    return Learner(db.dataloaders(range(53), bs=8, num_workers=0), nn.Sequential(_conv(2), nn.Unflatten(1, (1,2))), loss_func=MSELossFlat(), metrics=[mae])

@seeded
def boxes():
    "A box and its label for each picture"
    db = DataBlock((ImageBlock, BBoxBlock, BBoxLblBlock), n_inp=1, get_y=[lambda i: TensorBBox.create(_target(i)[2], img_size=(32,32)), lambda i: ['square']], **_augs)
    def loss(pred, bb, lbl): return F.l1_loss(pred[:,None,:4], bb) + F.cross_entropy(pred[:,4:], lbl[:,0])
    return Learner(db.dataloaders(range(53), bs=8, num_workers=0), _conv(6), loss_func=loss)

def _lengths(df):
    "Texts of many lengths"
    rng = np.random.RandomState(0)
    return df.assign(text=[' '.join((o.split()*4)[:n]) for o,n in zip(df.text, rng.randint(4, 32, len(df)))])

_cfg = dict(emb_sz=6, n_hid=8, n_layers=1)

@seeded
def text_classifier(emb_sz=6, n_train=40):
    db = DataBlock((TextBlock.from_df('text', tok=BaseTokenizer(), seq_len=8, min_freq=1, n_workers=0, rules=[]), CategoryBlock), get_x=ColReader('text'),
                   get_y=ColReader('label'), splitter=IndexSplitter(range(n_train, 53)))
    return text_classifier_learner(db.dataloaders(_lengths(texts()), bs=8, num_workers=0), AWD_LSTM, config={**awd_lstm_clas_config, **_cfg, 'emb_sz':emb_sz}, pretrained=False,
                                   seq_len=8, metrics=accuracy)

@seeded
def language_model():
    db = DataBlock(TextBlock.from_df('text', is_lm=True, tok=BaseTokenizer(), seq_len=8, min_freq=1, n_workers=0, rules=[]), get_x=ColReader('text'), splitter=IndexSplitter(range(40, 53)))
    return language_model_learner(db.dataloaders(_lengths(texts()), bs=4, seq_len=8, num_workers=0), AWD_LSTM, config={**awd_lstm_lm_config, **_cfg}, pretrained=False,
                                  metrics=[accuracy, Perplexity()])

def text_classifier_ragged():
    "With a smaller last batch in training, which fastai drops by default; another size, so that it finds no graph compiled"
    learn = text_classifier(10, n_train=37)
    learn.dls.train = learn.dls.train.new(drop_last=False)
    return learn

LEARNERS = [vision, segmentation, points, boxes, tabular, collab_nn, language_model, text_classifier, text_classifier_ragged]

def learners():
    for mk in LEARNERS:
        learn,counts = mk().to_tpu(),EpochCounts()
        with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-3, cbs=counts)
        one,two = counts.epochs
        yield f'`{mk.__name__}`', one.compiles, two.compiles, sum(one.fallbacks.values()), sum(two.fallbacks.values())

# ---- reading for several cores: a loader of all, or one for each, in a process of its own as ranks have them

def _photos(n, px):
    "A folder of `n` JPEGs of `px` pixels a side"
    folder = Path(tempfile.mkdtemp())
    rng = np.random.RandomState(0)
    for i in range(n): Image.fromarray(rng.randint(0, 256, (px//8,px//8,3)).astype(np.uint8)).resize((px,px)).save(folder/f'{i%4}_{i}.jpg')
    return folder

def _read(files, bs, workers, ready, q):
    "Read `files` twice, and say the time when the second reading began and ended, and the CPU seconds of both this process and its workers"
    dl = DataBlock((ImageBlock, CategoryBlock), get_y=lambda o: o.name[0], splitter=lambda o: (range(len(o)), [])).dataloaders(files, bs=bs, num_workers=workers, shuffle=False).train
    dl.drop_last = False
    dl.after_batch = Pipeline()
    def epoch(): return sum(len(b[0]) for b in dl)
    def cpu(): return sum(o.ru_utime+o.ru_stime for o in map(resource.getrusage, (resource.RUSAGE_SELF,resource.RUSAGE_CHILDREN)))
    epoch()
    ready.wait()
    start,used = time.time(),cpu()
    assert epoch()==len(files)
    q.put((start, time.time(), cpu()-used))

def _reading(files, n, bs, workers):
    "(images a second, CPU seconds) of `n` processes, which share the files"
    ctx = multiprocessing.get_context('fork')
    ready,q = ctx.Barrier(n),ctx.Queue()
    ps = [ctx.Process(target=_read, args=(files[i::n], bs, workers, ready, q)) for i in range(n)]
    for p in ps: p.start()
    starts,ends,used = zip(*[q.get() for _ in ps])
    for p in ps: p.join()
    return len(files)/(max(ends)-min(starts)),sum(used)

def cores(n=4, bs=16, px=224, n_files=1024, rounds=3):
    folder = _photos(n_files, px)
    files = sorted(folder.iterdir())
    for workers in (0,n):
        runs = [(_reading(files, 1, n*bs, workers),_reading(files, n, bs, workers//n)) for _ in range(rounds)]
        one,many = [[statistics.median(o) for o in zip(*rs)] for rs in zip(*runs)]
        yield f'{workers} and {n} of {workers//n}',*[f'{o:.0f}' for o in (one[0], many[0])],f'{one[0]/many[0]:.2f}',*[f'{o:.2f}' for o in (one[1], many[1])],f'{one[1]/many[1]:.2f}'
    shutil.rmtree(folder)

TABLES = dict(transforms=(['transform', 'fallbacks', 'reads in 10 batches', 'compiles', 'largest difference to the CPU'], transforms),
              learners=(['Learner', 'compiles in epoch 1', 'in epoch 2', 'fallbacks in epoch 1', 'in epoch 2'], learners),
              cores=(['workers', 'images a second, one loader of 64', 'four of 16', 'ratio', 'CPU seconds, one', 'four', 'ratio'], cores))

def overlap():
    "In a process of its own, whose device works on one core"
    env = {k:v for k,v in os.environ.items() if k!='XLA_FLAGS'}
    print(subprocess.run([sys.executable, Path(__file__).with_name('overlap.py')], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True).stdout)

if __name__=='__main__':
    for name in sys.argv[1:] or [*TABLES,'overlap']:
        if name=='overlap': overlap()
        else: table(*TABLES[name])
