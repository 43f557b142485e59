"""Grouped products of fp8 codes: each row with its group's codes and scales, gradients from turned tiles, and what is refused."""

import itertools

import pytest
import torch

from tilestack import backend, ops
from tilestack.ops.quantised_linear import spread_over_blocks

E4M3 = torch.float8_e4m3fn
EACH = pytest.mark.parametrize("chosen", ["torch", "triton"])


def fp8(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(E4M3)


def ones(*shape):
    return torch.ones(shape)


def ends(*at):
    return torch.tensor(at, dtype=torch.int32)


def close(found, exact):
    largest = exact.abs().max().item() if exact.numel() else 0
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * largest)


@EACH
def test_each_group_has_its_weight_and_its_scales(chosen):
    """Scales that are powers of two and products that float32 holds: all is exact."""
    x, weight = fp8(9, 16), fp8(3, 5, 16, seed=1)
    x_scale, scale = 2.0 ** torch.arange(9), 2.0 ** -torch.arange(15.0).view(3, 5)
    with backend(grouped_linear_fp8=chosen):
        out = ops.grouped_linear_fp8(x, weight, x_scale, scale, ends(2, 2, 7))
    for row, group in enumerate([0, 0, 2, 2, 2, 2, 2]):
        expected = x[row].double() @ weight[group].double().T * x_scale[row] * scale[group]
        torch.testing.assert_close(out[row], expected.float(), rtol=1e-6, atol=0)
    assert not out[7:].any()


@EACH
def test_rows_of_no_group_are_zero_whatever_their_scale(chosen):
    x_scale = torch.tensor([1.0, torch.nan, torch.inf])
    with backend(grouped_linear_fp8=chosen):
        out = ops.grouped_linear_fp8(fp8(3, 16), fp8(1, 4, 16), x_scale, ones(1, 4), ends(1))
    assert out[0].isfinite().all()
    assert not out[1:].any()


@EACH
def test_gradients_of_a_grouped_layer_come_from_turned_tiles(chosen):
    """As training has them: groups begin amid blocks of 128 rows, one is empty, and no two blocks have one scale."""
    x, grad = (torch.randn(300, n) * 2.0 ** torch.arange(300)[:, None].div(60).floor() for n in (24, 40))
    weight, offsets = torch.randn(4, 40, 24), ends(30, 130, 130, 290)
    x8, x_scale, x_turned, x_turned_scale = ops.fp8_tiles(x, "rows", "blocks")
    w8, w_scale, w_turned, w_turned_scale = ops.fp8_tiles(weight, "blocks", "blocks")
    g8, g_scale, g_turned, g_turned_scale = ops.fp8_tiles(grad, "rows", "rows")
    with backend(grouped_linear_fp8=chosen, grouped_outer_fp8=chosen):
        y = ops.grouped_linear_fp8(x8, w8, x_scale, w_scale, offsets)
        dx = ops.grouped_linear_fp8(g8, w_turned, g_scale, w_turned_scale, offsets)
        dw = ops.grouped_outer_fp8(g_turned, x_turned, g_turned_scale, x_turned_scale, offsets)
    numbers = lambda codes, scale, *sizes: codes.double() * spread_over_blocks(scale.double(), *sizes)
    coded_x, coded_g = numbers(x8, x_scale, 24), numbers(g8, g_scale, 40)
    coded_w = numbers(w8, w_scale, 40, 24)
    turned_x, turned_g = numbers(x_turned, x_turned_scale, 24, 300), numbers(g_turned, g_turned_scale, 300)
    bounds = [0, *offsets.tolist()]
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        rows = slice(start, end)
        close(y[rows], coded_x[rows] @ coded_w[group].T)
        close(dx[rows], coded_g[rows] @ coded_w[group])
        close(dw[group], turned_g[:, rows] @ turned_x[:, rows].T)
    assert not dw[2].any()
    assert not y[290:].any()
    assert not dx[290:].any()


@EACH
def test_without_groups_all_rows_are_zero(chosen):
    with backend(grouped_linear=chosen, grouped_linear_fp8=chosen):
        assert not ops.grouped_linear(ones(3, 4), ones(0, 2, 4), ends()).any()
        assert not ops.grouped_linear_fp8(fp8(3, 16), fp8(0, 2, 16), ones(3), ones(0, 2), ends()).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=fp8(9, 8)), r"x is \[rows, K\] and weight \[groups, N, K\]"),
        (dict(x_scale=ones(9, 1)), r"\(9,\) and \(3, 5\), not \(9, 1\) and \(3, 5\)"),
        (dict(weight_scale=ones(3, 1, 2)), r"\(9, 1\) and \(3, 1, 1\), not \(9,\) and \(3, 1, 2\)"),
        (dict(offsets=ends(2, 9)), "where each of the 3 groups ends, not 2"),
        (dict(offsets=ends(2, 9, 9).long()), "a vector of int32"),
        (dict(offsets=ends(2, 9, 10)), "rise up to at most the 9 rows"),
        (dict(dtype="float64"), "dtype must be float16"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    given = dict(x=fp8(9, 16), weight=fp8(3, 5, 16), x_scale=ones(9), weight_scale=ones(3, 5), offsets=ends(2, 2, 7))
    with pytest.raises(ValueError, match=message):
        ops.grouped_linear_fp8(**given | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(left=fp8(5, 9)), r"left is \[N, rows\] and right \[K, rows\]"),
        (dict(right_scale=ones(6, 1)), r"\(5, 1\) and \(1, 1\), not \(5, 1\) and \(6, 1\)"),
        (dict(offsets=ends(2, 17)), "rise up to at most the 16 rows"),
        (dict(dtype="int8"), "dtype must be float16"),
    ],
)
def test_outer_products_that_do_not_fit_are_refused(change, message):
    given = dict(left=fp8(5, 16), right=fp8(6, 16), left_scale=ones(5, 1), right_scale=ones(1, 1), offsets=ends(2, 7))
    with pytest.raises(ValueError, match=message):
        ops.grouped_outer_fp8(**given | change)
