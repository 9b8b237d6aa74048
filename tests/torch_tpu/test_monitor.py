"What a user is told: the doctor's table, and how fast a fit was"
import math, re
from parity_models import cnn
from fastai_xla.all import *

def test_doctor():
    d = doctor()
    rows = {o.check: o for o in d}
    assert d.ok and (rows['torch_tpu'].seen, rows['device'].seen)==('0.2.0', 'tpu') and 'torch_xla' not in rows

def test_line(capsys):
    learn = cnn(cbs=TPUMeter()).to_tpu()
    with learn.no_bar(): learn.fit(2, 1e-3)
    out = capsys.readouterr().out
    assert re.search(r'^TPU: [\d.,]+ samples/s, [\d.,]+ ms/step, bottleneck: \w+ \(\d+%\), [\d.]+ s compiling; in all 80 samples', out, re.M), out
    first,second = learn.tpu_meter.values
    assert [o[0] for o in (first, second)]==[0,1] and first[1:]!=second[1:]
    table = learn.training_speed
    assert len(table)==2 and table.columns[:2]==('epoch','samples_per_sec')
    r = learn.tpu_meter.rates()
    assert r.samples==80 and math.isclose(r.device_wait+r.host_work+r.input_wait, 1) and r.compile_secs>0 and r.mfu is None and r.memory is None

