"Cases that need a process like no other: they run in groups, each group in a fresh process, by `python test_file.py <group> [case ...]`."
import json, os, time, traceback
from tempfile import TemporaryDirectory

from fresh import run

class Groups(dict):
    "The cases of the test file `file` by group and name; `env` gives the environment of a process"
    def __init__(self, file, env): self.file,self.env,self._processes = file,env,{}

    @property
    def names(self): return [(g,o) for g,cases in self.items() for o in cases]

    def case(self, group):
        "A function that a process of this group calls; its pytest test says what became of it"
        def _inner(f):
            self.setdefault(group, {})[f.__name__] = f
            return f
        return _inner

    def outcome(self, group):
        "{case: [error or None, seconds]}"
        if group not in self._processes: self._processes[group] = run(self.file, group, **self.env())
        res = self._processes[group]
        assert res.returncode==0, f'exit {res.returncode}\n{res.stdout}\n{res.stderr}'
        return json.loads(res.stdout.splitlines()[-1])

    def check(self, group, name):
        "Fail with the case's own traceback if it has failed"
        import pytest # not above: the processes of cases need none
        error,_ = self.outcome(group)[name]
        if error: pytest.fail(error, pytrace=False)

    def main(self, group, *names):
        "Run the cases of `group`, in a folder of their own, and print what became of them"
        res = {}
        with TemporaryDirectory() as d:
            os.chdir(d)
            for name,f in self[group].items():
                if names and name not in names: continue
                start,error = time.time(),None
                try: f()
                except BaseException: error = traceback.format_exc()
                res[name] = error,time.time()-start
        print(json.dumps(res))

# ---- comparisons of Learners, in such a process

def near(a, b, tol=2e-5):
    "Assert that two nests of tensors and numbers agree"
    from parity_models import leaves
    a,b = leaves(a),leaves(b)
    assert a.keys()==b.keys()
    far = {k: abs(a[k]-b[k]).max(initial=0) for k in a if not abs(a[k]-b[k]).max(initial=0)<=tol}
    assert not far, far

def same(plain, learn, tol=2e-5):
    "Assert that two Learners have equal weights, optimizer state and history"
    near(*[[o.model.state_dict(), o.opt.state_dict()['state'], list(o.recorder.losses), list(o.recorder.values)] for o in (plain, learn)], tol)

def pieces(t):
    "Shapes of what each core has of a tensor"
    import torch_xla
    return [tuple(o[0].shape) for o in torch_xla._XLAC._get_local_shards([t.detach()])[0]]
