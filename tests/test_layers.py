"Layers that XLA computes in another way than torch train as in plain fastai, or are refused in a sentence, in each strategy: complex numbers, sparse embeddings, packed sequences."
import pytest, torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from fastai.basics import *
from fastai_xla.all import *
from fastai_xla.data.loader import bucket_len
from strategies import Cases, STRATEGIES

for o in [o for o in dir() if o.startswith('test')]: del globals()[o] # fastcore's own would be collected as tests
cases = Cases(__file__)
in_one_process = 'to_tpu','cores','sharded' # on ranks the same operators run

def trained(attach, samples, bs, model, loss_func, opt_func=SGD, lr=.1, create_batch=None, epochs=2, **kwargs):
    "Losses, predictions and weights of `model`"
    dls = DataLoaders(*[DataLoader(o, bs=bs, num_workers=0, **({'create_batch': create_batch} if create_batch else {})) for o in (samples[8:], samples[:8])])
    learn = attach(Learner(dls, model, loss_func=loss_func, opt_func=opt_func, **kwargs))
    with learn.no_bar(),learn.no_logging():
        learn.fit(epochs, lr)
        preds,_ = learn.get_preds()
    return [list(o) for o in learn.recorder.values],preds,[torch.view_as_real(p) if p.is_complex() else p for p in map(Tensor.detach, map(Tensor.cpu, learn.model.parameters()))]

# ---- complex numbers

class Spectral(nn.Module):
    "A layer of a Fourier neural operator: the lowest frequencies times complex weights"
    def __init__(self, n=3, modes=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, n, modes, modes, dtype=torch.cfloat)/n)
        self.modes = modes
    def forward(self, x):
        f,m = torch.fft.rfft2(x),self.modes
        out = torch.zeros(x.shape[0], self.weight.shape[1], x.shape[2], x.shape[3]//2+1, dtype=torch.cfloat, device=x.device)
        out[:,:,:m,:m] = torch.einsum('bixy,ioxy->boxy', f[:,:,:m,:m], self.weight)
        return torch.fft.irfft2(out, s=x.shape[-2:])

class FNO(nn.Module):
    def __init__(self):
        super().__init__()
        self.up,self.layers,self.skips,self.down = nn.Conv2d(1, 3, 1),nn.ModuleList([Spectral() for _ in range(2)]),nn.ModuleList([nn.Conv2d(3, 3, 1) for _ in range(2)]),nn.Conv2d(3, 1, 1)
    def forward(self, x):
        x = self.up(x)
        for f,w in zip(self.layers, self.skips): x = F.gelu(f(x)+w(x))
        return self.down(x)

def fields(n=40):
    g = torch.Generator().manual_seed(0)
    xs = torch.randn(n, 1, 8, 8, generator=g)
    return [(x, (x.roll(1, 1)+x.roll(2, 2))/2) for x in xs]

@cases.case()
def fourier_operator(attach, bs): return trained(attach, fields(), bs, FNO(), MSELossFlat(), lr=.3)

# ---- sparse embeddings

def words(n=40):
    g = torch.Generator().manual_seed(0)
    return [(torch.randint(1, 20, (6,), generator=g), i%3) for i in range(n)]

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.lin = nn.Embedding(20, 4, sparse=True),nn.Linear(4, 3)
    def forward(self, x): return self.lin(self.emb(x).mean(1))

@cases.case()
def sparse_embedding(attach, bs):
    "Its gradients are dense, and a warning says so"
    if attach in (STRATEGIES['plain'], STRATEGIES['ranks']): return trained(attach, words(), bs, Bag(), CrossEntropyLossFlat()) # ranks warn in processes of their own
    with pytest.warns(UserWarning, match='An embedding has `sparse=True`, and XLA has no sparse tensors: its gradient is dense'):
        return trained(attach, words(), bs, Bag(), CrossEntropyLossFlat())

# ---- packed sequences

class Packed(nn.Module):
    "Reads sequences of any length by recurrent layers, forward and backward, and looks at outputs and last states"
    def __init__(self):
        super().__init__()
        self.emb,self.lin = nn.Embedding(20, 4),nn.Linear(40, 3)
        self.lstm,self.gru = [cls(4, 5, batch_first=True, bidirectional=True) for cls in (nn.LSTM, nn.GRU)]
    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.emb(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        (a,(h,_)),(b,h2) = self.lstm(packed),self.gru(packed)
        outs = [pad_packed_sequence(o, batch_first=True, total_length=x.shape[1])[0].sum(1) for o in (a,b)]
        return self.lin(torch.cat([*outs, *h, *h2], 1))

def collate(to):
    "Sequences padded to `to(the longest)`, with their lengths on the host, as packing takes them"
    def _inner(b):
        n = to(max(len(x) for x,*_ in b))
        return torch.stack([F.pad(x, (0, n-len(x))) for x,*_ in b]),tensor([len(x) for x,*_ in b]),tensor([y for *_,y in b])
    return _inner

def sequences(n=72):
    g = torch.Generator().manual_seed(0)
    return [(torch.randint(1, 20, (int(torch.randint(3, 15, (), generator=g)),), generator=g), i%3) for i in range(n)]

class Compiles(Callback):
    "Programs that each epoch of training has compiled"
    def __init__(self): self.seen = []
    def before_train(self): self.at = xla_counts()
    def after_train(self): self.seen.append((xla_counts()-self.at).compiles)

@cases.case(*in_one_process)
def packed(attach, bs):
    "As with sequences padded to the longest; on a device they are padded to one of two lengths, and few programs are compiled"
    plain = attach is STRATEGIES['plain']
    cb = Compiles()
    res = trained(attach, sequences(), bs, Packed(), CrossEntropyLossFlat(), create_batch=collate(noop if plain else bucket_len), cbs=None if plain else cb)
    if not plain: assert sum(cb.seen)<=6 and cb.seen[1]<=1, cb.seen # the last is the one of a length that the first epoch has met once
    return res

# ---- numbers that change

class Focal(Module):
    "A focal loss with a `gamma` that a callback changes"
    y_int,gamma = True,2.
    def __call__(self, p, y):
        ce = F.cross_entropy(p, y, reduction='none')
        return ((1-(-ce).exp()+1e-6)**self.gamma*ce).mean()

class Gammas(Callback):
    def before_batch(self): self.learn.loss_func.gamma = 1.31+.047*self.train_iter if self.training else 2.

@cases.case(*in_one_process)
def scheduled_exponent(attach, bs):
    "A `gamma` of each step is an input of the program"
    plain = attach is STRATEGIES['plain']
    cbs = [Gammas(), *([] if plain else [cb := Compiles()])]
    g = torch.Generator().manual_seed(0)
    res = trained(attach, [(torch.randn(4, generator=g), i%3) for i in range(72)], bs, nn.Linear(4, 3), Focal(), cbs=cbs)
    if not plain: assert cb.seen[0]<=3 and cb.seen[1]==0, cb.seen
    return res

@pytest.mark.parametrize('strategy,name', [pytest.param(*o, marks=pytest.mark.slow) if o[0]=='ranks' else o for o in cases.names])
def test_layers(strategy, name): cases.check(strategy, name)

if __name__=='__main__': cases.main()
