"""Losses of all kinds, each with a small Learner: what they leave in one strategy, pickled.

    python tests/loss_cases.py STRATEGY N FILE [CASE ...]     # 'plain', 'ranks' (N processes), 'one_process' or 'sharded' (of N cores)

A batch has 16 samples in each strategy. The training set leaves a last step of 5 samples; the validation set a round in which ranks have a smaller batch, or none."""
import pickle, sys
from functools import partial
from fastai.vision.all import *
from torch.nn import functional as F

BS,N_TRAIN,N_VALID,C = 16,53,23,4
W = [.1,1.,5.,2.]

def seeded(i): return torch.Generator().manual_seed(i)
def loader(ds, bs, shuffle=False): return TfmdDL(ds, bs=bs, shuffle=shuffle, drop_last=False, num_workers=0)

# ---- data: lists of samples

class Samples(list): n_inp = 1 # of the things of a sample, how many go into the model

def vectors(n, seed):
    g = seeded(seed)
    return [(torch.randn(8, generator=g), torch.randint(0, C, (), generator=g)) for _ in range(n)]

def pictures(n, seed):
    "With a mask of classes, some of it void"
    g = seeded(seed)
    return [(torch.randn(3, 16, 16, generator=g), torch.randint(0, C+1, (16,16), generator=g)) for _ in range(n)]

def captions(n, seed):
    "Pictures, each with a caption of 3 to 14 tokens, filled up by 0"
    g = seeded(seed)
    def _caption():
        k = int(torch.randint(3, 15, (), generator=g))
        return F.pad(torch.randint(1, 20, (k,), generator=g), (0, 14-k))
    return [(torch.randn(3, 8, 8, generator=g), _caption()) for _ in range(n)]

def labelled(n, seed):
    "Tokens and labels, which the model gets and of which some are -100"
    g,res = seeded(seed),[]
    for _ in range(n):
        x,y = (torch.randint(0, 20, (6,), generator=g) for _ in range(2))
        y[torch.rand(6, generator=g)<.4] = -100
        res.append((x, y, y))
    return res

def views(n, seed):
    "Two views of each sample"
    return [(torch.stack([x, x+.3*torch.randn(8, generator=seeded(i))]), y) for i,(x,y) in enumerate(vectors(n, seed))]

# ---- models

def net(c=C): return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, c))
def pixels(): return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, C+1, 1))

class Views(Module):
    "One prediction for each view: all first ones, then all second ones"
    def __init__(self): self.net = net(6)
    def forward(self, x): return self.net(torch.cat(x.unbind(1)))

class Captioner(Module):
    "Predicts all tokens of a picture's caption at once"
    def __init__(self, d=16): self.enc,self.queries,self.out = nn.Conv2d(3, d, 8),nn.Parameter(torch.randn(14, d)*.1),nn.Linear(d, 20)
    def forward(self, x): return self.out(torch.tanh(self.enc(x).flatten(1)[:,None]+self.queries))

class Labelled(Module):
    "As a model of transformers: it gets the labels, and returns its loss"
    def __init__(self): self.net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 20))
    def forward(self, x, labels):
        logits = self.net(x)
        return dict(loss=nn.CrossEntropyLoss()(logits.view(-1, 20), labels.view(-1)), logits=logits)

class ArcFace(Module):
    def __init__(self, s=8., m=.3):
        self.s,self.m,self.weight = s,m,nn.Parameter(torch.randn(C, 6)*.5)
    def forward(self, emb, y):
        cos = F.linear(F.normalize(emb), F.normalize(self.weight)).clamp(-.999, .999)
        one = one_hot(y).to(cos.dtype)
        return F.cross_entropy(self.s*(torch.cos(torch.acos(cos)+self.m)*one + cos*(1-one)), y.long())

# ---- losses of the user's

def one_hot(y): return y.long()[:,None]==torch.arange(C, device=y.device)
def weight(p): return torch.tensor(W, device=p.device)
def weighted(p, y): return F.nll_loss(F.log_softmax(p, 1), y, weight=weight(p))
def token_mean(p, y):
    l = F.cross_entropy(p.flatten(0, 1), y.flatten(), reduction='none')*(y.flatten()>0)
    return l.sum()/(y>0).sum()
def total(p, y): return F.cross_entropy(p, y, reduction='sum')
def dice(p, y):
    p,t = p.softmax(1),one_hot(y).to(p.dtype)
    return 1-(2*(p*t).sum()+1)/(p.sum()+t.sum()+1)
def simclr(p, y):
    "All pairs of the batch: the views of a sample are drawn together"
    z = F.normalize(p, dim=1)
    n = len(z)//2
    s = (z@z.T/.5).masked_fill(torch.eye(2*n, dtype=torch.bool, device=z.device), -1e4)
    return F.cross_entropy(s, (torch.arange(2*n, device=z.device)+n)%(2*n))
def focal(p, y):
    l = F.cross_entropy(p, y, reduction='none')
    return ((1-(-l).exp())**2*l).mean()
def computed(out, *yb): return out['loss']

def case(loss, model=net, data=vectors, metrics=accuracy, **kwargs): return dict(loss=loss, model=model, data=data, metrics=metrics, **kwargs)

CASES = dict( # means that are known, denominators of all ranks, sums, what needs all predictions, a model's own loss, losses with weights
    mean=case(CrossEntropyLossFlat), focal=case(lambda: focal),
    class_weights=case(lambda: CrossEntropyLossFlat(weight=torch.tensor(W))), weights_in_function=case(lambda: weighted),
    smoothed_weights=case(lambda: nn.CrossEntropyLoss(weight=torch.tensor(W), label_smoothing=.1)), ignored_class=case(lambda: CrossEntropyLossFlat(ignore_index=2)),
    ignored_tokens=case(lambda: CrossEntropyLossFlat(axis=-1, ignore_index=0), Captioner, captions, None),
    pixels=case(lambda: CrossEntropyLossFlat(axis=1, weight=torch.tensor([*W,0.]), ignore_index=C), pixels, pictures, None, n_train=52, sync_bn=True, tol=1e-5),
    total=case(lambda: total, tol=1e-5), dice=case(lambda: dice), simclr=case(lambda: simclr, Views, views, None), captioner=case(lambda: token_mean, Captioner, captions, None),
    computed=case(lambda: computed, Labelled, labelled, None), arcface=case(ArcFace, partial(net, 6), metrics=None))

def learner(loss, model, data, metrics, tol=None, bs=BS, n_train=N_TRAIN, sync_bn=None):
    set_seed(3)
    loss,(train,valid) = loss(),[Samples(data(n, i)) for i,n in enumerate((n_train, N_VALID))]
    if data is labelled: train.n_inp = valid.n_inp = 2
    dls = DataLoaders(loader(train, bs, True), loader(valid, bs))
    held = params(loss) if isinstance(loss, nn.Module) and params(loss) else []
    return Learner(dls, model(), loss_func=loss, metrics=metrics, opt_func=partial(SGD, mom=.9), path='.', splitter=lambda m: L(params(m), held) if held else L([params(m)])),held

def outcome(strategy, n, name):
    "What two epochs leave: losses, the table, weights, those of the loss, predictions"
    learn,held = learner(**CASES[name], bs=BS//n if strategy in ('ranks','one_process') else BS)
    if strategy=='ranks': learn.to_tpu_distributed(n_cores=n, processes=True, sync_bn=CASES[name].get('sync_bn'))
    if strategy=='one_process': learn.to_tpu_distributed(processes=False)
    if strategy=='sharded': learn.to_tpu_sharded()
    set_seed(7)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, .005 if name=='total' else .02 if name=='pixels' else .1)
        res = dict(losses=[float(o) for o in learn.recorder.losses], values=[[float(o) for o in row] for row in learn.recorder.values])
        preds = [] if name in ('computed','simclr') else learn.get_preds()[0] # fastai cannot join numbers, and joins views batch by batch
    res.update(weights=[p.detach().cpu() for p in [*learn.model.parameters(), *held]], preds=preds)
    return res

def main(strategy, n, file, *names):
    n,res = int(n),{}
    if strategy!='plain':
        import fastai_xla.all as fx
        fx.use_virtual_cores(n)
    for name in names or CASES:
        print(name, file=sys.stderr, flush=True)
        try: res[name] = outcome(strategy, n, name)
        except Exception as e:
            import traceback
            res[name] = f'{type(e).__name__}: {e}\n{traceback.format_exc()}'
    Path(file).write_bytes(pickle.dumps(res))

if __name__=='__main__': main(*sys.argv[1:])
