"Two replicas that train a text classifier have batches of one length in each step"
import numpy as np, pytest
from threads import run_replicas, use_virtual_cores
use_virtual_cores(2)
from fastai_xla.all import to_host
from fastai_xla.distributed.loader import ShardedDL
from fastai_xla.runtime.device import torch_xla
from fastai_xla.models.text import pads_text
from fastai.basics import Callback
from text_models import classifier

class Shapes(Callback):
    "Shapes of the training batches"
    def before_fit(self): self.seen = []
    def after_pred(self): self.seen += [tuple(self.x.shape)]*self.training

def test_ranks_share_the_length_of_a_step():
    learns = [classifier() for _ in range(2)]
    def batches(r):
        dl = ShardedDL(learns[r].dls.train, torch_xla.device(), pad_text=pads_text(learns[r].model))
        return dl.ragged_across_ranks,[to_host(b[0]) for b in dl]
    (varies,a),(_,b) = run_replicas(batches)
    real = [[(x!=1).sum(1).max().item() for x in o] for o in (a,b)]
    assert not varies and len(a)==len(b)>=5
    assert [x.shape[1] for x in a]==[x.shape[1] for x in b] and len({x.shape[1] for x in a})<=3
    assert any(-(-m//8)!=-(-n//8) for m,n in zip(*real)), 'alone, the ranks would have chosen other lengths'

def test_ranks_train():
    learns = [classifier() for _ in range(2)]
    def fit(r):
        learn,cb = learns[r].to_tpu_distributed(),Shapes()
        with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2, cbs=cb)
        return cb.seen,[float(o) for o in learn.recorder.losses],{k:v.cpu() for k,v in learn.model.state_dict().items()}
    (shapes,losses,ws),(shapes1,losses1,ws1) = run_replicas(fit)
    assert shapes==shapes1 and len(shapes)>=5
    assert np.isfinite(losses).all() and losses==losses1
    assert all(abs(ws[k].float()-ws1[k].float()).max()<1e-6 for k in ws)
