"""Stacks of products: each matrix meets its own, however both lie in memory, and a row has its bits in any batch."""

import pytest
import torch

from tilestack import backend, ops

BACKENDS = ["torch", "aten", "triton"]


def drawn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (drawn(3, 5, 20), drawn(3, 20, 7, seed=1)),
        (drawn(3, 20, 5).mT, drawn(3, 7, 20, seed=1).mT),
        (
            drawn(5, 3, 40)[..., ::2].transpose(0, 1),
            drawn(3, 20, 9, seed=1)[..., 2:],
        ),  # heads between rows and their elements
        (drawn(1, 5, 20).expand(3, -1, -1), drawn(20, 7, seed=1).expand(3, -1, -1)),
        (drawn(2, 3, 0), drawn(2, 0, 4)),
        (drawn(0, 3, 2), drawn(0, 2, 4)),
    ],
    ids=["plain", "turned", "between", "expanded", "inner 0", "none"],
)
def test_each_matrix_meets_its_own(name, a, b):
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    with backend(name):
        out = ops.bmm(a, b)
    expected = (a[:, :, :, None] * b[:, None]).sum(2)
    torch.testing.assert_close(out, expected)
    arriving = drawn(*out.shape, seed=2)
    for found, truth in zip(
        torch.autograd.grad(out, (a, b), arriving), torch.autograd.grad(expected, (a, b), arriving), strict=True
    ):
        torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    """Of the stack and of rows; its gradient too. Rows lie as heads do, between which those of other heads are."""
    a, b, arriving = (
        drawn(140, 2, 80, dtype=dtype),
        drawn(2, 80, 48, dtype=dtype, seed=1),
        drawn(2, 140, 48, dtype=dtype, seed=2),
    )

    def run(rows, stack=slice(None)):
        part = a[rows].transpose(0, 1)[stack].detach().requires_grad_()
        with backend("triton"):
            out = ops.bmm(part, b[stack])
        return out, torch.autograd.grad(out, part, arriving[stack, rows])[0]

    whole = run(slice(None))
    for row in (0, 3, 139):
        for found, among in zip(run(slice(row, row + 1)), whole, strict=True):
            assert torch.equal(found, among[:, row : row + 1])
    for found, among in zip(run(slice(None), slice(1, 2)), whole, strict=True):
        assert torch.equal(found, among[1:])


@pytest.mark.parametrize("name", BACKENDS)
def test_autocast_lowers_both_and_gradients_are_their_own(name):
    a, b = drawn(2, 3, 16, dtype=torch.float32).requires_grad_(), drawn(2, 16, 4, dtype=torch.float32).requires_grad_()
    with backend(name), torch.autocast("cpu", torch.bfloat16):
        out = ops.bmm(a, b)
    assert out.dtype == torch.bfloat16
    assert [g.dtype for g in torch.autograd.grad(out.float().sum(), (a, b))] == [torch.float32] * 2


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 3, 4), r"a is \[B, M, K\] and b \[B, K, N\], but a is \(2, 3\) and b is \(2, 3, 4\)"),
        (torch.ones(2, 3, 4), torch.ones(3, 4, 5), r"but a is \(2, 3, 4\) and b is \(3, 4, 5\)"),
        (torch.ones(2, 3, 4), torch.ones(2, 3, 4), r"but a is \(2, 3, 4\) and b is \(2, 3, 4\)"),
        (torch.ones(2, 3, 4), torch.ones(2, 4, 4).half(), "a and b must have one dtype, but a is torch.float32 and b is torch.float16"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(a, b, message):
    with pytest.raises(ValueError, match=message):
        ops.bmm(a, b)
