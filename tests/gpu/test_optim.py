"""The optimizers on a GPU: against torch's, without host syncs, and inside CUDA graphs."""

import copy

import pytest
import torch

from tilestack import backend, optim
from tilestack.optim.dynamic_map import dynamic_map

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

SHAPES = [(4096, 33), (1,), (0,), (100_003,), (64, 64)]
PAIRS = [
    ("SGD", dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
    ("Adam", dict(weight_decay=0.1, amsgrad=True)),
    ("AdamW", dict(maximize=True)),
]


def parameters(dtype=torch.float32, drawn=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(s, dtype=torch.float64, generator=g).to(drawn).to("cuda", dtype)) for s in SHAPES
    ]


def give_gradients(params, step, keep=False, drawn=torch.float32):
    g = torch.Generator("cuda").manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape, device="cuda", generator=g).to(drawn).to(param.dtype)
        if keep and param.grad is not None:
            param.grad.copy_(grad)
        else:
            param.grad = grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_errs_no_more_than_torch(name, options, dtype):
    if dtype == torch.float16 and name != "SGD":
        options = options | dict(eps=1e-3)  # torch's own 1e-8 is zero in float16, and its step NaN
    runs = []
    for home, kind in ((optim, dtype), (torch.optim, dtype), (torch.optim, torch.float64)):
        params = parameters(kind, dtype)
        optimizer = getattr(home, name)(params, **options)
        for step in range(20):
            give_gradients(params, step, drawn=dtype)
            optimizer.step()
        runs.append([param.detach().double() for param in params])
    for ours, theirs, truth in zip(*runs, strict=True):
        own = (theirs - truth).abs().max() if truth.numel() else 0
        # in float64 torch is the truth: what 20 steps may part by is derived in tests/optim/test_matches_torch.py
        unit = torch.finfo(dtype).eps * truth.abs() * (100 if dtype == torch.float64 else 1) + 1e-13
        assert bool(((ours - truth).abs() <= 2 * own + unit).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_8bit_step_is_the_definitions(dtype):
    """From the same moments to the same codes; where they differ, a last bit has tipped a value over a middle."""
    params = parameters(dtype)
    optimizer = optim.AdamW8bit(params, lr=1e-2)
    give_gradients(params, 0)
    optimizer.step()
    give_gradients(params, 1)
    twins, twin = copy.deepcopy((params, optimizer))
    for param, other in zip(params, twins, strict=True):
        other.grad = param.grad.clone()
    optimizer.step()
    with backend(adamw8bit="torch"):
        twin.step()
    for a, b in zip(params, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-6)
        mine, theirs = optimizer.state[a], twin.state[b]
        for name in ("exp_avg_scale", "exp_avg_sq_scale"):
            torch.testing.assert_close(mine.get(name), theirs.get(name), rtol=1e-5, atol=0)
        for name in ("exp_avg", "exp_avg_sq"):
            if mine[name].dtype == torch.uint8:
                assert (mine[name] != theirs[name]).double().mean() <= 0.01
                values = dynamic_map(name == "exp_avg").cuda()
                off = (values[mine[name].long()] - values[theirs[name].long()]).abs().max()
                assert off <= 0.9 / 64 * 1.001  # the widest part of a decade


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: optim.AdamW(p, clip_norm=1.0, lr=torch.tensor(1e-3, device="cuda")),
        lambda p: optim.AdamW(p, stochastic_rounding=True),
        lambda p: optim.AdamW(p, master_weights=True),
        lambda p: optim.AdamW8bit(p),
        lambda p: optim.Muon(p, master_weights=True, clip_norm=1.0),
    ],
)
@pytest.mark.parametrize("new_gradients", [False, True])
def test_a_graph_replays_what_eager_steps_do(make, new_gradients):
    """With gradients of its own or those of the eager steps; and eager steps between replays do not disturb it."""
    params = parameters(torch.bfloat16)
    optimizer = make(params)
    give_gradients(params, 0)
    optimizer.step()
    twins, twin = copy.deepcopy((params, optimizer))
    if new_gradients:
        give_gradients(params, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
        optimizer.step()
    captured = [param.grad for param in params]
    for _ in range(2):
        give_gradients(params, 2)  # an eager step on other gradients in between
        optimizer.step()
        for param, grad in zip(params, captured, strict=True):
            param.grad = grad
        give_gradients(params, 3, keep=True)
        graph.replay()
        for seed in (2, 3, 3):
            give_gradients(twins, seed)
            twin.step()
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_capture_without_a_step_before_says_so():
    params = parameters()
    give_gradients(params, 0)
    with pytest.raises(RuntimeError, match="run one step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optim.AdamW(params).step()


def test_nothing_waits_for_the_device():
    params = parameters()
    optimizer = optim.AdamW(params, clip_norm=1.0)
    give_gradients(params, 0)
    optimizer.step()
    scale, found = torch.tensor(2.0, device="cuda"), torch.tensor(0.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.grad_scale, optimizer.found_inf = scale, found
            optimizer.step()
            optim.clip_grad_norm_(params, 1.0)
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(optimizer.state[params[0]]["step"]) == 4


def test_a_found_infinity_changes_nothing():
    params = parameters()
    optimizer = optim.AdamW(params)
    give_gradients(params, 0)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    optimizer.found_inf = torch.tensor(1.0, device="cuda")
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    assert int(optimizer.state[params[0]]["step"]) == 1


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_muon_errs_no_more_than_torchs_over_50_steps(rule):
    shapes, runs = [(256, 640), (640, 256), (256, 640), (130, 70)], []
    kinds = (optim.Muon, torch.float32, {}), (torch.optim.Muon, torch.float32, {})
    for kind, dtype, more in (*kinds, (optim.Muon, torch.float64, dict(ns_dtype=torch.float64))):
        g = torch.Generator("cuda").manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, device="cuda", generator=g).to(dtype)) for s in shapes]
        optimizer = kind(params, lr=0.02, adjust_lr_fn=rule, **more)
        for step in range(50):
            give_gradients(params, step)
            optimizer.step()
        runs.append([param.detach().double() for param in params])
    for ours, theirs, truth in zip(*runs, strict=True):
        own = theirs - truth
        assert bool(((ours - truth).abs() <= 2 * own.abs().max() + torch.finfo(torch.float32).eps * truth.abs()).all())
        assert (ours - truth).norm() <= 1.2 * own.norm()


def test_muon_waits_for_nothing():
    params = [torch.nn.Parameter(torch.randn(s, device="cuda")) for s in [(64, 96), (96, 64), (64,)]]
    optimizer = optim.Muon(params, clip_norm=1.0)
    give_gradients(params, 0)
    optimizer.step()
    optimizer.found_inf = torch.tensor(0.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
