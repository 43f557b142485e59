"""Hopper's attention over and over, beside other work: what has an order of its own has the same bits every time."""

import pytest
import torch

from tilestack import ops
from tilestack.contract import backend
from tilestack.contract.cases import Make
from tilestack.kernels.hopper.attention import CONFIGS

RUNS = 300
SHAPES = [(3, 1000, 1000, 6, 2, True), (1, 640, 1333, 4, 4, True), (2, 517, 300, 4, 1, False)]
ENDS = [0, 40, 900, 1000, 1300, 2000, 2128, 2500, 3000, 3000]  # of documents in the rows of the first


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Gluon's kernels are for Hopper, which this GPU is not")


@pytest.mark.parametrize("config", [name for name, config in CONFIGS.items() if config.of_64])
@pytest.mark.parametrize(("shape", "ends"), [*((shape, None) for shape in SHAPES), (SHAPES[0], ENDS)], ids=str)
def test_every_run_has_the_bits_of_the_first_but_for_the_order_of_dq(config, shape, ends):
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
    batch, queries, keys, heads, kv_heads, causal = shape
    make, sizes = Make(torch.bfloat16, "cuda"), ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    leaves = [make.normal(batch, *size, 64).requires_grad_() for size in sizes]
    arriving = make.normal(batch, queries, heads, 64)
    others, disturbance = torch.cuda.Stream(), torch.empty(1 << 26, device="cuda")
    first = None
    with backend(attention=f"gluon:{config}"):
        for run in range(RUNS):
            with torch.cuda.stream(others):
                if run % 3:  # programs start and end at other times
                    disturbance[: (run % 7 + 1) << 20].mul_(1.0)
            out = ops.attention(*leaves, cu_seqlens, causal=causal)
            found = out.detach(), *torch.autograd.grad(out, leaves, arriving)
            first = first or found
            same = [torch.equal(*pair) for pair in zip(found, first, strict=True)]
            assert [same[0], *same[2:]] == [True] * 3, f"run {run}: {same}"
            torch.testing.assert_close(found[1], first[1], rtol=2**-6, atol=2**-10)  # sums rounded a unit or two apart
