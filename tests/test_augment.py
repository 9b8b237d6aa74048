"Batch transforms on the device: no fallback, no read, one compilation for all draws, and the CPU's result for the same seed. `python tests/test_augment.py` prints the table"
import os
os.environ.setdefault('PJRT_DEVICE', 'CPU')
import pytest
from fastai.vision.all import *
from fastai_xla.all import *
from fastai_xla.runtime.transfer import upload
from fastai_xla.data.loader import device_version
from fastai_xla.patches.registry import Loans
from fastai_xla.runtime.device import make_programs_for, torch_xla, xm
from fastai_xla.train.stand_ins import lend_stand_ins

for _nm in [o for o in dir() if o.startswith('test')]: del globals()[_nm]   # fastcore's own would be collected as tests
DEVICE,N_BATCHES,BS = xla_device(),4,4

def batch(kind, h=16, w=16):
    "A batch of `kind`, the same at each call"
    g = torch.Generator().manual_seed(0)
    im = TensorImage(torch.rand(BS, 3, h, w, generator=g))
    im[:2] = im[:2].round()         # half of it saturated
    other = dict(mask=lambda: TensorMask(torch.randint(0, 5, (BS,h,w), generator=g)), points=lambda: TensorPoint(torch.rand(BS, 5, 2, generator=g)*2-1),
                 boxes=lambda: TensorBBox(tensor([[-.5,-.4,.3,.6],[0.,.1,.9,.8]]).expand(BS, 2, 4).contiguous()),
                 bytes=lambda: TensorMask(torch.randint(0, 256, (BS,h,w), generator=g, dtype=torch.uint8)))
    if kind=='image': return im,
    return (TensorImage((im*255).byte()) if kind=='bytes' else im), other[kind]()

def tensors(b): return [o.as_subclass(Tensor) for o in b]

def measure(on_cpu, on_device, b):
    "Some draws: the largest difference in each tensor of the result, and what XLA counted"
    want,got = [],[]
    for i in range(N_BATCHES):
        set_seed(i)
        want.append(tensors(on_cpu(tuple(o.clone() for o in b))))
    torch_xla.sync()
    xm.wait_device_ops()
    start = xla_counts()
    for i in range(N_BATCHES):
        set_seed(i)
        got.append(tensors(on_device(upload(tuple(b), DEVICE))))
        torch_xla.sync()
    xm.wait_device_ops()
    counts,got = xla_counts()-start,to_host(got)
    assert [[(o.dtype,o.shape) for o in x] for x in want]==[[(o.dtype,o.shape) for o in x] for x in got]
    return [max((w.double()-g.double()).abs().max().item() for w,g in zip(*o)) for o in zip(zip(*want), zip(*got))],counts

def of_pipeline(make, b, split_idx=0):
    return measure(Pipeline(make(), split_idx=split_idx), TfmPlacement(Pipeline(make()), 'device').device(DEVICE, split_idx), b)

def acts(make):
    "Is one of some batches other than what came in?"
    set_seed(0)
    f,(im,) = Pipeline(L(make()), split_idx=0),batch('image')
    return any(not torch.equal(f((im.clone(),))[0], im) for _ in range(N_BATCHES))

def holds(differences, counts, *tols):
    assert (counts.fallbacks,counts.reads)==({},0) and counts.compiles<=1, counts      # 0 when an earlier test made the same graph
    assert all(d<=t for d,t in zip(differences, tols)), f'{differences} against {tols}'

# ---- fastai's transforms: what makes them, on what, how far an image's value may be off, what the batch is besides

AFFINE,LIGHT = 2e-5,2e-6
def norm(): return Normalize.from_stats(*imagenet_stats, cuda=False)

TFMS = dict(
    int_to_float=(IntToFloatTensor, 1e-7), normalize=(norm, 1e-6),
    flip=(Flip, AFFINE), dihedral=(partial(Dihedral, p=.9), AFFINE), rotate=(partial(Rotate, 30, p=.9), AFFINE), zoom=(partial(Zoom, max_zoom=2., p=.9), AFFINE),
    warp=(partial(Warp, .4, p=.9), AFFINE), deterministic_flip=(DeterministicFlip, AFFINE), deterministic_dihedral=(DeterministicDihedral, AFFINE),
    brightness=(Brightness, LIGHT), contrast=(Contrast, LIGHT), saturation=(Saturation, LIGHT), hue=(Hue, LIGHT),
    saturation_hue=(lambda: [Saturation(.9, p=1.),Hue(p=1.)], 5e-6), hue_saturation=(lambda: [Hue(p=1.),Saturation(p=1.)], 5e-6),
    **{f'{f.__name__.lower()}_batch': (partial(f, batch=True), AFFINE) for f in (Flip,Dihedral,Rotate,Zoom,Warp)},
    **{f'{f.__name__.lower()}_batch': (partial(f, batch=True), LIGHT) for f in (Brightness,Contrast,Saturation,Hue)},
    aug=(aug_transforms, AFFINE), aug_mult=(partial(aug_transforms, mult=2., flip_vert=True), AFFINE), aug_batch=(partial(aug_transforms, batch=True), AFFINE),
    aug_no_warp=(partial(aug_transforms, max_warp=0, do_flip=False), AFFINE),
    aug_zeros=(partial(aug_transforms, pad_mode='zeros'), AFFINE), aug_border=(partial(aug_transforms, pad_mode='border'), AFFINE),
    aug_edges=(partial(aug_transforms, align_corners=False), AFFINE),
    rotate_nearest=(partial(Rotate, 30, mode='nearest'), 0), rotate_draw=(partial(Rotate, p=1., draw=[5,-5,20,0]), AFFINE),
    whole=(lambda: [IntToFloatTensor(), *aug_transforms(xtra_tfms=[Saturation(),Hue()]), norm()], 1e-4))

@pytest.mark.parametrize('name', 'int_to_float dihedral warp hue_saturation aug_mult aug_batch aug_edges rotate_nearest rotate_draw whole'.split())
def test_images(name):
    make,tol = TFMS[name]
    assert acts(make)
    holds(*of_pipeline(lambda: L(make()), batch('bytes' if name in ('int_to_float','whole') else 'image')), tol, 0)

SIZES = dict(
    larger=(partial(aug_transforms, size=24), 16, 16), wide=(partial(aug_transforms, size=(12,20)), 16, 16),
    smaller=(partial(aug_transforms, size=5, max_zoom=3., p_affine=.7), 40, 31), smaller_exact=(partial(Zoom, max_zoom=4., size=8, p=.8), 48, 48),
    crop=(partial(RandomResizedCropGPU, 8), 24, 20), crop_shrunk=(partial(RandomResizedCropGPU, 6, min_scale=.1), 60, 50),
    crop_wide=(partial(RandomResizedCropGPU, (5,9), ratio=(1,2), max_scale=.8), 40, 64), crop_larger=(partial(RandomResizedCropGPU, 24), 16, 16),
    aug_crop=(partial(aug_transforms, size=8, min_scale=.3), 24, 24))

@pytest.mark.parametrize('name', 'wide smaller smaller_exact crop_shrunk crop_wide aug_crop'.split())
def test_sizes(name):
    make,h,w = SIZES[name]
    holds(*of_pipeline(lambda: L(make()), batch('mask', h, w)), AFFINE, 0)

@pytest.mark.parametrize('kind', ['mask','points','boxes'])
def test_targets(kind):
    "With an image go its mask (exactly), its points or its boxes"
    make,tol = TFMS['aug_mult']
    holds(*of_pipeline(lambda: L(make()), batch(kind)), tol, 0 if kind=='mask' else 1e-5)

@pytest.mark.parametrize('make,size', [(aug_transforms,16), (partial(aug_transforms, size=8),40), (partial(RandomResizedCropGPU, 8, valid_scale=.9),40), (RandomErasing,16)])
def test_validation(make, size):
    b = batch('mask', size, size)
    on_cpu,on_device = [f for f in (Pipeline(L(make()), split_idx=1), TfmPlacement(Pipeline(L(make())), 'device').device(DEVICE, 1))]
    want = on_cpu(tuple(o.clone() for o in b))
    start = xla_counts()
    got = on_device(upload(b, DEVICE))
    torch_xla.sync()
    c = xla_counts()-start
    assert (c.reads,c.fallbacks)==(0,{})
    for x,y in zip(tensors(want), tensors(to_host(got))): assert (x.double()-y.double()).abs().max()<=AFFINE

# ---- erasing: the rectangles are the CPU's, noise is the device's own

@pytest.mark.parametrize('make', [RandomErasing, partial(RandomErasing, p=.5, max_count=4)])
def test_erasing_with_noise(make):
    def left(f): return lambda b: (TensorImage((f(b)[0]==-3).float()),)
    on_cpu,on_device = Pipeline([make()], split_idx=0),TfmPlacement(Pipeline([make()]), 'device').device(DEVICE, 0)
    holds(*measure(left(on_cpu), left(on_device), (TensorImage(torch.full((BS,3,16,16), -3.)),)), 0)

# ---- mixing

class Mixing:
    "As much of a Learner as a mixing callback sees, for a function of a batch; on the device with the stand-in of a fit"
    def __init__(self, make, y_int=True, tpu=False):
        self.cb,self.loss_func,self.training,self.model = make(),SimpleNamespace(y_int=y_int),True,nn.Linear(1, 1)
        self.cb.learn,self.cbs = self,L(self.cb)
        if tpu: lend_stand_ins(self, Loans())
    def _grab_cbs(self, cls): return self.cbs.filter(lambda cb: isinstance(cb, cls))
    x,y = [property(lambda self,k=k: getattr(self, k)[0]) for k in ('xb','yb')]
    def __call__(self, b):
        self.xb,self.yb = b[:1],b[1:]
        self.cb.stack_y = self.loss_func.y_int
        self.cb.before_batch()
        return *self.xb,*(self.cb.yb1 if self.cb.stack_y else ()),*self.yb,self.cb.lam

@pytest.mark.parametrize('make,stack_y', [(MixUp,True), (CutMix,False)], ids=lambda o: getattr(o, '__name__', ''))
def test_mixing_callbacks(make, stack_y):
    b = (*batch('image'),TensorCategory(torch.arange(BS)) if stack_y else TensorMultiCategory(torch.rand(BS,3)))
    holds(*measure(Mixing(make, stack_y), Mixing(make, stack_y, tpu=True), b), *[1e-6]*4)

# ---- in a Learner

def image_learner(tfms, n=40, **kwargs):
    rng = np.random.RandomState(0)
    ims = [(rng.randint(0, 256, (16,16,3)).astype(np.uint8), 'ab'[i%2]) for i in range(n)]
    dls = DataBlock((ImageBlock, CategoryBlock), get_x=ItemGetter(0), get_y=ItemGetter(1), splitter=IndexSplitter(range(n-8, n)), batch_tfms=tfms).dataloaders(ims, bs=4, num_workers=0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), **kwargs)

class Counts(Callback):
    order = 200
    def before_fit(self): self.epochs = []
    def before_epoch(self):
        xm.wait_device_ops()
        self.start = xla_counts()
    def after_train(self):
        xm.wait_device_ops()
        self.epochs.append(xla_counts()-self.start)

def test_same_seed_same_training_as_on_the_cpu():
    "All of it on the device by `auto`, bytes over the wire, and nothing to write for it"
    losses = []
    for tpu in (False,True):
        set_seed(3)
        learn = image_learner([*aug_transforms(size=12, max_lighting=.4), Saturation(), norm()], cbs=CutMix())
        if tpu: learn.to_tpu(fetch_every=1e9, replay=False) # which reads no tensors to compare steps
        cb = Counts()
        set_seed(5)
        with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-2, cbs=cb)
        losses.append([float(o) for o in learn.recorder.losses])
    assert losses[0]==pytest.approx(losses[1], abs=1e-4)
    assert {place for _,place,*_ in learn.tfm_placement.rows}=={'device'}
    c = cb.epochs[1]
    assert (c.compiles,c.fallbacks)==(0,{}) and c.reads<=2

def test_replayed_steps_transform_as_on_the_cpu():
    res = []
    for tpu in (False,True):
        set_seed(3)
        learn = image_learner([DeterministicDihedral(), RandomResizedCropGPU(8, min_scale=.3), *aug_transforms(max_lighting=.4), Hue(p=1.), norm()])
        if tpu: learn.to_tpu()
        set_seed(5)
        with learn.no_bar(),learn.no_logging(): learn.fit(3, 1e-2)
        res.append([float(o) for o in learn.recorder.losses])
    assert res[0]==pytest.approx(res[1], abs=1e-4)
    assert '22 of 24 training steps were replayed' in str(learn.replay), learn.replay

def halved(x:TensorImage): return x/2
def by_its_largest(x:TensorImage): return x/x.max().item()

def test_unknown_transforms_run_on_the_host():
    "Those that come before them too; the table says so, and they compute what plain fastai does"
    def trained(attach):
        set_seed(1)
        learn = attach(image_learner([halved,by_its_largest,norm()]))
        set_seed(2)
        with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-2)
        return learn,[list(o) for o in learn.recorder.values]
    (_,want),(learn,got) = trained(noop),trained(lambda o: o.to_tpu())
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert [row[1:] for row in learn.tfm_placement.rows]==[('host','not known to be clean on the device')]*2+[('device','clean on the device')]*2

# ---- as traced for a TPU: matrix products for look-ups

@pytest.fixture
def for_a_tpu():
    make_programs_for('TPU')
    yield
    make_programs_for(None)

@pytest.mark.parametrize('mode,padding_mode,align_corners', [('bilinear','zeros',True), ('bilinear','border',False), ('nearest','reflection',True)])
def test_grid_sample_for_a_tpu(mode, padding_mode, align_corners, for_a_tpu):
    g = torch.Generator().manual_seed(0)
    x,grid = torch.randn(2,3,7,5, generator=g),torch.randn(2,6,4,2, generator=g)*1.5
    grid[0,0] = torch.tensor([[-1,-1],[1,1],[3,-40],[0,0]])
    def f(b): return F.grid_sample(*b, mode=mode, padding_mode=padding_mode, align_corners=align_corners),
    holds(*measure(f, f, (x,grid)), AFFINE if mode=='bilinear' else 0)
    text = torch_xla._XLAC._get_xla_tensors_hlo(list(f(upload((x,grid), DEVICE))))
    assert 'dot(' in text and 'gather(' not in text

@pytest.mark.parametrize('name', ['aug_mult','aug_zeros','whole'])
def test_images_for_a_tpu(name, for_a_tpu): test_images(name)

@pytest.mark.parametrize('name', ['smaller','crop_wide','aug_crop'])
def test_sizes_for_a_tpu(name, for_a_tpu): test_sizes(name)

@pytest.mark.parametrize('make', [aug_transforms, partial(aug_transforms, size=(97,130), pad_mode='zeros')], ids=['same','sizes'])
def test_tiles(make, for_a_tpu):
    "Of draws that look as far as a tile reaches and of those that look further, in one program"
    holds(*of_pipeline(lambda: L(make()), batch('image', 100, 131)), 1e-4)

def test_tiles_are_for_large_images_without_gradients(for_a_tpu):
    def text(n, grad=False, **kwargs):
        tfms = TfmPlacement(Pipeline(L(aug_transforms(**kwargs))), 'device').device(DEVICE, 0)
        ims = TensorImage(torch.rand(2,3,n,n)).to(DEVICE).requires_grad_(grad)
        return torch_xla._XLAC._get_xla_tensors_hlo([tfms((ims,))[0].as_subclass(Tensor)])
    assert 'while(' in text(128) and 'dynamic-update-slice' in text(128, mult=2.)
    for o in (text(64), text(128, size=64), text(128, grad=True), text(128, mode='nearest')): assert 'while(' not in o

def test_bytes_take_one_product_on_a_tpu(for_a_tpu):
    "bfloat16 holds them; other numbers are cut into pieces"
    tfms = TfmPlacement(Pipeline([IntToFloatTensor(), Rotate(30, p=1.)]), 'device').device(DEVICE, 0)
    def text(kind): return torch_xla._XLAC._get_xla_tensors_hlo(tensors(tfms(upload(batch(kind), DEVICE)))[:1])
    assert 'bf16[' not in text('bytes') and 'bf16[' in text('image')

def test_gradients_and_large_images_are_looked_up_on_a_tpu_too(for_a_tpu):
    def text(x, grid): return torch_xla._XLAC._get_xla_tensors_hlo([F.grid_sample(x, grid, align_corners=True)])
    x,grid = torch.rand(1,3,8,8, device=DEVICE),torch.rand(1,8,8,2, device=DEVICE)
    assert 'gather(' not in text(x, grid)
    assert 'gather(' in text(x.requires_grad_(), grid) and 'gather(' in text(torch.rand(1,3,640,480, device=DEVICE), grid)

def table():
    "Of each transform: its name, the largest difference to the CPU, and what XLA counted in ten batches"
    global N_BATCHES
    N_BATCHES = 10
    for name,(make,_) in TFMS.items(): yield name, *of_pipeline(lambda: L(make()), batch('bytes' if name in ('int_to_float','whole') else 'image'))
    for name,(make,h,w) in SIZES.items(): yield f'{name} {h}x{w}, mask', *of_pipeline(lambda: L(make()), batch('mask', h, w))
    for kind in ('mask','points','boxes'): yield f'aug_mult with {kind}', *of_pipeline(lambda: L(TFMS['aug_mult'][0]()), batch(kind))
    for make in (MixUp,CutMix):
        for stack_y,y in ((True,TensorCategory(torch.arange(BS))), (False,TensorMultiCategory(torch.rand(BS,3)))):
            yield f'{make.__name__} stack_y={stack_y}', *measure(Mixing(make, stack_y), Mixing(make, stack_y, tpu=True), (*batch('image'),y))

if __name__=='__main__':
    print(f'{"transform":24}{"off by":>9}  fallbacks  reads  compiles  uploads a batch')
    for name,d,c in table(): print(f'{name:24}{max(d):9.1e}{sum(c.fallbacks.values()):11}{c.reads:7}{c.compiles:10}{c.uploads/N_BATCHES:17.1f}')
