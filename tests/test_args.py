"Every option of what users call against wrong values: each is an error of ours, in one sentence that names the argument and what came, before the device starts."
import inspect
from functools import partial

import pytest, timm
from fastai.basics import Learner, nn, noop
from fastai.test_utils import synth_learner
from fastai_xla.all import *
from fastai_xla.runtime.device import runtime_started

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
def saver(**kwargs): return TPUCheckpoint(**{'path': 'a', **kwargs})
def smallest(**kwargs): return smallest_slices(**{'model': linear(), 'batch': 2, 'shape': (2,), **kwargs})
def learner_method(name):
    def f(**kwargs): return getattr(learn(), name)(**kwargs)
    f.__name__ = name
    return f
def mixed(**kwargs): return mixture([learn().dls], **kwargs)

CASES = [ # what is called, and of its arguments the wrong values
    (use_compile_cache, dict(path=place)), (use_virtual_cores, dict(n=count_or_none)),
    (TfmPlacement, dict(mode=WRONG), dict(tfms=None), dict(mode='batch_tfms')), (xladl, dict(prefetch=count, batch_tfms=WRONG)),
    (shards, dict(urls=but('a', []), tfms=WRONG, sizes=but(None, []), window=count, lanes=count)),
    (deferred_init, dict(f=WRONG)), (materialize, dict(model=WRONG, place=but(None)), dict(model=linear())),
    (xla_friendly, dict(model=WRONG, img_size=count_or_none), dict(model=timm.create_model('test_vit'))),
    (vit, dict(embed_dim=count, num_heads=count, depth=count, patch_size=count)),
    (EMACallback, dict(decay=but(0), update_after_step=at_least_0, use_warmup=bit, every=count, validate=bit)),
    (GradientClipValue, dict(max_value=but(1.5))), (AdaptiveGradientClip, dict(clip_factor=but(1.5), eps=but(1.5), norm_type=but(1.5), exclude_head=bit)),
    (LayerDecay, dict(decay=WRONG, min_scale=but(0), by_wd=bit)), (scaled_lr, dict(lr=but(1.5), bs=count, base_bs=count, rule=WRONG), dict(lr=.1, bs=1)),
    (EvalEvery, dict(label=but('a'), epochs=count_or_none, steps=count_or_none, examples=count_or_none, percent=but(None, 1.5), initial=bit, final=bit,
        predict=but(None)), dict(valid_dl=[], label='a')),
    (mixture, dict(dls=WRONG)), (mixed, dict(weights=but(None), n=count_or_none, names=but(None))), (AugSplits, dict(aug=WRONG, num_splits=count), dict(aug=noop)),
    (JSDLoss, dict(num_splits=count, alpha=but(0, 1.5), smoothing=but(0))),
    (NaNGuard, dict(action=WRONG)), (XLAStats, dict(warm=at_least_0)), (TPUMeter, dict(show=bit, flops=but(None, 1.5), peak_flops=but(None, 1.5))),
    (StepProfiler, dict(steps=WRONG, folder=place, trace=bit)), (lambda **kw: TPUMeter().metrics(*kw.values()), dict(names=WRONG)),
    (lambda **kw: NormMeter().metrics(*kw.values()), dict(kinds=WRONG)), (lambda **kw: NormMeter().plot(**kw), dict(kind=WRONG)),
    (StepReplay, dict(on=bit), {}, dict(on='replay')),
    (learner_method('to_tpu'), dict(batch_tfms=WRONG, fetch_every=but(0, 1.5), replay=bit, strict=bit, cache=place_or_none)),
    (learner_method('to_tpu_distributed'), dict(n_cores=count_or_none, processes=bit_or_none, strict=bit, cache=place_or_none, batch_tfms=WRONG, fetch_every=but(0, 1.5),
        sync_bn=but(None), scale_lr=bit, loss=but(None), watchdog=but(None, 1.5), replay=bit)),
    (learner_method('to_tpu_sharded'), dict(replica=count_or_none, fsdp=count_or_none, rules=but([]), grad_ckpt=bit, scan=bit, replay=bit,
        batch_tfms=WRONG, fetch_every=but(0, 1.5), strict=bit, cache=place_or_none)),
    (TorchTPUTrainer, dict(batch_tfms=WRONG, fetch_every=but(0, 1.5), replay=bit)),
    (TPUPool, dict(n_cores=count_or_none)), (get_pool, dict(n_cores=count_or_none)), (tpu_launch, dict(fn=WRONG, n_cores=count_or_none), dict(fn=noop)),
    (pool_setup, dict(fn=but(None), remove=bit)), (make_mesh, dict(replica=count_or_none, fsdp=count_or_none, n=count_or_none, model=count_or_none)),
    (ShardRule, dict(pattern=but('a'), axes=but('a', []), min_size=at_least_0), dict(pattern='a')),
    (infer_sharding, dict(model=WRONG, mesh=WRONG, rules=but([])), dict(model=linear(), mesh=mesh())),
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
    (plan, dict(model=WRONG, mesh=WRONG, batch=count, shape=but([]), rules=but([]), opt=WRONG, grad_ckpt=bit, scan=bit, bf16=bit, mfu=WRONG, ema=bit)),
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

@pytest.mark.parametrize('name', ['to_tpu','to_tpu_distributed','to_tpu_sharded'])
def test_no_option_is_left_out(name):
    args = {p for p,o in inspect.signature(getattr(Learner, name)).parameters.items() if p!='self' and o.kind is not o.VAR_KEYWORD}
    assert args<=next({*o[1]} for o in CASES if getattr(o[0], '__name__', '')==name)

def test_what_needs_an_attached_learner():
    for f,words in ((lambda o: o.tfm_placement, 'call `learn.to_tpu()`'), (lambda o: o.sharding, 'call `learn.to_tpu_sharded()`')):
        with pytest.raises(RuntimeError) as e: f(learn())
        assert words in str(e.value)
