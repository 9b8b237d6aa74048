"What a Learner has the device compute on a TPU (other forms of operators, layouts, tiles), computed here: replayed, and equal to plain fastai."
import pytest
from compile_families import collab_dot, image_dls, small_images, tabular, vit
from fastai.vision.all import aug_transforms, ConvLayer, Flatten, imagenet_stats, Learner, nn, Normalize, set_seed
from parity_models import seeded
import fastai_xla.all
from fastai_xla.runtime.device import make_programs_for

@seeded
def large_images():
    "Affine maps by tiles"
    return Learner(image_dls(112, bs=8, n=48, n_valid=8, batch_tfms=[*aug_transforms(), Normalize.from_stats(*imagenet_stats, cuda=False)], src_sz=112),
        nn.Sequential(ConvLayer(3, 4, stride=8), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(4, 4)))

@pytest.fixture(autouse=True)
def for_a_tpu():
    make_programs_for('TPU')
    yield
    make_programs_for(None)

slow = [pytest.param(o, marks=pytest.mark.slow) for o in (collab_dot, tabular)]

@pytest.mark.parametrize('make', [vit, small_images, large_images, *slow], ids=lambda f: f.__name__)
def test_replayed_and_equal(make):
    losses = []
    for tpu in (False,True):
        learn = make()
        if tpu: learn.to_tpu()
        set_seed(5)
        with learn.no_bar(),learn.no_logging(): learn.fit(3, 1e-3)
        losses.append([float(o) for o in learn.recorder.losses])
    assert losses[0]==pytest.approx(losses[1], abs=1e-4)
    n = len(losses[0])
    assert learn.replay.n_replayed>=n-5, learn.replay
