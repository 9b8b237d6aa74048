"The `fastai-xla` command in processes of its own, and the main job that its demo runs."
import json, platform, re
from importlib.metadata import version

import pytest
from fresh import packages_without, run, run_ok

script = '''import sys
from importlib.metadata import entry_points
sys.exit(next(iter(entry_points(group='console_scripts', name='fastai-xla'))).load()())'''

def cli(*args, **env): return run('-c', script, *args, **env)

def test_doctor_without_fault():
    res = cli('doctor')
    assert res.returncode == 0 and res.stderr == '', res.stdout + res.stderr
    rows = [re.split('  +', o) for o in res.stdout.splitlines()]
    assert rows[0] == ['check', 'seen', 'remedy'] and ['torch_xla', version('torch_xla'), 'ok'] in rows and ['device', 'CPU, 1 core', 'ok'] in rows
    assert ['platform', f'{platform.system()} {platform.machine()}', 'ok'] in rows

def test_torch_xla_is_missing(tmp_path):
    "One line with the remedy, and status 1; `plan` needs no torch_xla"
    (tmp_path/'train.py').write_text('')
    commands = ['doctor'], ['plan', '--model', 'vit_10m', '--batch', 8], ['launch', tmp_path/'train.py'], ['demo'], ['bench', 'platform:system']
    code = '''import json, sys
from fastai_xla.cli import main
for o in sys.argv[1:]:
    try: print('status', main(json.loads(o)))
    except SystemExit as e: print('status 1', e.code) # this on stderr'''
    res = run('-S', '-c', code, *(json.dumps([*map(str, o)]) for o in commands), PYTHONPATH=packages_without(tmp_path, 'torch_xla', '_xlac', 'libtpu'))
    said = [o for o in res.stdout.splitlines() if o.startswith('status')]
    assert said[:2]==['status 1','status 0'] and [o.partition(': pip')[0] for o in said[2:]]==['status 1 XLANotInstalled: torch_xla is not installed']*3, res.stdout+res.stderr
    assert re.search(r"torch_xla +missing +FAULT  torch_xla is not installed: pip install 'fastai_xla\[tpu\]'", res.stdout)
    assert '8 samples a step, 1 on each core' in res.stdout

def test_every_command_has_an_example_and_help_is_there_at_once():
    "In one process, which has imported nothing that takes time; the example's own options are options of the command"
    out = run_ok("""
        import contextlib, io, re, sys
        from fastai_xla.cli import main
        def said(*args):
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
                try: code = main([*args])
                except SystemExit as e: code = e.code
            return code,out.getvalue()
        code,text = said()
        assert code==0 and [o.split()[1] for o in text.splitlines()[-3:]] == ['doctor','demo','launch']
        commands = re.findall(r'^    (\\w+) ', text.split('COMMAND\\n')[1].split('\\n\\n')[0], re.M)
        for o in commands:
            code,text = said(o, '--help')
            what,example = text.split('\\nexample:\\n  fastai-xla '+o)
            assert code==0 and set(re.findall(r'(?<= )--\\w+', example.split('train.py --')[0])) <= set(re.findall(r'--\\w+', what)), (o, text)
            assert said(o, '--nonsense')[0]==2
        for args,what in ((['launch'], 'required: script'), (['launch', 'nowhere.py'], 'There is no file nowhere.py'), (['docter'], "invalid choice: 'docter'"), (['bench', 'nowhere.py:f'], 'There is no file')):
            code,text = said(*args)
            assert code==2 and what in text, (args, text)
            if args[0]=='docter': print(commands, [o for o in ('torch','fastai','torch_xla','numpy') if o in sys.modules])""", cold=True)
    assert out=="['doctor', 'demo', 'launch', 'bench', 'plan', 'compile'] []"
    v = run('-m', 'fastai_xla', '--version')
    assert v.returncode == 0 and v.stdout.startswith(f"fastai-xla {version('fastai_xla')}, torch {version('torch')}, torch_xla {version('torch_xla')}, fastai")

TRAIN = '''
import sys, time, names
from fastai.basics import *
from fastai.test_utils import synth_learner
from fastai_xla.all import *
from fastai_xla.runtime import rank
set_seed(1)
learn = synth_learner(n_trn=4, lr=.1).to_tpu_distributed()
with learn.no_bar(), learn.no_logging(): learn.fit(int(sys.argv[1]))
print('rank', rank(), __name__, flush=True)
(names.folder/str(rank())).write_text(f'{world_size()} {learn.model.a.item():.6f}')
if rank()==1:
    while not (names.folder/'0').exists(): time.sleep(.1)
    raise ValueError('boom')
'''

def test_launch_of_a_script(tmp_path):
    (tmp_path/'train.py').write_text(TRAIN)
    (tmp_path/'names.py').write_text('from pathlib import Path; folder = Path(__file__).parent')
    res = cli('launch', '--cores', '2', tmp_path/'train.py', '2', PJRT_DEVICE='CPU')
    assert res.returncode == 1 and 'LaunchError' in res.stderr and 'ValueError: boom' in res.stderr and 'train.py' in res.stderr
    of = [(tmp_path/o).read_text() for o in '01']
    assert of[0] == of[1] and of[0].startswith('2 ') and res.stdout.strip().splitlines() == ["No TPU found: 2 virtual cores on this machine's CPU", 'rank 0 __main__']

MINE = '''
import sizes
from fastai.test_utils import synth_learner
def get_learner(): return synth_learner(n_trn=sizes.n)
def nothing(): return 3
'''

def test_bench_of_ones_own_learner(tmp_path):
    "From a file with a neighbour: the table, and the steps as JSON"
    (tmp_path/'mine.py').write_text(MINE)
    (tmp_path/'sizes.py').write_text('n = 4')
    res = cli('bench', tmp_path/'mine.py:get_learner', '--batches', '10', '--strict', '--json', tmp_path/'steps.json')
    assert res.returncode == 0, res.stderr
    assert re.search(r'first 2 steps: (1 graph|\d+ graphs) compiled in [\d.]+ s; each of the 8 steps after:\n *wall ms +host ms +compiles +reads', res.stdout), res.stdout
    steps = json.loads((tmp_path/'steps.json').read_text())
    assert len(steps) == 10 and sum(o['compiles'] for o in steps[2:]) == 0
    wrong = cli('bench', tmp_path/'mine.py:nothing')
    assert wrong.returncode == 2 and 'returned int: it must return a Learner' in wrong.stderr

def test_demo_is_on_one_core_and_then_on_all(tmp_path, monkeypatch):
    "The example is called once for each, with the options; when it fails, there is no second"
    import fastai_xla.cli as c
    (tmp_path/'seen.py').write_text('import sys; open("seen", "a").write(" ".join(sys.argv[1:])+"\\n"); sys.exit(sys.argv[-1]=="bad")')
    monkeypatch.setattr(c, '_example', lambda name: tmp_path/('seen.py' if name=='digits.py' else name))
    monkeypatch.chdir(tmp_path)
    assert [c.main(['demo', *o]) for o in (['--epochs', '2', '--out', 'a'], ['--cores', '2'], ['--out', 'bad'])]==[0,0,1]
    assert (tmp_path/'seen').read_text().splitlines()==['--cores 1 --epochs 2 --out a', '--cores 8 --epochs 2 --out a/8_cores', '--cores 2 --epochs 6 --out out', '--cores 1 --epochs 6 --out bad']

@pytest.mark.slow
def test_demo_trains(tmp_path):
    "The main job: a table row an epoch, 97% of the held-out fifth, pictures; and the export loads where neither torch_xla nor fastai_xla is installed"
    from PIL import Image
    out = tmp_path/'demo' # half the epochs of a user, compiled quickly, but not so that it takes long
    res = cli('demo', '--cores', '1', '--epochs', '3', '--out', out, OMP_NUM_THREADS=None, XLA_FLAGS='--xla_backend_optimization_level=1')
    assert res.returncode == 0, res.stdout + res.stderr
    table = re.findall(r'^(\d) +([\d.]+) +([\d.]+) +([\d.]+) +\d\d:\d\d', res.stdout.replace('\r', '\n'), re.M)
    assert [int(o[0]) for o in table] == list(range(3)) and re.search('epoch +train_loss +valid_loss +accuracy +time', res.stdout)
    acc,n,dev = re.search(r'Done: ([\d.]+)% of (\d+) held-out digits right, 3 epochs in \d+ s on (.+)', res.stdout).groups()
    assert float(acc) >= 97 and int(n) == 1797//5 and dev == '1 CPU core' and abs(float(table[-1][3]) - float(acc)/100) < 1e-4
    assert re.search(r'gives 359 of 359 predictions the same, probabilities within \de-0[5-9]', res.stdout), res.stdout
    for f in ('curves.png', 'predictions.png'): assert min(Image.open(out/f).size) > 400
    assert len(list((out/'digits').glob('*/*.png'))) == 1797 and (out/'models'/'digits.pth').stat().st_size > 1e6
    (tmp_path/'lib').mkdir()
    packages_without(tmp_path/'lib', 'torch_xla', '_xlac', 'libtpu', 'fastai_xla', '__editable__')
    seen = run_ok(f'''
        from fastai.vision.all import *
        import importlib.util
        learn = load_learner({str(out/'digits.pkl')!r})
        images = get_image_files({str(out/'digits')!r})[:64]
        with learn.no_bar(): probs,_ = learn.get_preds(dl=learn.dls.test_dl(images))
        right = sum(learn.dls.vocab[p]==f.parent.name for p,f in zip(probs.argmax(1), images))
        print(right>=62, [importlib.util.find_spec(o) for o in ('torch_xla','fastai_xla')], next(learn.model.parameters()).device)''',
        '-S', cwd=tmp_path, PYTHONPATH=str(tmp_path/'lib'))
    assert seen == 'True [None, None] cpu'

@pytest.mark.slow
def test_demo_trains_on_all_cores(tmp_path):
    res = cli('demo', '--cores', '8', '--epochs', '1', '--out', tmp_path, XLA_FLAGS='--xla_backend_optimization_level=1')
    assert res.returncode == 0, res.stdout + res.stderr
    acc, = re.findall(r'gives 359 of 359 predictions the same.*\nDone: ([\d.]+)% of 359 held-out digits right, 1 epoch in \d+ s on 8 virtual CPU cores', res.stdout)
    assert float(acc) > 30 and (tmp_path/'curves.png').exists(), res.stdout
