"""The 8-bit step to the code: what a kernel encodes is the nearest code, and a master copy is what it updates."""

import pytest
import torch
import triton
import triton.language as tl

from tilestack import backend, optim
from tilestack.kernels.optim.eight_bit import BLOCK, SIGNED, UNSIGNED, signed_codes, unsigned_codes
from tilestack.optim.dynamic_map import dynamic_map, encode

UNITS = 4  # of float32: a division, a power of ten and a product before the code is read off


@triton.jit
def codes_kernel(x_ptr, out_ptr, SIGN: tl.constexpr, LINES: tl.constexpr, N: tl.constexpr):
    lane = tl.arange(0, N)
    x = tl.load(x_ptr + lane)
    one = tl.full([N], 1.0, tl.float32)
    if SIGN:
        code = signed_codes(x, one, LINES)
    else:
        code = unsigned_codes(x, one, LINES)
    tl.store(out_ptr + lane, code.to(tl.uint8))


def near_every_middle(signed):
    """Values on both sides of every middle between two codes, from a hundredth of a gap away down to a few units."""
    ordered = dynamic_map(signed).double().sort().values
    middles, gaps = (ordered[1:] + ordered[:-1]) / 2, ordered.diff()
    around = torch.tensor([-0.3, -0.01, -1e-4, 1e-4, 0.01, 0.3], dtype=torch.float64)
    return torch.cat([(middles[:, None] + gaps[:, None] * around).flatten(), ordered]).float()


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_the_nearest(signed):
    x = near_every_middle(signed)
    x = x[(x != 0) if signed else (x > 0)]
    filled = torch.zeros(2048)
    filled[: len(x)] = x
    found = torch.empty(2048, dtype=torch.uint8)
    codes_kernel[(1,)](filled, found, SIGN=signed, LINES=SIGNED if signed else UNSIGNED, N=2048)
    wanted = torch.stack([encode(torch.stack([value, torch.tensor(1.0)]), signed)[0][0] for value in x])
    values = dynamic_map(signed).double()
    differing = found[: len(x)] != wanted
    # The other of two codes, only where a value lies in the middle between them to the last digits.
    distance = lambda codes: (values[codes.long()] - x.double()).abs()
    excess = (distance(found[: len(x)]) - distance(wanted)).abs()
    assert bool((excess[differing] <= UNITS * torch.finfo(torch.float32).eps * x[differing].abs()).all())


def test_a_master_copy_is_what_an_8bit_step_updates(path):
    """Steps too small for the parameter's own dtype add up in the master copy, and in nothing else."""
    param = torch.nn.Parameter(torch.ones(600, dtype=torch.bfloat16))
    optimizer = optim.AdamW8bit([param], lr=1e-4, weight_decay=0.0, min_8bit_size=64, master_weights=True)
    for _ in range(20):
        param.grad = torch.ones_like(param)
        optimizer.step()
    master = optimizer.state[param]["master_param"]
    # Every step is by lr where all gradients are equal, up to the quantised moments' error.
    torch.testing.assert_close(master, torch.full_like(master, 1 - 20 * 1e-4), rtol=0, atol=20 * 1e-4 * 0.02)
    assert torch.equal(param.detach(), master.bfloat16())


def test_8bit_kernels_follow_the_definition_to_the_code(path, run):
    """Where a code differs from the definition's, the moment lies between both, at their middle to the last digits."""
    make = lambda params: optim.AdamW8bit(params, lr=1e-2, min_8bit_size=64)
    params, optimizer = run(make, count=1)
    with backend("torch"):
        expected, reference = run(make, count=1)
    for a, b in zip(params, expected, strict=True):
        for name, share, power, signed in (("exp_avg", 0.1, 1, True), ("exp_avg_sq", 0.001, 2, False)):
            mine, theirs = optimizer.state[a][name], reference.state[b][name]
            if mine.dtype != torch.uint8 or not bool((mine != theirs).any()):
                continue
            moment = share * b.grad.double() ** power
            scale = reference.state[b][f"{name}_scale"].double().repeat_interleave(256)[: moment.numel()]
            flat = lambda t: torch.empty_like(b, dtype=t.dtype).copy_(t).as_strided((b.numel(),), (1,))
            relative = flat(moment) / scale
            off = lambda codes: (dynamic_map(signed).double()[flat(codes).long()] - relative).abs()
            assert float((off(mine) - off(theirs)).abs().max()) <= 1e-6


@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "off 16 bytes"])
def test_whole_tiles_and_those_cut_short_follow_the_definition(path, first):
    """One whole tile and one that ends within a block; off 16 bytes, both go the way of the cut one."""
    drawn = torch.randn(BLOCK + 700 + first, generator=torch.Generator().manual_seed(0))
    mine, theirs = (torch.nn.Parameter(drawn.clone()[first:]) for _ in range(2))
    assert mine.data_ptr() % 16 == 4 * first
    optimizer, reference = (optim.AdamW8bit([p], lr=1e-2, min_8bit_size=64) for p in (mine, theirs))
    for step in range(2):
        g = torch.Generator().manual_seed(step)
        grad = torch.randn(mine.shape, generator=g) * torch.logspace(-5, 0, len(mine))
        mine.grad, theirs.grad = grad, grad
        optimizer.step()
        with backend("torch"):
            reference.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        a, b = optimizer.state[mine], reference.state[theirs]
        torch.testing.assert_close(a[f"{name}_scale"], b[f"{name}_scale"], rtol=1e-5, atol=0)
        assert (a[name] != b[name]).double().mean() <= 0.01


def test_a_gradient_that_is_no_number_takes_its_block_along(path):
    """As in the definition: a scale is the largest magnitude of a block, and NaN is not passed over."""
    param = torch.nn.Parameter(torch.ones(600))
    optimizer = optim.AdamW8bit([param], min_8bit_size=64)
    for value in (torch.nan, 1.0):
        param.grad = torch.ones_like(param)
        param.grad[300] = value
        optimizer.step()
    assert optimizer.state[param]["exp_avg_scale"].isnan().tolist() == [False, True, False]
    assert optimizer.state[param]["exp_avg_sq_scale"].isnan().tolist() == [False, True, False]
    lost = torch.zeros(600, dtype=torch.bool)
    lost[256:512] = True
    assert torch.equal(param.isnan(), lost)
