"`unet_learner` with metrics that XLA cannot lower: no fallback in training or validation, and the values of plain fastai"
import numpy as np
from torch import nn
from fastai.vision.all import (ConvLayer, DataBlock, DiceMulti, Flatten, ImageBlock, IndexSplitter, JaccardCoeffMulti, MaskBlock, Normalize,
                               foreground_acc, imagenet_stats, unet_learner)
from fastai_xla.all import xla_device
from text_models import EpochCounts, OPTS, seeded

def tiny(pretrained=False): return nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 16, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(16, 2))

@seeded
def unet():
    "Discs on noise, in two classes and the ground"
    rng,g = np.random.RandomState(0),np.arange(16)
    def one(i):
        cx,cy,r = rng.randint(4, 12, 3)
        m = ((g-cx)**2+(g[:,None]-cy)**2<r).astype(np.uint8)*(1+i%2)
        return np.clip(m[...,None]*90+rng.rand(16,16,3)*60, 0, 255).astype(np.uint8),m
    xs,ys = zip(*map(one, range(18)))
    db = DataBlock((ImageBlock, MaskBlock(codes=['ground','a','b'])), get_x=lambda i: xs[i], get_y=lambda i: ys[i], splitter=IndexSplitter(range(12, 18)),
                   batch_tfms=[Normalize.from_stats(*imagenet_stats)])
    dls = db.dataloaders(range(18), bs=4, num_workers=0)
    return unet_learner(dls, tiny, pretrained=False, n_out=3, opt_func=OPTS['SGD'], metrics=[DiceMulti(), JaccardCoeffMulti(), foreground_acc])

def test_unet_with_dice():
    xla_device()
    def fit(learn, cbs=None):
        with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-2, cbs=cbs)
        return np.array(learn.recorder.values, dtype=float)
    cb,want = EpochCounts(),fit(unet())
    got = fit(unet().to_tpu(fetch_every=1e9), cb)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)
    assert [o.fallbacks for o in cb.epochs]==[{},{}]
    assert cb.epochs[1].compiles==0 and cb.batches[1].reads==0
