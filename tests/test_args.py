"Every public option against wrong values: each is an error of ours, in one sentence that names the argument and what came, before the device starts."
import inspect, sys
from functools import partial
from types import ModuleType

import pytest, timm
from fastai.basics import Learner, nn, noop
from fastai.test_utils import synth_learner
from fastai_xla.all import *
from fastai_xla.checkpoint.storage import CheckpointManager
from fastai_xla.data.rng import seed_all, set_rng_state
from fastai_xla.data.loader import bucket_len, bucket_lens
from fastai_xla.distributed.loss import BatchLoss
from fastai_xla.distributed.trainer import GradientReducer
from fastai_xla.launch.launcher import Watchdog
from fastai_xla.models.blocks import block_runs, BlockRunner, repeated_blocks
from fastai_xla.aot.plan import count_model
from fastai_xla.aot.plan import tpu_slice
from fastai_xla.monitor.profile import train_batches, usual_step
from fastai_xla.monitor.throughput import batch_flops, peak_flops_of, tpu_kind
from fastai_xla.recipes.optim import timm_layers
from fastai_xla.runtime.device import runtime_started
from fastai_xla.runtime.ranks import from_main
from fastai_xla.train.meters import HostQueue
from fastai_xla.train.move import move_learner
from fastai_xla.train.replay import BatchReplay, ValidReplay
from fastai_xla.train.strict import StrictSteps

thing = object()
WRONG = (None, 'a', -1, 0, 1.5, [], thing)

def but(*ok): return [o for o in WRONG if not any(o is v or type(o) is type(v) and o==v for v in ok)]
count,count_or_none,bit,bit_or_none,place,place_or_none = but(),but(None),but(0),but(0, None),but('a'),but('a', None)
at_least_0 = but(0)

linear = partial(nn.Linear, 2, 2)
def learn(): return synth_learner(n_trn=2)
def mesh(**kwargs): return make_mesh(**{'fsdp': 2, **kwargs})
def plan(**kwargs): return plan_training(**{'model': linear(), 'mesh': mesh(), 'batch': 2, 'shape': (2,), **kwargs})
def shards(**kwargs): return TarShards(**{'urls': ['a.tar'], 'tfms': {}, 'sizes': [1], **kwargs})
def vit(**kwargs): return mean_vit(**{'embed_dim': 8, 'num_heads': 2, 'depth': 1, 'img_size': 14, 'num_classes': 2, **kwargs})
def xladl(**kwargs): return XLADL(learn().dls.train, 'xla', **kwargs)
def sharded(**kwargs): return learn().to_tpu_sharded(**kwargs)
def pooled(**kwargs): return learn().to_tpu_distributed(**kwargs)
def saver(**kwargs): return TPUCheckpoint(**{'path': 'a', **kwargs})
def smallest(**kwargs): return smallest_slices(**{'model': linear(), 'batch': 2, 'shape': (2,), **kwargs})
def compiled(**kwargs): return learn().compile_for(**{'name': 'v5e-8', **kwargs})
def mixed(**kwargs): return mixture([learn().dls], **kwargs)
def one_core(**kwargs): return learn().to_tpu(**kwargs)

CASES = [ # what is called, and of its arguments the wrong values
    (use_compile_cache, dict(path=place)), (from_main, dict(f=WRONG)),
    (seed_all, dict(seed=at_least_0)), (set_rng_state, dict(s=WRONG)),
    (TfmPlacement, dict(mode=WRONG), dict(tfms=None), dict(mode='batch_tfms')), (xladl, dict(prefetch=count, batch_tfms=WRONG)),
    (bucket_lens, dict(bs=count, n=count), dict(lens=[8,9], bs=1)), (bucket_len, dict(n=at_least_0)),
    (shards, dict(urls=but('a', []), tfms=WRONG, sizes=but(None, []), window=count, lanes=count)),
    (deferred_init, dict(f=WRONG)), (materialize, dict(model=WRONG, place=but(None)), dict(model=linear())),
    (repeated_blocks, dict(model=WRONG)), (block_runs, dict(model=WRONG)), (BlockRunner, dict(scan=bit)),
    (xla_friendly, dict(model=WRONG, img_size=count_or_none), dict(model=timm.create_model('test_vit'))),
    (vit, dict(embed_dim=count, num_heads=count, depth=count, patch_size=count)),
    (move_learner, dict(learn=WRONG, device=but('a')), dict(learn=learn(), device='cpu')),
    (EMACallback, dict(decay=but(0), update_after_step=at_least_0, use_warmup=bit, every=count, validate=bit)),
    (GradientClipValue, dict(max_value=but(1.5))), (AdaptiveGradientClip, dict(clip_factor=but(1.5), eps=but(1.5), norm_type=but(1.5), exclude_head=bit)),
    (LayerDecay, dict(decay=WRONG, min_scale=but(0), by_wd=bit)), (timm_layers, dict(model=WRONG)),
    (scaled_lr, dict(lr=but(1.5), bs=count, base_bs=count, rule=WRONG), dict(lr=.1, bs=1)),
    (EvalEvery, dict(label=but('a'), epochs=count_or_none, steps=count_or_none, examples=count_or_none, percent=but(None, 1.5), initial=bit, final=bit,
        predict=but(None)), dict(valid_dl=[], label='a')),
    (mixture, dict(dls=WRONG)), (mixed, dict(weights=but(None), n=count_or_none, names=but(None))), (AugSplits, dict(aug=WRONG, num_splits=count), dict(aug=noop)),
    (JSDLoss, dict(num_splits=count, alpha=but(0, 1.5), smoothing=but(0))),
    (NaNGuard, dict(action=WRONG)), (HostQueue, dict(every=but(0, 1.5)), {}, dict(every='fetch_every')),
    (StrictSteps, dict(warm=at_least_0)), (TPUTrainer, dict(batch_tfms=WRONG, fetch_every=but(0, 1.5), replay=bit)),
    (TorchTPUTrainer, dict(batch_tfms=WRONG, fetch_every=but(0, 1.5), replay=bit)),
    *((o, dict(on=bit, confirm=count), {}, dict(on='replay')) for o in (BatchReplay, StepReplay, ValidReplay)),
    (one_core, dict(batch_tfms=WRONG, fetch_every=but(0, 1.5), replay=bit, strict=bit, cache=place_or_none)),
    (use_virtual_cores, dict(n=count_or_none)),
    (TPUPool, dict(n_cores=count_or_none)), (get_pool, dict(n_cores=count_or_none)), (tpu_launch, dict(fn=WRONG, n_cores=count_or_none), dict(fn=noop)),
    (TPUDistributedTrainer, dict(batch_tfms=WRONG, fetch_every=but(0, 1.5), sync_bn=WRONG, replay=bit)), (GradientReducer, dict(scale_lr=bit)), (BatchLoss, dict(loss=but(None))),
    (pooled, dict(n_cores=count_or_none, processes=bit_or_none, strict=bit, cache=place_or_none, batch_tfms=WRONG, fetch_every=but(0, 1.5), sync_bn=but(None), scale_lr=bit, loss=but(None),
        watchdog=but(None, 1.5), replay=bit)), (Watchdog, dict(minutes=but(None, 1.5)), {}, dict(minutes='watchdog')), (pool_setup, dict(fn=but(None), remove=bit)),
    (make_mesh, dict(replica=count_or_none, fsdp=count_or_none, n=count_or_none, model=count_or_none)),
    (ShardRule, dict(pattern=but('a'), axes=but('a', []), min_size=at_least_0), dict(pattern='a')),
    (infer_sharding, dict(model=WRONG, mesh=WRONG, rules=but([])), dict(model=linear(), mesh=mesh())),
    (sharded, dict(replica=count_or_none, fsdp=count_or_none, rules=but([]), grad_ckpt=bit, scan=bit, replay=bit, partition_norms=but(0, None),
        batch_tfms=WRONG, fetch_every=but(0, 1.5), strict=bit, cache=place_or_none)),
    (TPUDataParallelTrainer, dict(sync_bn=but(None), scale_lr=bit), dict(mesh=make_mesh(2, 1))),
    (CheckpointManager, dict(path=place, keep=count), dict(path='a')),
    (KeepPolicy, dict(newest=count, best=at_least_0, every=at_least_0, monitor=but('a'), mode=but(None))),
    (saver, dict(path=place, every=count_or_none, keep=count, resume=bit, minutes=but(None, 1.5), epochs=but(None, 0), keep_best=at_least_0,
        keep_every=at_least_0, monitor=but('a'), mode=but(None), load_best=bit, asynchronous=bit, resume_from=place_or_none)),
    (register_type, dict(cls=WRONG)),
    (resume_from, dict(path=place, every=count_or_none, keep=count), dict(path='a')),
    (lambda **kw: learn().save_sharded(**kw), dict(file=place, with_opt=bit), dict(file='a')),
    (lambda **kw: learn().load_sharded(**kw), dict(file=place, with_opt=but(None, 0), strict=bit), dict(file='a')),
    (lambda **kw: learn().export_safetensors(**kw), dict(file=place, config=but(None)), dict(file='a')),
    (lambda **kw: learn().save_for_hub(**kw), dict(folder=place, labels=but(None, [])), dict(folder='a')),
    (smallest, dict(model=WRONG, batch=count, shape=but([]), opt=WRONG, bf16=bit)),
    (tpu_slice, dict(name=but('a'))), (compiled, dict(name=but('a'), strategy=but(None), fast=bit, limit=but(1.5), cache=place_or_none)),
    (lambda **kw: learn().largest_batch(**kw), dict(name=but('a'), most=count), dict(name='v5e-8')),
    (XLAStats, dict(warm=at_least_0)), (usual_step, dict(steps=but([]), warm=at_least_0), dict(steps=[])),
    (train_batches, dict(learn=WRONG, n=count), dict(learn=learn(), n=1, cbs=[])),
    (count_model, dict(model=WRONG), dict(model=linear(), shape=(2,))),
    (plan, dict(model=WRONG, mesh=WRONG, batch=count, shape=but([]), rules=but([]), opt=WRONG, grad_ckpt=bit, scan=bit, bf16=bit, mfu=WRONG, ema=bit)),
    (TPUMeter, dict(show=bit, flops=but(None, 1.5), peak_flops=but(None, 1.5))), (lambda **kw: TPUMeter().metrics(*kw.values()), dict(names=WRONG)),
    (lambda **kw: NormMeter().metrics(*kw.values()), dict(kinds=WRONG)), (lambda **kw: NormMeter().plot(**kw), dict(kind=WRONG)),
    (StepProfiler, dict(steps=WRONG, folder=place, trace=bit)), (batch_flops, dict(learn=WRONG)), (peak_flops_of, dict(name=but('a'))), (tpu_kind, dict(name=but('a'))),
    (lambda **kw: plan().seconds(**kw), dict(kind=WRONG)), (lambda **kw: plan().fits(**kw), dict(kind=WRONG)),
]

def refusal(f, name, v, kwargs):
    "What `f` says to `v`; None if it takes it"
    try: f(**{**kwargs, name: v})
    except (ValueError, TypeError) as e:
        ours = 'fastai_xla' in inspect.getinnerframes(e.__traceback__)[-1].filename
        return e if ours else f'raw {type(e).__name__}: {e}'
    except Exception as e: return f'raw {type(e).__name__}: {e}'

def faults_of(f, args, kwargs={}, called={}):
    res = []
    for name,values in args.items():
        for v in values:
            e,shown = refusal(f, name, v, kwargs),called.get(name, name)
            if not isinstance(e, Exception): res.append(f'{name}={v!r}: {e}')
            elif f'`{shown}`' not in str(e) or f'{v!r}'[:60] not in str(e) or str(e)[-1] not in '.`': res.append(f'{name}={v!r}: {e}')
    return res

@pytest.mark.parametrize('case', CASES, ids=lambda o: getattr(o[0], '__name__', '')+'-'+'-'.join(o[1]))
def test_wrong_values(case):
    before = runtime_started()
    faults = faults_of(*case)
    assert not faults, '\n'.join(faults)
    assert runtime_started()==before

# what takes only what the package itself hands it: arithmetic and seams between rooms, not options of users
SEAMS = '''gather_bytes tpu_line Denominators is_sample_mean gather_rows is_users process_env open_store Ranks become_rank take_place map_memory Received ValuePickler dump dump_named serve stacks_file
    pack_run TwoPhaseStop layout read_stacks ProgressReporter run_phase start_iter Prefetcher lengthen_lr_find lend_core_norms data_parallel_mesh scale_bs to_ranks attach_mesh check_process cores_text tell_cores shard_idxs rank_span RankShare RowShare deal n_dealt pad_batch
    pad_text Kernels kernels start_spmd loss_weight Shares ShardedDL drawn_for first_signal size_text
    kept_rng load_state replaces Patch grid_sample_xla tile_grid from_tiles suits_tiles sampled_by_tiles affine_by_tiles step_row step_program stand_in optional_library
    bucket_len MixtureDL MeshTrainer DeviceMetric check_number check_int check_bool check_choice check_type check_callable check_path wrong_arg
    TPUPoolTrainer attach_replica 
    TPUShardedTrainer device_version Shards TFRecordShards StreamDL XLADL standardize
    dist_version inside_boxes ShardReader make_programs_for lend_builtin arranged_update program_calls
    function_of register OwnDraws graph_error wrong_device_error launch_error shapes_of
    settings_of
    hlo_number hlo_message compile_options ProgramReport ProgramLog tpu_advice trace_phase TPUReport module_of unpack_call state_bytes LastOfStep StepRecorder step_times Throughput
    time_fit device_span host_span HostShare
    assemble MeshTrainer bar_says notice_nan
    step_metrics 
    CheckpointDir StackedList safe_loads ModelCopy ShardFiles shards_of plan_resume Position write_shards Kernels to_tpu to_tpu_distributed TorchTPURankTrainer GradientAverager'''.split()

def options(f):
    "The parameters of `f` that say they are numbers, words or switches"
    try: ps = inspect.signature(f).parameters.values()
    except (TypeError, ValueError): return []
    plain = int, float, bool, str, int|None, str|None, float|None
    return [p.name for p in ps if p.annotation in plain or isinstance(p.default, (bool, int, float)) and p.default is not p.empty]

def is_record(o): return isinstance(o, type) and (hasattr(o, '__dataclass_fields__') or hasattr(o, '_fields') or issubclass(o, Exception))

def test_no_option_is_left_out():
    "Whoever adds a public function with options adds them to the table"
    rooms = [m for k,m in sys.modules.items() if k.startswith('fastai_xla.') and k.count('.')==2 and getattr(m, '__all__', None)]
    public = {n: getattr(m, n) for m in rooms for n in m.__all__ if not isinstance(getattr(m, n), ModuleType)}
    covered = {getattr(o[0], '__name__', '') for o in CASES} | {'plan_training','smallest_slices','TarShards','mean_vit','TPUCheckpoint','bar_waits'} | set(SEAMS)
    assert not [n for n,o in public.items() if callable(o) and options(o) and not is_record(o) and n not in covered]
    swept = {'to_tpu': one_core, 'to_tpu_distributed': pooled, 'to_tpu_sharded': sharded}
    for name,f in swept.items():
        args = next(o[1] for o in CASES if o[0] is f)
        own = [p for p,o in inspect.signature(getattr(Learner, name)).parameters.items() if p!='self' and o.kind is not o.VAR_KEYWORD]
        assert not set(own)-args.keys(), name

def test_what_needs_an_attached_learner():
    for f,words in ((lambda o: o.tfm_placement, 'call `learn.to_tpu()`'), (lambda o: o.sharding, 'call `learn.to_tpu_sharded()`')):
        with pytest.raises(RuntimeError) as e: f(learn())
        assert words in str(e.value)
