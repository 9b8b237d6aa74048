"""The input side in three tables: batch transforms on the device, compilations per epoch, and reading while the device works.

    python benchmarks/input.py                # all three
    python benchmarks/input.py learners       # one of: transforms learners overlap

The counts do not depend on the machine; the times do.
"""
import os, sys, warnings
from pathlib import Path
warnings.filterwarnings('ignore')
sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'tests'))
os.environ.setdefault('PJRT_DEVICE', 'CPU')
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0') # compiles three times as fast; read when the runtime starts
from parity_models import *
from fastai_xla.all import *

def table(head, rows):
    print(f"\n| {' | '.join(head)} |\n|{'---|'*len(head)}")
    for r in rows: print(f"| {' | '.join(map(str, r))} |", flush=True)

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

def _lengths(df):
    "Texts of many lengths"
    rng = np.random.RandomState(0)
    return df.assign(text=[' '.join((o.split()*4)[:n]) for o,n in zip(df.text, rng.randint(4, 32, len(df)))])

_cfg = dict(emb_sz=6, n_hid=8, n_layers=1)

@seeded
def text_classifier():
    db = DataBlock((TextBlock.from_df('text', tok=BaseTokenizer(), seq_len=8, min_freq=1, n_workers=0, rules=[]), CategoryBlock), get_x=ColReader('text'),
                   get_y=ColReader('label'), splitter=IndexSplitter(range(40, 53)))
    return text_classifier_learner(db.dataloaders(_lengths(texts()), bs=8, num_workers=0), AWD_LSTM, config={**awd_lstm_clas_config, **_cfg}, pretrained=False,
                                   seq_len=8, metrics=accuracy)

@seeded
def language_model():
    db = DataBlock(TextBlock.from_df('text', is_lm=True, tok=BaseTokenizer(), seq_len=8, min_freq=1, n_workers=0, rules=[]), get_x=ColReader('text'), splitter=IndexSplitter(range(40, 53)))
    return language_model_learner(db.dataloaders(_lengths(texts()), bs=4, seq_len=8, num_workers=0), AWD_LSTM, config={**awd_lstm_lm_config, **_cfg}, pretrained=False,
                                  metrics=[accuracy, Perplexity()])

LEARNERS = [vision, segmentation, tabular, collab_nn, text_classifier, language_model]

def learners():
    for mk in LEARNERS:
        learn,stats = mk().to_tpu(),XLAStats()
        with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-3, cbs=stats)
        (t1,v1),(t2,v2) = zip(stats.train, stats.valid)
        yield mk.__name__, t1.compiles+v1.compiles, t2.compiles+v2.compiles, sum(t2.fallbacks.values())+sum(v2.fallbacks.values())

def overlap():
    from overlap import ratios
    for w,*ts,r in ratios(): yield f'{w:g}', *[f'{t:.2f}' for t in ts], f'{r:.2f}'

TABLES = dict(transforms=(['transform', 'fallbacks', 'reads in 10 batches', 'compiles', 'largest difference to the CPU'], transforms),
              learners=(['Learner', 'compiles in epoch 1', 'in epoch 2', 'fallbacks in epoch 2'], learners),
              overlap=(['wait of the host, in steps of the device', 'host alone, s', 'device alone, s', 'both, s', 'ratio to the slower'], overlap))

if __name__=='__main__':
    for name in sys.argv[1:] or TABLES:
        head,rows = TABLES[name]
        table(head, rows())
