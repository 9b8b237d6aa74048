"""'tpu_gloo', a stand-in for TorchTPU's backend of collectives, which needs TPUs: tensors of the device go to the host, through gloo, and back.

It is a whole process group, for tensors of the host too, since torch takes a group that is written in Python for all devices."""
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

class TPUGloo(dist.ProcessGroup):
    "What `init_process_group('tpu_gloo')` makes"
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self): return 'tpu_gloo'

    def _done(self, res):
        f = Future()
        f.set_result(res)
        return _create_work_from_future(f)

    @torch.no_grad()
    def _on_host(self, f, ts, opts):
        for t in ts:
            c = t.detach().cpu()
            f([c], opts).wait()
            t.copy_(c)
        return self._done(ts)

    def allreduce(self, ts, opts=None): return self._on_host(self.gloo.allreduce, ts, opts or dist.AllreduceOptions())
    def broadcast(self, ts, opts=None): return self._on_host(self.gloo.broadcast, ts, opts or dist.BroadcastOptions())
    def allgather(self, outs, ts, opts=None): # of objects, which are on the host
        self.gloo.allgather(outs, ts).wait()
        return self._done(outs)
    def barrier(self, opts=None):
        self.gloo.barrier(dist.BarrierOptions()).wait()
        return self._done(None)

dist.Backend.register_backend('tpu_gloo', TPUGloo, devices=['tpu'])
