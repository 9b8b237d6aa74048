"Calls beside `fit`, on TorchTPU and in plain fastai with the same weights"
import pytest, torch
from fastai.vision.all import ClassificationInterpretation, noop, PILImage
from parity_models import cnn, images, vit
from workloads import plain_fastai
from fastai_xla.all import *

def close(a, b):
    if isinstance(a, (tuple,list)):
        assert len(a)==len(b)
        for o,p in zip(a, b): close(o, p)
    elif isinstance(a, torch.Tensor):
        assert a.device.type==b.device.type=='cpu'
        torch.testing.assert_close(torch.as_tensor(a).as_subclass(torch.Tensor), torch.as_tensor(b).as_subclass(torch.Tensor), rtol=1e-4, atol=1e-5)
    elif isinstance(a, float): assert a==pytest.approx(b, rel=1e-4, abs=1e-5)
    else: assert a==b

def losses_found(learn):
    i = ClassificationInterpretation.from_learner(learn)
    return i.confusion_matrix().tolist(), i.top_losses(3)[0]

calls = dict(validate=lambda l: list(l.validate()), preds=lambda l: l.get_preds(with_decoded=True, with_loss=True), preds_of_training=lambda l: l.get_preds(ds_idx=0),
    predict=lambda l: [o for o in l.predict(PILImage.create(images()[0][0]))], test_dl=lambda l: l.get_preds(dl=l.dls.test_dl([0,1,2]))[0],
    interpretation=losses_found, loss_not_reduced=lambda l: l.get_preds(with_loss=True, act=noop)[2])

@pytest.fixture(scope='module')
def learners():
    with plain_fastai():
        plain = cnn()
        with plain.no_bar(),plain.no_logging(): plain.fit(1, 1e-2)
    ours = cnn()
    ours.model.load_state_dict(plain.model.state_dict())
    return plain,ours.to_tpu()

@pytest.mark.parametrize('name', calls)
def test_call(name, learners):
    plain,ours = learners
    with plain_fastai(),plain.no_bar(): want = calls[name](plain)
    with ours.no_bar(): got = calls[name](ours)
    close(got, want)

def test_batches_are_on_the_device(learners):
    assert {o.device.type for o in learners[1].dls.one_batch()}=={'tpu'} and learners[1].summary()
    learners[1].show_results(max_n=2)

def test_tta():
    with plain_fastai():
        plain = vit()
        with plain.no_bar(): want = plain.tta(n=1)[0]
    ours = vit()
    ours.model.load_state_dict(plain.model.state_dict())
    ours.to_tpu()
    with ours.no_bar(): close(ours.tta(n=1)[0], want)
