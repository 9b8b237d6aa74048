"fastai's text learners as they are: few graphs, no fallback, no read in a batch, and the results of plain fastai. Texts differ in length"
import warnings
import numpy as np, pytest, torch, torch_xla
from torch import nn
from torch.nn import functional as F
from fastcore.all import noop
from fastai.callback.rnn import RNNRegularizer
from fastai_xla.all import EvalEvery, XLADL, apply_patches, to_host, undo_patches, xla_device
from fastai_xla.patches.registry import Loans
from fastai_xla.data.loader import bucket_lens
from fastai_xla.models.text import lend_text, pads_text
from fastai.text.all import LMLearner, TensorImage, TfmdDL
from text_models import DROPS, OPTS, TOLS, EpochCounts, assert_same, classifier, language_model, leaves, moved

TOL = {**TOLS['text'], 'start':1e-6, 'metrics':1e-4}
"Predictions and losses at the start, of plain evaluation, are those of the CPU but for the last bit or two"
TOL64 = {'start':1e-14, 'weights':1e-12, 'losses':2e-7}
"In float64, where rounding is 1e-16 and a batch of four makes it a hundred thousand times larger; the Recorder keeps losses in float32"
MAX_GRAPHS = 8 # of a first epoch, training and validation
ALL_DROPS = dict.fromkeys(DROPS, .1)
LEARNERS = dict(classifier=classifier, language_model=language_model)

@pytest.fixture(autouse=True, scope='module')
def started(): xla_device()

def quiet_fit(learn, *args, **kwargs):
    with learn.no_bar(),learn.no_logging(): learn.fit(*args, **kwargs)
    return learn

# ---- graphs

def ragged(**kwargs):
    "With a smaller last batch in training, which fastai drops by default; no graph is one that another test has compiled"
    learn = classifier(n_hid=20, **kwargs)
    learn.dls.train = learn.dls.train.new(drop_last=False)
    return learn

@pytest.mark.parametrize('mk', [classifier, ragged, language_model], ids=lambda o: o.__name__)
def test_few_graphs_and_no_reads(mk):
    "With dropout and the regularizer on"
    cb,learn = EpochCounts(),mk(drops=ALL_DROPS).to_tpu(fetch_every=1e9)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='The batches of this DataLoader')
        quiet_fit(learn, 2, 1e-2, cbs=cb)
    print(mk.__name__, 'compiles', [o.compiles for o in cb.epochs])
    assert 0<cb.epochs[0].compiles<=MAX_GRAPHS and cb.epochs[1].compiles==0
    assert [o.fallbacks for o in cb.epochs]==[{},{}]
    assert cb.batches[1].reads==0 and cb.batches[1].executions==len(learn.dls.train)

def test_texts_come_in_a_few_lengths():
    learn = classifier()
    dl = learn.dls.train
    stock = {b[0].shape[1] for _ in range(3) for b in dl}
    got = {b[0].shape[1] for _ in range(3) for b in XLADL(dl, xla_device(), pad_text=pads_text(learn.model))}
    assert len(stock)>4 and len(got)<=3 and got<=set(bucket_lens(dl.res, dl.bs))
    dl = dl.new(drop_last=False)
    got = {b[0].shape for _ in range(3) for b in XLADL(dl, xla_device(), pad_text=pads_text(learn.model))}
    assert {o[0] for o in got}=={2,4} and len(got)<=3 and len([o for o in got if o[0]==2])==1

def n_nodes(steps):
    "Nodes of the graph of an LSTM, forward and backward"
    m,x = nn.LSTM(3, 4).to('xla'),torch.ones(steps, 2, 3, device='xla')
    torch_xla.sync()
    m(x, (torch.zeros(1, 2, 4, device='xla'),)*2)[0].sum().backward()
    n = torch_xla._XLAC._get_xla_tensors_text([p.grad for p in m.parameters()]).count('\n')
    torch_xla.sync()
    return n

def test_the_graph_of_an_lstm_does_not_grow_with_the_text():
    assert n_nodes(4)==n_nodes(64)<150
    undo_patches()
    try: assert n_nodes(8)>n_nodes(4)+50
    finally: apply_patches()

# ---- equal to plain fastai

def start_and_run(learn):
    "Predictions at the start; history, weights and predictions after two epochs"
    with learn.no_bar(): start = learn.get_preds()[0] if not isinstance(learn, LMLearner) else learn.validate()[:2]
    quiet_fit(learn, 2, 1e-2)
    r = learn.recorder
    vals = list(zip(*r.values))
    res = {'start':leaves(start), 'batch loss':leaves(r.losses), 'train loss':leaves(vals[0]), 'valid loss':leaves(vals[1]), 'metrics':leaves(vals[2:]),
           'weights':leaves(learn.model.state_dict())}
    if isinstance(learn, LMLearner): return res
    with learn.no_bar(): return {**res, 'preds':leaves(learn.get_preds()[0])}

def equal_head(learn):
    "Without BatchNorm, which in batches of four makes rounding a hundred thousand times larger: see `test_parity_in_float64`"
    for m in learn.model.modules():
        for k,v in list(m.named_children()):
            if isinstance(v, nn.BatchNorm1d): setattr(m, k, nn.Identity())
    return learn

@pytest.mark.parametrize('name,kwargs', [('classifier',{}), ('classifier',dict(max_len=16)), ('language_model',{})], ids=['classifier','long_texts','language_model'])
def test_parity(name, kwargs):
    "Also for texts of which fastai leaves the start out of the pooling"
    def mk(): return equal_head(LEARNERS[name](opt_func=OPTS['SGD'], **kwargs))
    ref,learn = start_and_run(mk()),mk()
    before = leaves(learn.model.state_dict())
    got = start_and_run(learn.to_tpu())
    assert moved(before, got['weights'])>100*TOL['weights']
    assert_same(got, ref, TOL)

def float64(learn):
    "All of the training in float64: fastai rounds predictions in its losses and in the regularizer, and torch_xla BatchNorm's `eps` and `momentum`, to float32"
    learn.model.double()
    learn.loss_func = lambda pred,y: F.cross_entropy(pred.flatten(0, -2), y.flatten()).float()
    learn.remove_cbs(learn._grab_cbs(RNNRegularizer))
    for m in learn.model.modules():
        if isinstance(m, nn.BatchNorm1d): m.eps,m.momentum = 2**-17,2**-3
    return learn

@pytest.mark.parametrize('name', LEARNERS)
def test_parity_in_float64(name):
    "With the head as it is: what float32 is off by in small batches is rounding, and nothing else"
    def run(to_tpu):
        learn = float64(LEARNERS[name](opt_func=OPTS['SGD'], drops={**DROPS, 'weight_p':1e-20}))
        if to_tpu: learn.to_tpu()
        with learn.no_bar():
            start = to_host(learn.get_preds(act=noop)[0]) if name=='classifier' else learn.validate()[0]
            quiet_fit(learn, 2, 1e-2)
        return {'start':leaves(start), 'weights':leaves(learn.model.state_dict()), 'losses':leaves(learn.recorder.losses)}
    assert_same(run(True), run(False), TOL64)

def test_the_cpu_keeps_what_is_fastais():
    def run(): return quiet_fit(classifier(), 1, 1e-2).model.state_dict()
    got = run()
    undo_patches()
    try:
        assert 'lstm' not in vars(torch._VF)
        want = run()
    finally: apply_patches()
    assert all(torch.equal(want[k], got[k]) for k in want)

def test_padding_is_neutral_for_the_regularizer():
    "Of plain means over padded batches the training would be another"
    learn = classifier().to_tpu()
    reg = learn.rnn_regularizer
    def loss(n):
        learn.model.train()
        b = pads_text(learn.model)(learn.dls.valid.one_batch(), n)
        learn.xb,learn.yb,learn.training = (b[0].to('xla'),),(b[1].to('xla'),),True
        learn.model.reset()
        with Loans() as loans:
            lend_text(learn.model, loans)
            learn.pred = learn.model(*learn.xb)
        learn.loss_grad = torch.zeros([], device='xla')
        learn.rnn.after_pred()
        reg.after_loss()
        return learn.loss_grad.item()
    sl = learn.dls.valid.one_batch()[0].shape[1]
    learn.tpu_trainer._lend_patches() # as in a fit
    assert loss(sl)==pytest.approx(loss(sl+19), rel=1e-5)
    assert loss(sl)>0
    learn.tpu_trainer.release()
    assert loss(sl)!=pytest.approx(loss(sl+19), rel=1e-5)

# ---- told once

def test_another_set_in_the_middle_of_an_epoch():
    "A language model goes on with the states that it had, to the last bit, and draws the dropout that it would have drawn"
    def trained(steps):
        learn = language_model(drops=ALL_DROPS).to_tpu()
        cbs = [EvalEvery(learn.dls.valid, 'other', steps=o) for o in steps]
        torch.manual_seed(3)
        return quiet_fit(learn, 1, cbs=cbs).recorder,*cbs
    (a,),(b,other) = trained([]),trained([2])
    assert a.losses==b.losses and len(other.history)==3 and [*a.values[0]]==[*b.values[0]][:4]==[a.values[0][0], *other.history[-1][1:]]

def test_many_shapes_are_told_once():
    rng = np.random.RandomState(0)
    bs = [(TensorImage(torch.rand(2, 3, 8+i, 8)), torch.zeros(2)) for i in range(6)]
    dl = TfmdDL(range(12), bs=2, num_workers=0, create_batch=lambda s: bs[s[0]//2])
    def told():
        with warnings.catch_warnings(record=True) as ws:
            warnings.simplefilter('always')
            assert len(list(XLADL(dl, xla_device())))==6
        return [str(w.message) for w in ws if 'shapes' in str(w.message)]
    msg, = told()
    assert 'element 0 (TensorImage) came as (2, 3, 8, 8), (2, 3, 9, 8)' in msg and 'element 1' not in msg and 'Resize' in msg
    assert told()==[]
