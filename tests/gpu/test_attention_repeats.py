"""Hopper's attention over and over, beside other work: what has an order of its own has the same bits every time."""

import time

import pytest
import torch

from tilestack import ops
from tilestack.contract import backend
from tilestack.contract.cases import Make
from tilestack.kernels.hopper.attention import CONFIGS, ORDERED

RUNS, SECONDS = 3000, 6  # of each test; whichever comes first ends it
TOGETHER = 100  # runs between two looks at what they were: fewer would give the GPU pauses
SHAPES = [(3, 1000, 1000, 6, 2, True), (1, 640, 1333, 4, 4, True), (2, 517, 300, 4, 1, False)]
ENDS = [0, 40, 900, 1000, 1300, 2000, 2128, 2500, 3000, 3000]  # of documents in the rows of the first
OWN_FORWARD = [
    (dim, f"{backend}:{name}")
    for dim, of in ((64, "of_64"), (128, "of_128"))
    for backend, configs in (("gluon", CONFIGS), ("gluon_ordered", ORDERED))
    for name, config in configs.items()
    if getattr(config, of) and config.own_backward
]


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Gluon's kernels are for Hopper, which this GPU is not")


@pytest.mark.parametrize(("dim", "config"), OWN_FORWARD)
@pytest.mark.parametrize(("shape", "ends"), [*((shape, None) for shape in SHAPES), (SHAPES[0], ENDS)], ids=str)
def test_every_run_has_the_bits_of_the_first_but_for_the_order_of_dq(dim, config, shape, ends):
    in_one_order = config.startswith("gluon_ordered")
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
    batch, queries, keys, heads, kv_heads, causal = shape
    make, sizes = Make(torch.bfloat16, "cuda"), ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    leaves = [make.normal(batch, *size, dim).requires_grad_() for size in sizes]
    arriving = make.normal(batch, queries, heads, dim)
    others, disturbance = torch.cuda.Stream(), torch.empty(1 << 26, device="cuda")
    first, differing, until = None, torch.zeros(4, dtype=torch.int64, device="cuda"), time.monotonic() + SECONDS
    with backend(attention=config):
        for run in range(RUNS):
            with torch.cuda.stream(others):
                if run % 3:  # programs start and end at other times
                    disturbance[: (run % 7 + 1) << 20].mul_(1.0)
            out = ops.attention(*leaves, cu_seqlens, causal=causal)
            found = out.detach(), *torch.autograd.grad(out, leaves, arriving)
            first = first or found
            differing += differences(found, first, in_one_order)
            if (run + 1) % TOGETHER == 0:
                assert differing.tolist() == [0] * 4, (
                    f"runs that differ of {run + 1}, in out, dq, dk and dv: {differing}"
                )
                if time.monotonic() > until:
                    break


def differences(found: tuple[torch.Tensor, ...], first: tuple[torch.Tensor, ...], in_one_order: bool) -> torch.Tensor:
    """Whether out, dk and dv differ in any bit, and dq too or else by more than sums rounded a unit or two apart; told on the
    GPU."""
    unlike = [(one != other).any() for one, other in zip(found, first, strict=True)]
    if in_one_order:
        return torch.stack(unlike)
    dq, once = found[1].float(), first[1].float()
    unlike[1] = ((dq - once).abs() <= 2**-10 + 2**-6 * once.abs()).logical_not().any()
    return torch.stack(unlike)
