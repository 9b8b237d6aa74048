"Compare the flags of examples/train_timm.py with those of timm bits' and timm's training scripts: `python tools/timm_flags.py` writes examples/train_timm_flags.md."
import sys
from pathlib import Path

root = Path(__file__).parent.parent
sys.path.insert(0, str(root/'examples'))

# timm's repository at branch bits_and_tpu (1186fc9) and at aa4b585, train.py of each
bits = '''config dataset train-split val-split dataset-download class-map model pretrained initial-checkpoint resume no-resume-opt num-classes gp img-size input-size crop-pct mean std interpolation batch-size
    validation-batch-size channels-last torchscript grad-checkpointing opt opt-eps opt-betas momentum weight-decay clip-grad clip-mode layer-decay sched lr lr-base lr-base-size lr-base-scale lr-noise
    lr-noise-pct lr-noise-std lr-cycle-mul lr-cycle-decay lr-cycle-limit lr-k-decay warmup-lr min-lr epochs epoch-repeats start-epoch decay-milestones decay-epochs warmup-epochs cooldown-epochs
    patience-epochs decay-rate no-aug scale ratio hflip vflip color-jitter aa aug-splits jsd-loss bce-loss bce-target-thresh reprob remode recount resplit mixup cutmix cutmix-minmax mixup-prob
    mixup-switch-prob mixup-mode mixup-off-epoch smoothing train-interpolation drop drop-connect drop-path drop-block bn-momentum bn-eps sync-bn dist-bn split-bn model-ema model-ema-decay seed
    log-interval recovery-interval checkpoint-hist workers save-images amp pin-mem output experiment eval-metric tta local_rank use-multi-epochs-loader force-cpu log-wandb'''
timms = '''config data-dir dataset train-split val-split train-num-samples val-num-samples dataset-download class-map input-img-mode input-key target-key dataset-trust-remote-code model pretrained
    pretrained-path initial-checkpoint resume no-resume-opt num-classes gp img-size in-chans input-size crop-pct mean std interpolation batch-size validation-batch-size channels-last fuser
    grad-accum-steps grad-checkpointing fast-norm model-kwargs head-init-scale head-init-bias torchcompile-mode torchscript torchcompile device amp amp-dtype model-dtype no-ddp-bb synchronize-step
    local_rank device-modules opt opt-eps opt-betas momentum weight-decay clip-grad clip-mode layer-decay layer-decay-min-scale layer-decay-no-opt-scale opt-kwargs sched sched-on-updates lr lr-base
    lr-base-size lr-base-scale lr-noise lr-noise-pct lr-noise-std lr-cycle-mul lr-cycle-decay lr-cycle-limit lr-k-decay warmup-lr min-lr epochs epoch-repeats start-epoch decay-milestones decay-epochs
    warmup-epochs warmup-prefix cooldown-epochs patience-epochs decay-rate no-aug train-crop-mode scale ratio hflip vflip color-jitter color-jitter-prob grayscale-prob gaussian-blur-prob aa aug-repeats
    aug-splits jsd-loss bce-loss bce-sum bce-target-thresh bce-pos-weight reprob remode recount resplit mixup cutmix cutmix-minmax mixup-prob mixup-switch-prob mixup-mode mixup-off-epoch smoothing
    train-interpolation drop drop-connect drop-path drop-block bn-momentum bn-eps sync-bn dist-bn split-bn model-ema model-ema-force-cpu model-ema-decay model-ema-warmup seed worker-seeding log-interval
    val-interval recovery-interval checkpoint-hist workers save-images pin-mem no-prefetcher output experiment eval-metric tta use-multi-epochs-loader log-wandb wandb-project wandb-tags wandb-resume-id
    train-img-sizes train-batch-sizes train-size-probs train-size-schedule train-size-schedule-spread train-size-random-mix train-batches-per-epoch variable-batch-loss-scale naflex-loader
    naflex-train-seq-lens naflex-max-seq-len naflex-patch-sizes naflex-patch-size-probs naflex-loss-scale naflex-patchify-channels-first kd-model-name kd-distill-type kd-loss-type distill-loss-weight
    task-loss-weight kd-temperature kd-student-feature-dim kd-teacher-feature-dim kd-token-distill-type'''

def rows():
    "Flag, whether timm bits and timm have it, and what becomes of it here"
    import train_timm
    here = {o[2:] for a in train_timm.parser()._actions for o in a.option_strings if o.startswith('--')} - {'help'}
    left = train_timm.not_taken()
    res = [(o, o in bits.split(), o in timms.split(), 'yes' if o in here else f'no: {left[o]}') for o in dict.fromkeys([*bits.split(), *timms.split()])]
    return [*res, *[(o, False, False, 'yes') for o in sorted(here-{r[0] for r in res})]]

def render():
    "The table as Markdown"
    found = rows()
    n = {k: (sum(r[i] and r[3]=='yes' for r in found), sum(r[i] for r in found)) for i,k in ((1,'timm bits'),(2,'timm'))}
    head = '# Flags of `train_timm.py`\n\nMade by `python tools/timm_flags.py`. ' + ' '.join(f"It takes {a} of the {b} flags of `train.py` of {k}." for k,(a,b) in n.items())
    lines = [f"| `--{o}` | {'yes' if a else ''} | {'yes' if b else ''} | {c.replace('|', '/')} |" for o,a,b,c in found]
    return '\n'.join([head, '', '| flag | timm bits | timm | here |', '|---|---|---|---|', *lines]) + '\n'

if __name__=='__main__': (root/'examples/train_timm_flags.md').write_text(render(), encoding='utf-8')
