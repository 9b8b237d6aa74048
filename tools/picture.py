"Draw the picture of README: a Learner trains on eight virtual cores and in plain fastai on the CPU. `python tools/picture.py` (a minute or two)."
from pathlib import Path

from fastai.vision.all import *
from fastai_xla.all import *
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

digits = load_digits()
def pixels(i): return PILImageBW.create((digits.images[i]*15).astype(np.uint8))
def label(i): return digits.target[i]

def get_learner(bs):
    set_seed(42)
    dls = DataBlock((ImageBlock(PILImageBW), CategoryBlock), get_x=pixels, get_y=label, splitter=RandomSplitter(seed=42),
        item_tfms=Resize(16), batch_tfms=Normalize.from_stats([0.5], [0.5])).dataloaders(range(len(digits.target)), bs=bs, num_workers=0)
    model = nn.Sequential(ConvLayer(1, 16), ConvLayer(16, 32, stride=2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)

def losses(learn):
    "Smoothed loss of each step, and accuracy of each epoch"
    learn.fit_one_cycle(5, 1e-2)
    return [float(o) for o in learn.recorder.losses], [o[-1] for o in learn.recorder.values]

def draw(plain, cores, file):
    "The losses over each other, and how far apart they are"
    (a,accs),(b,accs_b) = plain,cores
    apart = max(abs(x-y) for x,y in zip(a, b))
    fig = Figure(figsize=(8,3.2), layout='constrained')
    ax = fig.subplots()
    ax.plot(a, color='#ffb74d', lw=7, solid_capstyle='round', label='plain fastai on the CPU, batches of 64')
    ax.plot(b, color='#3949ab', lw=1.6, label='to_tpu_distributed(sync_bn=True): 8 virtual cores, batches of 8')
    ax.set(xlabel='step', ylabel='training loss', title=f'Losses differ by at most {apart:.0e}; accuracy on held-out digits {accs[-1]:.1%} and {accs_b[-1]:.1%}')
    ax.title.set_size(11)
    ax.grid(alpha=.3)
    ax.legend(frameon=False)
    fig.savefig(file, dpi=110, facecolor='white')
    return apart

if __name__ == '__main__':
    file = Path(__file__).resolve().parent.parent/'nbs'/'images'/'eight_cores.png'
    file.parent.mkdir(exist_ok=True)
    plain = losses(get_learner(64))
    cores = losses(get_learner(8).to_tpu_distributed(n_cores=8, sync_bn=True))
    print(f'{file.name}: {len(plain[0])} and {len(cores[0])} steps, losses differ by at most {draw(plain, cores, file):.1e}, {file.stat().st_size} bytes')
