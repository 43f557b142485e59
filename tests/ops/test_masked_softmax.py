"""What the registry's proof cannot see of masked softmax: long rows, what is never read, and masks that stay small."""

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract.backends import usable
from tilestack.kernels.softmax import masked as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(usable("triton", DEVICE) is not True, reason=str(usable("triton", DEVICE))),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, for arithmetic with infinities
]


def scores(*shape, seed=0):
    return (4 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


def below_diagonal(rows, columns):
    return torch.ones(rows, columns, dtype=torch.bool, device=DEVICE).tril(columns - rows)


@pytest.fixture(params=["in registers", "long"])
def rows_kept(request, monkeypatch):
    if request.param == "long":
        monkeypatch.setattr(kernels, "WIDEST_SOFTMAX", 16)
        monkeypatch.setattr(kernels, "CHUNK", 32)


@pytest.mark.usefixtures("rows_kept")
@pytest.mark.parametrize("shape", [(40, 40), (2, 5, 100), (70, 40)], ids=str)
def test_causal_is_masked_below_the_diagonal(shape):
    x, grad = scores(*shape).requires_grad_(), scores(*shape, seed=1)
    with contract.backend("triton"):
        out = ops.causal_softmax(x, 0.25)
    expected = ops.masked_softmax.definition(0.25 * x, below_diagonal(*shape[-2:]))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad) for y in (out, expected)))


@pytest.mark.usefixtures("rows_kept")
def test_mask_agrees_with_pytorch_where_it_shows_something():
    x, grad = scores(2, 3, 7, 100).requires_grad_(), scores(2, 3, 7, 100, seed=1)
    mask = scores(2, 1, 7, 100, seed=2) > 0
    expected = torch.softmax(x.masked_fill(~mask, -torch.inf), -1)
    with contract.backend("triton"):
        out = ops.masked_softmax(x, mask)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad) for y in (out, expected)))


@pytest.mark.usefixtures("rows_kept")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_is_excluded_does_not_matter(backend):
    seen = below_diagonal(50, 40)
    x = scores(50, 40).masked_fill(~seen, torch.nan).requires_grad_()
    grad = scores(50, 40, seed=1).masked_fill(~seen, torch.nan)
    with contract.backend(backend):
        masked, causal = ops.masked_softmax(x, seen), ops.causal_softmax(x)
    torch.testing.assert_close(masked, causal)
    assert not bool(masked[~seen].any())
    torch.testing.assert_close(masked[10:].sum(-1), torch.ones_like(masked[10:, 0]))  # the first ten rows see nothing
    if backend == "triton":
        (dx,) = torch.autograd.grad(causal, x, grad)
        assert bool(dx.isfinite().all())
        assert not bool(dx[~seen].any())


@pytest.mark.parametrize("shape", [(2, 1, 5, 8), (2, 1, 1, 8), (5, 8), (1, 3, 1, 8), (1, 1, 1, 8)], ids=str)
def test_a_shared_mask_is_not_spread_out(shape):
    mask = torch.ones(shape, dtype=torch.bool, device=DEVICE)
    found, *_ = kernels.places_in_mask(mask, torch.Size((2, 3, 5, 8)))
    assert found.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()


def test_a_mask_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"mask must be boolean, True where a score counts, not torch\.float64"):
        ops.masked_softmax(scores(2, 3), scores(2, 3))
    with pytest.raises(ValueError, match=r"a mask of shape \(2,\) does not broadcast to x of shape \(2, 3\)"):
        ops.masked_softmax(scores(2, 3), torch.ones(2, dtype=torch.bool, device=DEVICE))
