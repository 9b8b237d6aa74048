"""Train from tar shards: the form for a dataset that is too big for the disk.

    python examples/stream_digits.py --cores 2

Makes shards of scikit-learn's digits, and trains from them. In place of a folder, `TarShards` takes addresses in object storage too.
"""
import json

import webdataset
from fastai.vision.all import *
from fastai_xla.all import *
from fastcore.script import call_parse
from sklearn.datasets import load_digits

def png(im):
    "An 8x8 digit as the bytes of a PNG"
    f = io.BytesIO()
    Image.fromarray((im*255/16).round().astype('uint8')).save(f, 'png')
    return f.getvalue()

def write_shards(path, name, idxs, digits, per_shard=100):
    "Digits `idxs` in tar files of `per_shard`, with the number of samples in each beside them"
    path.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(str(path/f'{name}-%03d.tar'), maxcount=per_shard, verbose=0) as out:
        for i in idxs: out.write({'__key__': f'{i:04d}', 'png': png(digits.images[i]), 'cls': str(digits.target[i])})
    sizes = [min(per_shard, len(idxs)-i) for i in range(0, len(idxs), per_shard)]
    (path/f'{name}.json').write_text(json.dumps(sizes))

def get_dl(path, name, **kwargs):
    sizes = json.loads((path/f'{name}.json').read_text())
    shards = TarShards(f'{path}/{name}-{{000..{len(sizes)-1:03d}}}.tar', dict(png=PILImageBW.create, cls=int), sizes, window=300)
    return StreamDL(shards, after_item=[Resize(16), ToTensor()], after_batch=[IntToFloatTensor(), Normalize.from_stats([0.5], [0.5])], **kwargs)

@call_parse
def main(
    epochs:int=3, # Epochs to train
    cores:int=1, # Number of cores, virtual ones where there is no TPU
    num_workers:int=2, # Worker processes of a core
    out:Path='out', # Directory for the shards
):
    "Train on handwritten digits from tar shards"
    set_seed(42)
    digits,path = load_digits(),Path(out)/'shards'
    idxs = np.random.permutation(len(digits.target))
    write_shards(path, 'train', idxs[360:], digits)
    write_shards(path, 'valid', idxs[:360], digits)
    kwargs = dict(bs=32//cores, num_workers=num_workers)
    dls = DataLoaders(get_dl(path, 'train', shuffle=True, drop_last=True, **kwargs), get_dl(path, 'valid', **kwargs))
    model = nn.Sequential(ConvLayer(1, 16), ConvLayer(16, 32, stride=2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    learn = learn.to_tpu() if cores==1 else learn.to_tpu_distributed(n_cores=cores)
    learn.fit_one_cycle(epochs, 1e-2)
    probs,targs = learn.get_preds()
    wanted = digits.target[idxs[:360]]
    print(f'Done: {float(accuracy(probs, targs)):.2%} of {len(targs)} held-out digits right on {cores} {device_kind()} cores, '
          f'{(targs.numpy()==wanted).sum()} predictions in the order of the shards')
