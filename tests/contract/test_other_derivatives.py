"""Derivatives and views that kernels know nothing of: refused by name, or right."""

import pytest
import torch
from torch.autograd import forward_ad

from tilestack import ops
from tilestack.contract import backend

pytestmark = pytest.mark.usefixtures("each_node")
X, TANGENT = torch.randn(5), torch.randn(5)


def test_forward_mode_works_on_torch_and_is_refused_by_name_on_triton():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, TANGENT)
        with backend("torch"):
            found = forward_ad.unpack_dual(ops.silu(dual)).tangent
            expected = forward_ad.unpack_dual(torch.nn.functional.silu(dual)).tangent
        torch.testing.assert_close(found, expected)
        with backend("triton"):
            ops.silu(X)  # no tangent, no trouble
            with pytest.raises(
                NotImplementedError, match="silu has no forward-mode derivative on triton; run it `with"
            ):
                ops.silu(dual)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_negated_view_keeps_its_sign(name):
    negated = torch._neg_view(X)
    with backend(name):
        for _ in range(3):
            torch.testing.assert_close(ops.silu(negated), torch.nn.functional.silu(-X))
            torch.testing.assert_close(ops.silu(X), torch.nn.functional.silu(X))
    leaf = X.clone().requires_grad_()
    with backend(name):
        ops.silu(torch._neg_view(leaf)).sum().backward()
    other = X.clone().requires_grad_()
    torch.nn.functional.silu(-other).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: torch.func.vmap(f)(X.view(5, 1)),
        lambda f: torch.func.grad(lambda x: f(x).sum())(X),
        lambda f: torch.func.grad(lambda x: f(X).sum() + x.sum())(X),
        lambda f: torch.func.hessian(lambda x: f(x).sum())(X),
    ],
    ids=["vmap", "grad", "grad beside", "hessian"],
)
def test_transforms_work_on_torch_and_are_refused_by_name_on_triton(transformed):
    with backend("torch"):
        torch.testing.assert_close(transformed(ops.silu), transformed(torch.nn.functional.silu))
    with backend("triton"):
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=r"silu (cannot be transformed by torch.func|has no forward)"):
                transformed(ops.silu)


def test_a_second_derivative_is_refused_where_a_gradient_comes_from_extras_alone():
    """A product with the Hessian of a loss: the loss's own second derivative must not be left out without a word."""
    targets, direction = torch.tensor([1, 2]), torch.randn(2, 5)
    product = lambda loss: torch.autograd.functional.vhp(
        lambda x: loss(x.tanh(), targets), torch.randn(2, 5), direction, strict=False
    )
    with backend("torch"):
        assert product(ops.cross_entropy)[1].any()
    with (
        backend("triton"),
        pytest.raises(NotImplementedError, match="cross_entropy has no second derivative on triton"),
    ):
        product(ops.cross_entropy)
