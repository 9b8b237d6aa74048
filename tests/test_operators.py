"""Operators of torch on an XLA device compute what they compute on the host, results and gradients, whatever they were called with before.

torch_xla remembers programs by what it takes for all that decides about them: an argument that it forgets shows in the second of several calls alone,
so the calls of a case are made in turn, in one process.
"""
import pytest, torch, torch_xla
from torch.nn import functional as F

import fastai_xla.all
from fastai_xla.runtime.counts import xla_counts

dev = torch_xla.device()

def of(f, *args): return [lambda x, a=a: f(x, a) for a in args]
def at(x, o): return torch.tensor(o, device=x.device)

IMAGES = dict(
    elu=of(lambda x,a: F.elu(x, a), 1.0, 2.0, 0.5),
    celu=of(lambda x,a: F.celu(x, a), 1.0, 2.0, 0.5),
    selu=[F.selu],
    leaky=of(lambda x,a: F.leaky_relu(x, a), 0.01, 0.2, 0.5),
    hardtanh=of(lambda x,a: F.hardtanh(x, -a, a * 2), 1.0, 0.5, 0.2),
    softplus=of(lambda x,a: F.softplus(x, a, a * 5), 1.0, 2.0, 0.5),
    softplusth=of(lambda x,a: F.softplus(x, 1.0, a), 20.0, 0.5),
    threshold=of(lambda x,a: F.threshold(x, a, -a), 0.1, 0.5),
    thresholdv=of(lambda x,a: F.threshold(x, 0.1, a), 0.1, 0.5),
    softshrink=of(lambda x,a: F.softshrink(x, a), 0.1, 0.5, 1.0),
    hardshrink=of(lambda x,a: F.hardshrink(x, a), 0.1, 0.5, 1.0),
    gelu=of(lambda x,a: F.gelu(x, approximate=a), 'none', 'tanh'),
    relu6=[F.relu6],
    glu=of(lambda x,a: F.glu(x, a), 1, 3),
    softmax=of(lambda x,a: F.softmax(x, a), 1, 2, 3),
    logsoftmax=of(lambda x,a: F.log_softmax(x, a), 1, 2, 3),
    clamp=of(lambda x,a: x.clamp(-a, a), 0.1, 0.5, 1.0),
    clampmin=of(lambda x,a: x.clamp(min=a), 0.1, 0.5),
    clampmax=of(lambda x,a: x.clamp(max=a), 0.1, 0.5),
    pow=of(lambda x,a: x.abs().pow(a), 2.0, 3.0, 0.5, 1.5),
    rpow=of(lambda x,a: a ** x, 2.0, 3.0),
    remainder=of(lambda x,a: x.remainder(a), 0.3, 0.7),
    fmod=of(lambda x,a: x.fmod(a), 0.3, 0.7),
    nanto=of(lambda x,a: x.log().nan_to_num(a, a, a), 1.0, 2.0),
    lerp=of(lambda x,a: x.lerp(x * x, a), 0.1, 0.7),
    addcmul=of(lambda x,a: torch.addcmul(x, x, x, value=a), 0.1, 0.7),
    addcdiv=of(lambda x,a: torch.addcdiv(x, x, x.abs() + 1, value=a), 0.1, 0.7),
    addalpha=of(lambda x,a: torch.add(x, x * x, alpha=a), 0.1, 0.7),
    subalpha=of(lambda x,a: torch.sub(x, x * x, alpha=a), 0.1, 0.7),
    huber=of(lambda x,a: F.huber_loss(x, x * x, delta=a), 1.0, 0.3, 2.0),
    smoothl1=of(lambda x,a: F.smooth_l1_loss(x, x * x, beta=a), 1.0, 0.3, 2.0),
    huberred=of(lambda x,a: F.huber_loss(x, x * x, reduction=a), 'mean', 'sum', 'none'),
    mse=of(lambda x,a: F.mse_loss(x, x * x, reduction=a), 'mean', 'sum', 'none'),
    l1=of(lambda x,a: F.l1_loss(x, x * x, reduction=a), 'mean', 'sum', 'none'),
    bce=of(lambda x,a: F.binary_cross_entropy(x.sigmoid(), (x * x).sigmoid(), reduction=a), 'mean', 'sum', 'none'),
    bcew=of(lambda x,a: F.binary_cross_entropy_with_logits(x, (x * x).sigmoid(), pos_weight=torch.full((x.shape[-1],), a, device=x.device)), 1.0, 3.0),
    nll2d=of(lambda x,a: F.nll_loss(x.log_softmax(1), (x[:, 0] > 0).long(), ignore_index=a, reduction='sum'), -100, 0, 1),
    kl_div=of(lambda x,a: F.kl_div(x.log_softmax(1), x.softmax(2), reduction=a), 'mean', 'sum', 'none', 'batchmean'),
    kl_div_log=of(lambda x,a: F.kl_div(x.log_softmax(1), x.log_softmax(2), log_target=a), True, False),
    triplet=of(lambda x,a: F.triplet_margin_loss(x, x * x, x.exp(), margin=a), 0.1, 1.0, 3.0),
    tripp=of(lambda x,a: F.triplet_margin_loss(x, x * x, x.exp(), p=a), 1.0, 2.0, 3.0),
    marginrank=of(lambda x,a: F.margin_ranking_loss(x, x * x, x.sign(), margin=a), 0.1, 1.0),
    hingeemb=of(lambda x,a: F.hinge_embedding_loss(x, x.detach().sign(), margin=a), 0.1, 1.0),
    poisson=of(lambda x,a: F.poisson_nll_loss(x, x.exp(), log_input=a), True, False),
    poissonfull=of(lambda x,a: F.poisson_nll_loss(x, x.detach().exp() * 3, full=a), True, False),
    gnll=of(lambda x,a: F.gaussian_nll_loss(x, x * x, x.exp(), full=a), True, False),
    mlsm=[lambda x: F.multilabel_soft_margin_loss(x, (x > 0).float())],
    softmargin=[lambda x: F.soft_margin_loss(x, x.detach().sign())],
    layer_norm=of(lambda x,a: F.layer_norm(x, (10,), eps=a), 1e-05, 0.1, 1.0),
    layer_norm_dims=of(lambda x,a: F.layer_norm(x, x.shape[a:]), 1, 2, 3),
    group_norm=of(lambda x,a: F.group_norm(x, a), 1, 2, 4),
    group_norm_eps=of(lambda x,a: F.group_norm(x, 2, eps=a), 1e-05, 0.5),
    instance_norm=of(lambda x,a: F.instance_norm(x, eps=a), 1e-05, 0.5),
    batch_norm=of(lambda x,a: F.batch_norm(x, None, None, training=True, eps=a), 1e-05, 0.5),
    batch_norm_eval=of(lambda x,a: F.batch_norm(x, torch.zeros(4, device=x.device), torch.ones(4, device=x.device), training=False, eps=a), 1e-05, 0.5),
    rms=of(lambda x,a: F.rms_norm(x, (10,), eps=a), 1e-05, 0.5),
    lrn=of(lambda x,a: F.local_response_norm(x, 3, alpha=a, beta=a, k=a), 0.5, 1.0),
    normalize=of(lambda x,a: F.normalize(x, p=a), 1.0, 2.0, 3.0),
    normdim=of(lambda x,a: F.normalize(x, dim=a), 1, 2, 3),
    normeps=of(lambda x,a: F.normalize(x * 0.001, eps=a), 1e-12, 1.0),
    pnormdim=of(lambda x,a: x.norm(p=2, dim=a), 1, 2),
    vecnorm=of(lambda x,a: torch.linalg.vector_norm(x, a, dim=2), 0.5, 1, 2, float('inf'), -float('inf')),
    cdist=of(lambda x,a: torch.cdist(x, x.exp(), p=a), 1.0, 2.0, 3.0),
    pwd=of(lambda x,a: F.pairwise_distance(x, x.exp(), p=a), 1.0, 2.0, 3.0),
    cos=of(lambda x,a: F.cosine_similarity(x, x.exp(), dim=a), 1, 2, 3),
    maxpool=of(lambda x,a: F.max_pool2d(x, *a), (2,), (3, 1), (3, 2, 1), (2, 1, 0, 1)),
    maxpoolceil=of(lambda x,a: F.max_pool2d(x, 2, ceil_mode=a), False, True),
    avgpool=of(lambda x,a: F.avg_pool2d(x, *a), (2,), (3, 1), (3, 2, 1)),
    avgceil=of(lambda x,a: F.avg_pool2d(x, 2, ceil_mode=a), False, True),
    avgpad=of(lambda x,a: F.avg_pool2d(x, 3, 2, 1, count_include_pad=a), False, True),
    avg_pool_divisor=of(lambda x,a: F.avg_pool2d(x, 2, divisor_override=a), 1, 3, None),
    lppool=of(lambda x,a: F.lp_pool2d(x.abs(), a, 2), 1.0, 2.0, 3.0),
    adaptive_avg_pool=of(lambda x,a: F.adaptive_avg_pool2d(x, a), 1, (3, 5), (9, 2), 4),
    adaptive_max_pool=of(lambda x,a: F.adaptive_max_pool2d(x, a), 1, (3, 5), (9, 2), 4),
    conv=of(lambda x,a: F.conv2d(x, torch.arange(1.0, 73.0).reshape(4, 2, 3, 3).to(x.device) / 72, stride=a[0], padding=a[1], dilation=a[2],
        groups=2), (1, 0, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2)),
    convgroups=of(lambda x,a: F.conv2d(x, (torch.arange(1.0, 4 * 4 // a * 9 + 1).reshape(4, 4 // a, 3, 3) / 72).to(x.device), groups=a), 1, 2, 4),
    convsame=of(lambda x,a: F.conv2d(x, torch.ones(4, 4, 3, 3, device=x.device), padding='same', dilation=a), 1, 2),
    convT=of(lambda x,a: F.conv_transpose2d(x, torch.arange(1.0, 145.0).reshape(4, 4, 3, 3).to(x.device) / 72, stride=a[0], padding=a[1],
        output_padding=a[2], dilation=a[3]), (1, 0, 0, 1), (2, 1, 1, 1), (2, 0, 1, 1), (1, 1, 0, 2), (3, 0, 2, 1)),
    convTg=of(lambda x,a: F.conv_transpose2d(x, torch.arange(1.0, 4 * 4 // a * 9 + 1).reshape(4, 4 // a, 3, 3).to(x.device) / 72, groups=a), 1, 2, 4),
    padc=of(lambda x,a: F.pad(x, (1, 2, 0, 1), value=a), 0.0, 1.0, -2.0),
    padneg=of(lambda x,a: F.pad(x, a), (1, -2), (-1, 1, 2, -1)),
    padmode=of(lambda x,a: F.pad(x, (1, 2, 2, 1), mode=a), 'reflect', 'replicate', 'circular'),
    interpolate=of(lambda x,a: F.interpolate(x, **a), dict(scale_factor=2), dict(size=(5, 5)), dict(size=(13, 7), mode='bilinear'), dict(size=(13, 7),
        mode='bilinear', align_corners=True), dict(scale_factor=1.7, mode='bilinear'), dict(scale_factor=1.7, mode='bilinear',
        recompute_scale_factor=True), dict(scale_factor=0.5, mode='bilinear'), dict(size=(13, 7), mode='bicubic'), dict(size=(13, 7), mode='bicubic',
        align_corners=True), dict(scale_factor=1.7), dict(scale_factor=(1.5, 2.0)), dict(size=(13, 7), mode='nearest-exact'), dict(size=(5, 6),
        mode='area')),
    gridsample=of(lambda x,a: F.grid_sample(x, F.affine_grid(torch.tensor([[1.2, 0.1, 0.1], [-0.1, 0.9, 0.2]]).to(x.device)[None].repeat(2, 1, 1), (2,
        4, 7, 7), align_corners=a[2]), mode=a[0], padding_mode=a[1], align_corners=a[2]), *[(m, p, c) for m in ('bilinear', 'nearest', 'bicubic') for
        p in ('zeros', 'border', 'reflection') for c in (True, False)]),
    unfold=of(lambda x,a: F.unfold(x, 2, *a), (1, 0, 1), (2, 1, 1), (1, 1, 2)),
    windows=of(lambda x,a: x.unfold(*a), (2, 3, 1), (2, 3, 2), (3, 4, 3)),
    pixel_shuffle=of(lambda x,a: F.pixel_shuffle(x, a), 1, 2),
    sum=of(lambda x,a: x.sum(a), 1, 2, (1, 2)),
    mean=of(lambda x,a: x.mean(a), 1, 2, (1, 2)),
    std=of(lambda x,a: x.std(1, correction=a), 0, 1, 2),
    var=of(lambda x,a: x.var(1, correction=a), 0, 1, 2),
    keep=of(lambda x,a: x.sum(1, keepdim=a), True, False),
    amax=of(lambda x,a: x.amax(a), 1, 2, (1, 2)),
    maxd=of(lambda x,a: x.max(a)[0], 1, 2),
    prod=of(lambda x,a: x.prod(a), 1, 2),
    logsumexp=of(lambda x,a: x.logsumexp(a), 1, 2),
    cumsum=of(lambda x,a: x.cumsum(a), 1, 2, 3),
    cumprod=of(lambda x,a: x.cumprod(a), 1, 2, 3),
    cummax=of(lambda x,a: x.cummax(a)[0], 1, 2),
    flip=of(lambda x,a: x.flip(a), 1, 2, (1, 2)),
    roll=of(lambda x,a: x.roll(*a), (1, 1), (2, 1), (1, 2), ((1, 2), (1, 2))),
    topk=of(lambda x,a: x.topk(*a)[0], (2, 1, True), (2, 1, False), (3, 1, True), (2, 2, True)),
    sort=of(lambda x,a: x.sort(*a)[0], (1, True), (1, False), (2, True)),
    kthvalue=of(lambda x,a: x.kthvalue(*a)[0], (1, 1), (2, 1), (2, 2)),
    quantile=of(lambda x,a: x.quantile(a, dim=1), 0.1, 0.5, 0.9),
    quantile_between=of(lambda x,a: x.quantile(0.33, dim=1, interpolation=a), 'linear', 'lower', 'higher', 'nearest', 'midpoint'),
    median=of(lambda x,a: x.median(a)[0], 1, 2),
    tril=of(lambda x,a: x.tril(a), 0, 1, -1),
    triu=of(lambda x,a: x.triu(a), 0, 1, -1),
    diag=of(lambda x,a: x.diagonal(a, 2, 3), 0, 1, -1),
    diagembed=of(lambda x,a: torch.diag_embed(x, a), 0, 1, -1),
    gather=of(lambda x,a: x.gather(a, (x.detach() > 0).long()), 1, 2, 3),
    scatter_add=of(lambda x,a: torch.zeros_like(x).scatter_add(a, (x.detach() > 0).long(), x), 1, 2, 3),
    scatter_reduce=of(lambda x,a: torch.ones_like(x).scatter_reduce(1, (x.detach() > 0).long(), x, a), 'sum', 'amax', 'amin', 'prod', 'mean'),
    scatter_amax_self=of(lambda x,a: torch.ones_like(x).scatter_reduce(1, (x.detach() > 0).long(), x, 'amax', include_self=a), True, False),
    scatter_sum_self=of(lambda x,a: torch.ones_like(x).scatter_reduce(1, (x.detach() > 0).long(), x, 'sum', include_self=a), True, False),
    scatter_value=of(lambda x,a: x.scatter(1, torch.zeros_like(x[:, :1], dtype=torch.long), a), 1.0, 2.0),
    index_select=of(lambda x,a: x.index_select(a, at(x, [1, 0, 1])), 1, 2),
    index_add=of(lambda x,a: x.index_add(1, at(x, [0, 1]), x[:, :2], alpha=a), 1.0, 2.0),
    index_fill=of(lambda x,a: x.index_fill(1, at(x, [0, 1]), a), 1.0, 2.0),
    index_copy=of(lambda x,a: x.index_copy(a, at(x, [0, 1]), x.narrow(a, 0, 2) * 2), 1, 2),
    masked_fill=of(lambda x,a: x.masked_fill(x > 0, a), 1.0, 2.0),
    index_put=of(lambda x,a: x.index_put((at(x, [0, 0]),), x[:2] * 2, accumulate=a), True, False),
    where=of(lambda x,a: torch.where(x > 0, x, a), 1.0, 2.0),
    repint=of(lambda x,a: x.repeat_interleave(*a), (2, 1), (3, 1), (2, 2)),
    narrow=of(lambda x,a: x.narrow(*a), (1, 0, 2), (1, 1, 2), (2, 1, 2)),
    slice=of(lambda x,a: x[:, :, ::a], 1, 2, 3),
    select=of(lambda x,a: x.select(*a), (1, 0), (1, 1), (2, 1)),
    expand=of(lambda x,a: x[:, :1].expand(-1, a, -1, -1), 2, 3),
    perm=of(lambda x,a: x.permute(a), (0, 2, 1, 3), (0, 3, 2, 1)),
    round=of(lambda x,a: x + x.detach().round(decimals=a), 0, 1, 2),
    whole_quotient=of(lambda x,a: torch.div(x, 0.3, rounding_mode=a), 'floor', 'trunc'),
    divmode=of(lambda x,a: x + torch.div(x.detach(), 0.3, rounding_mode=a), None, 'floor', 'trunc'),
    sdpa=of(lambda x,a: F.scaled_dot_product_attention(x, x, x, is_causal=a), True, False),
    sdpas=of(lambda x,a: F.scaled_dot_product_attention(x, x, x, scale=a), 0.1, 1.0),
    onehot=of(lambda x,a: x.sum() * F.one_hot((x.detach() > 0).long(), a)[..., 0].sum(), 2, 5),
    polyg=of(lambda x,a: torch.polygamma(a, x.abs() + 1), 1, 2),
    stdm=of(lambda x,a: torch.std_mean(x, a)[1], 1, 2),
    logs=of(lambda x,a: torch.logspace(0, 1, 10, base=a, device=x.device) * x, 2.0, 10.0),
    linsp=of(lambda x,a: torch.linspace(0, a, 10, device=x.device) * x, 2.0, 10.0),
    arange=of(lambda x,a: torch.arange(0, a * 10, a, device=x.device) * x, 2.0, 10.0),
    full=of(lambda x,a: torch.full((10,), a, device=x.device) * x, 2.0, 10.0),
    mulS=of(lambda x,a: x * a, 2.0, 10.0),
    addS=of(lambda x,a: x + a, 2.0, 10.0),
    rsub=of(lambda x,a: a - x, 2.0, 10.0),
    divS=of(lambda x,a: a / (x.abs() + 1), 2.0, 10.0),
    gt=of(lambda x,a: x * (x > a), 0.0, 1.0),
    eq=of(lambda x,a: x * (x.round() == a), 0.0, 1.0),
    atan2=[lambda x: torch.atan2(x, x * x)],
    ldexp=of(lambda x,a: torch.ldexp(x, at(x, a)), 1, 2),
    ss=of(lambda x,a: torch.searchsorted(at(x, [0.0, 1.0]), x.detach(), right=a) * x, True, False),
    tdot=of(lambda x,a: torch.tensordot(x, x, a), ([0, 1], [0, 1]), ([2, 3], [2, 3])),
    movedim=of(lambda x,a: x.movedim(*a), (1, 2), (1, 3)),
    unbind=of(lambda x,a: x.unbind(a)[0], 1, 2),
    split=of(lambda x,a: x.split(a, 1)[0], 1, 2),
    chunk=of(lambda x,a: x.chunk(a, 2)[0], 2, 3),
    stack=of(lambda x,a: torch.stack([x, x * 2], a), 0, 1, 2),
    cat=of(lambda x,a: torch.cat([x, x * 2], a), 0, 1, 2),
    squeeze=of(lambda x,a: x[:, :1, :1].squeeze(a), 1, 2),
    argm=of(lambda x,a: x * x.detach().argmax(a, keepdim=True), 1, 2),
    diff=of(lambda x,a: x.diff(a, dim=2), 1, 2),
    trapz=of(lambda x,a: torch.trapezoid(x, dx=a, dim=1), 1.0, 2.0),
    cumtrapz=of(lambda x,a: torch.cumulative_trapezoid(x, dim=a), 1, 2),
    grad=of(lambda x,a: torch.gradient(x, spacing=a, dim=2)[0], 1.0, 2.0),
    prelu=of(lambda x,a: F.prelu(x, torch.full((4,), a, device=x.device)), 0.1, 0.5),
    fold=of(lambda x,a: F.fold(F.unfold(x, 2, stride=a), (9, 10), 2, stride=a), 1, 2),
    channel_shuffle=of(lambda x,a: F.channel_shuffle(x, a), 1, 2),
)

SIGNALS = dict(
    baddbmm=of(lambda x,a: torch.baddbmm(x @ x.transpose(1, 2), x, x.transpose(1, 2), beta=a, alpha=a * 2), 0.5, 2.0),
    maxpool1=of(lambda x,a: F.max_pool1d(x, *a), (2,), (3, 1), (3, 2, 1)),
    avgpool1=of(lambda x,a: F.avg_pool1d(x, *a), (2,), (3, 1), (3, 2, 1)),
    interpolate_signals=of(lambda x,a: F.interpolate(x, **a), dict(scale_factor=2), dict(size=5), dict(size=13, mode='linear'), dict(size=13,
        mode='linear', align_corners=True), dict(scale_factor=1.7, mode='linear')),
    solve_triangular=of(lambda x,a: torch.linalg.solve_triangular(x @ x.transpose(1, 2) + 3 * torch.eye(4, device=x.device), x, upper=a), True, False),
    cholesky=of(lambda x,a: torch.linalg.cholesky(x @ x.transpose(1, 2) + 3 * torch.eye(4, device=x.device), upper=a), False, True),
)

VOLUMES = dict(
    maxpool3=of(lambda x,a: F.max_pool3d(x, *a), (2,), (3, 1), (3, 2, 1)),
    avgpool3=of(lambda x,a: F.avg_pool3d(x, *a), (2,), (3, 1), (3, 2, 1)),
    interpolate_volumes=of(lambda x,a: F.interpolate(x, **a), dict(scale_factor=2), dict(size=5), dict(size=13, mode='trilinear'), dict(size=13,
        mode='trilinear', align_corners=True), dict(scale_factor=1.7, mode='trilinear')),
)

MATRIX = dict(
    one_sample=of(lambda x,a: F.cross_entropy(x[0], at(x, 2), reduction=a), 'mean', 'sum', 'none'), # which ended the process
    one_smoothed=of(lambda x,a: F.cross_entropy(x[0], at(x, 2), x[1].detach().abs(), label_smoothing=a), 0., .1),
    addmm=of(lambda x,a: torch.addmm(x @ x.T, x, x.T, beta=a, alpha=a * 2), 0.5, 2.0),
    cross_entropy=of(lambda x,a: F.cross_entropy(x, at(x, [0, 1, 2, 1]), label_smoothing=a), 0.0, 0.1, 0.4),
    cross_entropy_reduction=of(lambda x,a: F.cross_entropy(x, at(x, [0, 1, 2, 1]), reduction=a), 'mean', 'sum', 'none'),
    cross_entropy_ignored=of(lambda x,a: F.cross_entropy(x, at(x, [0, 1, 2, 1]), ignore_index=a), -100, 1, 2),
    cross_entropy_weights=of(lambda x,a: F.cross_entropy(x, at(x, [0, 1, 2, 1]), weight=torch.arange(1.0, 6.0).to(x.device) ** a), 1, 2),
    cosemb=of(lambda x,a: F.cosine_embedding_loss(x, x.exp(), at(x, [1, -1, 1, -1]), margin=a), 0.1, 0.5),
    embedding=of(lambda w, a: F.embedding(torch.tensor([[0, 1], [2, 1]], device=w.device), w, padding_idx=a), None, 0, 1),
    embedding_max_norm=of(lambda w, a: F.embedding(torch.tensor([[0, 1], [2, 1]], device=w.device), w.clone(), max_norm=a), 0.5, 2.0),
    embedding_freq=of(lambda w, a: F.embedding(torch.tensor([[0, 1], [2, 1]], device=w.device), w, scale_grad_by_freq=a), True, False),
    multimargin=of(lambda x,a: F.multi_margin_loss(x, at(x, [0, 1, 2, 1]), p=a), 1, 2),
    multimarginm=of(lambda x,a: F.multi_margin_loss(x, at(x, [0, 1, 2, 1]), margin=a), 1.0, 2.0),
)
ON_HOST = dict( # what no form is known for, by case
    gnll='aten::_local_scalar_dense',
    cdist='aten::_cdist_backward',
    avgceil='aten::avg_pool2d_backward',
    adaptive_max_pool='aten::adaptive_max_pool2d aten::adaptive_max_pool2d_backward',
    gridsample='aten::grid_sampler_2d aten::grid_sampler_2d_backward',
    windows='aten::unfold_backward aten::unfold_copy',
    median='aten::median.dim_values',
    scatter_reduce='aten::scatter_reduce.two',
    scatter_amax_self='aten::scatter_reduce.two',
    scatter_sum_self='aten::scatter_reduce.two',
    round='aten::round.decimals',
    polyg='aten::polygamma',
    logs='aten::logspace.out',
    ss='aten::searchsorted.Tensor',
    solve_triangular='aten::linalg_solve_triangular',
    cholesky='aten::_local_scalar_dense aten::linalg_cholesky_ex aten::linalg_solve_triangular',
    embedding_max_norm='aten::embedding_renorm_',
    reduced='aten::cumprod',
    mask='aten::cumprod',
    cumulated_short='aten::cumprod',
    largest='aten::median.dim_values',
)

IN_PLACE = dict(
    elu=of(lambda x,a: F.elu(x*1, a, inplace=True), 1., 2.),
    celu=of(lambda x,a: F.celu(x*1, a, inplace=True), 1., 2.),
    selu=[lambda x: F.selu(x*1, inplace=True)],
    leaky_relu=of(lambda x,a: F.leaky_relu(x*1, a, inplace=True), .1, .3),
    hardtanh=of(lambda x,a: F.hardtanh(x*1, -a, a, inplace=True), .5, .2),
    threshold=of(lambda x,a: F.threshold(x*1, a, .3, inplace=True), .1, .4),
    named=of(lambda x,a: getattr(x*1, a)(), *'relu_ sigmoid_ tanh_ abs_ exp_ neg_ sin_ floor_ round_ frac_ reciprocal_ sign_ square_ tril_ zero_ atan_'.split()),
    by_number=of(lambda x,a: getattr(x*1, a[0])(*a[1:]), *[(o, n) for o in ('mul_','add_','sub_','div_','pow_','clamp_min_','fill_','remainder_') for n in (2.,3.)]),
    addcmul=of(lambda x,a: (x*1).addcmul_(x, x, value=a), .3, .7),
    lerp=of(lambda x,a: (x*1).lerp_(x*x, a), .3, .6),
    masked_fill=of(lambda x,a: (x*1).masked_fill_(x>0, a), .3, .6),
    index_add=of(lambda x,a: (x*1).index_add_(1, at(x, [0,1]), x[:,:2], alpha=a), 1., 2.),
    scatter=of(lambda x,a: (x*1).scatter_(1, torch.zeros_like(x[:,:1], dtype=torch.long), a), .5, 2.),
    cumsum=of(lambda x,a: (x*1).cumsum_(a), 1, 2),
    scatter_add=of(lambda x,a: (x*1).scatter_add_(a, (x>0).long(), x), 1, 2),
    views=of(lambda x,a: (lambda y: (a(y), y)[1])(x*1), lambda y: y[0].mul_(2), lambda y: y[:,::2].add_(1), lambda y: y.view(-1)[3:7].zero_(),
        lambda y: y.transpose(1, 2)[0,0].fill_(3.), lambda y: y.diagonal(dim1=2, dim2=3).fill_(3.), lambda y: y.narrow(1, 1, 2).copy_(y[:,:2].clone()),
        lambda y: y.permute(3, 2, 1, 0)[2:4].mul_(2.), lambda y: y.select(1, 1).copy_(y[:,0].clone())),
)

WHOLE = dict(
    range_as=of(lambda x,a: torch.arange(0, 6, 2, dtype=a, device=x.device), torch.float, torch.int32, torch.double),
    divided=of(lambda x,a: a(x), lambda x: x//3, lambda x: x//-3, lambda x: x%3, lambda x: x%-3, lambda x: x/3, lambda x: x.fmod(-3), lambda x: x//(x.abs()+1)),
    rounded=of(lambda x,a: torch.div(x, 3, rounding_mode=a), 'floor', 'trunc', None),
    bits=of(lambda x,a: a(x), lambda x: x&3, lambda x: x|3, lambda x: x^3, lambda x: ~x, lambda x: x<<2, lambda x: (x>0)&(x<3), lambda x: ~(x>0), torch.logical_not),
    reduced=of(lambda x,a: getattr(x, a)(1), *'sum prod cumsum cumprod argmax argmin any all count_nonzero amax'.split()),
    cumulated_as=of(lambda x,a: (x>0).cumsum(1, dtype=a), torch.float, torch.int32),
    with_numbers=of(lambda x,a: a(x), lambda x: x*True, lambda x: x+.5, lambda x: x*2.5, lambda x: x**2, lambda x: 2**x.abs(), lambda x: 1-x, lambda x: (x>0)*2, lambda x: x==1.),
    cast=of(lambda x,a: (x*.6).to(a), torch.long, torch.int32, torch.int16, torch.int8, torch.bool, torch.half, torch.bfloat16, torch.double),
    mixed=of(lambda x,a: a(x, x.float()*1.5), torch.maximum, torch.add, torch.mul, lambda x,y: torch.cat([x,y]), lambda x,y: x<y),
    filled=of(lambda x,a: torch.full((3,), a, device=x.device), 2, 3, 2.5, True),
    ranges=of(lambda x,a: torch.arange(*a, device=x.device), (5,), (2,9,3), (0,1,.3)),
    one_hot=of(lambda x,a: F.one_hot(x.abs(), a), 10, 12),
)

HALVES = dict(
    variance=lambda x: (x*torch.arange(1000, device=x.device).sin().to(x.dtype)).var(1),
)

INPUTS = dict(images=(2,4,9,10), signals=(2,4,11), volumes=(1,2,6,6,8), matrix=(4,5))
CASES = {**{(k,n): fs for k,o in zip(INPUTS, (IMAGES,SIGNALS,VOLUMES,MATRIX)) for n,fs in o.items()}, **{('images',f'{n}_'): fs for n,fs in IN_PLACE.items()}}

def outcome(f, x, device, grad):
    "What `f` makes of `x` on `device`, and the gradient of a weighted sum of it"
    x = x.clone().to(device).requires_grad_(grad)
    res = f(x)
    if grad and res.requires_grad: (res*(torch.arange(1, res.numel()+1, device=device)/res.numel()).reshape(res.shape)).sum().backward()
    torch_xla.sync()
    return [res.detach().cpu(), *([x.grad.cpu()] if x.grad is not None else [])]

def check(fs, x, grad):
    before = xla_counts()
    got = [outcome(f, x, dev, grad) for f in fs]
    on_host = (xla_counts()-before).fallbacks
    for i,f in enumerate(fs):
        want = outcome(f, x, 'cpu', grad)
        assert len(got[i])==len(want), f'call {i}: a gradient is missing'
        for what,a,b in zip(('result','gradient'), got[i], want):
            assert (a.dtype,a.shape)==(b.dtype,b.shape), f'call {i}, {what}: {a.dtype} {tuple(a.shape)}, on the host {b.dtype} {tuple(b.shape)}'
            assert torch.allclose(a.double(), b.double(), atol=2e-4, rtol=2e-3, equal_nan=True), f'call {i}, {what}: {(a.double()-b.double()).abs().max()}'
    return on_host

@pytest.mark.parametrize('kind,name', CASES)
def test_numbers_and_gradients(kind, name):
    torch.manual_seed(0)
    on_host = check(CASES[kind,name], torch.randn(INPUTS[kind]), True)
    assert {*on_host}=={*ON_HOST.get(name, '').split()}

@pytest.mark.parametrize('name', WHOLE)
def test_whole_numbers(name):
    torch.manual_seed(0)
    on_host = check(WHOLE[name], torch.randint(-9, 10, (2,4,9,10)), False)
    assert {*on_host}=={*ON_HOST.get(name, '').split()}

@pytest.mark.parametrize('dtype', (torch.bfloat16,torch.half), ids=str)
@pytest.mark.parametrize('name', HALVES)
def test_sums_of_16_bits(name, dtype):
    "Are near those of 32, forwards and backwards"
    x = torch.ones(4, 1000)
    for got,want in zip(outcome(HALVES[name], x.to(dtype), dev, True), outcome(HALVES[name], x, 'cpu', True), strict=True):
        assert got.dtype==dtype and torch.allclose(got.float(), want, rtol=8e-3, atol=1e-3)

def test_in_place_keeps_its_type():
    torch.testing.assert_close(torch.arange(-3, 9, device=dev).floor_divide_(2).cpu(), torch.arange(-3, 9)//2)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.arange(3, device=dev).floor_divide_(.5)

def test_in_a_validation():
    "fastai validates by `no_grad`, where autograd keeps nothing and forms are the same"
    x = torch.randn(2, 4, 9, 10)
    with torch.no_grad():
        for fs in (IMAGES['interpolate'], IMAGES['avg_pool_divisor'], IMAGES['celu']): check(fs, x, False)
