"""Every collective, in random order, on virtual cores: is there a deadlock or a wrong value?

Each run trains a small model for some steps with two batch sizes, so several graphs. At every fifth step it also issues one
of ten kinds of collective or read, the same on all ranks, while each rank sleeps at moments of its own. Every value is checked.
"""
import argparse, os, random, time
os.environ.setdefault('OMP_NUM_THREADS', '1')

import torch
from torch import nn
from fastai_xla.runtime.device import torch_xla, xm, xr, met
from fastai_xla.virtual_cores import run_replicas

def new_model(dev):
    "The same weights on each rank, whatever the threads do to torch's generator"
    m,g = nn.Sequential(nn.Linear(16,32), nn.ReLU(), nn.Linear(32,4)),torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in m.parameters(): p.copy_(torch.randn(p.shape, generator=g)*.2)
    return m.to(dev)

def checks(rank, n, dev, model, loss):
    "Collectives and reads, each with whether its value is right"
    def t(x): return torch.tensor(x).to(dev)
    ranks,total = list(range(n)),sum(range(n))
    def in_place():
        x = t([rank*1.]*2)
        xm.all_reduce('sum', [x])
        return x.tolist()==[total]*2
    def one_rank_reads(): return rank or (loss.item()>0 and bool(str(model[0].weight.detach()[0,:2])))
    def broadcast():
        xm.broadcast_master_param(model)
        return True
    return dict(
        sync=lambda: torch_xla.sync(wait=True) is None,
        item=lambda: loss.item()>0,
        all_reduce=lambda: xm.all_reduce('sum', t([rank*1.]*3)).cpu().tolist()==[total]*3,
        mesh_reduce=lambda: xm.mesh_reduce('t', rank, sum)==total,
        rendezvous=lambda: xm.rendezvous('r', b'x'*rank)==[b'x'*o for o in ranks],
        all_gather=lambda: xm.all_gather(t([rank])).tolist()==ranks,
        reduce_scatter=lambda: xm.reduce_scatter('sum', torch.arange(n).float().to(dev), 1., 0, n).item()==rank*n,
        all_to_all=lambda: xm.all_to_all(t([[rank*n+o for o in ranks]]), 1, 0, n).tolist()==[[o*n+rank] for o in ranks],
        permute=lambda: xm.collective_permute(t([rank]), [[o,(o+1)%n] for o in ranks]).item()==(rank-1)%n,
        in_place=in_place, one_rank_reads=one_rank_reads, broadcast=broadcast)

def train(rank, steps, seed):
    "Train and check; returns the sum of the weights"
    n,dev = xr.world_size(),torch_xla.device()
    choose,delay = random.Random(seed),random.Random(seed*1000+rank)
    model,loss_func = new_model(dev),nn.CrossEntropyLoss()
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    for step in range(steps):
        bs = 8 if step%50 else 5
        x = torch.randn(bs, 16, generator=torch.Generator().manual_seed(step*n+rank)).to(dev)
        if delay.random()<.02: time.sleep(delay.random()*.2)
        opt.zero_grad()
        loss = loss_func(model(x), (torch.arange(bs)%4).to(dev))
        loss.backward()
        xm.optimizer_step(opt)
        todo = checks(rank, n, dev, model, loss)
        kind = choose.choice(list(todo)) if step%5==0 else None
        if choose.random()<.5: torch_xla.sync()
        if kind: assert todo[kind](), f'step {step}: wrong value from {kind}'
        torch_xla.sync()
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()]).double().sum().item()

def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--steps', type=int, default=200)
    p.add_argument('--runs', type=int, default=10)
    p.add_argument('--cores', type=int, default=8)
    p.add_argument('--seed', type=int, default=0)
    a = p.parse_args()
    for run in range(a.seed, a.seed+a.runs):
        start = time.time()
        sums = run_replicas(train, a.steps, run, n=a.cores)
        assert len(set(sums))==1, f'the ranks ended with different weights: {sums}'
        print(f'run {run}: {a.steps} steps on {a.cores} cores in {time.time()-start:.1f} s, compiles so far {met.metric_data("CompileTime")[0]}', flush=True)

if __name__=='__main__': main()
