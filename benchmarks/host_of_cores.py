"""Host time of a replayed step on one core, and of one program for several, and the bytes that are sent for it.

    python benchmarks/host_of_cores.py            # 1, 4 and 8 cores of XLA:CPU, each in a process of its own
    python benchmarks/host_of_cores.py 8          # in this process

20 linear layers of 64, batches of 64 samples over all cores. Times are those of the main thread's own work, medians of the last epoch, so that it does not
matter how long the device takes. `pytorch/xla` settles the outputs of a program for each core in it.
"""
import os, subprocess, sys
from pathlib import Path

def main(n):
    os.environ.update(PJRT_DEVICE='CPU', CPU_NUM_DEVICES=str(n), OMP_NUM_THREADS='1')
    import statistics, time
    from fastai.basics import Callback, CrossEntropyLossFlat, DataLoaders, Learner, TfmdDL, nn, torch
    import fastai_xla.all
    from fastai_xla.runtime.device import met
    class Costs(Callback):
        order = -1000
        def before_fit(self): self.ms,self.sent = [],[]
        def before_batch(self): self.start = time.thread_time()
        def after_batch(self):
            if not self.training: return
            self.ms.append(1e3*(time.thread_time()-self.start))
            self.sent.append(met.metric_data('OutboundData')[1])
    x = torch.randn(2048, 64)
    dls = DataLoaders(*[TfmdDL(list(zip(x, (x[:,0]>0).long())), bs=64//n, num_workers=0) for _ in range(2)])
    learn = Learner(dls, nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)], nn.Linear(64, 2)), loss_func=CrossEntropyLossFlat())
    learn = learn.to_tpu() if n==1 else learn.to_tpu_distributed(n_cores=n)
    with learn.no_bar(),learn.no_logging(): learn.fit(3, 1e-3, cbs=(cb := Costs()))
    print(f'| {n} | {statistics.median(cb.ms[-30:]):.2f} | {learn.replay.n_replayed} of {len(cb.ms)} | {cb.sent[-1]-cb.sent[-2]:,.0f} | {64*(64*4+8):,} |')

if __name__=='__main__':
    if sys.argv[1:]: sys.exit(main(int(sys.argv[1])))
    print('| cores | ms of the host | steps replayed | bytes sent in a step | bytes of a batch |', f"|{' --- |'*5}", sep='\n', flush=True)
    for n in (1,4,8): print(subprocess.run([sys.executable, Path(__file__), str(n)], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1], flush=True)
