"Learners and a callback for counting what XLA does in an epoch of training"
import time
from parity_models import *
from fastai_xla.all import xla_counts
from fastai_xla.runtime.device import xm

@seeded
def resnet18_32(bs=4, n=36, n_valid=10):
    "resnet18 at 32 px with fastai's usual augmentation"
    dls = image_dls(32, bs=bs, n=n, n_valid=n_valid, src_sz=40, batch_tfms=[*aug_transforms(), Normalize.from_stats(*imagenet_stats)])
    return vision_learner(dls, resnet18, pretrained=False, metrics=[accuracy, F1Score(average='macro')])

COUNTED = dict(resnet18=resnet18_32, vit=vit, tabular=tabular)

class BatchCounts(Callback):
    "Counts of each epoch's training: in `batches` up to the end of its last batch, in `epochs` with what its end adds. XLA counts a graph when it has run, so wait for the last"
    order = 200
    def before_fit(self): self.batches,self.epochs,self.seconds = [],[],[]
    def before_train(self):
        xm.wait_device_ops()
        self.start,self.t0,self.n_batches = xla_counts(),time.monotonic(),0
    def after_batch(self):
        if not self.training: return
        self.n_batches += 1
        if self.iter==self.n_iter-1: xm.wait_device_ops()
        self.last = xla_counts()-self.start
    def after_train(self):
        self.batches.append(self.last)
        self.epochs.append(xla_counts()-self.start)
        self.seconds.append(time.monotonic()-self.t0)
