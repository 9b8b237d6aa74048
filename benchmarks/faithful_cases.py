"The workloads of faithful.py, each as a user writes it; `python faithful_cases.py FORM CORES OUT case ...` runs them in one form and pickles what they give"
import faulthandler, gc, pickle, sys, time, traceback, warnings
warnings.filterwarnings('ignore')
form,cores,out,*names = sys.argv[1:] if __name__=='__main__' else ('plain', 4, None)
cores = int(cores)
from fastai.vision.all import *
from fastai.tabular.all import *
from fastai.collab import *
from fastai.text.all import *
from fastai.vision.gan import *
if form!='plain': from fastai_xla.all import *

cases = {}

def case(tol=1e-4, but=None, **reasons):
    "Decorator: a case, with the forms in which it may differ and why; `but` says how it is equal there too: run as `f(False)`, before `f(True)`"
    def _inner(f):
        cases[f.__name__.replace('_', ' ')] = f,tol,but,reasons
        return f
    return _inner

# ---- the form

def bs(n):
    "The `bs` of a user who wants batches of `n` samples: it is that of one core where it is per core"
    return n//cores if form in ('cores','pool') else n

def place(learn):
    "The one line that differs"
    if form=='tpu': learn.to_tpu()
    if form=='cores': learn.to_tpu_distributed(cores)
    if form=='pool': learn.to_tpu_distributed(cores, processes=True, sync_bn=True)
    if form=='sharded': learn.to_tpu_sharded(fsdp=cores)
    return learn

# ---- what is compared

def flat(o, key=()):
    "{path: array of float64 or of texts} of a nest"
    if isinstance(o, Tensor): o = o.detach().cpu().numpy()
    if isinstance(o, dict): return {k: v for n,x in o.items() for k,v in flat(x, (*key, str(n))).items()}
    if isinstance(o, (list,tuple,L)) and not (len(o) and isinstance(o[0], (int,float))):
        return {k: v for i,x in enumerate(o) for k,v in flat(x, (*key, str(i))).items()}
    a = np.asarray(o)
    return {key: a.astype(np.float64) if a.dtype.kind in 'fiub' else a.astype(str)}

def trained(learn):
    "What the last fit left"
    rec = learn.recorder
    weights = {k: v.clone() for k,v in to_cpu(learn.model.state_dict()).items()}
    return dict(losses=[float(o) for o in rec.losses], lrs=list(rec.lrs), values=[list(o) for o in rec.values], weights=weights)

# ---- data and models

def pictures(n=48, sz=32, seed=0):
    "Noisy stripes of four kinds"
    rng,g = np.random.RandomState(seed),np.arange(sz)
    waves = [np.sin(g[:,None]/2)+0*g, np.sin(g/2)+0*g[:,None], np.sin((g+g[:,None])/3), np.sin(g[:,None]/6)*np.sin(g/6)]
    ys = rng.permutation(np.arange(n)%4)
    return [np.clip(128+70*waves[y][...,None]+rng.randn(sz, sz, 3)*25, 0, 255).astype(np.uint8) for y in ys],[f'stripes{y}' for y in ys]

def normalize(): return Normalize.from_stats(*imagenet_stats)
def squish(sz): return Resize(sz, ResizeMethod.Squish)

def image_block(xs, ys, valid, item_tfms=None, batch_tfms=None, blocks=(ImageBlock, CategoryBlock), get_y=None):
    return DataBlock(blocks, get_x=lambda i: xs[i], get_y=get_y or (lambda i: ys[i]), splitter=IndexSplitter(valid), item_tfms=item_tfms,
                     batch_tfms=batch_tfms or normalize())

def image_dls(**kwargs):
    "48 pictures to train with, 14 to validate"
    return image_block(*pictures(62), range(48, 62), **kwargs).dataloaders(range(62), bs=bs(8), num_workers=0)

def arch(pretrained=False): return nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 16, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(16, 4))

def vision(dls, **kwargs): return vision_learner(dls, arch, pretrained=False, cut=-3, ps=0., lin_ftrs=[12], **kwargs)

# ---- the cases

@case(but='without draws', pool='each core draws its own augmentations')
def presizing_and_aug_transforms(draws):
    item_tfms,batch_tfms = (Resize(28), aug_transforms(size=24, min_scale=.75)) if draws else (Resize(24), [])
    learn = place(vision(image_dls(item_tfms=item_tfms, batch_tfms=[*batch_tfms, normalize()]), metrics=error_rate))
    found = learn.lr_find(num_it=12, suggest_funcs=(minimum, valley))
    learn.fine_tune(1, 3e-3, freeze_epochs=1)
    return dict(found=list(found), **trained(learn), preds=learn.get_preds())

@case()
def multi_label():
    ys = pictures(62)[1]
    dls = image_dls(blocks=(ImageBlock, MultiCategoryBlock), get_y=lambda i: [ys[i], 'even'] if i%2==0 else [ys[i]])
    learn = place(vision(dls, metrics=partial(accuracy_multi, thresh=.4)))
    learn.fine_tune(1, 3e-3, freeze_epochs=1)
    return dict(**trained(learn), preds=learn.get_preds(), results=learn.get_preds(with_decoded=True)[2])

@case()
def tabular():
    rng,n = np.random.RandomState(0),141
    df = pd.DataFrame(dict(job=rng.choice(['clerk','farmer','nurse','cook'], n), age=rng.randint(18, 70, n).astype(float), income=rng.lognormal(10, .5, n)))
    df['rich'] = np.where((df.age-44)/15+(df.job=='nurse')*1.5+(df.income-25000)/12000>.3, 'yes', 'no')
    df.loc[rng.choice(n-29, 12, replace=False), 'age'] = np.nan
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, FillMissing, Normalize], cat_names=['job'], cont_names=['age','income'], y_names='rich',
                                     y_block=CategoryBlock(), valid_idx=list(range(n-29, n)), bs=bs(16))
    learn = place(tabular_learner(dls, layers=[20,10], metrics=[accuracy, RocAucBinary()]))
    learn.fit_one_cycle(2, 1e-2)
    row,cls,probs = learn.predict(df.iloc[0])
    return dict(**trained(learn), preds=learn.get_preds(), test=learn.get_preds(dl=dls.test_dl(df.iloc[:9].drop(columns='rich')))[0], cls=cls, probs=probs)

@case()
def segmentation_with_unet():
    xs = pictures(62)[0]
    dls = image_dls(blocks=(ImageBlock, MaskBlock(codes=['back','stripe'])), get_y=lambda i: PILMask.create((xs[i][...,0]>128).astype(np.uint8)))
    learn = place(unet_learner(dls, arch, pretrained=False, cut=-3, metrics=[Dice(), JaccardCoeff()]))
    learn.fine_tune(1, 3e-3, freeze_epochs=1)
    preds,targs,masks = learn.get_preds(with_decoded=True)
    return dict(**trained(learn), preds=preds, targs=targs, masks=masks)

@case()
def key_points():
    dls = image_dls(blocks=(ImageBlock, PointBlock), get_y=lambda i: [[i%32, 31-i%32]], item_tfms=squish(24))
    learn = place(vision(dls, y_range=(-1,1), loss_func=MSELossFlat()))
    learn.fine_tune(1, 3e-3, freeze_epochs=1)
    return dict(**trained(learn), preds=learn.get_preds())

@case()
def collab():
    rng,n,f = np.random.RandomState(0),141,3
    u,i = rng.randint(0, 14, n),rng.randint(0, 11, n)
    r = (rng.randn(14, f)[u]*rng.randn(11, f)[i]).sum(1)+3
    df = pd.DataFrame(dict(user=[f'u{o}' for o in u], film=[f'film {o}' for o in i], rating=np.clip(np.round(r*2)/2, .5, 5)))
    dls = CollabDataLoaders.from_df(df, seed=3, bs=bs(16))
    learn = place(collab_learner(dls, n_factors=6, y_range=(0,5.5), metrics=[rmse, mae]))
    learn.fit_one_cycle(2, 5e-3, wd=.1)
    return dict(**trained(learn), preds=learn.get_preds(), bias=learn.model.bias(['film 3','film 0'], is_item=True))

_no_drop = dict(output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=1e-12)

def sentences(n=60, seed=0):
    "Of 4 to 11 words"
    rng = np.random.RandomState(seed)
    words = np.array('good fine great bad poor awful film book play story plot the a this that'.split())
    rows = [rng.randint(0, len(words), rng.randint(4, 12)) for _ in range(n)]
    return pd.DataFrame(dict(text=[' '.join(words[o]) for o in rows], label=['pos' if ((o<3).sum()>((o>2)&(o<6)).sum()) else 'neg' for o in rows]))

def text_dls(*blocks, **kwargs):
    tok = dict(tok=BaseTokenizer(), min_freq=1, n_workers=0, rules=[])
    db = DataBlock((TextBlock.from_df('text', seq_len=6, is_lm=not blocks, **tok), *blocks), get_x=ColReader('text'),
                   get_y=ColReader('label') if blocks else None, splitter=IndexSplitter(range(44, 60)))
    return db.dataloaders(sentences(), bs=bs(8), num_workers=0, **kwargs)

def text_clas(draws):
    dls = text_dls(CategoryBlock)
    if not draws: dls.train.shuffle = False
    cfg = {**awd_lstm_clas_config, **dict(emb_sz=6, n_hid=8, n_layers=1), **_no_drop}
    learn = text_classifier_learner(dls, AWD_LSTM, config=cfg, pretrained=False, seq_len=6, drop_mult=1., ps=[0.], lin_ftrs=[10],
                                    metrics=[accuracy, Perplexity()])
    learn.model[0].module.encoder.weight.data.mul_(10)
    return learn

by_bs = 'texts are sorted by length within batches of `bs`, that of a core'

@case(but='without draws', tol=5e-4, pool=by_bs)
def text_classifier(draws):
    learn = place(text_clas(draws))
    learn.fit_one_cycle(2, 3e-3)
    return dict(**trained(learn), preds=learn.get_preds(), one=learn.predict('good film')[2])

@case(but='without draws', tol=5e-4, pool=by_bs)
def gradual_unfreezing(draws):
    learn,res = place(text_clas(draws)),[]
    learn.freeze()
    learn.fit_one_cycle(1, 2e-3)
    res.append(trained(learn))
    learn.freeze_to(-2)
    learn.fit_one_cycle(1, slice(1e-3/2.6**4, 1e-3))
    res.append(trained(learn))
    learn.unfreeze()
    learn.fit_one_cycle(1, slice(5e-4/2.6**4, 5e-4))
    return dict(stages=res, **trained(learn), preds=learn.get_preds())

@case(but='with one `val_bs`', pool='the text of the validation is read in `bs` rows, which are shared')
def language_model(own):
    cfg = {**awd_lstm_lm_config, **dict(emb_sz=6, n_hid=8, n_layers=1), **_no_drop}
    dls = text_dls(val_bs=None if own else bs(8) if form=='cores' else 8) # ranks share its rows
    learn = place(language_model_learner(dls, AWD_LSTM, config=cfg, pretrained=False, drop_mult=1., metrics=[accuracy, Perplexity()]))
    learn.fit_one_cycle(2, 1e-2)
    return dict(**trained(learn), valid=learn.validate())

# ---- siamese, as in fastai's tutorial

class SiameseImage(fastuple): pass

class SiameseTransform(Transform):
    def __init__(self, xs, ys, valid, draws):
        self.xs,self.ys,self.draws = xs,ys,draws
        self.valid = {i: self._pair(i) for i in valid}
    def _pair(self, i):
        same = random.random()<.5 if self.draws else i%2==0
        others = [j for j in range(len(self.xs)) if (self.ys[j]==self.ys[i])==same]
        return random.choice(others) if self.draws else others[i%len(others)],same
    def encodes(self, i):
        j,same = self.valid.get(i) or self._pair(i)
        return SiameseImage(PILImage.create(self.xs[i]), PILImage.create(self.xs[j]), int(same))

class SiameseModel(Module):
    def __init__(self, encoder, head): self.encoder,self.head = encoder,head
    def forward(self, x1, x2): return self.head(torch.cat([self.encoder(x1), self.encoder(x2)], dim=1))

def siamese_loss(out, targ): return CrossEntropyLossFlat()(out, targ.long())
def siamese_splitter(m): return [params(m.encoder), params(m.head)]

@case(but='without draws', pool='each core draws its own pairs')
def siamese(draws):
    xs,ys = pictures(62)
    tls = TfmdLists(range(62), SiameseTransform(xs, ys, range(48, 62), draws), splits=[L(range(48)), L(range(48, 62))])
    dls = tls.dataloaders(bs=bs(8), num_workers=0, after_item=[squish(24), ToTensor], after_batch=[IntToFloatTensor, normalize()])
    model = SiameseModel(create_body(arch(), pretrained=False, cut=-3), create_head(32, 2, [12], ps=0.))
    learn = place(Learner(dls, model, loss_func=siamese_loss, splitter=siamese_splitter, metrics=accuracy))
    learn.freeze()
    learn.fit_one_cycle(1, 3e-3)
    learn.unfreeze()
    learn.fit_one_cycle(1, slice(1e-4, 1e-3))
    return dict(**trained(learn), preds=learn.get_preds())

# ---- GAN

def noise(i, draws): return TensorBase(torch.randn(6) if draws else torch.randn(6, generator=torch.Generator().manual_seed(i)))

@case(but='without draws', pool='each core draws its own noise')
def gan(draws):
    xs = pictures(62)[0]
    db = DataBlock((TransformBlock, ImageBlock), get_x=partial(noise, draws=draws), get_y=lambda i: xs[i], splitter=IndexSplitter(range(48, 62)),
                   item_tfms=squish(16), batch_tfms=Normalize.from_stats([.5]*3, [.5]*3))
    dls = db.dataloaders(range(62), bs=bs(8), num_workers=0)
    gen,crit = basic_generator(16, 3, in_sz=6, n_features=4),basic_critic(16, 3, n_features=4, act_cls=partial(nn.LeakyReLU, negative_slope=.2))
    learn = place(GANLearner.wgan(dls, gen, crit, opt_func=partial(Adam, mom=0.), switcher=FixedGANSwitcher(n_crit=2, n_gen=1)))
    learn.recorder.train_metrics,learn.recorder.valid_metrics = True,False
    learn.fit(2, 2e-4, wd=0.)
    return dict(**trained(learn), preds=learn.get_preds()[0])

class Evaluates(Callback):
    order = GANTrainer.order+1
    def before_validate(self): self.model.eval()

by_core = "it validates in training mode, by batches of a core; the critic's metric is its loss on a core's last training batch"

@case(but='in eval mode, without metrics', pool=by_core)
def gan_from_learners(trains):
    xs = pictures(62)[0]
    mk = lambda blocks,get_y: image_dls(blocks=blocks, get_y=get_y, item_tfms=squish(16))
    gen = unet_learner(mk((ImageBlock,ImageBlock), lambda i: xs[i][::-1].copy()), arch, pretrained=False, cut=-3, n_out=3, y_range=(-3.,3.),
                       loss_func=MSELossFlat())
    critic = gan_critic(n_channels=3, nf=4, n_blocks=1, p=0.)
    crit = Learner(mk((ImageBlock,CategoryBlock), lambda i: 'ab'[i%2]), critic, loss_func=AdaptiveLoss(nn.BCEWithLogitsLoss()))
    switcher = FixedGANSwitcher(n_crit=1, n_gen=1)
    cbs = [] if trains else Evaluates()
    learn = place(GANLearner.from_learners(gen, crit, weights_gen=(1.,50.), switcher=switcher, opt_func=partial(Adam, mom=0.), cbs=cbs))
    if not trains: learn._metrics = L()
    learn.fit(2, 1e-4, wd=0.)
    return dict(**trained(learn), preds=learn.get_preds()[0])

# ---- mixing

class NeighbourMixUp(MixUp):
    "Mixes each sample with its neighbour, which is on the same core"
    def before_batch(self):
        n = len(self.y)
        other = torch.arange(n).reshape(-1, 2).flip(1).flatten().to(self.x.device)
        self.lam,self.yb1 = torch.full((n,), .7, device=self.x.device),(self.y[other],)
        self.learn.xb = (torch.lerp(self.x[other], self.x, .7),)

@case(but='without draws', pool='each core mixes its own samples')
def mixup(draws):
    learn = place(vision(image_dls(), cbs=MixUp() if draws else NeighbourMixUp(), metrics=accuracy))
    learn.fit_one_cycle(2, 3e-3)
    return dict(**trained(learn), preds=learn.get_preds())

@case(pool='each core cuts from its own samples')
def cutmix():
    learn = place(vision(image_dls(), cbs=CutMix(), metrics=accuracy))
    learn.fit_one_cycle(2, 3e-3)
    return dict(**trained(learn), preds=learn.get_preds())

# ---- how notebooks go on

@case()
def progressive_resizing():
    learn = place(vision(image_dls(item_tfms=squish(16)), metrics=accuracy))
    learn.fit_one_cycle(1, 3e-3)
    first = trained(learn)
    learn.dls = image_dls(item_tfms=squish(24))
    learn.fine_tune(1, 1e-3)
    return dict(first=first, **trained(learn), preds=learn.get_preds())

@case()
def k_fold():
    xs,ys = pictures(48)
    res = []
    for fold in range(3):
        dls = image_block(xs, ys, range(fold*16, fold*16+16)).dataloaders(range(48), bs=bs(8), num_workers=0)
        learn = place(vision(dls, metrics=accuracy))
        learn.fine_tune(1, 3e-3)
        res.append(dict(**trained(learn), test=learn.get_preds(dl=dls.test_dl(range(10)))[0]))
    return dict(folds=res, mean=sum(o['test'] for o in res)/3)

@case()
def two_learners():
    a,b = place(vision(image_dls(), metrics=accuracy)),place(vision(image_dls(item_tfms=Resize(16)), metrics=error_rate, opt_func=SGD))
    a.fit(1, 3e-3)
    b.fit(1, 1e-2)
    a.fit(1, 1e-3)
    return dict(a=trained(a), b=trained(b), preds=[a.get_preds(), b.get_preds()])

@case()
def weighted_loader():
    xs,ys = pictures(62)
    dls = image_block(xs, ys, range(48, 62)).weighted_dataloaders(range(62), [1+2*(i%4==0) for i in range(62)], bs=bs(8), num_workers=0)
    learn = place(vision(dls, metrics=accuracy))
    learn.fit_one_cycle(2, 3e-3)
    return dict(**trained(learn), preds=learn.get_preds())

@case(but='without draws', pool='each core draws its own augmentations')
def tta(draws):
    tfms = [*(aug_transforms(size=24) if draws else []), normalize()]
    learn = place(vision(image_dls(batch_tfms=tfms), metrics=accuracy))
    learn.fit(1, 3e-3)
    return dict(**trained(learn), tta=learn.tta(n=2), most=learn.tta(n=2, use_max=True))

@case()
def interpretation():
    learn = place(vision(image_dls(), metrics=accuracy))
    learn.fit_one_cycle(2, 3e-3)
    interp = ClassificationInterpretation.from_learner(learn)
    losses,idxs = interp.top_losses(6)
    return dict(matrix=interp.confusion_matrix(), losses=losses, idxs=idxs, confused=interp.most_confused(min_val=1), preds=learn.get_preds())

@case()
def export_and_load_learner():
    learn = place(vision(image_dls(), metrics=accuracy))
    learn.fit_one_cycle(2, 3e-3)
    learn.save('m')
    learn.export('m.pkl')
    xs = pictures(62)[0]
    cls,i,probs = learn.predict(50)
    loaded = load_learner(Path('m.pkl'))
    test = loaded.get_preds(dl=loaded.dls.test_dl(range(9)))[0]
    return dict(**trained(learn), cls=cls, i=i, probs=probs, again=loaded.predict(50), test=test, saved=learn.load('m').validate())

# ---- run

def outcome(name):
    "What case `name` gives, or the error that it ends in"
    f,tol,but,reasons = cases[name]
    start,res = time.time(),dict(case=name, tol=tol, reasons=reasons)
    faulthandler.dump_traceback_later(300, exit=True)
    try:
        res['runs'] = {}
        for o in (but,'') if but else ('',):
            set_seed(42, reproducible=True)
            res['runs'][o] = flat(f(not o) if but else f())
    except BaseException as e: res.update(error=f'{type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ""}', trace=traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    return dict(res, seconds=time.time()-start)

def main():
    if form=='tpu': xla_device() # before the CPU runs a backward
    names[:] = [o.replace('_', ' ') for o in names]
    if not set(names)<=set(cases): sys.exit(f'no such case: {set(names)-set(cases)}; there are {[*cases]}')
    defaults.callbacks.remove(ProgressCallback)
    with open(out, 'wb') as f:
        pickle.dump(names or [*cases], f)
        for o in names or cases:
            pickle.dump(outcome(o), f)
            f.flush()

if __name__=='__main__': main()
