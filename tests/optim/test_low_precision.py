"""bfloat16 with stochastic rounding or a master copy, and 8-bit moments."""

import copy
import math

import pytest
import torch

from tilestack import backend, optim
from tilestack.optim.definitions import random_words, round_stochastically
from tilestack.optim.dynamic_map import BLOCK, decode, dynamic_map, encode


def test_stochastic_rounding_is_unbiased():
    """The mean of n roundings of one value has the deviation ulp · √(q (1 - q) / n) ≤ ulp / (2 √n); six of them bound it
    with a failure probability below 2e-9 per value, and the seed is fixed."""
    n = 4096
    for value in (1.001, -3.3, 1e-20, 0.7):
        x = torch.full((n,), value)
        rounded = round_stochastically(x, random_words(3, 5, 1, x)[0]).double()
        lower, upper = rounded.min(), rounded.max()
        assert torch.equal(rounded.bfloat16().double(), rounded)
        assert lower <= x[0] <= upper
        ulp = float(upper - lower)
        assert 0 < ulp <= abs(value) * 2**-7
        assert abs(float(rounded.mean()) - float(x[0])) <= 6 * ulp / (2 * math.sqrt(n))


def test_rounding_keeps_what_is_exact_infinite_or_nan():
    x = torch.tensor([1.0, -0.0, math.inf, -math.inf, math.nan])
    x = torch.cat([x, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)])
    for word in random_words(0, 1, 0, x):
        rounded = round_stochastically(x, word)
        assert torch.equal(rounded[:4], x[:4])
        assert bool(rounded[4:].isnan().all())


def test_random_words_differ_between_steps_tensors_seeds_and_uses():
    x = torch.empty(2000)
    drawn = torch.cat([random_words(*key, x) for key in ((0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0))]).double()
    correlation = torch.corrcoef(drawn).fill_diagonal_(0)
    assert correlation.abs().max() < 6 / math.sqrt(2000)  # six deviations of a correlation of independent words


def test_updates_too_small_for_bfloat16_are_not_lost(path):
    """200 steps of 1e-3 from 1: a bfloat16 there has a spacing of 2⁻⁸, so that rounding to nearest never moves."""
    ends = {}
    for name, options in dict(
        nearest={}, stochastic=dict(stochastic_rounding=True), master=dict(master_weights=True)
    ).items():
        if path == "triton" and name != "stochastic":
            continue  # the interpreter truncates what it casts to bfloat16
        weight = torch.nn.Parameter(torch.ones(500, dtype=torch.bfloat16))
        optimizer = optim.AdamW([weight], lr=1e-3, weight_decay=0, **options)
        for _ in range(20 if path == "triton" else 200):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        ends[name] = weight.detach().double().mean().item()
    if path == "triton":
        # Each of the 20 steps rounds 500 elements independently, by at most a spacing of 2⁻⁸.
        assert abs(ends["stochastic"] - 0.98) <= 6 * 2**-8 * math.sqrt(20 / 500)
    else:
        assert ends["nearest"] == 1
        assert abs(ends["master"] - 0.8) <= 2**-9
        assert abs(ends["stochastic"] - 0.8) <= 6 * 2**-8 * math.sqrt(200 / 500)


@pytest.mark.parametrize("make", [
    lambda params: optim.AdamW(params, lr=1e-2, stochastic_rounding=True, amsgrad=True, seed=11),
    lambda params: optim.AdamW8bit(params, lr=1e-2, stochastic_rounding=True, min_8bit_size=64, seed=11),
], ids=["bfloat16", "8 bits"])  # fmt: skip
def test_kernels_round_as_the_definition_does(path, run, make):
    """Compared as bits with the definition: a rounding that used other random words would differ almost everywhere."""
    params, optimizer = run(make, torch.bfloat16)
    with backend("torch"):
        expected, reference = run(make, torch.bfloat16)
    for a, b in zip(params, expected, strict=True):
        same = (a == b).double().mean().item() if a.numel() else 1.0
        assert same >= 0.99  # a float32 that differs in its last bit may round the other way once in 2¹⁶
        for name in optimizer.state[a].keys() & {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}:
            mine, theirs = optimizer.state[a][name], reference.state[b][name]
            if mine.dtype == torch.uint8:
                assert (mine != theirs).double().mean() <= 0.01
                continue
            assert mine.dtype == torch.bfloat16
            torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=0)


def test_a_master_copy_is_a_float32_run(path, run):
    """Parameters in float16 with a master copy follow the float32 run on the same gradients, rounded for show only."""
    make = lambda **options: lambda params: optim.AdamW(params, lr=1e-2, **options)
    params, optimizer = run(make(master_weights=True), torch.float16)
    full = [torch.nn.Parameter(p.detach().float()) for p in run(make(), torch.float16, count=0)[0]]
    reference = torch.optim.AdamW(full, lr=1e-2)
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        for param in full:
            param.grad = torch.randn(param.shape, dtype=torch.float64, generator=g).float().half().float()
        reference.step()
    for a, b in zip(params, full, strict=True):
        master = optimizer.state[a]["master_param"]
        assert master.dtype == optimizer.state[a]["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(master, b.detach(), rtol=1e-5, atol=1e-7)
        assert torch.equal(a.detach(), master.half())


def test_checkpoints_keep_master_copies_and_codes_exactly(path, run):
    for make in (
        lambda params: optim.AdamW(params, master_weights=True),
        lambda params: optim.AdamW8bit(params, min_8bit_size=64),
    ):
        params, optimizer = run(make, torch.float16, count=2)
        clones = [torch.nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in params]
        resumed = make(clones)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for a, b in zip(params, clones, strict=True):
            for name, value in optimizer.state[a].items():
                assert resumed.state[b][name].dtype == value.dtype
                assert torch.equal(resumed.state[b][name], value)
            a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        optimizer.step()
        resumed.step()
        assert all(torch.equal(a, b) for a, b in zip(params, clones, strict=True))


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_is_the_tree(signed):
    """256 different values: zero, one, and 2^f interval middles in each of seven decades, on both sides when signed."""
    values = dynamic_map(signed).double()
    assert len(values.unique()) == 256
    assert values[0] == 0
    assert values.max() == 1
    expected = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** ((6 if signed else 7) - decade) + 1, dtype=torch.float64) * 10.0**-decade
        middles = ((edges[1:] + edges[:-1]) / 2).tolist()
        expected += middles + ([-m for m in middles] if signed else [])
    torch.testing.assert_close(
        values.sort().values, torch.tensor(sorted(expected), dtype=torch.float64), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("signed", [True, False])
def test_quantisation_error_is_half_a_gap(signed):
    torch.manual_seed(0)
    x = torch.randn(1000) * torch.logspace(-7, 0, 1000)[torch.randperm(1000)]
    x = x if signed else x.square()
    x[512:768] = 0
    codes, scales = encode(x, signed)
    back = decode(codes, scales, signed)
    ordered = dynamic_map(signed).double().sort().values
    scale = scales.double().repeat_interleave(BLOCK)[:1000].clamp_min(1e-30)
    relative, decoded = x.double() / scale, back.double() / scale
    nearest = (relative[:, None] - ordered).abs().amin(1)
    # Unsigned values nearest to zero take the smallest code instead, so that nothing divides by their root.
    saved = (relative > 0) & (relative < ordered[1] / 2) & (not signed)
    rounding = torch.finfo(torch.float32).eps * 2 * relative.abs()
    assert bool(((decoded - relative).abs() <= nearest + rounding)[~saved].all())
    torch.testing.assert_close(decoded[saved], ordered[1].expand(int(saved.sum())), rtol=1e-6, atol=0)
    assert signed or bool(saved.any())
    assert bool((back[512:768] == 0).all())


def test_8bit_kernels_agree_with_the_definition(path, run):
    make = lambda params: optim.AdamW8bit(params, lr=1e-2, min_8bit_size=91)  # as large as one of them
    params, optimizer = run(make)
    with backend("torch"):
        expected, reference = run(make)
    assert 91 in [a.numel() for a in params]
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            mine, theirs = optimizer.state[a][name], reference.state[b][name]
            assert mine.dtype == (torch.uint8 if a.numel() >= 91 else torch.float32)
            if mine.dtype == torch.uint8:
                # the last bit of a float32 may tip a value over the middle between two codes
                assert (mine != theirs).double().mean() <= 0.01
                assert int((mine.int() - theirs.int()).abs().max()) <= 1


def test_8bit_moments_take_over_a_torch_checkpoint(path, run):
    params, full = run(lambda p: torch.optim.AdamW(p), count=2)
    quantised = optim.AdamW8bit([torch.nn.Parameter(p.detach().clone()) for p in params], min_8bit_size=64)
    quantised.load_state_dict(full.state_dict())
    for a, b in zip(params, quantised.param_groups[0]["params"], strict=True):
        if b.numel() >= 64:
            state = quantised.state[b]
            flat = state["exp_avg"].as_strided((b.numel(),), (1,))
            back = decode(flat, state["exp_avg_scale"], True)
            expected = torch.empty_like(b).copy_(full.state[a]["exp_avg"]).as_strided((b.numel(),), (1,)).detach()
            assert (back - expected).abs().max() <= expected.abs().max() * 0.45 / 64 * 1.01
        b.grad = torch.ones_like(b)
    quantised.step()
    assert all(bool(b.isfinite().all()) for b in quantised.param_groups[0]["params"])


def test_8bit_training_reaches_the_loss_of_32_bits():
    """A regression of 64 features: the same number of steps ends within a factor 1.1 of the float32 run's loss."""
    losses = {}
    for cls in (torch.optim.AdamW, optim.AdamW8bit):
        torch.manual_seed(0)
        x, y = torch.randn(64, 64), torch.randn(64, 8)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        optimizer = cls(model.parameters(), lr=3e-3, **({"min_8bit_size": 256} if cls is optim.AdamW8bit else {}))
        for _ in range(100):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        losses[cls] = float(loss.detach())
    assert losses[optim.AdamW8bit] <= 1.1 * losses[torch.optim.AdamW]
    assert losses[torch.optim.AdamW] < 0.5  # it has learned something to compare
