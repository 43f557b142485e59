"""Rows too long for registers, which the registry's small cases never reach, and rows of infinities."""

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract.backends import usable
from tilestack.kernels.softmax import rows as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(usable("triton", DEVICE) is not True, reason=str(usable("triton", DEVICE))),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, for arithmetic with infinities
]


def awkward_rows():
    x = 4 * torch.randn(6, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1, :70] = -torch.inf
    x[2, 5:] = -torch.inf  # lanes of the long kernels that see nothing but -inf
    x[2] -= 1000
    x[3] = -torch.inf
    x[4, 3] = torch.nan
    x[5, 7] = torch.inf
    return x.to(DEVICE)


@pytest.fixture(params=["in registers", "read again", "long"])
def rows_kept(request, monkeypatch):
    if request.param == "read again":
        monkeypatch.setattr(kernels, "HELD", 16)
    if request.param == "long":
        monkeypatch.setattr(kernels, "WIDEST_SOFTMAX", 16)
        monkeypatch.setattr(kernels, "CHUNK_BYTES", 128)
        monkeypatch.setattr(kernels, "BACKWARD_CHUNK_BYTES", 128)


@pytest.mark.usefixtures("rows_kept")
@pytest.mark.parametrize(
    "described", [ops.softmax, ops.log_softmax, ops.logsumexp], ids=lambda described: described.name
)
def test_infinite_scores_are_as_the_definition_has_them(described):
    x = awkward_rows()
    with contract.backend("triton"):
        torch.testing.assert_close(described(x), described.definition(x), equal_nan=True)
    x = x[:5].requires_grad_()  # an infinite logsumexp has a gradient in no sense worth agreeing on
    with contract.backend("triton"):
        out = described(x)
    arriving = torch.ones_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, x, arriving), torch.autograd.grad(described.definition(x), x, arriving), equal_nan=True
    )


@pytest.mark.usefixtures("rows_kept")
@pytest.mark.parametrize("dim", [0, 1])
def test_both_gradients_of_logsumexp_are_those_of_the_definition(dim):
    """That of a compiler, which finds the normaliser again, and the eager one, which has kept it."""
    x = awkward_rows()[:3].requires_grad_()
    out = ops.logsumexp.definition(x, dim)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grad[out.isinf()] = 0
    (expected,) = torch.autograd.grad(out, x, grad)
    source = x.detach()
    _, lse = kernels.logsumexp_with_lse(source, dim)
    for found in (
        kernels.logsumexp_backward(grad, source, dim),
        kernels.logsumexp_with_lse_backward(grad, source, lse, dim),
    ):
        torch.testing.assert_close(found, expected, equal_nan=True)
