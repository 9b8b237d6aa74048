"""What the TPU's compiler says of resizing images, result and gradient: by the matrix products of `patches.ops`, and by torch's decompositions, which take pixels by their places. Nothing runs on a TPU.

    python benchmarks/resize.py
    python benchmarks/resize.py --shape '16 256 32 32' --size '64 64' --modes 'bilinear nearest bicubic'
"""
import os
os.environ.setdefault('PJRT_DEVICE', 'CPU')
import warnings
from fastcore.script import call_parse
warnings.filterwarnings('ignore')

def graph(resize, shape):
    "The graph of an image of `shape` that is resized, and of its gradient"
    import torch, torch_xla
    x = torch.randn(shape).to(torch_xla.device()).requires_grad_()
    torch_xla.sync()
    y = resize(x*2)
    grad, = torch.autograd.grad((y**2).sum(), x)
    return torch_xla._XLAC._get_xla_tensors_hlo_proto([y.detach(), grad])

@call_parse
def main(
    shape:str='16 21 64 64', # Of the images
    size:str='512 512', # What they are resized to
    modes:str='bilinear nearest bicubic',
    chip:str='v5e-1', # What to compile for
):
    "Print a row for each mode and form"
    import torch
    import fastai_xla.all
    from torch._decomp import decomposition_table
    from torch.nn import functional as F
    from fastai_xla.aot.libtpu import hlo_message
    from fastai_xla.aot.libtpu import TPUCompiler
    from fastai_xla.aot.report import ProgramReport
    from fastai_xla.aot.plan import tpu_slice
    from fastai_xla.runtime.device import make_programs_for
    make_programs_for('TPU')
    s,shape,size = tpu_slice(chip),[int(o) for o in shape.split()],[int(o) for o in size.split()]
    compiler = TPUCompiler(s)
    print(f'| {shape} to {size} | form | ms on a {chip}, by estimate | MB |\n| --- | --- | --- | --- |')
    for mode in modes.split():
        op,flags = getattr(torch.ops.aten, f'upsample_{mode}2d').default,() if mode=='nearest' else (False,)
        for form,resize in dict(products=lambda x: F.interpolate(x, size=size, mode=mode), decomposition=lambda x: decomposition_table[op](x, size, *flags)).items():
            module,memory = compiler.compile(hlo_message('HloModuleProto').FromString(graph(resize, shape)))
            print(f'| {mode} | {form} | {ProgramReport(module, memory, s).time*1e3:.1f} | {(memory.args+memory.temp)/1e6:.0f} |', flush=True)
