"""Does reading go on while the device works? The time of an epoch, over that of the slower of the two alone.

    python benchmarks/overlap.py

The host part of a batch waits, as one that reads files does, for half, once and twice the time of a step on the device. XLA's CPU device works on
one core here, so that the two do not share it; other work on the machine shows in the table all the same. A step takes about 15 ms. Where it takes 5
(`--width 600`), the ratio of the equal case rises to 1.1-1.2: the two threads lose about half a millisecond a batch to each other.
"""
import os, time
os.environ.setdefault('XLA_FLAGS', '--xla_cpu_multi_thread_eigen=false') # read when the runtime starts
from fastai.basics import *
from fastai_xla.all import *
from fastai_xla.runtime.device import xm
from fastcore.script import call_parse

class Timer(Callback):
    "Seconds of each epoch's training, up to the end of its last step on the device"
    order = 200
    def before_fit(self): self.seconds = []
    def before_train(self):
        xm.wait_device_ops()
        self.start = time.monotonic()
    def after_train(self):
        xm.wait_device_ops()
        self.seconds.append(time.monotonic()-self.start)

class Wait:
    "A batch transform that takes `seconds`"
    seconds = 0.
    def __call__(self, b):
        time.sleep(self.seconds)
        return b

def on_device(learn):
    cb = Timer()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3, cbs=cb)
    return cb.seconds[0]

def on_host(dl):
    start = time.monotonic()
    for _ in dl: pass
    return time.monotonic()-start

WAITS = {'device-bound':.5, 'equal':1., 'host-bound':2.}

def ratios(n_batches=60, width=1200, rounds=7):
    "Rows of kind, host alone, device alone, epoch, its ratio to the slower of the two, and the least that can be: medians of interleaved rounds"
    wait,x = Wait(),torch.randn(32, width)
    dl = TfmdDL([(x[i%32], i%10) for i in range(32*n_batches)], bs=32, num_workers=0, before_batch=wait)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)], nn.Linear(width, 10))
    learn = Learner(DataLoaders(dl, dl.new([])), model, loss_func=CrossEntropyLossFlat(), opt_func=SGD).to_tpu()
    step = np.median([on_device(learn) for _ in range(7)][2:])/n_batches
    def times(seconds):
        wait.seconds = 0.
        device = on_device(learn)
        wait.seconds = seconds
        return on_host(dl), device, on_device(learn)
    all_times = np.array([[times(w*step) for w in WAITS.values()] for _ in range(rounds)])
    for i,(kind,(host,device,both)) in enumerate(zip(WAITS, np.median(all_times, 0))):
        hosts,devices,epochs = all_times[:,i].T
        yield kind, host, device, both, np.median(epochs/np.maximum(hosts, devices)), 1 + min(host, device)/max(host, device)/n_batches

HEAD = ['epoch of 60 batches', 'host alone, s', 'device alone, s', 'epoch, s', 'ratio to the slower', 'least ratio']

def rows(**kwargs):
    for kind,*ts in ratios(**kwargs): yield kind, *[f'{t:.2f}' for t in ts]

@call_parse
def main(
    width:int=1200, # Features of the layers, which decide what a step takes
):
    "Print the table"
    print(f"| {' | '.join(HEAD)} |\n|{'---|'*len(HEAD)}")
    for r in rows(width=width): print(f"| {' | '.join(r)} |")
    print('\nThe least ratio is above 1 because nothing overlaps with the making of the first batch, nor with the last step on the device.')
