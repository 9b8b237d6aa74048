"""A training step through the TPU's own compiler, beside a plain JAX program of the same model through the same compiler.

    python -m venv jax && jax/bin/pip install 'jax[cpu]==0.7.1'   # its programs are of libtpu 0.0.21's time
    python benchmarks/device.py --jax jax/bin/python                  # all works
    python benchmarks/device.py --jax jax/bin/python vit_f32          # some
    python benchmarks/device.py --sampling                            # what sampling alone takes, by look-ups and by products
Needs `pip install 'fastai_xla[compile]'`, and for the JAX column a Python with jax, which is asked for the program alone; without it the column is empty.
Estimates of a compiler for a described chip: nothing runs on a TPU. Gathers have no estimate: their rows are counted at 5.3 cycles each, as libtpu's assembly has them.
"""
import argparse, math, re, subprocess, sys, tempfile, warnings
from pathlib import Path
from typing import NamedTuple
warnings.filterwarnings('ignore')

class WorkOf(NamedTuple):
    "A model, how it is trained, and on what"
    model:str
    bf16:bool=False
    aug:bool=False
    size:int=64
    bs:int=16

works = {f'{m}{"" if px==64 else f"_{px}"}{"_aug" if a else ""}_{"bf16" if b else "f32"}': WorkOf(m, b, a, px)
    for m,a,px in (('resnet18',False,64), ('resnet18',True,64), ('vit',False,64), ('resnet18',False,128), ('resnet18',True,128)) for b in (False,True)}
row_cycles = 5.3

# ---- ours

def model_of(w):
    "The model of the work `w`"
    import timm, torchvision
    return torchvision.models.resnet18(num_classes=10) if w.model=='resnet18' else timm.create_model('vit_tiny_patch16_224', img_size=w.size, patch_size=8, num_classes=10)

def planned(w):
    "Bytes that `plan_training` says a step of the work `w` takes"
    from fastai_xla.monitor import plan_training
    from fastai_xla.sharding import make_mesh
    return plan_training(model_of(w), make_mesh(n=1), w.bs, (3,w.size,w.size), bf16=w.bf16).total

def learner(w):
    "A Learner of the work `w`"
    import torch, numpy as np
    from fastai.vision.all import (aug_transforms, CategoryBlock, CrossEntropyLossFlat, DataBlock, DataLoaders, ImageBlock, imagenet_stats, IndexSplitter, Learner,
        Normalize, TfmdDL)
    torch.manual_seed(0)
    if w.aug:
        ims = [np.random.RandomState(i).randint(0, 256, (w.size, w.size, 3)).astype(np.uint8) for i in range(3*w.bs)]
        db = DataBlock((ImageBlock, CategoryBlock(vocab=list(range(10)))), get_x=lambda i: ims[i], get_y=lambda i: i%10, splitter=IndexSplitter(range(2*w.bs, 3*w.bs)),
            batch_tfms=[*aug_transforms(), Normalize.from_stats(*imagenet_stats)])
        dls = db.dataloaders(range(3*w.bs), bs=w.bs, num_workers=0)
    else:
        ds = list(zip(torch.randn(2*w.bs, 3, w.size, w.size), torch.arange(2*w.bs)%10))
        dls = DataLoaders(*[TfmdDL(ds, bs=w.bs, num_workers=0) for _ in range(2)])
    learn = Learner(dls, model_of(w), loss_func=CrossEntropyLossFlat())
    return learn.to_bf16() if w.bf16 else learn

def ours(w, chips, limit, cache):
    "What the compiler says of our training step"
    import fastai_xla.all
    return learner(w).compile_for(chips, limit=limit, cache=cache).programs['train']

# ---- JAX: imported by the Python that has it

def norm_of(kind):
    "BatchNorm over a batch or LayerNorm, in float32, its result as its input"
    import jax, jax.numpy as jnp
    def f(x, p, eps):
        axes,y = ((0,1,2) if kind=='batch' else (-1,)),x.astype(jnp.float32)
        mean,var = y.mean(axes, keepdims=kind!='batch'),(y*y).mean(axes, keepdims=kind!='batch')
        var = var-mean*mean
        return ((y-mean)*jax.lax.rsqrt(var+eps)*p['w']+p['b']).astype(x.dtype),mean,var
    return f

def resnet18(dtype):
    "Shapes of the parameters of ResNet-18, those of its statistics, and its loss with the new ones"
    import jax, jax.numpy as jnp
    shapes,stats,norm = {},{},norm_of('batch')
    def conv_shape(name, i, o, k):
        shapes[name] = (k,k,i,o)
        shapes[name+'.w'] = shapes[name+'.b'] = stats[name+'.mean'] = stats[name+'.var'] = (o,)
    conv_shape('stem', 3, 64, 7)
    blocks = [(f'{s}.{b}', 64*2**max(s-(b==0), 0) if s else 64, 64*2**s, 2 if s and not b else 1) for s in range(4) for b in range(2)]
    for name,i,o,stride in blocks:
        conv_shape(name+'.1', i, o, 3)
        conv_shape(name+'.2', o, o, 3)
        if stride>1: conv_shape(name+'.id', i, o, 1)
    shapes.update(fc=(512,10), bias=(10,))
    def forward(p, st, x):
        new = {}
        def conv(x, name, stride, pad):
            y = jax.lax.conv_general_dilated(x, p[name].astype(dtype), (stride,stride), [(pad,pad)]*2, dimension_numbers=('NHWC','HWIO','NHWC'))
            y,mean,var = norm(y, dict(w=p[name+'.w'], b=p[name+'.b']), 1e-5)
            n = y.size//y.shape[-1]
            new[name+'.mean'],new[name+'.var'] = st[name+'.mean']*.9+mean*.1,st[name+'.var']*.9+var*(.1*n/(n-1))
            return y
        x = jax.nn.relu(conv(x.astype(dtype), 'stem', 2, 3))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1,3,3,1), (1,2,2,1), [(0,0),(1,1),(1,1),(0,0)])
        for name,_,_,stride in blocks:
            y = conv(jax.nn.relu(conv(x, name+'.1', stride, 1)), name+'.2', 1, 1)
            x = jax.nn.relu(y + (conv(x, name+'.id', stride, 0) if stride>1 else x))
        return x.mean((1,2))@p['fc'].astype(dtype)+p['bias'].astype(dtype),new
    return shapes,stats,forward

def vit(dtype, size, d=192, depth=12, heads=3, patch=8):
    "As `resnet18`, of ViT-tiny"
    import jax, jax.numpy as jnp
    n,norm = (size//patch)**2+1,norm_of('layer')
    shapes = dict(embed=(patch,patch,3,d), embed_b=(d,), cls=(1,1,d), pos=(1,n,d), fc=(d,10), bias=(10,)) | {'norm.w': (d,), 'norm.b': (d,)}
    for i in range(depth):
        for k,s in dict(qkv=(d,3*d), out=(d,d), up=(d,4*d), down=(4*d,d)).items(): shapes |= {f'{i}.{k}': s, f'{i}.{k}_b': s[1:]}
        for k in ('n1','n2'): shapes |= {f'{i}.{k}.w': (d,), f'{i}.{k}.b': (d,)}
    def forward(p, st, x):
        def ln(x, k): return norm(x, dict(w=p[k+'.w'], b=p[k+'.b']), 1e-6)[0]
        def lin(x, k): return x@p[k].astype(dtype)+p[k+'_b'].astype(dtype)
        x = jax.lax.conv_general_dilated(x.astype(dtype), p['embed'].astype(dtype), (patch,patch), 'VALID', dimension_numbers=('NHWC','HWIO','NHWC'))
        x = x.reshape(len(x), -1, d)+p['embed_b'].astype(dtype)
        x = jnp.concatenate([jnp.broadcast_to(p['cls'].astype(dtype), (len(x),1,d)), x], 1)+p['pos'].astype(dtype)
        for i in range(depth):
            q,k,v = lin(ln(x, f'{i}.n1'), f'{i}.qkv').reshape(len(x), n, 3, heads, d//heads).transpose(2,0,3,1,4)
            a = jax.nn.softmax((q@k.swapaxes(-1,-2)).astype(jnp.float32)*(d//heads)**-.5, -1).astype(dtype)
            x = x+lin((a@v).transpose(0,2,1,3).reshape(len(x), n, d), f'{i}.out')
            x = x+lin(jax.nn.gelu(lin(ln(x, f'{i}.n2'), f'{i}.up'), approximate=False), f'{i}.down')
        return ln(x, 'norm')[:,0]@p['fc'].astype(dtype)+p['bias'].astype(dtype),{}
    return shapes,{},forward

def augmented(x, mat, light):
    "`x`, bytes, as floats that are moved, lit and normalized: look-ups by `map_coordinates`"
    import jax, jax.numpy as jnp
    n,h,w,_ = x.shape
    x = x.astype(jnp.float32)/255
    gy,gx = jnp.meshgrid(jnp.linspace(-1, 1, h), jnp.linspace(-1, 1, w), indexing='ij')
    cx,cy = [(mat[:,i,0,None,None]*gx+mat[:,i,1,None,None]*gy+mat[:,i,2,None,None]+1)*((s-1)/2) for i,s in ((0,w),(1,h))]
    one = lambda im, cy, cx: jax.scipy.ndimage.map_coordinates(im, [cy,cx], order=1, mode='mirror')
    x = jax.vmap(jax.vmap(one, (2,None,None), 2))(x, cy, cx)
    y = jnp.log(jnp.clip(x, 1e-7, 1-1e-7)) - jnp.log1p(-jnp.clip(x, 1e-7, 1-1e-7))
    x = jax.nn.sigmoid((y+light[:,0,None,None,None])*light[:,1,None,None,None])
    return (x-jnp.array([.485,.456,.406]))/jnp.array([.229,.224,.225])

def write_jax(name, path):
    "Write the HLO of one training step, with fastai's Adam, as for a TPU"
    import jax, jax.numpy as jnp
    w = works[name]
    dtype = jnp.bfloat16 if w.bf16 else jnp.float32
    shapes,stats,forward = resnet18(dtype) if w.model=='resnet18' else vit(dtype, w.size)
    def step(p, m, v, st, lr, n, x, y, mat, light):
        def loss(p):
            out,new = forward(p, st, augmented(x, mat, light) if w.aug else x)
            return -jnp.take_along_axis(jax.nn.log_softmax(out.astype(jnp.float32)), y[:,None], 1).mean(),new
        (res,new),g = jax.value_and_grad(loss, has_aux=True)(p)
        m,v = jax.tree.map(lambda m,g: .9*m+.1*g, m, g),jax.tree.map(lambda v,g: .99*v+.01*g*g, v, g)
        upd = lambda p,m,v: p*(1-lr*.01)-lr*(m/(1-.9**n))/(jnp.sqrt(v/(1-.99**n))+1e-5)
        return jax.tree.map(upd, p, m, v),m,v,new,res
    of = lambda d: {k: jax.ShapeDtypeStruct(s, jnp.float32) for k,s in d.items()}
    p,num = of(shapes),jax.ShapeDtypeStruct((), jnp.float32)
    x = jax.ShapeDtypeStruct((w.bs,w.size,w.size,3), jnp.uint8 if w.aug else jnp.float32)
    args = p,p,p,of(stats),num,num,x,jax.ShapeDtypeStruct((w.bs,), jnp.int32),jax.ShapeDtypeStruct((w.bs,2,3), jnp.float32),jax.ShapeDtypeStruct((w.bs,2), jnp.float32)
    low = jax.jit(step, donate_argnums=(0,1,2,3), keep_unused=True).trace(*args).lower(lowering_platforms=('tpu',))
    Path(path).write_bytes(low.compiler_ir('hlo').as_serialized_hlo_module_proto())

def of_jax(name, chips, python, cache):
    "What the compiler says of JAX's step"
    from fastai_xla.monitor import CompiledPrograms, hlo_message, ProgramReport, tpu_slice
    s = tpu_slice(chips)
    with tempfile.TemporaryDirectory() as d:
        subprocess.run([python, __file__, '--write', f'{d}/hlo', name], check=True, env={'JAX_PLATFORMS': 'cpu'})
        module = hlo_message('HloModuleProto').FromString(Path(f'{d}/hlo').read_bytes())
    res,memory,seconds = CompiledPrograms(s, cache).compile(module, effort=0.)
    return ProgramReport(res, memory, s, seconds)

# ---- sampling alone

def sampled(size, kind, chips, cache, bs=16):
    "What the compiler says of the bilinear sampling of a batch, by 'look-ups', or by products of 'numbers' or of 'bytes'"
    import torch
    from fastai_xla.monitor import CompiledPrograms, hlo_message, ProgramReport, tpu_slice
    from fastai_xla.patches import grid_sample_xla
    from fastai_xla.runtime.device import make_programs_for, torch_xla, xla_device
    x,grid = [torch.rand(bs, *o).to(xla_device()) for o in ((3,size,size), (size,size,2))]
    make_programs_for(None if kind=='look-ups' else 'TPU')
    res = grid_sample_xla(x, grid, 'bilinear', 'reflection', True, 255 if kind=='bytes' else None)
    module = hlo_message('HloModuleProto').FromString(torch_xla._XLAC._get_xla_tensors_hlo_proto([res]))
    s = tpu_slice(chips)
    res,memory,seconds = CompiledPrograms(s, cache).compile(module, effort=0.)
    return ProgramReport(res, memory, s, seconds)

def sampling(chips, cache):
    "The table of what sampling takes"
    kinds = 'look-ups','numbers','bytes'
    print('| 16 images of | four look-ups a pixel, at 5.3 cycles a row | products of any numbers | of bytes |', '| --- | --- | --- | --- |', sep='\n')
    for size in (64, 128, 224):
        cells = [f'{(r.cycles+gathered(r))/1e6:.2f}' for r in (sampled(size, k, chips, cache) for k in kinds)]
        print(f"| {size} px | {' | '.join(cells)} |", flush=True)

# ---- the table

def gathered(r):
    "Cycles of the rows that are looked up: all dims of a result but the last"
    n = 0
    for (kind,shape),runs in r.unknown.items():
        if 'gather' in kind.split('+'):
            dims = [int(o) for o in re.search(r'\[([\d,]*)\]', shape)[1].split(',') if o]
            n += runs*max(1, math.prod(dims[:-1]))
    return n*row_cycles

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('names', nargs='*', help=f'of {", ".join(works)}')
    p.add_argument('--jax', help='a Python that has jax')
    p.add_argument('--slice', default='v5e-1', help='a TPU slice (default: v5e-1)')
    p.add_argument('--limit', type=float, default=1800, help='seconds for one work (default: 1800)')
    p.add_argument('--cache', type=Path, default=Path.home()/'.cache'/'fastai_xla'/'compiled', help='folder of what was compiled before')
    p.add_argument('--sampling', action='store_true', help='what sampling alone takes, by look-ups and by products')
    p.add_argument('--write', help=argparse.SUPPRESS)
    a = p.parse_args()
    for o in a.names:
        if o not in works: p.error(f'there is no work {o!r}: choose of {", ".join(works)}')
    if a.write: return write_jax(a.names[0], a.write)
    if a.sampling: return sampling(a.slice, a.cache)
    print('| work | Mcycles, ours | with look-ups | JAX | with look-ups | ratio | MB, ours | planned | JAX | ratio | compiled in, s |')
    print('| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |')
    for name in a.names or works:
        rs = [ours(works[name], a.slice, a.limit, a.cache)] + ([of_jax(name, a.slice, a.jax, a.cache)] if a.jax else [])
        (c,full,mem),*other = [(r.cycles/1e6, (r.cycles+gathered(r))/1e6, r.memory.total/1e6) for r in rs]
        jc,jfull,jmem = other[0] if other else (float('nan'),)*3
        cells = (name, f'{c:.2f}', f'{full:.2f}', f'{jc:.2f}', f'{jfull:.2f}', f'{full/jfull:.2f}', f'{mem:.0f}', f'{planned(works[name])/1e6:.0f}', f'{jmem:.0f}', f'{mem/jmem:.2f}',
            '+'.join(f'{r.seconds:.0f}' for r in rs))
        print(f"| {' | '.join(cells)} |", flush=True)

if __name__ == '__main__': main()
