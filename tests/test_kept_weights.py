"Weights that a callback keeps on the device, reads, and puts back more than once: all is as in plain fastai"
import pytest, torch
from synth import *
import fastai_xla
from fastai_xla.all import *

def learner(*cbs):
    set_seed(3)
    dls = DataLoaders(*[DataLoader(vectors(n, seed=n), bs=8, num_workers=0) for n in (96,32)])
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs)

def copies(model, kept):
    with torch.no_grad():
        for k,p in model.named_parameters(): p.copy_(kept[k])

def copies_data(model, kept):
    for k,p in model.named_parameters(): p.data.copy_(kept[k])

def loads(model, kept): model.load_state_dict(kept)

def reads(model, kept):
    for k,v in model.state_dict().items(): kept[k] = v.clone()
    for v in kept.values(): v.cpu()

class Keeps(Callback):
    "Keeps the weights at the first `event`, and calls `use(model, kept)` at each later one, of batches at each tenth of training"
    order = 60
    def __init__(self, event, use):
        self.use,self.kept,self.n = use,None,0
        setattr(self, event, self._tenth if event.endswith('batch') else self._use)
    def _tenth(self):
        if self.training and self.train_iter%10==6: self._use()
    def _use(self):
        if self.kept is None: self.kept = {k: v.clone() for k,v in self.model.state_dict().items()}
        else:
            self.use(self.model, self.kept)
            self.n += 1

def outcome(learn, keeps):
    with learn.no_bar(),learn.no_logging():
        learn.fit(3, 1e-2)
        learn.validate()
        learn.fit(2, 1e-2)
    assert keeps.n>=2
    return to_host([[torch.tensor(o, dtype=torch.double) for o in learn.recorder.values], list(keeps.kept.values()), list(learn.model.state_dict().values())])

@pytest.mark.parametrize('event,use,replay', [('before_fit',copies,True), ('before_epoch',copies,False), ('after_validate',loads,True), ('before_batch',copies_data,True),
    ('after_batch',reads,True), ('after_batch',reads,False)])
def test_kept_weights(event, use, replay):
    plain,tpu = Keeps(event, use),Keeps(event, use)
    want,got = outcome(learner(plain), plain),outcome(learner(tpu).to_tpu(replay=replay), tpu)
    for a,b in zip(tensors(got), tensors(want)): assert torch.allclose(a.double(), b.double(), rtol=1e-3, atol=3e-4)
