"A function that runs on each core, in scripts: by torch_xla's own launchers and by ours."
import re
from fresh import repo, run

import pytest

pytestmark = pytest.mark.slow

def test_the_example_runs_as_written(tmp_path):
    res = run(repo/'examples'/'spawn.py', cwd=tmp_path, timeout=600)
    assert res.returncode==0, res.stderr
    acc,n = re.search(r'accuracy ([\d.]+) on (\d) cores', res.stdout).groups()
    assert float(acc)>.9 and n=='8' and res.stdout.count('train_loss')==1, res.stdout
    assert [o.name for o in (tmp_path/'models').iterdir()]==['digits.pth']

script = '''
import sys, torch, torch_xla, torch_xla.distributed.xla_multiprocessing as xmp
from fastai.basics import *
from fastai.callback.all import *
from fastai_xla.all import *
from fastai_xla.runtime import barrier, rank

def make(seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(70, 4, generator=g)
    ds = [(a,b) for a,b in zip(x, (x.sum(1)>0).long())]
    dls = DataLoaders(TfmdDL(ds, bs=8, shuffle=True, drop_last=True), TfmdDL(ds[:30], bs=8))
    return Learner(dls, nn.Linear(4, 2), CrossEntropyLossFlat(), lr=.1, metrics=accuracy, cbs=[CSVLogger(), SaveModelCallback(fname='best')])

def train_loop(index, how):
    assert index==rank()
    learn = make().to_tpu_distributed()
    with main_first(): Path(f'seen_{how}').touch(exist_ok=rank()>0)
    learn.fit(2)
    learn.save('m')
    w = learn.model.weight.detach().cpu().clone()
    learn.fit(1)
    learn.load('m')
    assert torch.equal(learn.model.weight.detach().cpu(), w)
    assert len(learn.get_preds()[0])==30
    barrier()
    learn.load('shared_before')
    learn.detach_tpu_distributed()
    assert learn.model.weight.device.type=='cpu' and learn.path==Path('.'), learn.path
    sys.stderr.write(f'\\n{how}: rank {index} of {world_size()}, {w.sum():.6f}\\n')
    return w

if __name__=='__main__':
    make().save('shared_before')
    use_virtual_cores(3)
    HOW
'''

def launch(how, tmp_path):
    f = tmp_path/'script.py'
    f.write_text(script.replace('HOW', how))
    return run(f, cwd=tmp_path)

def check(res, name, tmp_path):
    assert res.returncode==0, res.stderr
    seen = re.findall(rf'^{name}: rank (\d) of 3, (\S+)', res.stderr, re.M)
    assert sorted(o[0] for o in seen) in (['0','1','2'], ['0']) and len({o[1] for o in seen})==1, res.stderr
    assert res.stdout.count('train_loss')==2, 'one table a fit'
    assert sorted(o.name for o in (tmp_path/'models').iterdir())==['best.pth','m.pth','shared_before.pth']
    assert len((tmp_path/'history.csv').read_text().splitlines())==2, 'one rank writes'

def test_xmp_spawn(tmp_path): check(launch("xmp.spawn(train_loop, args=('xmp',))", tmp_path), 'xmp', tmp_path)

def test_torch_xla_launch(tmp_path): check(launch("torch_xla.launch(train_loop, args=('tx',))", tmp_path), 'tx', tmp_path)

def test_tpu_launch(tmp_path):
    check(launch("ws = tpu_launch(train_loop, 'ours', n_cores=3); assert len(ws)==3 and all(torch.equal(ws[0], w) for w in ws)", tmp_path), 'ours', tmp_path)

def test_replicas_that_cannot_wait_for_each_other(tmp_path):
    f = tmp_path/'script.py'
    f.write_text(script.replace('use_virtual_cores(3)', '').replace('HOW', "xmp.spawn(train_loop, args=('bare',))"))
    res = run(f, cwd=tmp_path, CPU_NUM_DEVICES='3')
    assert res.returncode and 'call use_virtual_cores(3) before xmp.spawn' in res.stderr

def test_timms_recipe(tmp_path):
    args = ('--dataset=synthetic --samples=60 --model=test_vit --img-size=32 -b 16 --opt=adamw --lr=1e-3 --warmup-epochs=1 --min-lr=1e-5 --layer-decay=.8 --model-ema '
        '--model-ema-warmup --clip-grad=.1 --clip-mode=value --aug-splits=2 --aa=rand-m5-mstd0.5 --jsd-loss --split-bn --workers=0 --epochs=1').split()
    res = run(repo/'examples'/'train_timm.py', *args, cwd=tmp_path)
    assert res.returncode==0, res.stderr
    assert 'parameters in 16 groups, rates up to 0.001, steps of 16 samples' in res.stdout and re.search(r'Done: [\d.]+% of 12 pictures right', res.stdout), res.stdout
    assert 'epoch' in (tmp_path/'output/summary.csv').read_text() and (tmp_path/'output/models/model_best.pth').exists()
