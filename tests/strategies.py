"""Cases that are run in each strategy, and whose numbers are compared with those of plain fastai.

A file of tests makes `Cases(__file__)`, marks with `@cases.case` functions that build a Learner and use it, and ends with `if __name__=='__main__': cases.main()`.
A case is called with `attach(learn)`, which puts a Learner on the cores, and `bs`, the batch size for which a step has 8 samples; it returns numbers, or tensors, in containers.
"""
import json, os, sys, traceback
from functools import cached_property
from tempfile import TemporaryDirectory

from fresh import run

N = 4 # cores
STRATEGIES = dict(plain=lambda learn: learn, to_tpu=lambda learn: learn.to_tpu(), cores=lambda learn: learn.to_tpu_distributed(n_cores=N),
    sharded=lambda learn: learn.to_tpu_sharded(fsdp=N), ranks=lambda learn: learn.to_tpu_distributed(n_cores=N, processes=True))

def numbers(o):
    "Everything in `o` as lists of floats"
    import torch
    if isinstance(o, torch.Tensor): return o.detach().cpu().float().flatten().tolist()
    if hasattr(o, 'items'): return [numbers(v) for v in o.values()]
    return [numbers(v) for v in o] if isinstance(o, (list,tuple)) or hasattr(o, '__iter__') and not isinstance(o, str) else float(o)

def difference(want, got):
    "The largest difference of two nests of numbers, relative to the largest of the list that they stand in"
    if not isinstance(want, list): return 0. if want==got or want!=want and got!=got else abs(want-got)/max(abs(want), 1.)
    assert len(want)==len(got), f'{len(got)} values are not {len(want)}'
    return max((difference(a, b) for a,b in zip(want, got)), default=0.)

class Cases(dict):
    "The cases of the test file `file` by name, each with the strategies that it is for"
    def __init__(self, file): self.file = file

    def case(self, *strategies):
        def _inner(f):
            self[f.__name__] = f,strategies or [o for o in STRATEGIES if o!='plain']
            return f
        return _inner

    @property
    def names(self): return [(s,k) for s in STRATEGIES if s!='plain' for k,(_,ss) in self.items() if s in ss]

    @cached_property
    def _ran(self): return {}

    def outcome(self, strategy):
        "What the cases gave in `strategy`: `{name: [numbers, error]}`"
        if strategy not in self._ran:
            res = run(self.file, strategy, CPU_NUM_DEVICES=None)
            assert res.returncode==0, f'exit {res.returncode}\n{res.stdout}\n{res.stderr}'
            self._ran[strategy] = json.loads(res.stdout.splitlines()[-1])
        return self._ran[strategy]

    def check(self, strategy, name, tol=2e-4):
        "Assert that the case gives in `strategy` what it gives in plain fastai"
        (want,failed),(got,error) = (self.outcome(o)[name] for o in ('plain',strategy))
        assert not failed, failed
        assert not error, error
        assert difference(want, got)<tol, f'{difference(want, got)}: {want} is not {got}'

    def main(self):
        "Run in this process the cases of a strategy, or those that are named, and print what they gave"
        from fastai.torch_core import set_seed
        strategy,*names = sys.argv[1:]
        res = {}
        with TemporaryDirectory() as d:
            os.chdir(d)
            for name,(f,ss) in self.items():
                if names and name not in names or strategy not in ('plain', *ss): continue
                set_seed(1)
                try: res[name] = numbers(f(STRATEGIES[strategy], 8//N if strategy in ('cores','ranks') else 8)),None
                except BaseException: res[name] = None,traceback.format_exc()
        print(json.dumps(res))
