"""Plain JAX programs of the works of `device.py`: one training step with fastai's Adam, images with channels last. Needs jax alone.

    python benchmarks/jax_twins.py vit_f32 vit_f32.hlo   # prints how many parameters the model has
    python benchmarks/jax_twins.py --flops vit_f32.hlo   # operations of any program of XLA, by XLA's own count
"""
import math, os, sys
from pathlib import Path
from typing import NamedTuple

class WorkOf(NamedTuple):
    "A model, how it is trained, and on what"
    model:str
    bf16:bool=False
    aug:bool=False
    size:int=64 # Pixels of a side, or tokens of a text
    bs:int=16
    chips:str='v5e-1'
    form:str='tpu' # 'tpu', 'ranks' or 'sharded'

works = {f'{m}{"" if px==64 else f"_{px}"}{"_aug" if a else ""}_{"bf16" if b else "f32"}': WorkOf(m, b, a, px)
    for m,a,px in (('resnet18',False,64), ('resnet18',True,64), ('vit',False,64), ('resnet18',False,128), ('resnet18',True,128)) for b in (False,True)}
works |= dict(resnet18_128_bs64_f32=WorkOf('resnet18', size=128, bs=64))
works |= {f'{m}_{px}_bf16': WorkOf(m, True, False, px, bs) for m,px,bs in (('resnet50',224,64), ('vit_base',224,64), ('convnext',224,64), ('unet',128,8))}
works |= dict(awd_lstm_f32=WorkOf('awd_lstm', size=72, bs=32), tabular_f32=WorkOf('tabular', size=8, bs=1024), collab_f32=WorkOf('collab', size=2, bs=1024),
    resnet18_replicas_f32=WorkOf('resnet18', chips='v5e-8', form='ranks'), vit_fsdp8_f32=WorkOf('vit', bs=64, chips='v5e-8', form='sharded'))
n_words,n_cont = 10_000,4 # of a vocabulary or a column of categories, and columns of numbers

class Net:
    "Layers that know their parameters by name; without `p` they note the shapes"
    def __init__(self, dtype, p=None, stats=None, key=None): self.dtype,self.p,self.stats,self.key,self.new,self.shapes,self.stat_shapes = dtype,p,stats,key,{},{},{}

    def par(self, name, *shape, of='p'):
        import jax.numpy as jnp
        if self.p is not None: return (self.p if of=='p' else self.stats)[name]
        (self.shapes if of=='p' else self.stat_shapes)[name] = shape
        return jnp.zeros(shape)

    def conv(self, x, name, o, k=1, stride=1, pad=None, groups=1, bias=False):
        import jax
        pad = k//2 if pad is None else pad
        y = jax.lax.conv_general_dilated(x.astype(self.dtype), self.par(name, k, k, x.shape[-1]//groups, o).astype(self.dtype), (stride,stride), [(pad,pad)]*2,
            dimension_numbers=('NHWC','HWIO','NHWC'), feature_group_count=groups)
        return y+self.par(name+'.bias', o).astype(self.dtype) if bias else y

    def lin(self, x, name, o, bias=True):
        y = x.astype(self.dtype)@self.par(name, x.shape[-1], o).astype(self.dtype)
        return y+self.par(name+'.bias', o).astype(self.dtype) if bias else y

    def _norm(self, x, name, axes, eps):
        "In float32, its result as its input"
        import jax, jax.numpy as jnp
        c,y,keep = x.shape[-1],x.astype(jnp.float32),axes==(-1,)
        mean,var = y.mean(axes, keepdims=keep),(y*y).mean(axes, keepdims=keep)
        var = var-mean*mean
        return ((y-mean)*jax.lax.rsqrt(var+eps)*self.par(name+'.w', c)+self.par(name+'.b', c)).astype(x.dtype),mean,var

    def bn(self, x, name):
        y,mean,var = self._norm(x, name, tuple(range(x.ndim-1)), 1e-5)
        n = y.size//y.shape[-1]
        for k,v in dict(mean=mean, var=var*(n/(n-1))).items(): self.new[f'{name}.{k}'] = self.par(f'{name}.{k}', x.shape[-1], of='stats')*.9+v*.1
        return y

    def ln(self, x, name): return self._norm(x, name, (-1,), 1e-6)[0]

    def mask(self, shape, p):
        "Zeros with a chance of `p`, and else 1/(1-p)"
        import jax, jax.numpy as jnp
        self.key,bits = jax.lax.rng_bit_generator(self.key, shape)
        return ((bits>>9).astype(jnp.float32)*2**-23>=p)*jnp.float32(1/(1-p))

def max_pool(x):
    import jax, jax.numpy as jnp
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1,3,3,1), (1,2,2,1), [(0,0),(1,1),(1,1),(0,0)])

def resnet_body(net, x, depths, wide):
    "Of torchvision: what comes before the pooling, and what a U-Net takes besides"
    import jax
    conv = lambda x, name, *a: net.bn(net.conv(x, name, *a), name)
    x = jax.nn.relu(conv(x, 'stem', 64, 7, 2))
    skips,x = [x],max_pool(x)
    for s,depth in enumerate(depths):
        for b in range(depth):
            name,o,stride = f'{s}.{b}',64*2**s,2 if s and not b else 1
            y = jax.nn.relu(conv(x, name+'.1', o, 1)) if wide else x
            y = conv(y, name+'.2', o, 3, stride)
            y = conv(jax.nn.relu(y), name+'.3', o*wide if wide else o, 1 if wide else 3)
            x = jax.nn.relu(y+(x if x.shape==y.shape else conv(x, name+'.id', y.shape[-1], 1, stride)))
        skips.append(x)
    return x,skips[:-1]

def resnet(net, x, depths=(2,2,2,2), wide=0): return net.lin(resnet_body(net, x, depths, wide)[0].mean((1,2)), 'fc', 10)

def resnet50(net, x): return resnet(net, x, (3,4,6,3), 4)

def vit(net, x, d=192, heads=3, patch=8, depth=12):
    "As timm's under autocast: what is added to float32 parameters is float32"
    import jax, jax.numpy as jnp
    x = net.conv(x, 'embed', d, patch, patch, 0, bias=True)
    x = x.reshape(len(x), -1, d)
    x = jnp.concatenate([jnp.broadcast_to(net.par('cls', 1, 1, d), (len(x),1,d)), x.astype(jnp.float32)], 1)
    x = x+net.par('pos', 1, x.shape[1], d)
    for i in range(depth):
        q,k,v = net.lin(net.ln(x, f'{i}.n1'), f'{i}.qkv', 3*d).reshape(*x.shape[:2], 3, heads, d//heads).transpose(2,0,3,1,4)
        a = jax.nn.softmax((q@k.swapaxes(-1,-2)).astype(jnp.float32)*(d//heads)**-.5, -1).astype(net.dtype)
        x = x+net.lin((a@v).transpose(0,2,1,3).reshape(x.shape), f'{i}.out', d)
        x = x+net.lin(jax.nn.gelu(net.lin(net.ln(x, f'{i}.n2'), f'{i}.up', 4*d), approximate=False), f'{i}.down', d)
    return net.lin(net.ln(x, 'norm')[:,0], 'fc', 10)

def vit_base(net, x): return vit(net, x, 768, 12, 16)

def convnext(net, x):
    import jax
    x = net.ln(net.conv(x, 'stem', 96, 4, 4, 0, bias=True), 'stem.n')
    for s,depth in enumerate((3,3,9,3)):
        d = 96*2**s
        if s: x = net.conv(net.ln(x, f'{s}.n'), f'{s}.down', d, 2, 2, 0, bias=True)
        for name in (f'{s}.{b}' for b in range(depth)):
            y = net.ln(net.conv(x, name+'.dw', d, 7, groups=d, bias=True), name+'.n')
            y = net.lin(jax.nn.gelu(net.lin(y, name+'.up', 4*d), approximate=False), name+'.down', d)
            x = y*net.par(name+'.gamma', d)+x
    return net.lin(net.ln(x.mean((1,2)), 'norm'), 'fc', 10)

def unet(net, x):
    "fastai's, with a ResNet-18"
    import jax, jax.numpy as jnp
    inp = x # autocast puts it together with the rest as it is
    conv = lambda x, name, o, k=3: jax.nn.relu(net.conv(x, name, o, k, bias=True))
    def shuffled(x, name, o):
        y = conv(x, name, 4*o, 1)
        n,h,w,_ = y.shape
        return y.reshape(n, h, w, 2, 2, o).transpose(0,1,3,2,4,5).reshape(n, 2*h, 2*w, o)
    x,skips = resnet_body(net, x, (2,2,2,2), 0)
    c = x.shape[-1]
    x = conv(conv(jax.nn.relu(net.bn(x, 'mid')), 'mid.1', 2*c), 'mid.2', c)
    for i,s in enumerate(reversed(skips)):
        x = jax.nn.relu(jnp.concatenate([shuffled(x, f'up{i}', x.shape[-1]//2), net.bn(s, f'up{i}.n')], -1))
        o = x.shape[-1]//(1+(i==len(skips)-1))
        x = conv(conv(x, f'up{i}.1', o), f'up{i}.2', o)
    x = jnp.concatenate([shuffled(x, 'last', x.shape[-1]), inp], -1)
    c = x.shape[-1]
    x = jax.nn.relu(net.conv(conv(x, 'res.1', c), 'res.2', c, 3, bias=True)+x)
    return net.conv(x, 'out', 3, bias=True)

def awd_lstm(net, x, states=None):
    "The language model: all steps' products with the inputs at once; its loss takes `regular` besides"
    import jax, jax.numpy as jnp
    emb,n_hid = 400,1152
    table = net.par('table', n_words, emb)
    y = (table*net.mask((n_words,1), .02))[x]*net.mask((len(x),1,emb), .25)
    for l,(n_in,o) in enumerate([(emb,n_hid), (n_hid,n_hid), (n_hid,emb)]):
        w = net.par(f'{l}.rec', o, 4*o)*net.mask((o,4*o), .2)
        gx = y@net.par(f'{l}.in', n_in, 4*o)+net.par(f'{l}.b_in', 4*o)+net.par(f'{l}.b_rec', 4*o)
        def cell(hc, g):
            i,f,g,o = jnp.split(g+hc[0]@w, 4, -1)
            c = jax.nn.sigmoid(f)*hc[1]+jax.nn.sigmoid(i)*jnp.tanh(g)
            h = jax.nn.sigmoid(o)*jnp.tanh(c)
            return (h,c),h
        start = [net.par(f'{l}.{k}', len(x), o, of='stats') for k in 'hc']
        end,y = jax.lax.scan(cell, tuple(start), gx.swapaxes(0, 1))
        y = y.swapaxes(0, 1)
        net.new |= {f'{l}.{k}': jax.lax.stop_gradient(s) for k,s in zip('hc', end)}
        if l<2: y = y*net.mask((len(x),1,o), .15)
    dropped = y*net.mask((len(x),1,emb), .1)
    net.regular = 2*(dropped**2).mean()+((y[:,1:]-y[:,:-1])**2).mean()
    return dropped@table.T+net.par('bias', n_words)

def tabular(net, x):
    import jax, jax.numpy as jnp
    cat,cont = x
    x = jnp.concatenate([net.par(f'table{i}', n_words, 50)[cat[:,i]] for i in range(cat.shape[1])]+[net.bn(cont, 'cont')], -1)
    for i,o in enumerate((200,100)): x = net.bn(jax.nn.relu(net.lin(x, f'{i}', o, bias=False)), f'{i}')
    return net.lin(x, 'fc', 10)

def collab(net, x):
    "fastai's `EmbeddingDotBias` with ratings up to 5"
    import jax
    (u,u_bias),(i,i_bias) = [[net.par(f'{k}{n}', n_words, n)[x[:,j]] for n in (50,1)] for j,k in enumerate(('user','item'))]
    return jax.nn.sigmoid((u*i).sum(-1)+u_bias[:,0]+i_bias[:,0])*5.5

models = dict(resnet18=resnet, resnet50=resnet50, vit=vit, vit_base=vit_base, convnext=convnext, unet=unet, awd_lstm=awd_lstm, tabular=tabular, collab=collab)

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

def batch_of(w):
    "Shapes of a batch: what goes in and what is wanted"
    import jax, jax.numpy as jnp
    s,i,f = jax.ShapeDtypeStruct,jnp.int32,jnp.float32
    if w.model=='awd_lstm': return s((w.bs,w.size), i),s((w.bs,w.size), i)
    if w.model=='collab': return s((w.bs,w.size), i),s((w.bs,), f)
    if w.model=='tabular': return (s((w.bs,w.size), i),s((w.bs,n_cont), f)),s((w.bs,), i)
    return s((w.bs,w.size,w.size,3), jnp.uint8 if w.aug else f),s((w.bs,w.size,w.size) if w.model=='unet' else (w.bs,), i)

def step_of(w, average=lambda t: t):
    "A training step of the work `w`, and the shapes of what it takes; `average` is that of gradients and statistics over replicas"
    import jax, jax.numpy as jnp
    dtype,model = jnp.bfloat16 if w.bf16 else jnp.float32,models[w.model]
    def step(p, m, v, st, lr, n, key, x, y, mat, light):
        def loss(p):
            net = Net(dtype, p, st, key)
            out = model(net, augmented(x, mat, light) if w.aug else x).astype(jnp.float32)
            if w.model=='collab': return ((out-y)**2).mean(),(net.new,net.key)
            out = jax.nn.log_softmax(out)
            return -jnp.take_along_axis(out, y[...,None], -1).mean()+getattr(net, 'regular', 0),(net.new,net.key)
        (res,(new,key)),g = jax.value_and_grad(loss, has_aux=True)(p)
        g,res = average((g,res))
        m,v = jax.tree.map(lambda m,g: .9*m+.1*g, m, g),jax.tree.map(lambda v,g: .99*v+.01*g*g, v, g)
        upd = lambda p,m,v: p*(1-lr*.01)-lr*(m/(1-.9**n))/(jnp.sqrt(v/(1-.99**n))+1e-5)
        return jax.tree.map(upd, p, m, v),m,v,new,key,res
    s = jax.ShapeDtypeStruct
    (x,y),num,key,net = batch_of(w),s((), jnp.float32),s((4,), jnp.uint32),Net(dtype)
    def note(x, key):
        net.key = key
        return model(net, x.astype(dtype) if w.aug else x)
    jax.eval_shape(note, x, key)
    of = lambda d: {k: s(shape, jnp.float32) for k,shape in d.items()}
    p = of(net.shapes)
    return step,(p, p, p, of(net.stat_shapes), num, num, key, x, y, s((w.bs,2,3), jnp.float32), s((w.bs,2), jnp.float32))

def spread(w, step, args):
    "`step` on the chips, and how its arguments and results lie on them: batches by their samples, and under FSDP parameters by their largest dim"
    import jax
    from jax.sharding import NamedSharding, PartitionSpec as P
    n = int(w.chips.split('-')[1])
    mesh = jax.make_mesh((n,), ('core',))
    def cut(t):
        if w.form=='ranks' or not t.shape or t.size<n or max(t.shape)%n: return P()
        return P(*[None]*t.shape.index(max(t.shape)), 'core')
    held,every,by = jax.tree.map(cut, args[:3]),jax.tree.map(lambda t: P(), args[3:7]),jax.tree.map(lambda t: P('core'), args[7:])
    ins,outs = (*held, *every, *by),(*held, every[0], P(), P())
    if w.form=='ranks': step = jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    named = lambda t: jax.tree.map(lambda s: NamedSharding(mesh, s), t, is_leaf=lambda s: isinstance(s, P))
    return jax.jit(step, in_shardings=named(ins), out_shardings=named(outs), donate_argnums=(0,1,2,3), keep_unused=True)

def write_program(name, path):
    "Write the HLO of one training step, as for a TPU"
    w = works[name]
    os.environ.update(JAX_PLATFORMS='cpu', XLA_FLAGS='--xla_force_host_platform_device_count=8')
    import jax
    jax.config.update('jax_use_shardy_partitioner', False)
    if w.form=='tpu':
        step,args = step_of(w)
        f = jax.jit(step, donate_argnums=(0,1,2,3), keep_unused=True)
    else:
        per = w._replace(bs=w.bs*8) if w.form=='ranks' else w # a replica has a batch of its own
        step,args = step_of(per, (lambda t: jax.lax.pmean(t, 'core')) if w.form=='ranks' else (lambda t: t))
        f = spread(w, step, args)
    low = f.trace(*args).lower(lowering_platforms=('tpu',))
    Path(path).write_bytes(low.compiler_ir('hlo').as_serialized_hlo_module_proto())
    print(sum(math.prod(o.shape) for o in args[0].values()))

def print_flops(path):
    "Print the operations of a program; those of a loop whose turns XLA does not know count once"
    os.environ['JAX_PLATFORMS'] = 'cpu'
    import jax
    from jax._src.lib import xla_client
    module = xla_client.XlaComputation(Path(path).read_bytes()).as_hlo_module()
    print(xla_client._xla.hlo_module_cost_analysis(jax.devices()[0].client, module)['flops'])

if __name__ == '__main__':
    if sys.argv[1]=='--flops': print_flops(sys.argv[2])
    else: write_program(*sys.argv[1:])
