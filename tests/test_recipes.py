"Recipes from a process that has not used the device: on a pool of replicas, and in one program on all cores."
import os
import pytest
from fresh import repo, run_ok
from recipes import *

@pytest.fixture(scope='module')
def pool():
    "Two replicas, which start once"
    learn = learner().to_tpu_distributed(2, processes=True)
    yield
    learn.detach_tpu_distributed()

def test_averages_come_home_from_a_pool(pool):
    want,learn = timms(),learner(bs=4).to_tpu_distributed(2, processes=True, sync_bn=True)
    fit(learn, cbs=[EMACallback(**warm), SaveModelCallback(fname='best', every_epoch=1)])
    near(want, ends(learn), 1e-3, 1e-4)
    near(want[0], host(torch.load('models/best_1.pth')), 1e-3, 1e-4)

def test_splits_of_a_mixture_and_another_set_on_a_pool(pool):
    "What the replicas find is in the notebook's table, and in its callback"
    mine,theirs,counts = split_eval(4),split_eval(),[MixtureCounts(), MixtureCounts()]
    want,learn = outcome(fit(split_learner(), cbs=[theirs, counts[0]])),split_learner(4).to_tpu_distributed(2, processes=True, sync_bn=True)
    set_of = mine.valid_dl
    fit(learn, cbs=[mine, counts[1], CSVLogger()])
    assert counts[0].seen==counts[1].seen and sum(counts[0].seen)==64
    near(want, outcome(learn), 1e-3, 1e-4, equal_nan=True)
    torch.testing.assert_close(torch.tensor(mine.history), torch.tensor(theirs.history), rtol=1e-3, atol=1e-4)
    assert mine.valid_dl is set_of and learn.recorder.metric_names[-5:]==['other_valid_loss','other_accuracy','seen_low','seen_high','time']
    table = pd.read_csv(learn.path/'history.csv')
    assert abs(table.other_valid_loss.iloc[-1]-want[1][-1][-4])<1e-3

def sharded(code): return run_ok(f'from recipes import *\nfrom fastai_xla.runtime.transfer import is_spread\n{code}', PYTHONPATH=f'{repo}{os.pathsep}{repo}/tests', CPU_NUM_DEVICES='2')

def test_on_all_cores():
    "Averages are spread like parameters; splits of a mixture, and another set, are what they are on one core"
    out = sharded("""
class Look(Callback):
    def after_train(self): print({(is_spread(p), is_spread(st['ema'])) for p,_,st,_ in self.opt.all_params() if p.ndim>1})
for kwargs in (dict(), dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))):
    want,learn = timms(**kwargs),learner(**kwargs).to_tpu_sharded(fsdp=2, rules=[ShardRule('weight', min_size=8)])
    fit(learn, cbs=[EMACallback(**warm), Look()])
    near(want, ends(learn), 1e-3, 1e-4)
    print(learn.replay.n_replayed>=10 and learn.replay.why is None)
for bs,to in ((8, partial(Learner.to_tpu_sharded, fsdp=2, rules=[ShardRule('weight', min_size=8)])), (4, Learner.to_tpu_distributed)):
    def cbs(bs): return [split_eval(bs), EvalEvery(mixed_pictures(bs).valid, 'samples', examples=24), MixtureCounts()]
    mine,theirs = cbs(bs),cbs(8)
    want,learn = outcome(fit(split_learner(), cbs=theirs)),to(split_learner(bs))
    fit(learn, cbs=mine)
    near(want, outcome(learn), 1e-3, 1e-4, equal_nan=True)
    for a,b in zip(theirs[:2], mine): torch.testing.assert_close(torch.tensor(b.history), torch.tensor(a.history), rtol=1e-3, atol=1e-4)
    print(learn.replay.n_replayed>2 and theirs[2].seen==mine[2].seen and len(mine[1].history)>2)""")
    assert [o for o in out.splitlines() if o[0] in '{TF']==2*['{(True, True)}', '{(True, True)}', 'True']+['True']*2, out
