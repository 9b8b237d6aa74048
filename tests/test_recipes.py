"Recipes from a process that has not used the device: on a pool of replicas, and in one program on all cores."
import os
from fresh import repo, run_ok
from recipes import *

def test_averages_come_home_from_a_pool():
    want,learn = timms(),learner(bs=4).to_tpu_distributed(2, sync_bn=True)
    try: fit(learn, cbs=[EMACallback(**warm), SaveModelCallback(fname='best', every_epoch=1)])
    finally: learn.detach_tpu_distributed()
    near(want, ends(learn), 1e-3, 1e-4)
    near(want[0], host(torch.load('models/best_1.pth')), 1e-3, 1e-4)

def sharded(code): return run_ok(f'from recipes import *\n{code}', PYTHONPATH=f'{repo}{os.pathsep}{repo}/tests', CPU_NUM_DEVICES='2')

def test_averages_are_spread_like_parameters():
    out = sharded("""
class Look(Callback):
    def after_train(self): print({(is_spread(p), is_spread(st['ema'])) for p,_,st,_ in self.opt.all_params() if p.ndim>1})
for kwargs in (dict(), dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))):
    want,learn = timms(**kwargs),learner(**kwargs).to_tpu_sharded(fsdp=2, rules=[ShardRule('weight', min_size=8)])
    fit(learn, cbs=[EMACallback(**warm), Look()])
    near(want, ends(learn), 1e-3, 1e-4)
    print(learn.replay.n_replayed>0)""")
    assert [o for o in out.splitlines() if o[0] in '{TF']==2*['{(True, True)}', '{(True, True)}', 'True'], out
