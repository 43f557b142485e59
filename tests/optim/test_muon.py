"""Muon against torch.optim.Muon, and what it does besides: AdamW for the rest, splits, stacks, exact resume."""

import copy

import pytest
import torch

from tilestack import backend, ops, optim
from tilestack.optim.muon import is_hidden_matrix, matrices

SHAPES = [(12, 20), (20, 12), (12, 20), (7, 7), (20, 12)]
RULES = ["original", "match_rms_adamw", None]


def parameters(dtype=torch.float32, shapes=SHAPES):
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64).to(dtype)) for s in shapes]


def take_steps(optimizer, params, count, first=0):
    for step in range(first, first + count):
        g = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=g).to(param.dtype)
        optimizer.step()


def iteration_on_kernels(path):
    """What Newton–Schulz may run in: the interpreter multiplies bfloat16 wrongly."""
    return torch.float16 if path == "triton" else torch.bfloat16


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_errs_no_more_than_torchs_over_50_steps(path, as_good_as, rule, nesterov):
    """The truth is the same run with Newton–Schulz in float64; torch's own has it in bfloat16."""
    options = dict(lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=rule)
    steps, shapes = (50, SHAPES) if path == "torch" else (4, SHAPES[:2])  # on kernels, 50 in tests/gpu
    ours, theirs, truth = (parameters(dtype, shapes) for dtype in (torch.float32, torch.float32, torch.float64))
    take_steps(optim.Muon(ours, **options, ns_dtype=iteration_on_kernels(path)), ours, steps)
    take_steps(torch.optim.Muon(theirs, **options), theirs, steps)
    with backend("torch"):
        take_steps(optim.Muon(truth, **options, ns_dtype=torch.float64), truth, steps)
    as_good_as(ours, theirs, truth)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (32, 8)])
def test_the_definition_is_torchs_up_to_the_norm_it_divides_by(shape, rule):
    """torch rounds the norm to bfloat16; for a gradient whose norm is a power of two both are the same arithmetic, and what
    the shape of a matrix makes of the learning rate."""
    ours, theirs = parameters(shapes=[shape]), parameters(shapes=[shape])
    options = dict(lr=0.5, weight_decay=0.25, momentum=0.0, adjust_lr_fn=rule)
    for params, home in ((ours, optim), (theirs, torch.optim)):
        params[0].grad = torch.eye(*shape) * 2**-0.5 * 2**-1  # of norm 1
        home.Muon(params, **options).step()
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_singular_values_land_in_the_promised_band(path, shape):
    """Those above 1/500 of the norm between 0.68 and 1.21, give or take the arithmetic; the singular vectors stay."""
    torch.manual_seed(0)
    short = min(shape)
    left, _ = torch.linalg.qr(torch.randn(shape[0], short, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(shape[1], short, dtype=torch.float64))
    values = torch.logspace(-1.8, 0, short, dtype=torch.float64)
    assert float((values / values.norm()).min()) > 1 / 500
    x = left * values @ right.T
    for dtype, slack in ((torch.float64, 1e-6), (torch.float32, 1e-4), (torch.float16, 0.02)):
        out = ops.newton_schulz(x.to(dtype)).double()
        found = torch.linalg.svdvals(out)
        assert 0.68 - slack < float(found.min()) <= float(found.max()) < 1.21 + slack
    aligned = left.T @ ops.newton_schulz(x) @ right
    assert float((aligned - aligned.diag().diag()).abs().max()) < 1e-6


def test_equal_shapes_go_together_and_pieces_apart(path):
    """A fused weight of q, k and v steps as the three would, and equal shapes share their launches."""
    separate = parameters(shapes=[(12, 8), (4, 8), (4, 8)])
    fused = [torch.nn.Parameter(torch.cat([p.detach() for p in separate]))]
    dtype = iteration_on_kernels(path)
    apart = optim.Muon(separate, lr=0.1, ns_dtype=dtype)
    joined = optim.Muon([("qkv.weight", fused[0])], lr=0.1, splits={"qkv.weight": (12, 4, 4)}, ns_dtype=dtype)
    whole = copy.deepcopy(fused)
    unsplit = optim.Muon([("qkv.weight", whole[0])], lr=0.1, ns_dtype=dtype)
    for step in range(2):
        g = torch.Generator().manual_seed(step)
        for param in separate:
            param.grad = torch.randn(param.shape, generator=g)
        fused[0].grad = whole[0].grad = torch.cat([p.grad for p in separate])
        for optimizer in (apart, joined, unsplit):
            optimizer.step()
    torch.testing.assert_close(fused[0], torch.cat([p.detach() for p in separate]), rtol=0, atol=0)
    assert not torch.allclose(fused[0], whole[0], atol=1e-3)
    if path == "triton":
        shapes = [key[-2] for key in joined._tables.kept]
        assert shapes == [(12, 8), (4, 8)]
        assert [table.tensors for table in joined._tables.kept.values()] == [1, 2]


def test_launches_are_cut_where_they_grow_too_large(path, monkeypatch):
    monkeypatch.setattr("tilestack.optim.muon.ELEMENTS_TOGETHER", 2 * 12 * 20)
    params, whole = parameters(shapes=[(12, 20)] * 3), parameters(shapes=[(12, 20)] * 3)
    cut = optim.Muon(params, ns_dtype=torch.float32)
    take_steps(cut, params, 1)
    monkeypatch.setattr("tilestack.optim.muon.ELEMENTS_TOGETHER", 1 << 26)
    take_steps(optim.Muon(whole, ns_dtype=torch.float32), whole, 1)
    assert all(torch.equal(a, b) for a, b in zip(params, whole, strict=True))
    if path == "triton":
        assert [table.tensors for table in cut._tables.kept.values()] == [2, 1]


def test_stacks_and_filters_are_matrices():
    assert [m.shape for m in matrices(torch.empty(3, 4, 5))] == [(4, 5)] * 3
    assert [m.shape for m in matrices(torch.empty(3, 4, 5), [2, 2] * 3)] == [(2, 5)] * 6
    assert [m.shape for m in matrices(torch.empty(8, 4, 3, 3))] == [(8, 36)]
    assert all(m.data_ptr() for m in matrices(torch.ones(8, 4, 3, 3)))


def test_experts_step_as_each_alone(path):
    stack = [torch.nn.Parameter(torch.stack([p.detach() for p in parameters(shapes=[(6, 9)] * 3)]))]
    alone = parameters(shapes=[(6, 9)] * 3)
    stacked, single = (optim.Muon(p, lr=0.1, ns_dtype=torch.float32) for p in (stack, alone))
    grads = torch.randn(3, 6, 9)
    stack[0].grad = grads
    for param, grad in zip(alone, grads, strict=True):
        param.grad = grad
    stacked.step()
    single.step()
    torch.testing.assert_close(stack[0].detach(), torch.stack([p.detach() for p in alone]), rtol=1e-6, atol=1e-6)


def test_what_is_no_hidden_matrix_goes_to_adamw(path):
    names = ["embedding.weight", "layers.0.qkv.weight", "layers.0.norm.weight", "head.weight", "layers.0.router.weight"]
    shapes = [(10, 6), (6, 6), (6,), (10, 6), (3, 6)]
    params, twins = parameters(shapes=shapes), parameters(shapes=shapes)
    options = dict(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    optimizer = optim.Muon(zip(names, params, strict=True), lr=0.1, adamw=options, ns_dtype=torch.float32)
    assert [group["param_names"] for group in optimizer.param_groups] == [names[1:2], [names[0], *names[2:]]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    rest = [twins[0], *twins[2:]]
    take_steps(optimizer, params, 3)
    with backend("torch"):
        pair = torch.optim.AdamW(rest, **options), optim.Muon(twins[1:2], lr=0.1, ns_dtype=torch.float32)
    for step in range(3):
        g = torch.Generator().manual_seed(100 + step)
        for twin in twins:
            twin.grad = torch.randn(twin.shape, generator=g)
        for each in pair:
            each.step()
    for a, b in zip(params, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not is_hidden_matrix("model.embed_tokens.weight", params[0])
    assert not is_hidden_matrix("lm_head.weight", params[0])
    assert is_hidden_matrix("layers.0.mlp.down", torch.empty(4, 8, 8))
    assert is_hidden_matrix("decoder.layers.0.multihead_attn.in_proj_weight", params[0])  # in torch.nn.Transformer


def test_a_run_resumes_to_the_bit(path):
    names = ["a.weight", "norm.weight", "b.weight"]
    shapes = [(12, 8), (8,), (8, 12)]
    make = lambda ps: optim.Muon(
        zip(names, ps, strict=True), lr=0.1, splits={"a.weight": [8, 4]}, ns_dtype=torch.float32
    )
    params = parameters(shapes=shapes)
    optimizer = make(params)
    take_steps(optimizer, params, 2)
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = make(twins)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copies, copied = copy.deepcopy((params, optimizer))
    for each, own in ((optimizer, params), (resumed, twins), (copied, copies)):
        take_steps(each, own, 2, first=2)
    for others in (twins, copies):
        assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_pass_to_torch_and_back(path, ours_first):
    ours = lambda params: optim.Muon(params, lr=0.1, ns_dtype=iteration_on_kernels(path))
    first, second = (ours, lambda p: torch.optim.Muon(p, lr=0.1))[:: 1 if ours_first else -1]
    params = parameters()
    saved = first(params)
    take_steps(saved, params, 2)
    clones = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = second(clones)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    for a, b in zip(params, clones, strict=True):
        torch.testing.assert_close(saved.state[a]["momentum_buffer"], resumed.state[b]["momentum_buffer"])
    take_steps(resumed, clones, 1, first=2)
    assert not any(torch.equal(a, b) for a, b in zip(params, clones, strict=True))


def test_bfloat16_parameters_have_a_master_copy(path):
    exact, rounded = parameters(shapes=[(12, 20)]), parameters(torch.bfloat16, shapes=[(12, 20)])
    with torch.no_grad():
        exact[0].copy_(rounded[0].float())
    options = dict(lr=1e-4, weight_decay=0.0, ns_dtype=torch.float32)
    runs = optim.Muon(exact, **options), optim.Muon(rounded, **options, master_weights=True)
    for step in range(3):
        grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(step)).bfloat16()
        exact[0].grad, rounded[0].grad = grad.float(), grad
        for run in runs:
            run.step()
    torch.testing.assert_close(runs[1].state[rounded[0]]["master_param"], exact[0].detach(), rtol=1e-6, atol=1e-7)
    assert rounded[0].dtype == torch.bfloat16


def test_strides_scales_clipping_and_skipping(path):
    """A transposed parameter, a loss scale, a bound on the norm and a found infinity."""
    plain, odd = parameters(shapes=[(9, 14)]), parameters(shapes=[(9, 14)])
    odd[0] = torch.nn.Parameter(odd[0].detach().t().contiguous().t())
    grad = torch.randn(9, 14)
    for params, by in ((plain, 1.0), (odd, 8.0)):
        optimizer = optim.Muon(params, lr=0.1, clip_norm=0.5, ns_dtype=torch.float32)
        optimizer.grad_scale = torch.tensor(by)
        for _ in range(2):
            params[0].grad = grad.clone() * by
            optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(grad.norm().item(), rel=1e-5)
        before = params[0].detach().clone()
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        assert torch.equal(before, params[0])
    torch.testing.assert_close(plain[0], odd[0], rtol=1e-5, atol=1e-6)
    assert odd[0].stride() == (1, 9)


def test_a_learning_rate_on_the_device(path):
    number, tensor = parameters(shapes=[(6, 8)]), parameters(shapes=[(6, 8)])
    take_steps(optim.Muon(number, lr=0.1, ns_dtype=torch.float32), number, 2)
    take_steps(optim.Muon(tensor, lr=torch.tensor(0.1, dtype=torch.float64), ns_dtype=torch.float32), tensor, 2)
    assert torch.equal(number[0], tensor[0])


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 4, 4), (2, 4, 0)])
def test_matrices_without_elements_are_passed_over(path, shape):
    params = parameters(shapes=[shape, (6, 8)])
    alone = parameters(shapes=[shape, (6, 8)])[1:]
    take_steps(optim.Muon(params, lr=0.1), params, 1)
    for param, other in zip(alone, params[1:], strict=True):
        param.grad = other.grad
    optim.Muon(alone, lr=0.1).step()
    assert torch.equal(params[1], alone[0])


def test_biases_of_what_is_split_go_to_adamw_whole():
    """A table of rows for all of a fused projection names its bias too, as that of a model with biases does."""
    weight, bias = torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Parameter(torch.ones(6))
    splits = {"qkv.weight": [2, 4], "qkv.bias": [2, 4]}
    optimizer = optim.Muon([("qkv.weight", weight), ("qkv.bias", bias)], splits=splits)
    assert [group["param_names"] for group in optimizer.param_groups] == [["qkv.weight"], ["qkv.bias"]]


def test_refusals_say_what_is_wrong():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    for message, options in {
        "adjust_lr_fn must be original or match_rms_adamw": dict(adjust_lr_fn="other"),
        "ns_steps must be 1 to 99": dict(ns_steps=0),
        "lr must not be negative": dict(lr=-1),
        "adamw takes lr, betas, eps, weight_decay, not rate": dict(adamw=dict(rate=1)),
        "lr of adamw must not be negative": dict(adamw=dict(lr=-1)),
        r"betas of adamw must be two numbers from 0 to below 1, not \(1.5, 0.9\)": dict(adamw=dict(betas=(1.5, 0.9))),
        "ns_dtype must be torch.bfloat16, .*, not torch.int8": dict(ns_dtype=torch.int8),  # moved nothing at all
        "splits names 'w', and params come without names": dict(splits={"w": [2, 2]}),
    }.items():
        with pytest.raises(ValueError, match=message):
            optim.Muon([weight], **options)
    for rows in ([1, 2], [-1, 5]):
        with pytest.raises(ValueError, match=r"splits\['w'\] are \[.*\] rows, and the parameter has 4"):
            optim.Muon([("w", weight)], splits={"w": rows})
    with pytest.raises(ValueError, match="splits names 'v', which no parameter given is called"):
        optim.Muon([("w", weight)], splits={"v": [2, 2]})
    for message, options in {
        "adjust_lr_fn must be original or": dict(adjust_lr_fn="other"),  # was taken for `original`
        "ns_steps must be 1 to 99": dict(ns_steps=0),
        "lr must not be negative": dict(lr=-1),
        "eps of adamw must not be negative": dict(eps=-1, use_muon=False),
    }.items():
        with pytest.raises(ValueError, match=message):
            optim.Muon([dict(params=[weight], **options)])
    with pytest.raises(ValueError, match=r"of matrices, and one has the shape \(3,\)"):
        optim.Muon([{"params": [torch.nn.Parameter(torch.ones(3))], "use_muon": True}])
    with pytest.raises(TypeError, match="ordered collections"):
        optim.Muon([{"params": {weight}}])
