"What a notebook does on a GPU without a thought does the same on the device: losses that hold the model, frozen norms, loaders outside a fit, single predictions, loads, and what comes after an error."
import pytest
from threads import run_replicas, use_virtual_cores
use_virtual_cores(2)
from synth import *
from fastai.text.all import AWD_LSTM, awd_lstm_lm_config, language_model_learner, TextDataLoaders
from fastai.vision.gan import FixedGANSwitcher, GANLearner
from fastai_xla.runtime.counts import n_compiles

def quiet(learn, f, *args, **kwargs):
    set_seed(3)
    with learn.no_bar(),learn.no_logging(): return f(*args, **kwargs)

def compiles(f):
    "The number of graphs that `f()` compiles"
    before = n_compiles()
    f()
    return n_compiles()-before

def on_replicas(mk):
    "The outcome on two replicas; their models are made before, one after the other: they are threads, and share the random state"
    learns = [mk(8) for _ in range(2)]
    return run_replicas(lambda rank: outcome(learns[rank].to_tpu_distributed()), n=2)[0]

# ---- a loss that holds the model

def gan(bs, switch_eval=False, bn=False):
    "Noise to points; no bias before a BatchNorm, whose gradient would be rounding noise"
    set_seed(1)
    g = torch.Generator().manual_seed(0)
    data = list(zip(torch.randn(48, 4, generator=g), torch.randn(48, 6, generator=g)*.3+1))
    dls = DataLoaders(DataLoader(data[:32], bs=bs), DataLoader(data[32:], bs=8))
    def net(n_in, n_out): return nn.Sequential(nn.Linear(n_in, 8, bias=not bn), *[nn.BatchNorm1d(8)]*bn, nn.ReLU(), nn.Linear(8, n_out))
    return GANLearner.wgan(dls, net(4,6), net(6,1), switcher=FixedGANSwitcher(n_crit=2, n_gen=1), opt_func=SGD, switch_eval=switch_eval)

class L2Loss(Module):
    "Holds the model, and one of its parameters by itself"
    def __init__(self, model): self.model,self.w = model,model[0].weight
    def forward(self, pred, targ): return F.cross_entropy(pred, targ) + .1*(sum(p.pow(2).sum() for p in self.model.parameters()) + self.w.abs().sum())

def regularized(bs):
    learn = twin(bs=bs, n_trn=48)
    learn.dls = DataLoaders(DataLoader(vectors(48), bs=bs), DataLoader(vectors(16, seed=1), bs=8))
    learn.model[1] = nn.Identity()
    learn.loss_func = L2Loss(learn.model)
    return learn

def outcome(learn):
    quiet(learn, learn.fit, 2, 1e-2)
    return [p.detach().cpu() for p in learn.model.parameters()],[list(o) for o in learn.recorder.values]

@pytest.mark.parametrize('mk', [gan, regularized])
def test_a_loss_that_holds_the_model(mk):
    close(outcome(mk(8)), outcome(learn := mk(8).to_tpu()))
    lf = learn.loss_func
    assert (lf.gan_model if mk is gan else lf.model) is learn.model and (mk is gan or lf.w is learn.model[0].weight)
    close(outcome(mk(16)), on_replicas(mk))

# ---- BatchNorm in eval mode

def test_a_gan_whose_other_half_is_in_eval_mode():
    close(outcome(gan(8, True, True)), outcome(gan(8, True, True).to_tpu()))

class Frozen(Module):
    "A loss on the features of a frozen net, as a perceptual loss is"
    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU()).eval().requires_grad_(False)
        self.net[1].running_mean.uniform_()
    def forward(self, pred, targ): return F.mse_loss(self.net(pred), self.net(F.one_hot(targ, 3).float()))

def test_a_perceptual_loss():
    def mk(bs):
        learn = regularized(bs)
        learn.loss_func = Frozen()
        return learn
    close(outcome(mk(8)), outcome(mk(8).to_tpu()))
    close(outcome(mk(16)), on_replicas(mk))

class StaysInTraining(Callback):
    "As the generator of a GAN does"
    def before_validate(self): self.model.train()

def in_training(bs):
    "The last batch of the validation is half a batch"
    learn = regularized(bs)
    learn.loss_func,learn.dls.loaders[1] = CrossEntropyLossFlat(),DataLoader(vectors(20, seed=1), bs=8)
    learn.model[1] = nn.BatchNorm1d(16)
    learn.add_cb(StaysInTraining())
    return learn

def test_padding_stays_out_of_a_batchnorm_in_training():
    close(outcome(in_training(8)), outcome(in_training(8).to_tpu()))
    def valid(learn): return [float(o) for o in quiet(learn, learn.validate)]
    learns = [in_training(8) for _ in range(2)]
    close(valid(in_training(8)), run_replicas(lambda rank: valid(learns[rank].to_tpu_distributed()), n=2)[0])

# ---- one sample

def test_a_batch_that_is_one_bare_tensor():
    samples = vectors(24)
    def mk(tpu=False):
        return twin(lambda: Learner(DataLoaders(DataLoader(samples, bs=8), DataLoader(samples, bs=8)), nn.Linear(8,3), loss_func=CrossEntropyLossFlat()), tpu=tpu)
    def f(learn): return quiet(learn, learn.get_preds, dl=learn.dls.test_dl([samples[0][0]]))
    for learn in (plain := mk(), tpu := mk(True)): quiet(learn, learn.fit, 1)
    close(f(plain), f(tpu))
    learns = [mk() for _ in range(2)]
    close(f(mk()), run_replicas(lambda rank: f(learns[rank].to_tpu_distributed()), n=2)[0])

def test_predict_compiles_nothing():
    plain,tpu = twin(image_learner, tfms=[Flip(p=.5)]),twin(image_learner, tpu=True, tfms=[Flip(p=.5)])
    im = images(1, seed=9)[0][0]
    for learn in (plain,tpu): quiet(learn, learn.fit, 1)
    res = []
    assert compiles(lambda: res.append(quiet(tpu, tpu.predict, im)))==0
    close(quiet(plain, plain.predict, im)[1:], res[0][1:])
    quiet(tpu, tpu.show_results, max_n=2)
    assert compiles(lambda: quiet(tpu, tpu.show_results, max_n=2))==0
    on_device(tpu)

def test_a_language_model_writes_without_compiling():
    texts = [' '.join('abcdefg'[i*j%7] for j in range(60)) for i in range(1, 20)]
    def lm():
        set_seed(1)
        dls = TextDataLoaders.from_df(pd.DataFrame(dict(text=texts)), is_lm=True, bs=4, seq_len=8, valid_pct=.2, seed=1)
        return language_model_learner(dls, AWD_LSTM, config={**awd_lstm_lm_config, **dict(emb_sz=8, n_hid=12, n_layers=2)}, pretrained=False)
    plain,tpu = lm(),lm().to_tpu()
    def write(learn):
        set_seed(3)
        return learn.predict('a b', 6, no_bar=True)
    want,got = write(plain),[]
    assert compiles(lambda: got.append(write(tpu)))==0 and got==[want]
    for learn in (plain, tpu): quiet(learn, learn.fit, 1, 1e-2)
    want = write(plain)
    assert compiles(lambda: got.append(write(tpu)))==0 and got[1:]==[want]

# ---- values that are loaded

def test_a_fit_after_a_load_compiles_nothing(tmp_path):
    learn = twin(tpu=True, path=tmp_path)
    fit = lambda **kwargs: quiet(learn, learn.fit, 2, **kwargs)
    fit()
    ps = list(learn.model.parameters())
    learn.save('m')
    learn.load('m')
    assert compiles(fit)==0
    learn.model.load_state_dict({k: v.cpu().clone() for k,v in learn.model.state_dict().items()})
    assert compiles(fit)==0
    learn.load('m', with_opt=False)
    assert compiles(fit)==0
    fit(cbs=SaveModelCallback())
    assert compiles(fit)==0
    assert all(p is q for p,q in zip(ps, learn.model.parameters()))

def test_parameters_stay_the_objects_they_are():
    learn = twin()
    ps = list(learn.model.parameters())
    learn.fit(1)
    for f in (learn.to_tpu, partial(learn.fit, 1), learn.detach_tpu):
        f()
        assert all(p is q for p,q in zip(ps, learn.model.parameters()))

# ---- after a graph that failed

def test_float64_is_told_in_words_and_spoils_nothing():
    samples = [(x.double(), y) for x,y in vectors(24)]
    learn = twin(lambda: Learner(dls_of(samples, samples), mlp(), loss_func=CrossEntropyLossFlat()), tpu=True)
    was = [p.detach().cpu().clone() for p in learn.model.parameters()]
    with pytest.raises(RuntimeError, match=r'float64 numbers and the model float32 weights.*x\.float\(\)'): quiet(learn, learn.fit, 1)
    good = twin(tpu=True)
    quiet(good, good.fit, 1)
    assert all(torch.equal(a, b.detach().cpu()) for a,b in zip(was, learn.model.parameters()))
    learn.dls = dls_of(vectors(24), vectors(24))
    quiet(learn, learn.fit, 1)
    assert all(o.isfinite().all() for o in learn.recorder.losses)

class OnTheHost(Module):
    "Makes a tensor where a notebook for GPUs makes it if there is none"
    def __init__(self): self.lin,self.emb = nn.Linear(8, 3),nn.Embedding(8, 1)
    def forward(self, x): return self.lin(x+self.emb(torch.arange(8).to('cuda' if torch.cuda.is_available() else 'cpu')).T)

def test_a_tensor_of_the_host_is_told_with_its_line():
    learn = twin(lambda: Learner(dls_of(vectors(24), vectors(24)), OnTheHost(), loss_func=CrossEntropyLossFlat()), tpu=True)
    with pytest.raises(RuntimeError, match=r'made on the host .*test_as_on_cuda.py, line \d+: `def forward.*`device=x.device`'): quiet(learn, learn.fit, 1)
    good = twin(tpu=True)
    quiet(good, good.fit, 1)

class Widens(Module):
    "Half of it in float64, which torch refuses on the host, and XLA when it compiles"
    def __init__(self): self.lin,self.wide = nn.Linear(8, 3),True
    def forward(self, x): return F.linear(x.double() if self.wide else x, self.lin.weight, self.lin.bias)

def test_a_graph_that_fails_spoils_no_later_one():
    learn = twin(lambda: Learner(dls_of(vectors(24), vectors(24)), Widens(), loss_func=CrossEntropyLossFlat()), tpu=True)
    with pytest.raises(RuntimeError, match='XLA could not run the graph of this step.*load them, or build the Learner again'): quiet(learn, learn.fit, 1)
    good = twin(tpu=True)
    quiet(good, good.fit, 1)
    assert all(o.isfinite().all() for o in good.recorder.losses)

# ---- loaders outside a fit

def test_the_loaders_of_a_learner_yield_on_the_device():
    learn = twin(image_learner, tfms=[Flip(p=.5)])
    home,train = str(learn.dls.train.after_batch),learn.dls.train
    learn.to_tpu()
    test = learn.dls.test_dl([o[0] for o in images(3)])
    for b in (learn.dls.one_batch(), learn.dls.valid.one_batch(), test.one_batch()): assert devices(b)=={'xla'}
    assert [learn.model(xb).device.type for xb,yb in learn.dls.valid]==['xla']*2
    learn.dls.show_batch(max_n=2)
    quiet(learn, learn.fit, 1)
    plain = Learner(learn.dls, cnn(), loss_func=CrossEntropyLossFlat())                    # which shares the loaders
    quiet(plain, plain.fit, 1)
    assert devices(list(plain.model.parameters()))=={'cpu'} and devices(learn.dls.one_batch())=={'xla'}
    learn.dls.cpu()
    assert devices(learn.dls.one_batch())=={'cpu'}
    learn.dls = image_dls()
    quiet(learn, learn.fit, 1)
    assert devices(learn.dls.one_batch())=={'xla'}
    learn.detach_tpu()
    assert devices([learn.dls.one_batch(), train.one_batch()])=={'cpu'} and str(train.after_batch)==home
