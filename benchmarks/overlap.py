"""Does reading go on while the device works? The time of an epoch, over that of the slower of the two alone.

    python benchmarks/overlap.py

The host part of a batch waits, as one that reads files does, for a time that is varied around that of a step on the device.
"""
import time
from fastai.basics import *
from fastai_xla.all import *
from fastai_xla.runtime import xm
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

def ratios(n_batches=30, width=900, waits=(.5,1.,2.), rounds=5):
    "Rows of host alone, device alone, both, and the ratio of the last to the slower of the two: the best of interleaved rounds"
    wait,x = Wait(),torch.randn(32, width)
    dl = TfmdDL([(x[i%32], i%10) for i in range(32*n_batches)], bs=32, num_workers=0, before_batch=wait)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)], nn.Linear(width, 10))
    learn = Learner(DataLoaders(dl, dl.new([])), model, loss_func=CrossEntropyLossFlat(), opt_func=SGD).to_tpu()
    step = min(on_device(learn) for _ in range(4))/n_batches
    def times(seconds):
        wait.seconds = 0.
        device = on_device(learn)
        wait.seconds = seconds
        return on_host(dl), device, on_device(learn)
    all_times = np.array([[times(w*step) for w in waits] for _ in range(rounds)])
    for w,(host,device,both) in zip(waits, all_times.min(0)): yield w, host, device, both, both/max(host, device)

@call_parse
def main():
    "Print the table"
    print('| wait of the host, in steps of the device | host alone, s | device alone, s | both, s | ratio to the slower |\n|---|---|---|---|---|')
    for w,*ts,r in ratios(): print(f"| {w:g} | {' | '.join(f'{t:.2f}' for t in ts)} | {r:.2f} |")
