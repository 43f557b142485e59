"""Products of few rows: steps along K that end anywhere, and shares of it that leave nothing behind."""

import pytest
import torch

from tilestack.contract.backends import usable
from tilestack.contract.workspace import workspace
from tilestack.kernels.matmul import gemv, slices, split_k

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(usable("triton", CPU) is not True, reason=str(usable("triton", CPU)))


def operands(M, N, K):
    draw = lambda *shape, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw(M, K, seed=0), draw(N, K, seed=1).T, draw(N, seed=2)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("inner", [15, 16, 50, 64])
def test_a_gemv_walks_over_every_step(rows, inner):
    x, b, bias = operands(rows, 7, inner)
    torch.testing.assert_close(gemv.gemv(x, b, bias, gemv.Config(2, 16, 4)), x @ b + bias)


@pytest.mark.parametrize("inner", [16, 50, 64, 144])
@pytest.mark.parametrize("splits", [2, 3, 8])
def test_shares_of_k_add_up_and_counters_go_back_to_zero(inner, splits):
    x, b, bias = operands(5, 40, inner)
    config = split_k.Config(16, 16, splits)
    first = split_k.split_product(x, b, bias, config)
    torch.testing.assert_close(first, x @ b + bias)
    assert not workspace("split_k_counts", (3,), torch.int32, CPU).any()
    assert torch.equal(split_k.split_product(x, b, bias, config), first)


@pytest.mark.parametrize("rows", [1, 5, 16, 20, 32])
@pytest.mark.parametrize("inner", [16, 50, 64, 144])
def test_slices_of_the_warps_add_up(rows, inner):
    x, b, bias = (tensor.half() for tensor in operands(rows, 20, inner))
    found = slices.sliced_product(x, b, bias, slices.Config(8, 16, 4, stages=2))
    truth = x.double() @ b.double() + bias
    torch.testing.assert_close(found.double(), truth, rtol=2**-10, atol=2**-14 * inner)
