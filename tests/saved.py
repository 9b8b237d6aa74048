"""Files that a Learner on a TPU has saved with one stack, and that a Learner on the other opens.

They are in tests/saved_by, a folder for each stack, written by `python tests/saved.py` where that stack is installed."""
import os, sys
from pathlib import Path
import torch
from fastai.basics import *
from fastai.callback.all import *

folder = Path(__file__).parent/'saved_by'
x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
items = list(zip(x, x[:,:3].argmax(1)))

def learner():
    "A Learner of classes that anybody can import, with momentum in its optimizer and running statistics in its model"
    set_seed(0)
    dls = Datasets(items, [[ItemGetter(0)],[ItemGetter(1)]], splits=[range(40), range(40, 60)]).dataloaders(bs=8, num_workers=0)
    return Learner(dls, nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), loss_func=CrossEntropyLossFlat())

def predictions(learn):
    with learn.no_bar(): return learn.get_preds(dl=learn.dls.test_dl(items[40:]))[0]

def save(to):
    to.mkdir(parents=True, exist_ok=True)
    learn = learner().to_tpu()
    with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-2)
    learn.path,learn.model_dir = Path(os.path.relpath(to)),'.' # the path is in the file
    learn.save('weights')
    torch.save(predictions(learn), to/'predictions.pt')
    torch.save([{k: v.cpu() if isinstance(v, torch.Tensor) else v for k,v in learn.opt.state[p].items()} for p in learn.opt.param_lists.concat()], to/'state.pt')
    learn.export('learner.pkl')

def check(by, learn):
    "`learn`, on a TPU or not, has what the stack `by` has saved"
    at = folder/by
    learn.create_opt()
    learn.path,learn.model_dir = at,'.'
    device = next(learn.model.parameters()).device
    learn.load('weights')
    assert {p.device for p in learn.model.parameters()}=={device}
    torch.testing.assert_close(predictions(learn), torch.load(at/'predictions.pt'), rtol=1e-5, atol=1e-6)
    for p,want in zip(learn.opt.param_lists.concat(), torch.load(at/'state.pt')):
        got = learn.opt.state[p]
        assert got.keys()>=want.keys()
        for k,v in want.items():
            if isinstance(v, torch.Tensor): assert got[k].device==p.device and torch.equal(got[k].cpu(), v)
            else: assert got[k]==v
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-3)
    again = load_learner(at/'learner.pkl')
    torch.testing.assert_close(predictions(again), torch.load(at/'predictions.pt'), rtol=1e-5, atol=1e-6)
    return again

if __name__ == '__main__':
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from fastai_xla.all import *
    from fastai_xla.runtime.device import backend
    save(folder/backend())
