"""Each core runs this function: the form for scripts, and for those who want the replica in hand.

    python examples/spawn.py

Without a TPU it trains on 8 virtual cores of XLA:CPU.
"""
import torch_xla.distributed.xla_multiprocessing as xmp
from fastai.vision.all import *
from fastai_xla.all import *
from sklearn.datasets import load_digits

def train_loop(index):
    digits = load_digits()
    dls = DataBlock((ImageBlock(PILImageBW), CategoryBlock), get_x=lambda i: PILImageBW.create((digits.images[i]*15).astype(np.uint8)),
                    get_y=lambda i: digits.target[i], splitter=RandomSplitter(seed=42), item_tfms=Resize(16),
                    batch_tfms=Normalize.from_stats([0.5], [0.5])).dataloaders(range(len(digits.target)), bs=8, num_workers=0)
    model = nn.Sequential(ConvLayer(1, 16), ConvLayer(16, 32, stride=2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy).to_tpu_distributed()
    learn.fit_one_cycle(3, 1e-2)
    learn.save('digits')
    if is_main(): print(f'accuracy {learn.recorder.values[-1][-1]:.3f} on {world_size()} cores')

if __name__ == '__main__':
    use_virtual_cores(8)
    xmp.spawn(train_loop)
