"Files go from stack to stack: what torch_xla has saved opens here, and what is saved here needs no torch_tpu"
import pickle, re, zipfile
import torch
import saved
from fastai_xla.all import *

def test_saved_by_torch_xla():
    again = saved.check('torch_xla', saved.learner().to_tpu())
    torch.testing.assert_close(saved.predictions(again.to_tpu()), torch.load(saved.folder/'torch_xla'/'predictions.pt'), rtol=1e-5, atol=1e-6)

def test_what_is_kept_for_the_other_stack_is_what_is_saved_here(tmp_path):
    saved.save(tmp_path)
    for o in ('predictions.pt','state.pt'):
        a,b = [torch.load(f/o) for f in (saved.folder/'torch_tpu', tmp_path)]
        for u,v in zip(a if o[0]=='s' else [{'p': a}], b if o[0]=='s' else [{'p': b}]):
            for k in u: torch.testing.assert_close(v[k], u[k], rtol=1e-4, atol=1e-5)

def mentions(file):
    with zipfile.ZipFile(file) as z: return [n for n in z.namelist() if n.endswith('data.pkl') and re.search(rb'(?<!ou)tpu|fastai_xla', z.read(n).lower())]

def test_files_do_not_mention_the_device(tmp_path):
    "Nor this package"
    saved.save(tmp_path)
    assert {f.name for f in tmp_path.iterdir()}=={'weights.pth','learner.pkl','predictions.pt','state.pt'}
    assert not [f for f in tmp_path.iterdir() if mentions(f)]

def test_pickled():
    learn = saved.learner().to_tpu()
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2)
    copy = pickle.loads(pickle.dumps(learn))
    torch.testing.assert_close(saved.predictions(copy), saved.predictions(learn), rtol=1e-5, atol=1e-6)
    with copy.no_bar(),copy.no_logging(): copy.fit(1, 1e-2)

def test_detach():
    learn = saved.learner().to_tpu()
    with learn.no_bar(),learn.no_logging():
        learn.fit(1, 1e-2)
        before = saved.predictions(learn)
        learn.detach_tpu()
        assert {t.device.type for t in learn.model.state_dict().values()}=={'cpu'} and not hasattr(learn, 'torch_tpu_trainer')
        assert {v.device.type for s in learn.opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)}=={'cpu'}
        torch.testing.assert_close(saved.predictions(learn), before, rtol=1e-5, atol=1e-6)
        learn.fit(1, 1e-2)
    with saved.learner().tpu_ctx() as learn: assert next(learn.model.parameters()).device.type=='tpu'
    assert next(learn.model.parameters()).device.type=='cpu'
