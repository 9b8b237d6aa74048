"""A fastai Learner trains on 1,797 real handwritten digits through PyTorch/XLA: on TPU cores, or on XLA's CPU devices.

    python examples/digits.py --epochs 6 --cores 8 --out out        (or, where the package is installed: fastai-xla demo)

All but `.to_tpu()` and `.to_tpu_distributed()` is plain fastai. Writes two plots and the model, and loads the model again in a process without XLA.
"""
import subprocess, sys, time

import timm
from fastai.vision.all import *
from fastai_xla.all import *
from fastcore.script import call_parse
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

def write_images(path):
    "Save scikit-learn's digits as 8x8 PNGs, in one directory a class"
    digits = load_digits()
    for c in digits.target_names: (path/str(c)).mkdir(parents=True, exist_ok=True)
    for i,(im,c) in enumerate(zip(digits.images, digits.target)):
        Image.fromarray((im*255/16).round().astype('uint8')).save(path/str(c)/f'{i:04d}.png')

def get_images(path):
    "All images, in an order that does not depend on the file system"
    return get_image_files(path).sorted()

def get_dls(path, bs=64):
    "Train on four fifths, with random rotation and zoom; hold out one fifth"
    block = DataBlock((ImageBlock(PILImageBW), CategoryBlock), get_items=get_images, get_y=parent_label,
                      splitter=RandomSplitter(0.2, seed=42), item_tfms=Resize(32),
                      batch_tfms=[Rotate(10), Zoom(0.9, 1.1), Normalize.from_stats([0.5], [0.5])])
    return block.dataloaders(path, bs=bs, num_workers=0)

def train(dls, out, epochs, cores):
    "The main job: an unchanged Learner, and one call"
    model = timm.create_model('test_resnet', num_classes=dls.c, in_chans=1)
    learn = Learner(dls, model, metrics=accuracy, path=out)
    learn = learn.to_tpu() if cores==1 else learn.to_tpu_distributed(n_cores=cores)
    learn.fit_one_cycle(epochs, 1e-2)
    return learn

def plot_curves(learn, file):
    "Losses and accuracy over the epochs"
    rec = learn.recorder
    _,valid,acc = zip(*rec.values)
    ends,n = range(1, len(acc)+1),len(rec.losses)/len(acc)
    fig = Figure(figsize=(10,4), layout='constrained')
    loss,score = fig.subplots(1, 2)
    loss.plot([(i+1)/n for i in range(len(rec.losses))], rec.losses, color='tab:blue', label='training (smoothed)')
    loss.plot(ends, valid, 'o-', color='tab:orange', label='held out')
    loss.set(xlabel='epoch', ylabel='cross-entropy', yscale='log', title='Loss')
    loss.legend()
    score.plot(ends, [100*o for o in acc], 'o-', color='tab:green')
    score.axhline(97, color='grey', ls='--', lw=1)
    score.annotate('97%', (1, 97), xytext=(0,4), textcoords='offset points', color='grey')
    score.set(xlabel='epoch', ylabel='%', ylim=(0,104), title=f'Accuracy on held-out digits: {acc[-1]:.1%} at the end')
    for ax in (loss,score): ax.grid(alpha=.3)
    fig.savefig(file, dpi=120)

def plot_predictions(dls, probs, targs, file, n=40):
    "The held-out digits that the model found hardest, with what it took them for"
    fig = Figure(figsize=(10,7), layout='constrained')
    hardest = probs.gather(1, targs[:,None])[:,0].argsort()[:n].tolist()
    for i,ax in zip(hardest, fig.subplots(n//8, 8).flat):
        conf,pred = probs[i].max(0)
        right = pred==targs[i]
        ax.imshow(Image.open(dls.valid_ds.items[i]), cmap='gray_r', interpolation='bilinear')
        ax.set_title(f"{dls.vocab[pred]}{'' if right else f', is {dls.vocab[targs[i]]}'}  ({conf:.0%})", color='tab:green' if right else 'tab:red')
        ax.set_xticks([]); ax.set_yticks([])
    wrong = (probs.argmax(1)!=targs).sum()
    fig.suptitle(f'The {n} hardest of {len(targs)} held-out digits: prediction and its probability; {wrong} wrong, in red')
    fig.savefig(file, dpi=120)

plain_fastai = """
import sys
sys.modules['torch_xla'] = None          # importing it now raises ImportError
from fastai.vision.all import *
export,images,dest = sys.argv[1:]
learn = load_learner(export)
with learn.no_bar(): probs,_ = learn.get_preds(dl=learn.dls.test_dl(torch.load(images, weights_only=False)))
torch.save(probs, dest)
"""

def predict_without_xla(export, images):
    "Probabilities from plain fastai, in a process of its own that cannot import torch_xla"
    with tempfile.TemporaryDirectory() as d:
        todo,done = Path(d)/'images.pt',Path(d)/'probs.pt'
        torch.save(images, todo)
        subprocess.run([sys.executable, '-W', 'ignore:load_learner', '-c', plain_fastai, export, todo, done], check=True)
        return torch.load(done)

@call_parse
def main(
    epochs:int=6, # Epochs to train
    cores:int=1, # Number of cores, virtual ones where there is no TPU
    out:Path='out', # Directory for images, plots and the model
):
    "Train on real handwritten digits, plot, save, and load again without XLA"
    start,out = time.time(),Path(out)
    write_images(out/'digits')
    set_seed(42, reproducible=True)
    dls = get_dls(out/'digits', bs=64//cores)
    learn = train(dls, out, epochs, cores)
    secs = time.time()-start

    plot_curves(learn, out/'curves.png')
    probs,targs = learn.get_preds()
    plot_predictions(dls, probs, targs, out/'predictions.png')
    learn.save('digits')
    learn.export('digits.pkl')
    again = predict_without_xla(out/'digits.pkl', dls.valid_ds.items)
    same = (again.argmax(1)==probs.argmax(1)).sum()

    print(f"\nCurves       {out/'curves.png'}\nPredictions  {out/'predictions.png'}")
    print(f"Model        {out/'models'/'digits.pth'} (learn.save), {out/'digits.pkl'} (learn.export)")
    print(f"Without XLA  plain fastai loads digits.pkl and gives {same} of {len(probs)} predictions the same, "
          f"probabilities within {(again-probs).abs().max():.0e}")
    print(f"Done: {(probs.argmax(1)==targs).float().mean():.2%} of {len(targs)} held-out digits right, "
          f"{epochs} epoch{'s'*(epochs!=1)} in {secs:.0f} s on {cores} {'virtual '*(cores>1 and device_kind()=='CPU')}{device_kind()} core{'s'*(cores!=1)}")
