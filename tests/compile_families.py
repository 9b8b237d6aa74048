"Small Learners, one of each family of programs, and what each is compiled for"
from parity_models import *
from text_models import classifier

def all_tfms():
    "Each transform that runs on the device and keeps the size, and noise"
    return [Dihedral(), Rotate(30), Zoom(max_zoom=2.), Warp(.4), Brightness(), Contrast(), Saturation(), Hue(), RandomErasing(p=.5), Normalize.from_stats(*imagenet_stats)]

@seeded
def images_bf16(sz=24, bs=8, cbs=MixUp):
    "bfloat16, each transform on the device, MixUp, metrics of each batch and of the epoch"
    body = nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 16, stride=2), nn.AdaptiveAvgPool2d(1), Flatten())
    return Learner(image_dls(sz, bs=bs, batch_tfms=all_tfms()), nn.Sequential(body, nn.Linear(16, 4)), metrics=[accuracy, F1Score(average='macro'), Perplexity()], cbs=cbs()).to_bf16()

@seeded
def images_sgd(sz=16, bs=8):
    "SGD with momentum, random crops, a flip alone, CutMix"
    tfms = [RandomResizedCropGPU(sz), Flip(), Normalize.from_stats(*imagenet_stats)]
    return Learner(image_dls(2*sz, bs=bs, batch_tfms=tfms), nn.Sequential(ConvLayer(3, 8, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8, 4)), opt_func=OPTS['SGD'],
        cbs=CutMix(), metrics=accuracy)

@seeded
def unet(sz=16, bs=4):
    "`unet_learner` with masks that go through the transforms"
    xs,_ = images(24, sz)
    db = DataBlock((ImageBlock, MaskBlock(codes=list('abc'))), get_x=lambda i: xs[i], get_y=lambda i: (xs[i].sum(2)//300).astype(np.uint8), splitter=IndexSplitter(range(16, 24)),
        batch_tfms=[Flip(), Normalize.from_stats(*imagenet_stats)])
    return unet_learner(db.dataloaders(range(24), bs=bs, num_workers=0), _tiny_body, pretrained=False, n_out=3, metrics=DiceMulti())

@seeded
def convnext():
    "A small ConvNeXt in bfloat16"
    return vision_learner(image_dls(64, bs=16), 'convnext_tiny', pretrained=False, metrics=accuracy, custom_head=nn.Sequential(nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(128, 4)),
        depths=(3,1,1,1), dims=(64,64,128,128)).to_bf16()

def _tiny_body(pretrained=False): return nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 16, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(16, 4))

@seeded
def wide_vit(opt_func=OPTS['AdamW'], depth=4):
    "A timm ViT with enough features to be cut in eight"
    return vision_learner(image_dls(32), 'vit_tiny_patch16_224', pretrained=False, opt_func=opt_func, metrics=accuracy, custom_head=nn.Linear(128, 4), img_size=32, patch_size=8,
        embed_dim=128, depth=depth, num_heads=4)

@seeded
def vit_checkpointed():
    "timm's own checkpointing, with dropout"
    learn = vision_learner(image_dls(64, bs=32, n=64, n_valid=32), 'vit_tiny_patch16_224', pretrained=False, custom_head=nn.Linear(64, 4), img_size=64, patch_size=8, embed_dim=64,
        depth=4, num_heads=2, proj_drop_rate=.1)
    for o in learn.model.modules():
        if hasattr(o, 'set_grad_checkpointing'): o.set_grad_checkpointing()
    return learn

@seeded
def small_images():
    "Kernels that are larger than the images, and one of 1x1"
    body = nn.Sequential(ConvLayer(3, 128, stride=4), ConvLayer(128, 128), ConvLayer(128, 256, ks=1), ConvLayer(256, 128, stride=2), ConvLayer(128, 128))
    return Learner(image_dls(8), nn.Sequential(body, nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(128, 4)))

class CutAfterPred(Callback):
    "Ends a program where the model has predicted"
    def after_pred(self):
        import torch_xla
        torch_xla.sync()

@seeded
def cut(): return Learner(image_dls(16), nn.Sequential(ConvLayer(3, 8, stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8, 4)), opt_func=OPTS['SGD'], cbs=CutAfterPred())

FAMILIES = dict(
    images_bf16=(images_bf16, 'v5e-1', None, {}), images_sgd_replicas=(images_sgd, 'v5e-4', 'ranks', {}), images_all_cores=(images_sgd, 'v5e-4', None, {}), vit_v6e=(vit, 'v6e-1', None, {}),
    vit_scan_fsdp8=(wide_vit, 'v5e-8', 'sharded', dict(fsdp=8, scan=True)), vit_2x4=(wide_vit, 'v5e-8', 'sharded', dict(replica=2, fsdp=4, grad_ckpt=True)),
    cut=(cut, 'v5e-1', None, {}), vit_checkpointed=(vit_checkpointed, 'v5e-1', None, {}),
    text=(classifier, 'v5e-1', None, {}), unet=(unet, 'v5e-1', None, {}),
    convnext=(convnext, 'v5e-1', None, {}), small_images=(small_images, 'v5e-1', None, {}), tabular_v4=(tabular, 'v4-8', None, {}),
    collab_dot=(collab_dot, 'v5e-1', None, {}))
"Of each family: a Learner, the slice, the form, and options"
