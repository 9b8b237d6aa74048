"Each error says what is wrong, what was seen and what to do, and comes before training; the Learner is as it was."
import pytest
from synth import *

def says(e, *words):
    "Assert that the message of `e` has all `words`"
    for w in words: assert w in str(e.value), f'{w!r} is not in: {e.value}'

# ---- data

@pytest.mark.parametrize('n', [0, 3], ids=['empty', 'fewer_than_a_batch'])
def test_no_training_data(n):
    learn = Learner(DataLoaders(TfmdDL(vectors(n), bs=8, shuffle=n>0, drop_last=True, num_workers=0), TfmdDL(vectors(8), bs=8, num_workers=0)), mlp(), loss_func=CrossEntropyLossFlat()).to_tpu()
    before = [p.detach().cpu().clone() for p in learn.model.parameters()]
    with nothing_left(), pytest.raises(ValueError) as e: learn.fit(1)
    says(e, 'no batches', f'{n} samples', 'bs=8', 'drop_last=True', '`drop_last=False`')
    for a,b in zip(before, learn.model.parameters()): assert torch.equal(a, b.detach().cpu())
    learn.dls = dls_of(vectors(48), vectors(20))
    learn.fit(1)
    on_device(learn)
    assert len(learn.recorder.losses)==6

@pytest.mark.parametrize('sample,create_batch', [('some text',list), (object(),list), (3,str)], ids=['str','object','no_container'])
def test_a_batch_without_tensors(sample, create_batch):
    dl = TfmdDL([sample]*16, bs=8, num_workers=0, create_batch=create_batch)
    dl._n_inp,dl._types = 1,[type(sample)]
    learn = Learner(DataLoaders(dl, dl), mlp(), loss_func=CrossEntropyLossFlat()).to_tpu()
    with nothing_left(), pytest.raises(TypeError) as e: learn.fit(1)
    says(e, f'{create_batch.__name__} without a tensor', str(sample)[:20], 'return tensors or arrays from the dataset')
    on_device(learn)
    learn.dls = dls_of(vectors(48), vectors(20))
    learn.fit(1)
    assert len(learn.recorder.losses)==6

# ---- model and optimizer

def test_model_replaced_while_attached():
    learn = twin(tpu=True)
    learn.fit(1)
    learn.model = mlp()
    before = [p.detach().cpu().clone() for p in learn.model.parameters()]
    with pytest.raises(AssertionError) as e: learn.fit(1)
    says(e, 'optimizer', "not the model's", '`learn.create_opt()`')
    for a,b in zip(before, learn.model.parameters()): assert torch.equal(a, b.detach().cpu())
    learn.create_opt()
    learn.fit(1, 1e-2)
    on_device(learn)
    assert not any(torch.equal(a, b.detach().cpu()) for a,b in zip(before, learn.model.parameters()))

def test_optimizer_that_points_elsewhere():
    learn = twin(tpu=True)
    learn.fit(1)
    learn.opt = Adam(list(mlp().parameters()), lr=1e-3)
    with pytest.raises(AssertionError) as e: learn.fit(1)
    says(e, 'optimizer', "not the model's", '5 parameters', '`learn.create_opt()`')
    learn.opt = None
    learn.fit(1)
    on_device(learn)

def test_a_layer_replaced_while_attached():
    learn = twin(tpu=True)
    learn.fit(1)
    learn.model[3] = nn.Linear(16, 3)
    with pytest.warns(UserWarning, match=r'optimizer holds 2 parameters .*the model\'s.* only the \d others.*`learn.create_opt\(\)`'): learn.fit(1)

class Stays(nn.Linear):
    "A module that does not move"
    def _apply(self, fn, recurse=True): return self

@pytest.mark.parametrize('model,words', [(lambda: Stays(8, 3), ('cpu', '`_apply`')), (lambda: nn.Sequential(nn.Linear(8, 4), Stays(4, 3)), ('2 of its 4',))], ids=['whole','part'])
def test_a_model_that_does_not_move(model, words):
    learn = Learner(mlp_learner().dls, model(), loss_func=CrossEntropyLossFlat())
    with pytest.raises(AssertionError) as e: learn.to_tpu()
    says(e, 'did not move', *words)
    assert devices(list(learn.model.parameters()))=={'cpu'} and not hasattr(learn, 'tpu_trainer')
    learn.fit(1)                                           # a plain Learner still

class MovedAway(Callback):
    "A callback that takes the model off the device in mid-fit"
    def before_epoch(self):
        if self.epoch==1: self.model.cpu()

def test_a_model_that_leaves_in_mid_fit():
    "comes back before the next batch, and its optimizer follows it"
    plain,tpu,*_ = both(lambda learn: learn.fit(3, 1e-2, cbs=MovedAway()))
    on_device(tpu)
    same(plain, tpu)

def test_default_device_that_forbids_accelerators():
    learn = twin(tpu=True)
    old = defaults.use_cuda
    try:
        default_device(use=False)
        with pytest.raises(AssertionError) as e: learn.fit(1)
        says(e, 'default_device(False)', '`default_device(None)`', '`learn.detach_tpu()`')
    finally: defaults.use_cuda = old
    learn.fit(1)
    on_device(learn)
