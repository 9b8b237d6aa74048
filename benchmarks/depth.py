"""What depth costs: time to compile a training step, size of its program, and the memory it takes on each core, with plain blocks, gradient checkpointing, and one loop:

    PJRT_DEVICE=CPU python benchmarks/depth.py [--depths 4,12,24] [--modes plain,grad_ckpt,scan] [--dim 64] [--mesh fsdp=8]

Each line is a process of its own on virtual cores, that trains a vision transformer sharded over them for a few steps. Times are XLA:CPU's, whose compiler is another than a TPU's; sizes are of the program as it is handed to the compiler (instructions) and the compiler's own account of temporary memory.
"""
import argparse, json, os, re, subprocess, sys, tempfile
from pathlib import Path

def measure(depth, mode, dim, bs, opt, mesh):
    "Train, and say what the training step's program is: in a process that writes programs and memory to files here"
    from fastai.vision.all import Learner, DataLoaders, DataLoader, TensorImage, TensorCategory, CrossEntropyLossFlat, set_seed, Adam, SGD
    from fastai_xla.all import mean_vit
    from fastai_xla.runtime.device import xm
    import torch, torch_xla, fastai_xla.all
    from torch_xla.debug import metrics as met
    set_seed(1)
    ds = [(TensorImage(torch.randn(3,64,64)), TensorCategory(i%4)) for i in range(bs)]
    dls = DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:0], bs=bs))
    learn = Learner(dls, mean_vit(dim, 4, depth, 8, img_size=64, num_classes=4), CrossEntropyLossFlat(), opt_func=dict(Adam=Adam, SGD=SGD)[opt], cbs=[])
    learn.to_tpu_sharded(**mesh, **({} if mode=='plain' else {mode: True}))
    n = met.metric_data('CompileTime') or (0,0)
    with learn.no_bar(),learn.no_logging(): learn.fit(3)
    def share(ts):
        ts = [t.detach() for t in ts]
        parts = [sum(c) for c in zip(*([o[0].nbytes for o in p] for p in torch_xla._XLAC._get_local_shards(ts)))]
        return max(parts),sum(t.nbytes for t in ts)
    params,state = share(list(learn.model.parameters())),share([v for s in learn.opt.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.device.type=='xla'] or [torch.zeros(8, device='xla')])
    compiled = met.metric_data('CompileTime')
    return dict(loss=float(learn.recorder.losses[-1]), compiles=compiled[0]-n[0], seconds=max(o[1] for o in compiled[2])/1e9, params=params, state=state)

def programs(folder):
    "Instructions and matrix products of the largest program before the compiler, and its temporary memory in bytes"
    step = max((o.read_text() for o in Path(folder).glob('*SyncTensorsGraph*before_optimizations.txt')), key=len)
    temp = [float(o) for o in re.findall(r'Intermediate tensor size: ([\d.]+) GB', (Path(folder)/'debug.txt').read_text())]
    return dict(instructions=step.count(' = '), products=step.count(' dot('), temp=max(temp)*2**30)

def run(start=subprocess.run, **kwargs):
    "`measure(**kwargs)` in a new process, which `start` starts, with what its programs are"
    with tempfile.TemporaryDirectory() as d:
        flags = f'--xla_backend_optimization_level=0 --xla_cpu_enable_concurrency_optimized_scheduler=false --xla_dump_to={d} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*SyncTensorsGraph.*'
        env = {**os.environ, 'PJRT_DEVICE': 'CPU', 'XLA_FLAGS': flags, 'PT_XLA_DEBUG_LEVEL': '2', 'PT_XLA_DEBUG_FILE': f'{d}/debug.txt'}
        env.pop('CPU_NUM_DEVICES', None)
        res = start([sys.executable, __file__, '--one', json.dumps(kwargs)], env=env, capture_output=True, text=True)
        if res.returncode: raise RuntimeError(res.stderr)
        return {**json.loads(res.stdout.splitlines()[-1]), **programs(d)}

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--depths', default='4,12,24'); p.add_argument('--modes', default='plain,grad_ckpt,scan'); p.add_argument('--dim', type=int, default=64)
    p.add_argument('--bs', type=int, default=64); p.add_argument('--opt', default='Adam'); p.add_argument('--mesh', default='fsdp=8'); p.add_argument('--one', help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.one: return print(json.dumps(measure(**json.loads(a.one))))
    mesh = {k: int(v) for k,v in (o.split('=') for o in a.mesh.split(','))}
    print(f"{'blocks':>6} {'run':10} {'compile':>9} {'instructions':>12} {'temporary':>10} {'parameters':>18} {'optimizer state':>18} {'loss':>9}", flush=True)
    for depth in map(int, a.depths.split(',')):
        for mode in a.modes.split(','):
            r = run(depth=depth, mode=mode, dim=a.dim, bs=a.bs, opt=a.opt, mesh=mesh)
            part = [f'{o[0]/1e3:.0f} kB ({o[0]/o[1]:.1%})' for o in (r['params'], r['state'])]
            print(f"{depth:6} {mode:10} {r['seconds']:7.1f} s {r['instructions']:12} {r['temp']/1e6:7.1f} MB {part[0]:>18} {part[1]:>18} {r['loss']:9.6f}", flush=True)

if __name__=='__main__': main()
