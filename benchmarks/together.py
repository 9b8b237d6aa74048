"""What the TPU's compiler says of several steps as one program (`to_tpu(steps_per_execution=...)`), beside one step: time of a step, memory, seconds of compiling. Nothing runs on a TPU.

    python benchmarks/together.py                      # the works of bench.py, 8 steps in one program
    python benchmarks/together.py --works mlp --n 16
"""
import os
os.environ.setdefault('PJRT_DEVICE', 'CPU')
import subprocess, sys, time, warnings
from fastcore.script import call_parse
from bench import BS, learner, MORE, WORKS
warnings.filterwarnings('ignore')

class Written(Exception): pass

def graphs(work, n):
    "The graph of a step as it is traced for a TPU, and of `n` in a row"
    import torch_xla
    import fastai_xla.all
    from fastai_xla.runtime.device import make_programs_for
    from fastai_xla.train import replay, step_loop
    got = {}
    class Capture(step_loop.LoopCapture):
        def loop(self, *args):
            got['one step'] = torch_xla._XLAC._get_xla_tensors_hlo_proto(self.roots)
            def noted(roots):
                got[f'{n} steps'] = torch_xla._XLAC._get_xla_tensors_hlo_proto(roots)
                raise Written('both are known')
            step_loop.compile_graph = noted
            super().loop(*args)
    replay.LoopCapture = Capture
    make_programs_for('TPU')
    learn = learner(work, 4, []).to_tpu(steps_per_execution=n)
    try:
        with learn.no_bar(),learn.no_logging(): learn.fit(1)
    except Written: return got
    raise RuntimeError(f'{work} was not run {n} steps at a time: {learn.replay}')

def reports(work, n, chip):
    "In a process of its own: what the compiler says of both"
    from fastai_xla.monitor.hlo import hlo_message
    from fastai_xla.monitor.libtpu import TPUCompiler
    from fastai_xla.monitor.report import ProgramReport
    from fastai_xla.monitor.slices import tpu_slice
    s = tpu_slice(chip)
    compiler = TPUCompiler(s)
    for name,hlo in graphs(work, n).items():
        start = time.time()
        module,memory = compiler.compile(hlo_message('HloModuleProto').FromString(hlo))
        report = ProgramReport(module, memory, s)
        ms = 1e3*(report.cycles+(n-1)*report.turn)/s.clock/(n if report.turn else 1) # the loop turns as often as there are steps
        print(f'ROW | {work} | {name} | {ms:.3f} | {(memory.args+memory.temp)/1e6:.0f} | {time.time()-start:.1f} |', flush=True)

@call_parse
def main(
    works:str=' '.join([*WORKS,'vit_tiny']), # What to train
    n:int=8, # Steps in one program
    chip:str='v5e-1', # What to compile for
    child:bool=False, # Compile in this process
):
    "Print a row for each program"
    if child: return reports(works, n, chip)
    print(f'| batch of {BS} | program | ms a step on a {chip}, by estimate | MB | compiling, s |\n| --- | --- | --- | --- | --- |')
    for work in works.split():
        assert work in {**WORKS, **MORE}, work
        res = subprocess.run([sys.executable, __file__, '--child', '--works', work, '--n', str(n), '--chip', chip], capture_output=True, text=True)
        rows = [o[4:] for o in res.stdout.splitlines() if o.startswith('ROW ')]
        print('\n'.join(rows) or res.stderr[-2000:], flush=True)
