"What the tests of recipes share: small Learners, timm's averages, and comparisons. Nothing here touches a device."
from fastai.vision.all import *
from fastai.callback.tracker import SaveModelCallback
from fastai_xla.all import *
from PIL import ImageOps
from timm.layers import BatchNormAct2d, convert_splitbn_model
from timm.utils import ModelEmaV3

for _nm in [o for o in dir() if o.startswith('test')]: del globals()[_nm] # fastcore's own would be collected as tests

def vectors(n, seed=0):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return list(zip(x, x[:,:3].argmax(1)))

def mlp(): return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

def learner(n=64, bs=8, model=mlp, **kwargs):
    "Eight batches to train, and three to validate"
    set_seed(3)
    dls = DataLoaders(*[TfmdDL(vectors(k, s), bs=bs, num_workers=0) for k,s in ((n,0), (20,1))])
    return Learner(dls, model(), loss_func=CrossEntropyLossFlat(), **{'metrics': accuracy, 'splitter': lambda m: L(m[:2], m[2:]).map(params), **kwargs})

def fit(learn, n=2, cbs=None, **kwargs):
    set_seed(7)
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(n, 1e-2, cbs=cbs, **kwargs)
    return learn

def host(sd): return {k: v.detach().cpu().float() for k,v in sd.items() if 'tracked' not in k}
def weights(m): return host(m.state_dict())
def outcome(learn): return weights(learn.model),[list(o) for o in learn.recorder.values]

def near(want, got, rtol=1e-4, atol=1e-5, **kwargs):
    "Assert that weights and recorded values agree"
    if not isinstance(want, tuple): want,got = (want,),(got,)
    assert want[0].keys()==got[0].keys()
    for k,v in want[0].items(): torch.testing.assert_close(got[0][k], v, rtol=rtol, atol=atol, msg=lambda m: f'{k}: {m}')
    for a,b in zip(want[1:], got[1:]): torch.testing.assert_close(torch.tensor(b), torch.tensor(a), rtol=rtol, atol=atol, **kwargs)

class TimmEMA(Callback):
    "timm's averages, by the calls of its training script; validates with them"
    def __init__(self, every=1, **kwargs): self.every,self.kwargs = every,kwargs
    def before_fit(self): self.ema,self.n = ModelEmaV3(self.model, **self.kwargs),0
    def after_step(self):
        self.n += 1
        if self.n%self.every==0: self.ema.update(self.model, step=self.n)
    def before_validate(self): self.raw,self.learn.model = self.model,self.ema.module
    def after_validate(self): self.learn.model = self.raw

warm = dict(decay=.95, use_warmup=True, update_after_step=1)

def timms(every=1, ema=warm, cbs=(), n=2, **kwargs):
    "Averages and what was validated, by timm in plain fastai"
    cb,learn = TimmEMA(every, **ema),learner(**kwargs)
    fit(learn, n, [cb, *cbs])
    return weights(cb.ema.module),outcome(learn)[1]

def ends(learn):
    "The outcome of a fit with averages, of which nothing else is left"
    assert not any('ema' in st for *_,st,_ in learn.opt.all_params()) and not learn._grab_cbs(EMACallback)
    return outcome(learn)

class Dies(Callback):
    "A kill from outside, at a batch of training or validation"
    order = 2000
    def __init__(self, at): self.at = at
    def after_batch(self):
        self.at -= 1
        if not self.at: raise KeyboardInterrupt

# ---- validation sets, mixtures, splits

def dropping(): return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(.3), nn.Linear(16, 3))

def every(bs=8):
    "Another set after each second epoch, and after each third batch"
    other = TfmdDL(vectors(30, 5), bs=bs, num_workers=0)
    return [EvalEvery(other, 'clean', epochs=2), EvalEvery(other, 'noisy', steps=3)]

def highest(p, y): return p.max(-1)[0].mean()
def halved(model, x): return model(x)/2

def cadences(bs=8):
    "In a fit of 2 epochs of 8 steps of 8 samples: after batches 3, 5, 8, ... of 20 samples each, and by percent of the fit, with a metric and predictions of its own"
    other = TfmdDL(vectors(30, 5), bs=bs, num_workers=0)
    return [EvalEvery(other, 'samples', examples=20, initial=True), EvalEvery(other, 'part', percent=30, final=True, metrics=highest, predict=halved)]
due = [0,3,5,8,10,13,15],[5,10,15,16]

def picture(i): return PILImage.create(np.random.RandomState(i).randint(0, 255, (4,4,3)).astype(np.uint8))
def label(i): return i%4

def mixed_pictures(bs=8):
    "Batches of three views of pictures from two sets"
    def one(start):
        ds = Datasets(range(start, start+28), [[picture],[label]], splits=[range(16),range(16,28)])
        return ds.dataloaders(bs=bs, num_workers=0, after_item=ToTensor(), before_batch=AugSplits(ImageOps.invert, 3), after_batch=IntToFloatTensor())
    return mixture([one(0), one(100)], [3,1], n=32, names=['low','high'])

def splitting(): return convert_splitbn_model(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), BatchNormAct2d(8), nn.Flatten(), nn.Linear(32, 4)), 3)

def split_learner(bs=8, cbs=()):
    set_seed(3)
    return Learner(mixed_pictures(bs), splitting(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, metrics=accuracy, cbs=[JSDLoss(3), *cbs])

def split_eval(bs=8): return EvalEvery(mixed_pictures(bs).valid, 'other', steps=3)
