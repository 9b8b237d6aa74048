"""What each form for a TPU's compiler saves: the estimated cycles of a step with all forms, and with all but one.

    python benchmarks/forms.py                        # all models
    python benchmarks/forms.py resnet18 awd_lstm      # some
    python benchmarks/forms.py --fast resnet50        # less effort of the compiler, as for those at 224 px
Needs `pip install 'fastai_xla[compile]'`. Estimates of libtpu's compiler for a described v5e chip: nothing runs on a TPU.
"""
import argparse, json, os, tempfile, warnings
from pathlib import Path
from device import compiled, gathered, learner, options_of, tpu_slice_of
from jax_twins import WorkOf
warnings.filterwarnings('ignore')

models = dict(resnet18_64=WorkOf('resnet18'), resnet18=WorkOf('resnet18', True, size=128, bs=64), resnet18_aug=WorkOf('resnet18', True, True, 128, 64),
    resnet50=WorkOf('resnet50', True, size=224, bs=64), convnext=WorkOf('convnext', True, size=224, bs=64), efficientnet=WorkOf('efficientnet', True, size=224, bs=64),
    vit_tiny=WorkOf('vit', True), vit_base=WorkOf('vit_base', True, size=224, bs=64), unet=WorkOf('unet', True, size=128, bs=8),
    awd_lstm=WorkOf('awd_lstm', size=72, bs=32), awd_lstm_bf16=WorkOf('awd_lstm', True, size=72, bs=32), tabular=WorkOf('tabular', size=8, bs=1024),
    collab=WorkOf('collab', size=2, bs=1024))

def _without(name):
    "Lend torch all functions but this"
    from fastai_xla.models import forms
    forms.tpu_forms = [o for o in forms.tpu_forms if o[2].__name__!=name]

def _no_order(pin):
    from fastai_xla.train import steppers
    stock = steppers.arranged_update
    if pin is None: steppers.arranged_update = lambda computation, inputs, *args: (computation, inputs)
    else: steppers.arranged_update = lambda *args: stock(*args[:-1], pin)

def _no_tiles():
    from fastai_xla.patches import augment
    augment.affine_by_tiles = lambda *args: None

# What leaves a form out
forms = {'attention': lambda: _without('_attention'), 'embedding': lambda: _without('_embedding'),
    'conv of small images': lambda: _without('_conv2d'),
    'order of the update': lambda: _no_order(None),
    'pinned layouts': lambda: _no_order(False), 'tiles': _no_tiles}
forms['all'] = lambda: [f() for k,f in forms.items() if k not in ('all','pinned layouts')]

def programs(w, off, folder):
    "The programs of a training step and a validation step of `w`, by phase"
    from fastai_xla.launch.launcher import pack_run
    from fastai_xla.aot.trace import CompileJob, trace_phase
    from fastai_xla.runtime.device import make_programs_for
    make_programs_for('TPU')
    if off: forms[off]()
    run,*_ = pack_run(print, (learner(w),), share=False)
    job = CompileJob(w.chips, w.form, tpu_slice_of(w).n, options_of(w))
    return {k: trace_phase(job, run, folder/k, k)[0] for k in ('train','valid')}

def measure(w, off, effort, cache):
    "Million cycles and MB by phase, with one form left out, in a fork"
    r,s = os.pipe()
    if not (pid := os.fork()):
        try:
            with tempfile.TemporaryDirectory() as d:
                res = {k: compiled(o, w, effort, cache) for k,o in programs(w, off, Path(d)).items()}
                os.write(s, json.dumps({k: ((o.cycles+gathered(o))/1e6, o.memory.total/1e6) for k,o in res.items()}).encode())
        finally: os._exit(0)
    os.close(s)
    with os.fdopen(r) as f: text = f.read()
    os.waitpid(pid, 0)
    if not text: raise RuntimeError(f'{w.model} without {off} could not be compiled')
    return json.loads(text)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('names', nargs='*', help=f'of {", ".join(models)}')
    p.add_argument('--fast', action='store_true', help="the compiler's lesser effort")
    p.add_argument('--cache', type=Path, default=Path.home()/'.cache'/'fastai_xla'/'compiled', help='folder of what was compiled before')
    a = p.parse_args()
    os.environ.update(PJRT_DEVICE='CPU', OMP_NUM_THREADS='1')
    import fastai_xla.all, device
    print('| model | without | training, Mcycles | saved | MB | saved | validation, Mcycles | saved |', f"|{' --- |'*8}", sep='\n')
    for name in a.names or models:
        base = measure(models[name], None, -.5 if a.fast else 0., a.cache)
        for off in (None, *forms):
            o = base if off is None else measure(models[name], off, -.5 if a.fast else 0., a.cache)
            if off and o==base: continue
            (c,m),(v,_),(bc,bm),(bv,_) = *o.values(),*base.values()
            print(f"| {name} | {off or 'none'} | {c:.3f} | {c/bc-1:.1%} | {m:.0f} | {m/bm-1:.1%} | {v:.3f} | {v/bv-1:.1%} |", flush=True)

if __name__ == '__main__': main()
