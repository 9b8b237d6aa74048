"fastai's text learners as they are: few graphs, no fallback, no read in a batch, and the results of plain fastai. Texts differ in length"
import warnings
import pytest, torch
from torch import nn
from fastai_xla.all import EvalEvery, XLADL, xla_device
from fastai_xla.data.loader import bucket_lens
from fastai_xla.models.text import pads_text
from fastai.text.all import LMLearner
from text_models import DROPS, OPTS, TOLS, EpochCounts, assert_same, classifier, language_model, leaves, moved

TOL = {**TOLS['text'], 'start':1e-6, 'metrics':1e-4}
"Predictions and losses at the start, of plain evaluation, are those of the CPU but for the last bit or two"
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
    "Without BatchNorm, which in batches of four makes rounding a hundred thousand times larger"
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

def test_another_set_in_the_middle_of_an_epoch():
    "A language model goes on with the states that it had, to the last bit, and draws the dropout that it would have drawn"
    def trained(steps):
        learn = language_model(drops=ALL_DROPS).to_tpu()
        cbs = [EvalEvery(learn.dls.valid, 'other', steps=o) for o in steps]
        torch.manual_seed(3)
        return quiet_fit(learn, 1, cbs=cbs).recorder,*cbs
    (a,),(b,other) = trained([]),trained([2])
    assert a.losses==b.losses and len(other.history)==3 and [*a.values[0]]==[*b.values[0]][:4]==[a.values[0][0], *other.history[-1][1:]]
