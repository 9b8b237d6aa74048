"""Ranks as threads of the test's process, with their collectives inside of compiled programs, as on a TPU: what replay of a rank's steps is tested on.

`run_replicas(fn, n=2)` calls `fn(rank)` on each device of XLA:CPU at once. XLA:CPU matches collectives by a channel id, which torch_xla gives none, and a device that waits for its
peers blocks the others' compilation; so collectives get one, and replicas meet on the host before a program with collectives runs."""
import os, threading, traceback
from functools import wraps
import torch
from fastai_xla.distributed import learner as rank_learner
from fastai_xla.patches.registry import Loans
from fastai_xla.runtime import counts
from fastai_xla.runtime.counts import own_reads
from fastai_xla.runtime.device import runtime_started, torch_xla, xla_device, xm, xr
from fastai_xla.train import recogniser
from fastai_xla.virtual_cores.processes import RankError as ReplicaError

def use_virtual_cores(n):
    "Give this process `n` devices that can wait for each other, unless its runtime has started"
    if runtime_started(): return
    os.environ.update(PJRT_DEVICE='CPU', CPU_NUM_DEVICES=str(n), CPU_NUM_PROCESSES='1', PJRT_CPU_ASYNC_CLIENT='0', XLA_THREAD_POOL_SIZE='32')

# ---- what a replica alone has asked of its device, beside others of its process

own = threading.local()

def count_call():
    if hasattr(own, 'calls'): own.calls += 1

def n_device_calls():
    "`counts.n_device_calls`, of this thread alone if it is a replica"
    return own.calls if hasattr(own, 'calls') else counts.n_device_calls()

# ---- where replicas meet

class Again(str):
    "A run of collectives that were recorded before; a peer that records them is at `next`"
    def __new__(cls, run, next):
        self = super().__new__(cls, run)
        self.next = next
        return self

def differ(steps):
    "Do replicas that are at `steps` not do the same?"
    if all(isinstance(o, Again) for o in steps): return len({*steps})>1
    return len({getattr(o, 'next', o) for o in steps})>1

class Barrier:
    "Where `n` replicas wait for each other; who has left is in `left`, with the reason"
    def __init__(self, n): self.n,self.cv,self.open,self.left = n,threading.Condition(),{},{}

    def meet(self, rank, step, group):
        "Where each rank of `group` is, when all have come"
        with self.cv:
            here = self.open.setdefault(group, {})
            here[rank] = step
            if len(here)==len(group): del self.open[group]
            self.cv.notify_all()
            while len(here)<len(group):
                if gone := [o for o in self.left if o not in here and o in group or o==rank]:
                    del here[rank]
                    raise ReplicaError(f'Replica {rank} waits in {step} for replica {gone[0]}, which {self.left[gone[0]]}', gone[0])
                self.cv.wait()
        if differ(here.values()): raise ReplicaError(f'The replicas issued different collectives. {here}')
        return [*here.values()]

    def leave(self, rank, why):
        with self.cv:
            self.left[rank] = why
            self.cv.notify_all()

class Replica:
    "Collectives that one replica has recorded and not run, and the end of its chain of all-reduces"
    def __init__(self, rank): self.rank,self.pending,self.first,self.token,self.lock = rank,[],None,None,threading.RLock()

class Run:
    "Replicas that run together; those of this process are `now`"
    now = None
    def __init__(self, n):
        self.n,self.barrier,self.loans,self.compiling,self.programs = n,Barrier(n),Loans(),threading.RLock(),{}
        self.replicas = [Replica(i) for i in range(n)]

    def replica(self, device): return self.replicas[torch.device(device).index]

    def record(self, op, x, groups):
        "Meet the peers that record `op` of such an `x`; returns `groups` as XLA wants them"
        me,step = self.replica(x.device),f'{op} of {x.dtype}{list(x.shape)}'
        groups = [list(map(int, g)) for g in groups] or [list(range(self.n))]
        group = next(tuple(g) for g in groups if me.rank in g)
        me.pending.append((step, group))
        self.barrier.meet(me.rank, step, group)
        return groups

    def meet_pending(self, me):
        pending,me.pending = me.pending,[]
        groups = [g for _,g in pending]
        for g in dict.fromkeys(groups): self.barrier.meet(me.rank, f'the run of {groups.count(g)} collectives', g)

    def meet_again(self, me, pending):
        "The same for a program that was recorded before"
        run = f'the run of {len(pending)} collectives'
        for step,g in [*pending, *[(run, g) for _,g in pending[:1]]]:
            if {*self.barrier.meet(me.rank, Again(run, step), g)}=={run}: return

# ---- what stands for torch_xla's functions while replicas run

def lib(): return torch_xla._XLAC
table = []

def stands_for(owner, *names):
    "Decorator: `f(old, *args)` takes the place of each of `names`"
    def inner(f):
        table.extend((owner, name, f) for name in names)
        return f
    return inner

@torch.no_grad()
def reduced(op, xs, scale, groups):
    "All-reduce `xs`: one operation for each dtype"
    res = {}
    for dtype in dict.fromkeys(o.dtype for o in xs):
        some = [o for o in xs if o.dtype==dtype]
        flat = torch.cat([o.detach().reshape(-1) for o in some])
        me,groups_ = Run.now.replica(flat.device),Run.now.record(f'all_reduce {op}', flat, groups)
        flat = lib()._xla_spmd_all_reduce(op, torch.cat([flat, me.token.to(dtype)]), float(scale), groups_)
        *parts,token = flat.split([*[o.numel() for o in some], 1])
        me.token = token.float()
        res.update({id(x): o.view(x.shape) for o,x in zip(parts, some)})
    return [res[id(x)] for x in xs]

@torch.no_grad()
def fill(outs, xs):
    for out,x in zip(outs, xs): out.detach().copy_(x)

@stands_for(lib, '_xla_all_reduce')
def all_reduce(old, op, x, scale, groups, pin_layout=True): return reduced(op, [x], scale, groups)[0].requires_grad_(x.requires_grad)

@stands_for(lib, '_xla_all_reduce_inplace')
def all_reduce_inplace(old, op, xs, scale, groups, pin_layout=True): return fill(xs, reduced(op, xs, scale, groups))

@stands_for(lambda: torch.ops._c10d_functional, 'all_reduce')
def c10d_all_reduce(old, x, op, group=''): return lib()._xla_all_reduce(op, x, 1., [], True)

@stands_for(lib, '_xla_all_gather')
def all_gather(old, x, dim, count, groups, pin_layout=False, *_):
    return old(x, dim, count, Run.now.record(f'all_gather on dim {dim}', x, groups), pin_layout, 2, True)

@stands_for(lib, '_xla_all_gather_coalesced')
def all_gather_list(old, xs, token, dim, count, groups, pin_layout=False, *_):
    return [*[lib()._xla_all_gather(x, dim, count, groups, pin_layout, None, None) for x in xs], token]

def launch(old, device, *args, wait=True, **kwargs):
    "Compile and start the graph of `device` while no other replica compiles"
    real = lib()._xla_real_devices([device])
    count_call()
    with Run.now.replica(device).lock:
        lib()._xla_wait_device_ops(real)
        with Run.now.compiling: old(*args, wait=False, **kwargs)
    if wait: lib()._xla_wait_device_ops(real)

@stands_for(lib, '_xla_step_marker')
def step_marker(old, device='', devices=(), wait=True, reset_scope=True):
    device = device or lib()._xla_get_default_device()
    Run.now.meet_pending(Run.now.replica(device))
    launch(old, device, device, list(devices), wait=wait, reset_scope=reset_scope)

@stands_for(lib, '_get_graph_hash')
def graph_hash(old, xs):
    key = old(xs)
    Run.now.programs[key] = Run.now.replica(xs[0].device).pending
    return key

@stands_for(lib, '_xla_set_enable_alias_with_buffer_donor_config')
def set_donation(old, on):
    "Set the flag by which graphs are compiled, while no other replica compiles"
    if on: Run.now.compiling.acquire()
    old(on)
    if not on: Run.now.compiling.release()

@stands_for(lib, '_run_cached_graph')
def run_again(old, key, ins):
    me = Run.now.replica(lib()._xla_get_default_device())
    if me.pending: Run.now.meet_pending(me) # it has just been traced
    else: Run.now.meet_again(me, Run.now.programs[key])
    with me.lock: return old(key, ins)

@stands_for(lib, '_set_all_reduce_token')
def set_token(old, device, token):
    if token is None: # the next all-reduce is the first of a chain
        me = Run.now.replica(device)
        me.token = me.first
    old(device, token)

@stands_for(lib, '_xla_sync_multi')
def sync_multi(old, xs, devices=(), wait=True, sync_xla_data=True):
    if not len(xs): return
    device,me = str(xs[0].device),Run.now.replica(xs[0].device)
    if me.pending and any(o in lib()._get_xla_tensors_text(xs) for o in ('xla::cross_replica_sum','xla::all_gather')):
        Run.now.meet_pending(me)
        launch(lib()._xla_sync_live_tensors, device, device, list(devices))
        lib()._set_all_reduce_token(device, None)
    launch(old, device, xs, list(devices), wait=wait, sync_xla_data=sync_xla_data)

def run_for(x):
    "Run what the value of `x` needs, together with the other replicas"
    if x.device.type!='xla': return
    count_call()
    lib()._xla_sync_multi([x], [], sync_xla_data=False)

@stands_for(lib, '_xla_get_cpu_tensors')
def get_cpu_tensors(old, xs):
    count_call()
    return old(xs)

@stands_for(lambda: torch.Tensor, *'item cpu tolist __bool__ __int__ __float__ __index__'.split())
def read(old, self, *args, **kwargs):
    run_for(self)
    return old(self, *args, **kwargs)

@stands_for(lambda: torch.Tensor, 'to')
def to(old, self, *args, **kwargs):
    target = args[0] if args else kwargs.get('device')
    if isinstance(target, (str, torch.device)) and torch.device(target).type=='cpu': run_for(self)
    return old(self, *args, **kwargs)

# ---- a run

def begin(n):
    run = Run.now = Run(n)
    for o in run.replicas:
        o.first = o.token = torch.zeros(1).to(f'xla:{o.rank}')
        lib()._set_all_reduce_token(f'xla:{o.rank}', None)
    with own_reads(): run.replicas[0].first.item() # adds its row to torch_xla's table before threads do
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    for owner,name,f in table: run.loans.put(owner(), name, wraps(old := getattr(owner(), name))(after(f, old)))
    run.loans.put(recogniser, 'n_device_calls', n_device_calls)
    run.loans.put(rank_learner, 'device_kind', lambda: 'TPU') # where replicas can wait for each other

def after(f, old):
    def new(*args, **kwargs): return f(old, *args, **kwargs)
    return new

def end():
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    Run.now.loans.give_back()
    Run.now = None

def replica(device, fn, results, errors):
    "Keep what `fn()` returns or raises, and tell the peers that this one has left"
    lib()._xla_set_default_device(device)
    own.calls = 0
    rank,why = xr.global_ordinal(),'has returned'
    try:
        xla_device()
        res = fn()
        torch_xla.sync()
        results[rank] = res
    except BaseException as e:
        errors[rank],why = e,f'raised {traceback.format_exception_only(e)[0].strip()}'
        traceback.clear_frames(e.__traceback__)
    Run.now.barrier.leave(rank, why)

def set_replication(devices):
    xm.set_replication(torch_xla.device(), devices)
    xr._WORLD_SIZE = xr._ORDINAL = None

def run_replicas(fn, *args, n=None, **kwargs):
    "What `fn(rank, *args, **kwargs)` returns on each device of this process, in threads that run at once"
    use_virtual_cores(n or 2)
    xla_device()
    torch_xla.sync(wait=True)
    devices,results,errors = xm.get_xla_supported_devices(),{},{}
    threads = [threading.Thread(target=replica, args=(o, lambda: fn(xr.global_ordinal(), *args, **kwargs), results, errors), daemon=True) for o in devices]
    set_replication(devices)
    try:
        begin(len(devices))
        for o in threads: o.start()
        for o in threads: o.join()
    finally:
        end()
        set_replication([])
        for o in devices if errors else []: lib()._clear_pending_irs(o)
    own = {r: e for r,e in errors.items() if not isinstance(e, ReplicaError)}
    for r,e in (own or errors).items(): raise e if isinstance(e, Exception) else ReplicaError(f'Replica {r} was ended by {type(e).__name__}: {e}', r)
    return [results[r] for r in sorted(results)]
