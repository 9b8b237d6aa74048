"Text learners on texts of many lengths, and a count of what XLA does in each of their epochs"
from parity_models import *
from fastai_xla.all import xla_counts
from fastai_xla.runtime.device import xm

DROPS = dict(output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=1e-12)
"As in `parity_models.text`: weights are dropped with a chance of 1e-12, so never"

def many_lengths(n=56, longest=24, seed=0):
    "`n` texts of 3 to `longest` words whose label depends on the words in them"
    rng = np.random.RandomState(seed)
    words,lens = np.array('good fine great bad poor awful'.split() + [f'w{i}' for i in range(45)]),rng.randint(3, longest+1, n)
    idxs = [np.where(rng.rand(l)<.4, rng.randint(0, 6, l), rng.randint(6, len(words), l)) for l in lens]
    return pd.DataFrame(dict(text=[' '.join(words[o]) for o in idxs], label=['pos' if (o<3).sum()>((o>2)&(o<6)).sum() else 'neg' for o in idxs]))

def text_dls(is_lm=False, n=56, n_valid=14, bs=4, seq_len=8, **kwargs):
    df = many_lengths(n)
    x = TextBlock.from_df('text', is_lm=is_lm, tok=BaseTokenizer(), seq_len=seq_len, min_freq=1, n_workers=0, rules=[])
    db = DataBlock(x if is_lm else (x, CategoryBlock), get_x=ColReader('text'), get_y=None if is_lm else ColReader('label'), splitter=IndexSplitter(range(n-n_valid, n)))
    return db.dataloaders(df, bs=bs, num_workers=0, seq_len=seq_len, **kwargs) if is_lm else db.dataloaders(df, bs=bs, num_workers=0, **kwargs)

SIZES = dict(emb_sz=12, n_hid=16, n_layers=2)

@seeded
def classifier(seq_len=8, drops=DROPS, max_len=72*20, n_hid=16, **kwargs):
    "`text_classifier_learner` whose texts differ in length"
    learn = text_classifier_learner(text_dls(seq_len=seq_len), AWD_LSTM, config={**awd_lstm_clas_config, **SIZES, **drops, 'n_hid':n_hid}, pretrained=False, seq_len=seq_len, drop_mult=1.,
                                    ps=[0.], lin_ftrs=[10], max_len=max_len, metrics=accuracy, **kwargs)
    learn.model[0].module.encoder.weight.data.mul_(10)
    return learn

@seeded
def language_model(seq_len=8, drops=DROPS, **kwargs):
    "`language_model_learner`"
    return language_model_learner(text_dls(True, seq_len=seq_len, n=20, n_valid=6), AWD_LSTM, config={**awd_lstm_lm_config, **SIZES, **drops}, pretrained=False, drop_mult=1.,
                                  metrics=[accuracy, Perplexity()], **kwargs)

class EpochCounts(Callback):
    "Counts of each epoch, training with validation, in `epochs`, of its training batches alone in `batches`"
    order = 200
    def before_fit(self): self.epochs,self.batches = [],[]
    def before_epoch(self):
        xm.wait_device_ops()
        self.start = xla_counts()
    def before_train(self): self.train_start = xla_counts()
    def after_batch(self):
        if not self.training: return
        if self.iter==self.n_iter-1: xm.wait_device_ops() # XLA counts a graph when it has run
        self.last = xla_counts()-self.train_start
    def after_train(self): self.batches.append(self.last)
    def after_epoch(self):
        xm.wait_device_ops()
        self.epochs.append(xla_counts()-self.start)
