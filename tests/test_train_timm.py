"`examples/train_timm.py`: a recipe of timm's, its flags, and a training that goes on"
import re, sys, pytest, torch
from fresh import repo, run
sys.path.insert(0, str(repo/'tools'))

@pytest.mark.slow
@pytest.mark.parametrize('more,bs,bce', [('--form tpu -b 16', 16, False), ('--form distributed --cores 4 -b 4 --bce-loss', 16, True)], ids=['one core, soft targets','four cores, BCE'])
def test_equals_timms_functions_in_a_loop(more, bs, bce, tmp_path):
    "RandAugment, MixUp with CutMix, RandomErasing, label smoothing or BCE, clipping, averaged weights, cosine with warm-up"
    from timm_recipe import by_timm
    res = run(repo/'tests'/'timm_recipe.py', tmp_path/'got.pth', *more.split(), cwd=tmp_path, CPU_NUM_DEVICES='4')
    assert res.returncode==0, res.stderr
    got,rows = torch.load(tmp_path/'got.pth')
    want,want_rows = by_timm(bs, bce)
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(want_rows), rtol=2e-4, atol=2e-5)
    for k,v in want.items(): torch.testing.assert_close(got[k], v, rtol=1e-3, atol=1e-4, msg=lambda m: f'{k}: {m}')
    assert rows[0]!=rows[-1]

def test_every_flag_of_timms_scripts_is_taken_or_left_out_with_a_reason():
    import timm_flags, train_timm
    found = timm_flags.rows() # which raises for a flag that is neither
    assert not [o for o,*_,here in found if here=='yes' and o in train_timm.not_taken()], 'left out, and yet there'
    for o in 'reprob bce-loss mixup cutmix sched aug-repeats resume initial-checkpoint log-wandb sync-bn amp-dtype eval-metric'.split(): assert (o,'yes') in [(r[0],r[3]) for r in found]
    assert (repo/'examples'/'train_timm_flags.md').read_text(encoding='utf-8') == timm_flags.render(), 'run python tools/timm_flags.py'

flags = '--dataset synthetic --samples 80 --model test_vit --img-size 32 -b 16 --workers 0 --opt adamw --lr 1e-3 --warmup-epochs 0 --aug-repeats 3 --sched plateau --patience-epochs 0 --eval-metric loss'.split()

def test_a_training_goes_on_with_its_schedule(tmp_path, capfd):
    "A plateau's rates depend on all epochs before"
    from fastai.vision.all import Callback, CancelFitException
    import train_timm
    def rates(folder, *more, stop=None):
        seen = []
        class Looks(Callback):
            def after_epoch(self): seen.append(self.opt.hypers[-1]['lr'])
            def after_batch(self):
                if stop==self.epoch: raise KeyboardInterrupt
        own,train_timm.get_cbs = train_timm.get_cbs,lambda *args: [*own(*args), Looks()]
        try: train_timm.train(train_timm.parse([*flags, '--epochs', '4', '--output', str(tmp_path/folder), *more]))
        except KeyboardInterrupt: assert stop
        finally: train_timm.get_cbs = own
        return seen
    whole = rates('whole')
    assert len(whole)==4 and whole[0]==1e-3
    assert rates('killed', stop=2)==whole[:2]
    assert rates('killed', '--resume')==whole[2:]
