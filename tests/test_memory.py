"A training step takes no more memory than that of a hand-written loop, and gives back as much, and a batch that is run again no more than one that is traced, by the account that XLA writes of its graphs"
import sys
from fresh import repo, run_ok

sys.path.insert(0, str(repo/'benchmarks'))
from dump import read_dump, training_graph

SETUP = """
import torch, torch_xla
from torch import nn
from fastai.vision.all import *
from fastai_xla.all import *
import torch_xla
class Net(nn.Sequential):
    def __init__(self): super().__init__(*[ConvLayer(a, b, stride=2) for a,b in ((3,16),(16,32),(32,64))], nn.Flatten(), nn.Linear(64, 10))
torch.manual_seed(0)
model,ds = Net(),[(torch.randn(3,8,8),i%10) for i in range(96)]
"""
HAND = """
dev = torch_xla.device()
model.to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x,y in torch.utils.data.DataLoader(ds, batch_size=16):
    loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
    loss.backward()
    opt.step()
    opt.zero_grad()
    torch_xla.sync()
print(len(list(model.parameters())), xla_counts().aliases)
"""
OURS = """
dls = DataLoaders(TfmdDL(ds, bs=16, drop_last=True), TfmdDL(ds, bs=16))
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.').to_tpu()
with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(1, 1e-3)
assert learn.replay.valid.n_replayed==4*learn.replay.on
print(len(list(model.parameters())), xla_counts().aliases)
"""

def graphs(code, folder):
    "The graphs of a step and of a batch of validation of `code`; number of parameters, and of graphs as large as a step's"
    out,found = run_ok(SETUP+code, XLA_FLAGS=f'--xla_dump_to={folder} --xla_dump_hlo_as_text'),read_dump(folder)
    step = training_graph(found)
    return step,found[-1],int(out.split()[-2]),sum(o.instructions>step.instructions/2 for o in found)

def test_memory_and_donation(tmp_path):
    traced = OURS.replace('to_tpu()', 'to_tpu(replay=False)')
    (hand,_,n,_),(ours,valid,_,_),(again,valid_again,_,n_again) = (graphs(o, tmp_path/str(i)) for i,o in enumerate((HAND, traced, OURS)))
    assert ours.donated>=hand.donated>=3*n # parameters and the two averages of Adam
    assert n_again==1 # the first step is the program of the others
    assert again.donated>=3*n # but no scalars, which torch_xla caches
    assert again.nbytes<=ours.nbytes+3*8 # the numbers of batches of three batch norms
    assert max(ours.nbytes, again.nbytes)<=1.02*hand.nbytes
    assert max(ours.instructions, again.instructions)<=1.3*hand.instructions
    assert not valid.donated and not valid_again.donated and valid_again.nbytes<=valid.nbytes<ours.nbytes
