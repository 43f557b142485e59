"""The grouped product against one product per row, what it refuses, and PyTorch's own kernel as we call it."""

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract import backend
from tilestack.kernels import aten
from tilestack.kernels.matmul.grouped import zero_rows_past
from tilestack.tuning.preferences import look_up


def row_by_row(x, weight, offsets):
    group = torch.searchsorted(offsets, torch.arange(len(x), dtype=torch.int32), right=True)
    return torch.einsum("mk,mnk->mn", x, weight[group])


def arguments(ends, inner=16, columns=24, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ends[-1], inner, generator=generator).to(dtype)
    weight = torch.randn(len(ends), columns, inner, generator=generator).to(dtype)
    return x.requires_grad_(), weight.requires_grad_(), torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("chosen", ["torch", "triton"])
@pytest.mark.parametrize("ends", [[7], [3, 7, 11], [0, 5, 5, 40, 40], [0, 0, 0, 9]])
def test_each_row_meets_the_weight_of_its_group(ends, chosen):
    x, weight, offsets = arguments(ends)
    with backend(chosen):
        out = ops.grouped_linear(x, weight, offsets)
    expected = row_by_row(x, weight, offsets)
    torch.testing.assert_close(out, expected)
    arriving = torch.randn(out.shape, dtype=out.dtype)
    for found, truth in zip(
        torch.autograd.grad(out, (x, weight), arriving),
        torch.autograd.grad(expected, (x, weight), arriving),
        strict=True,
    ):
        torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("ends", [[3, 7, 11], [0, 5, 5, 40, 40]])
def test_pytorchs_kernel_as_we_call_it(ends, as_good_as):
    """On the CPU, where torch._grouped_mm is slow and takes the same arguments."""
    x, weight, offsets = arguments(ends, dtype=torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    arriving = torch.randn(ends[-1], 1).bfloat16().expand(-1, 24)  # of strides that the kernel does not take
    with torch.no_grad():
        found = [
            aten.grouped_linear(x, weight, offsets),
            *aten.grouped_linear_backward(arriving, x, weight, offsets, (True, True, False))[:2],
        ]
    theirs, truth = (row_by_row(*pair, offsets) for pair in ((x, weight), exact))
    as_good_as(found[0], theirs, truth)
    for ours, definition, exactly in zip(
        found[1:],
        torch.autograd.grad(theirs, (x, weight), arriving),
        torch.autograd.grad(truth, exact, arriving.double()),
        strict=True,
    ):
        as_good_as(ours, definition, exactly)


def test_pytorchs_kernel_says_what_it_wants():
    x, weight, offsets = arguments([3, 7], dtype=torch.bfloat16)
    with pytest.raises(contract.BackendError, match="right for empty groups only on Hopper; torch"), backend("aten"):
        ops.grouped_linear(x, weight, offsets)
    assert look_up({}, ops.grouped_linear, dict(x=x, weight=weight, offsets=offsets)) == ["aten"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, o: (x[:, :8], w, o), r"x is \[rows, K\] and weight \[groups, N, K\]"),
        (lambda x, w, o: (x.float(), w, o), "must have one dtype"),
        (lambda x, w, o: (x, w, o.long()), "must be a vector of int32"),
        (lambda x, w, o: (x, w, o[1:]), "where each of the 2 groups ends, not 1"),
        (lambda x, w, o: (x, w, o + 1), r"rise up to at most the 7 rows, but are \[4, 8\]"),
        (lambda x, w, o: (x, w, torch.tensor([9, 7], dtype=torch.int32)), r"but are \[9, 7\]"),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ops.grouped_linear(*change(*arguments([3, 7])))


@pytest.mark.parametrize("which", ["torch", "triton", "triton_persistent"])
def test_rows_past_the_last_offset_are_zero_and_have_no_gradient(which, monkeypatch):
    """In memory that held something else before, as freshly taken memory may."""
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: torch.full(*args, fill_value=torch.nan, **kwargs))
    x, weight, offsets = arguments([3, 7], dtype=torch.float16 if which == "triton_persistent" else torch.float64)
    x = x.detach().requires_grad_()
    with backend(which):
        out = ops.grouped_linear(x, weight, offsets - 2)
    whole = ops.grouped_linear.definition(x[:5], weight, offsets - 2)
    assert torch.equal(out[5:], torch.zeros_like(out[5:]))
    torch.testing.assert_close(out[:5], whole)
    dx, dweight = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    assert torch.equal(dx[5:], torch.zeros_like(dx[5:]))
    expected = torch.autograd.grad(whole, (x, weight), torch.ones_like(whole))
    torch.testing.assert_close(dx, expected[0])
    torch.testing.assert_close(dweight, expected[1])


@pytest.mark.parametrize("config", ["64x128", "128x128"])
@pytest.mark.parametrize("ends", [[70, 70, 200], [64, 128, 130]])
def test_what_is_not_finite_in_one_group_stays_there(config, ends):
    """Tiles of the persistent product reach into the rows of the next group, and a weight's steps must not."""
    x, weight, offsets = arguments(ends, dtype=torch.float16)
    with torch.no_grad():
        x[ends[0] :] = torch.nan
        weight[1:] = torch.inf
    with backend(f"triton_persistent:{config}"):
        out = ops.grouped_linear(x, weight, offsets)
        dx, dweight = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    mine = slice(ends[0])
    torch.testing.assert_close(out[mine], x[mine] @ weight[0].T)
    torch.testing.assert_close(dx[mine], torch.ones_like(out[mine]) @ weight[0])
    torch.testing.assert_close(dweight[0], torch.ones_like(out[mine]).T @ x[mine])
    assert dweight[-1].isnan().all()


@pytest.mark.parametrize("last", [0, 63, 64, 150, 200])
def test_zeros_are_written_past_the_last_offset_alone(last):
    """As behind PyTorch's own product."""
    out = torch.ones(200, 130, dtype=torch.float16)
    zero_rows_past(out, torch.tensor([last // 2, last], dtype=torch.int32))
    assert torch.equal(out, (torch.arange(200) < last).half()[:, None].expand_as(out))


def test_a_meta_tensor_has_the_shape_of_a_result():
    x, weight, offsets = (t.detach().to("meta") for t in arguments([3, 7]))
    assert ops.grouped_linear(x, weight, offsets).shape == (7, 24)
