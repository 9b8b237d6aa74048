"""Throughput is what can be computed by hand, with each strategy; it costs no read, run or compilation, and goes on where a training
was killed. Norms are those that torch computes. The profile finds where time was spent on purpose, and its trace is written however the fit ends."""
import os, threading, time
import pytest
from synth import *
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai_xla.runtime.device import xm
from fastai_xla.monitor.throughput import ClockTimes, Throughput
from fresh import repo as here, run_ok

class Ticks:
    "Clocks that go on by 2 seconds, in half of which the host works, whenever they are read"
    def __init__(self): self.n = 0.
    def __call__(self, dl=None):
        self.n += 1
        return ClockTimes(2*self.n, self.n, 0.)

def ticking(**kwargs):
    meter = TPUMeter(**{'show': False, **kwargs})
    meter.read = Ticks()
    return meter

def fit(learn, n=2, **kwargs):
    with learn.no_bar(),learn.no_logging(): learn.fit(n, 1e-2, **kwargs)
    return learn

SUMS = 'steps','samples','seconds','core_seconds','host','device','flops'
def sums(meter): return [meter.total[k] for k in SUMS]

class Killed(Exception): pass

class Kill(Callback):
    order = 1200
    def __init__(self, at): self.at = at
    def after_batch(self):
        if self.training and self.train_iter==self.at: raise Killed('now')

def test_operations_are_counted_on_shapes():
    "Where the peak is known: once, without a run; a model that needs values has no MFU"
    meter = ticking(peak_flops=1e6)
    fit(mlp_learner().to_tpu(), 1, cbs=meter)
    forward,inputs = 2*(8*16+16*3),2*16*3
    assert (meter.flops,meter.flops_error)==(2*forward+inputs, None)
    assert meter.rates().mfu==meter.values[0][7]==pytest.approx(48*meter.flops/(12*1e6))
    class Odd(nn.Linear):
        def forward(self, x):
            if x.device.type=='meta': x.sum().item()
            return super().forward(x)
    learn = mlp_learner(splitter=trainable_params)
    learn.model = Odd(8, 3)
    fit(learn.to_tpu(), 1, cbs=meter)
    assert meter.values[0][7] is None and 'meta' in meter.flops_error and meter.total['samples']==96, 'totals go on over fits'

def test_costs_no_read_run_or_compilation(monkeypatch):
    "Neither the time of every fit, nor a `TPUMeter`; norms come with the losses"
    from fastai_xla.patches import learner as doors
    def cost(*cbs):
        learn,stats = plain_net_learner().to_tpu(fetch_every=1e9),XLAStats()
        xm.wait_device_ops()
        before = xla_counts()
        fit(learn, cbs=[stats, *cbs])
        xm.wait_device_ops()
        c = xla_counts()-before
        return [(o.reads,o.compiles,o.nodes) for o in stats.steps], [c.reads, c.executions, c.compiles, c.uploads, c.nodes, c.upload_bytes]
    cost() # compiles
    timed = cost()
    (steps,counts),(normed,with_norms) = cost(TPUMeter(show=False, peak_flops=1e12)),cost(norms := NormMeter())
    assert steps[3:]==timed[0][3:] and counts[0]==timed[1][0]==with_norms[0] and {o[:2] for o in normed[2:]}=={(0,0)} and len(norms.grads)==12
    monkeypatch.setattr(doors, '_around', {})
    assert timed==cost()

RATES = r'[\d,.]+ samples/s, [\d,.]+ ms/step, bottleneck: (device|host|input) \(\d+%\)'

def spoken(out): return [o for o in out.replace('\r', '\n').splitlines() if 'ms/step' in o]

def test_what_is_said(capsys, monkeypatch):
    "By a meter after each epoch, and at the end with what the training has taken; without one in a line at the end, after which nothing stays with the Learner"
    learn = mlp_learner(cbs=(meter := TPUMeter())).to_tpu()
    with learn.no_bar(): learn.fit(2)
    first,second,last = spoken(capsys.readouterr().out)
    assert re.fullmatch(RATES, first) and re.fullmatch(RATES, second)
    assert re.fullmatch('CPU: '+RATES+r', \S+ s compiling; in all 96 samples, \S+ core hours', last)
    with learn.no_logging(): learn.fit(1)
    with learn.no_bar(): learn.lr_find(num_it=8, show_plot=False)
    assert meter.total['steps']==18 and len(learn.training_speed)==1, 'to find a rate is no training'
    plain = mlp_learner()
    with plain.no_bar(): plain.fit(1)
    assert not spoken(capsys.readouterr().out)
    monkeypatch.setattr('fastai_xla.monitor.throughput.read_clocks', Ticks())
    monkeypatch.setattr(Throughput, 'text_every', float('inf'))
    learn = mlp_learner().to_tpu()
    cbs = list(learn.cbs)
    learn.fit(2, 1e-2)
    line, = spoken(capsys.readouterr().out)
    assert re.fullmatch(r'CPU: 4 samples/s, 2,000 ms/step, bottleneck: (device|host) \(50%\), [\d.e-]+ s compiling', line) and len(line)<80
    assert learn.training_speed.frame[['epoch','samples','samples_per_sec','step_ms']].values.tolist()==[['0','48','4','2000'], ['1','96','4','2000']] and list(learn.cbs)==cbs
    assert [*learn.recorder.metric_names]==['epoch','train_loss','valid_loss','accuracy','time'], "fastai's table is as it was"

class Slow(Callback):
    "Sleeps in events of training or validation, by their names and milliseconds"
    order = 1
    def __init__(self, training=True, **events):
        for k,ms in events.items(): setattr(self, k, lambda ms=ms: time.sleep(ms/1e3*(self.training==training)))

class Computes(Callback):
    def after_pred(self):
        until = time.thread_time()+.02
        while time.thread_time()<until: pass

class SlowItems(list):
    "A batch of 8 takes 40 ms"
    def __getitem__(self, i):
        time.sleep(.005)
        return super().__getitem__(i)

def test_its_parts_add_up(capsys):
    "of a fit that spends its time in the host, in the loader, and in the device; the profile of input says so, too"
    learn = mlp_learner().to_tpu()
    fit(learn, 1) # compiles
    def shares(cbs=(), data=vectors(48)):
        learn.dls.train = TfmdDL(data, bs=8, num_workers=0)
        capsys.readouterr()
        with learn.no_bar(): learn.fit(1, cbs=cbs)
        rates = learn.training_speed.frame.iloc[0]
        res = [float(rates[o]) for o in ('device_wait','host_work','input_wait')]
        assert .99<=sum(res)<=1.01
        assert re.search(RATES, spoken(capsys.readouterr().out)[0])[1]==('device','host','input')[res.index(max(res))]
        return res
    prof = StepProfiler((2,5), trace=False)
    found = shares(Slow(after_pred=30)),shares(Computes()),shares(prof, SlowItems(vectors(48)))
    assert [max(range(3), key=lambda j: found[j][i]) for i in range(3)]==[0,1,2], found # a thread that sleeps waits, as for the device
    assert sum(o['wait'][0] for o in prof.steps)>.5*prof.seconds['wall']

def test_the_bar_counts_while_the_first_steps_compile(monkeypatch):
    "Each second; also if the batch fails, nothing counts on"
    said = []
    monkeypatch.setattr('fastai_xla.monitor.throughput.bar_waits', lambda learn, text: said.append(text))
    class Slowly(Callback):
        def after_pred(self):
            time.sleep(1.3*(self.train_iter<1))
            if self.train_iter==1: raise KeyError('a fault')
    with pytest.raises(KeyError): mlp_learner().to_tpu().fit(1, cbs=Slowly())
    assert said==['compiling the first steps (1 s)',''], said
    assert not [o for o in threading.enumerate() if '_tick' in o.name], threading.enumerate()

def test_goes_on_where_it_was_killed(tmp_path):
    "Batches that are passed over cost nothing: a meter's totals go on, the time of a fit is of what this process trained"
    with pytest.raises(Killed): fit(mlp_learner().to_tpu(), cbs=[ticking(), TPUCheckpoint(tmp_path/'a', every=1), Kill(9)])
    shutil.copytree(tmp_path/'a', tmp_path/'b')
    learn = fit(mlp_learner().to_tpu(), cbs=[meter := ticking(), resume_from(tmp_path/'a', every=1)])
    assert sums(meter)[:4]==[12, 96, 24., 24.] and [o[0] for o in meter.values]==[0,1] and learn.train_iter==12
    assert meter.values[1][1:4]==(4., 4., 2000.) and meter.total['steps']-meter.start['steps']==3, 'an epoch counts from where it goes on'
    learn = fit(mlp_learner().to_tpu(), cbs=resume_from(tmp_path/'b', every=1))
    assert learn.training_speed.frame[['epoch','samples']].values.tolist()==[['1','24']]
    class Leave(Callback):
        def after_batch(self):
            if self.training and self.iter==1: raise CancelTrainException
    assert [*fit(learn, 1, cbs=Leave()).training_speed.frame.samples]==['8'] # the batch that is left is not counted
    learn.dls.train = TfmdDL(vectors(20), bs=8, num_workers=0)
    assert [*fit(learn, 1).training_speed.frame.samples]==['20'], 'the last, smaller batch by its samples'

# ---- the profile

def profiled(steps=(2,5), cbs=None):
    prof = StepProfiler(steps, trace=False)
    fit(mlp_learner().to_tpu(), cbs=[prof, *L(cbs)])
    return prof

def test_slow_phases_are_found():
    "of training; this thread slept, so it did not work"
    ms = dict(before_batch=30, after_pred=15, after_loss=20, before_backward=25, before_step=30, after_batch=35)
    prof = profiled(cbs=Slow(**ms))
    assert len(prof.steps)==3
    for phase,least in zip(('input','forward','loss','backward','step','sync'), ms.values()):
        assert all(o[phase][0]>=least/1e3 and o[phase][0]-o[phase][1]>=.5*least/1e3 for o in prof.steps), (phase, prof.steps)
    prof = profiled((4,8), cbs=Slow(training=False, after_batch=20))
    assert len(prof.steps)==4 and sum(v[0] for o in prof.steps for v in o.values())<=prof.seconds['wall']
    assert prof.table[-1][0]=='a step' and prof.seconds['wall']-sum(v[0] for o in prof.steps for v in o.values())<.06, 'three batches of 20 ms'

def test_the_trace_is_written_however_a_fit_ends(tmp_path):
    learn = mlp_learner(path=tmp_path).to_tpu()
    prof = StepProfiler((1,50), folder='found')
    with pytest.raises(Killed): fit(learn, cbs=[prof, Kill(3)])
    learn.remove_cbs([StepProfiler,Kill])
    assert Path(prof.file).is_relative_to(tmp_path/'found') and b'fastai: forward' in Path(prof.file).read_bytes() and len(prof.steps)==1
    fit(learn, cbs=(again := StepProfiler((0,2))))
    assert len(again.steps)==2 and Path(again.file).is_relative_to(tmp_path/'profile')

# ---- norms

class TorchNorms(Callback):
    "What `NormMeter` notes, by torch's own norm"
    order = 9
    def before_fit(self): self.seen = [],[],[]
    def norms(self, f):
        vs = [[f(p) for p in pl if f(p) is not None] for pl in self.opt.param_lists]
        return [torch.nn.utils.get_total_norm(v).item() if v else 0. for v in (sum(vs, []), *vs)]
    def before_step(self):
        self.seen[0].append(self.norms(lambda p: p.grad))
        self.seen[1].append(self.norms(lambda p: p.detach()))
        self.old = {p: p.detach().clone() for pl in self.opt.param_lists for p in pl}
    def after_step(self): self.seen[2].append(self.norms(lambda p: p.detach()-self.old[p]))

def plain_net_learner(bs=8, **kwargs):
    "The same batches whatever the seed, and no BatchNorm"
    dls = DataLoaders(*[TfmdDL(vectors(n), bs=bs, num_workers=0) for n in (48,16)])
    set_seed(4)
    m = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return Learner(dls, m, loss_func=CrossEntropyLossFlat(), splitter=lambda m: L(m[:1], m[2:]).map(params), path='.', **kwargs)

def norms_of(learn, **kwargs):
    fit(learn, cbs=[norms := NormMeter(), *L(kwargs.pop('cbs', None))], **kwargs)
    return [norms.grads, norms.params, norms.updates]

def torch_norms(cbs=None):
    fit(plain_net_learner(), cbs=[seen := TorchNorms(), *L(cbs)])
    return [*seen.seen]

@pytest.mark.parametrize('to', [noop, lambda o: o.to_tpu()], ids=['host','tpu'])
def test_norms_are_those_of_torch(to):
    "Before they are clipped; a step of two batches has one; of what is frozen there is no gradient and no update"
    def cbs(): return [GradientAccumulation(16), GradientClip(.1)]
    want = torch_norms(cbs())
    close(want, norms_of(to(plain_net_learner()), cbs=cbs()))
    assert [len(want[0]), len(want[0][0])]==[6,3] and min(o[0] for o in want[0])>.1
    learn = plain_net_learner()
    learn.freeze()
    got = norms_of(to(learn))
    assert all(o[1]==0<o[2]==o[0] for o in got[0]+got[2]) and got[1][0][1]>0

# ---- several cores

child = dict(PYTHONPATH=f'{here}{os.pathsep}{here}/tests', CPU_NUM_DEVICES='2')

@pytest.mark.slow
def test_in_a_pool():
    """The line and the rows of all cores are the notebook's; what is said of NaN, too. Samples of all, seconds of one: as many core seconds as two cores take.
    A trace is the main rank's"""
    out = run_ok("""
        from fastai_xla.all import get_pool
        get_pool(2).run(lambda rank: None) # before this process has a device
        from test_meter import *
        class Quick(Callback):
            def before_fit(self):
                from fastai_xla.monitor.throughput import Throughput
                Throughput.text_every = 0.
        class Watch(ShowGraphCallback):
            def before_fit(self): self.seen,self.nb_batches = [],[]
            def before_batch(self): self.seen.append(self.progress.pbar.comment)
            def after_epoch(self): pass
        pool = dict(n_cores=2, processes=True)
        learn = plain_net_learner(bs=4).to_tpu_distributed(**pool)
        learn.fit(2, 1e-2, cbs=[watch := Watch(), Quick(), prof := StepProfiler((1,3)), norms := NormMeter()])
        print('rows', *learn.training_speed.frame.samples, len(prof.steps), bool(prof.file))
        print('seen', *watch.seen, sep='\\n')
        learn.fit(1, lr=math.nan, cbs=TPUMeter())
        close(torch_norms(), [norms.grads, norms.params, norms.updates], rtol=1e-4)
        fit(mlp_learner(bs=4).to_tpu_distributed(**pool), cbs=(meter := ticking()))
        print('took', sums(meter)[:6], meter.values[-1][1:4], meter.n_here)""", '-W', 'error:You are shadowing', **child)
    lines = spoken(out)
    assert len(lines)==3 and re.fullmatch('2x CPU: '+RATES+r', \S+ s compiling', lines[0]) and 'rows 48 96 2 True' in out
    assert re.fullmatch(RATES, lines[1]) and ' core hours' in lines[2] and out.count('The losses of epoch 0 are not finite')==1
    said = [o for o in out.split('\nseen\n')[1].splitlines()[:6] if ' | ' in o[:20]]
    assert said and all(re.fullmatch(r'[\d.]* \| [\d,.]+ samples/s(, waits \d+% for input)?', o) for o in said)
    assert 'took [12, 96, 24.0, 48.0, 12.0, 12.0] (4.0, 2.0, 2000.0) 1' in out

def test_sharded():
    out = run_ok("""
        import torch
        from fastai.test_utils import synth_learner
        from fastai_xla.all import *
        learn = synth_learner(model=torch.nn.Linear(1, 1)).to_tpu_sharded(fsdp=2)
        from test_meter import *
        os.environ['TPU_ACCELERATOR_TYPE'] = 'v5litepod-8' # what a machine says of itself; devices do not under SPMD
        fit(learn, cbs=(meter := ticking()))
        close(torch_norms(), norms_of(plain_net_learner().to_tpu_sharded(fsdp=2)), rtol=1e-4)
        print(len(learn.dls.train), sums(meter)[:6], meter.values[-1][1:3], meter.n_here, meter.peak, meter.flops,
            *learn.training_speed.frame.samples)""", **child)
    assert out.splitlines()[-1]=='10 [20, 320, 40.0, 80.0, 20.0, 20.0] (8.0, 4.0) 1 197000000000000.0 4.0 160 320', "a weight takes four operations a sample"
