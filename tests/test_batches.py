"Batches of any structure, with names that come and go, arrive on the device, are checked, padded and come home as in plain fastai, in each strategy."
from collections import defaultdict, UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest, torch
from torch import nn
from fastai.basics import *
from fastai_xla.all import *
from strategies import Cases, STRATEGIES

for o in [o for o in dir() if o.startswith('test')]: del globals()[o] # fastcore's own would be collected as tests
cases = Cases(__file__)

class Encoding(UserDict):
    "As transformers' `BatchEncoding`"
    def to(self, device): return type(self)({k: v.to(device) for k,v in self.items()})

@dataclass(frozen=True)
class Item:
    ids:Tensor
    mask:Tensor|None
    name:str='a'

class Movable:
    def __init__(self, ids, mask): self.ids,self.mask = ids,mask
    def to(self, device): return type(self)(self.ids.to(device), self.mask if self.mask is None else self.mask.to(device))

class Model(nn.Module):
    "Classifies by the mean of embeddings; it finds its input in whatever it is given"
    def __init__(self):
        super().__init__()
        self.emb,self.lin = nn.Embedding(20, 8),nn.Linear(8, 3)
    def forward(self, b, mask=None):
        if hasattr(b, 'keys'): ids,mask = b['input_ids'],b.get('attention_mask')
        elif isinstance(b, list): ids = torch.stack(b)
        elif isinstance(b, Tensor): ids = b
        else: ids,mask = b.ids,b.mask
        x = self.emb(ids)
        if mask is None: return self.lin(x.mean(1))
        return self.lin((x*mask[...,None]).sum(1)/mask.sum(1)[:,None])

def samples(n, seed):
    "Token ids of different lengths, and the class of each"
    g = torch.Generator().manual_seed(seed)
    return [(torch.randint(1, 20, (int(torch.randint(3, 7, (), generator=g)),), generator=g), i%3) for i in range(n)]

def padded(b, longest):
    n = max(len(x) for x,_ in b) if longest else 6
    ids = torch.stack([F.pad(x, (0, n-len(x))) for x,_ in b])
    return ids,(ids>0).float(),tensor([y for _,y in b])

def trained(attach, bs, collate, longest=False, with_input=True):
    "Losses, weights and predictions, batch by batch, of a model whose batches `collate` makes of token ids, mask, targets, and the number of the batch"
    count = defaultdict(int)
    def create(b):
        count[0] += 1
        return collate(*padded(b, longest), count[0])
    dls = DataLoaders(*[DataLoader(samples(n, i), bs=bs, create_batch=create, num_workers=0) for i,n in enumerate((48, 20))])
    set_seed(2)
    learn = attach(Learner(dls, Model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=SGD))
    with learn.no_bar(),learn.no_logging():
        learn.fit(2, .1)
        preds,ys = learn.get_preds()
    return [list(o) for o in learn.recorder.values],preds,ys,[p for p in learn.model.parameters()]

@cases.case()
def mapping_of_a_collator(attach, bs):
    "A defaultdict, padded to the longest, with flags that come and go"
    def collate(ids, mask, y, i):
        b = defaultdict(list, input_ids=ids, attention_mask=mask)
        if i%2: b['token_type_ids'],b['overflow'] = torch.zeros_like(ids)+30,True
        return b,y
    return trained(attach, bs, collate, longest=True)

KINDS = dict(batch_encoding=lambda ids,mask,y,i: (Encoding(input_ids=ids, attention_mask=mask), y), namespace=lambda ids,mask,y,i: (SimpleNamespace(ids=ids, mask=mask, flag=True), y),
    frozen_dataclass=lambda ids,mask,y,i: (Item(ids, mask), y), movable=lambda ids,mask,y,i: (Movable(ids, mask if i%2 else None), y),
    sometimes_no_mask=lambda ids,mask,y,i: (ids, (mask if i%2 else None), y), a_tensor_a_sample=lambda ids,mask,y,i: ([*ids], y))

@cases.case('to_tpu', 'cores', 'sharded')
def containers(attach, bs): return {k: trained(attach, bs, f) for k,f in KINDS.items()}

class Seen(Callback):
    "What fastai's own callbacks would keep of the inputs of a validation"
    def before_validate(self): self.seen = []
    def after_batch(self):
        if not self.training: self.seen.append(self.learn.to_detach(self.x))

@cases.case('to_tpu', 'cores', 'sharded')
def inputs_come_home_as_they_were(attach, bs):
    "With their class, on the host, without the padding of the last batch"
    def create(b):
        ids,mask,y = padded(b, False)
        return Encoding(input_ids=ids, attention_mask=mask, n=len(y)),y
    dls = DataLoaders(*[DataLoader(samples(20, 1), bs=bs, create_batch=create, num_workers=0) for _ in range(2)])
    learn = attach(Learner(dls, Model(), loss_func=CrossEntropyLossFlat(), cbs=Seen()))
    with learn.no_bar(): learn.validate()
    kind = dict if attach is STRATEGIES['plain'] else Encoding # which fastai makes of it
    assert [(type(o),o['input_ids'].device.type,o['n']) for o in learn.seen.seen]==[(kind,'cpu',n) for n in (8,8,4)]
    return learn.seen.seen

class ByDls(Learner):
    "As tsai's, which puts each batch where `dls.device` says"
    def one_batch(self, i, b):
        self.iter = i
        self._split(to_device(b, self.dls.device) if self.dls.device is not None else b)
        self._with_events(self._do_one_batch, 'batch', CancelBatchException)

@cases.case('to_tpu', 'cores', 'sharded')
def where_dls_says(attach, bs):
    "Predictions of one sample, which run on the host, and of several"
    ds = [(torch.full((4,), i/5.), i%2) for i in range(16)]
    learn = attach(ByDls(DataLoaders.from_dsets(ds, ds, bs=bs, num_workers=0, device='cpu'), nn.Linear(4, 2), loss_func=CrossEntropyLossFlat(), opt_func=SGD))
    with learn.no_bar(),learn.no_logging():
        learn.fit(1, .1)
        return [learn.get_preds(dl=learn.dls.valid.new(ds[:n], bs=min(n, bs)))[0] for n in (1, 3, 16)]

@cases.case('to_tpu', 'cores', 'sharded')
def out_of_range(attach, bs):
    "An index that the embedding does not know is an error in each, and one that comes by another name is none"
    with pytest.raises(IndexError, match='index out of range in self'):
        trained(attach, bs, lambda ids,mask,y,i: (Encoding(input_ids=ids+(15 if i==3 else 0), attention_mask=mask), y))
    return 1.

@pytest.mark.parametrize('strategy,name', [pytest.param(*o, marks=pytest.mark.slow) if o[0]=='ranks' else o for o in cases.names])
def test_batches(strategy, name): cases.check(strategy, name)

if __name__=='__main__': cases.main()
