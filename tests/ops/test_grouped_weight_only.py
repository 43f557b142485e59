"""Grouped products of codes: each row with its group's codes, groups without rows, and what is refused."""

import itertools

import pytest
import torch

from tilestack import backend, ops
from tilestack.ops.weight_only import pack_int4, quantise_weight

EACH = pytest.mark.parametrize("chosen", ["torch", "triton"])
KINDS = [
    ("int8", 0, True),
    ("int8", 32, False),
    ("int4", 32, True),
    ("int4", 64, False),
    ("fp8", 0, True),
    ("fp8", 32, True),
]


def stack_of(groups, columns, inner, format="int4", part=0, symmetric=True):
    """Codes of random weights, one below the other, and the numbers that they stand for."""
    each = [
        quantise_weight(
            torch.randn(columns, inner, generator=torch.Generator().manual_seed(g)), format, part, symmetric
        )
        for g in range(groups)
    ]
    weight, scale, zero = (None if some[0] is None else torch.stack(some) for some in zip(*each, strict=True))
    numbers = [ops.linear_weight_only(torch.eye(inner), *codes).T for codes in each]
    return dict(weight=weight, scale=scale, zero=zero), numbers


def ends(*at):
    return torch.tensor(at, dtype=torch.int32)


@EACH
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_meets_the_codes_of_its_group(chosen, kind):
    codes, numbers = stack_of(4, 40, 128, *kind)
    x, at = torch.randn(50, 128), (17, 17, 20, 45)
    with backend(grouped_linear_weight_only=chosen):
        out = ops.grouped_linear_weight_only(x, offsets=ends(*at), **codes)
    for group, (start, end) in enumerate(itertools.pairwise((0, *at))):
        torch.testing.assert_close(out[start:end], x[start:end] @ numbers[group].T, rtol=1e-5, atol=1e-5)
    assert not out[45:].any()


@EACH
def test_a_stack_may_lie_in_any_order(chosen):
    """Strides of codes, scales and rows are what they are: a stack of which every other expert is taken, and turned rows."""
    codes, numbers = stack_of(4, 24, 64, "int4", 32, False)
    every_other = {name: tensor[::2] for name, tensor in codes.items()}
    x = torch.randn(64, 9).T
    with backend(grouped_linear_weight_only=chosen):
        out = ops.grouped_linear_weight_only(x, offsets=ends(4, 9), **every_other)
    expected = torch.cat([x[:4] @ numbers[0].T, x[4:] @ numbers[2].T])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@EACH
def test_a_group_without_rows_may_hold_anything(chosen):
    codes, numbers = stack_of(3, 8, 32, "int8")
    codes["scale"][1] = torch.nan
    x = torch.randn(5, 32)
    with backend(grouped_linear_weight_only=chosen):
        out = ops.grouped_linear_weight_only(x, offsets=ends(2, 2, 5), **codes)
    expected = torch.cat([x[:2] @ numbers[0].T, x[2:] @ numbers[2].T])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@EACH
def test_without_groups_or_rows_there_is_nothing_to_multiply(chosen):
    codes, _ = stack_of(2, 8, 32, "int8")
    none = {name: None if tensor is None else tensor[:0] for name, tensor in codes.items()}
    with backend(grouped_linear_weight_only=chosen):
        assert not ops.grouped_linear_weight_only(torch.ones(3, 32), offsets=ends(), **none).any()
        assert ops.grouped_linear_weight_only(torch.ones(0, 32), offsets=ends(0, 0), **codes).shape == (0, 8)


def test_parts_that_no_step_fits_are_left_to_the_definition():
    codes, numbers = stack_of(2, 8, 24, "int8", 8)
    x, offsets = torch.randn(5, 24), ends(2, 5)
    with backend(grouped_linear_weight_only="triton"), pytest.raises(RuntimeError, match="groups of a multiple of 16"):
        ops.grouped_linear_weight_only(x, offsets=offsets, **codes)
    found = ops.grouped_linear_weight_only(x, offsets=offsets, **codes)
    torch.testing.assert_close(found[2:], x[2:] @ numbers[1].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.ones(5, 64)), r"weight is \[N, K / 2\] of two codes a byte, but x is \(5, 64\)"),
        (dict(weight=torch.ones(8, 16, dtype=torch.uint8)), r"weight \[groups, N, K\]"),
        (dict(scale=torch.ones(3, 8, 1)), r"scale \[groups, N, parts\]"),
        (dict(scale=torch.ones(2, 8, 2)), "multiples of 32, not 16"),
        (dict(zero=torch.ones(2, 8, dtype=torch.int8)), r"zero is like scale, \(2, 8, 1\), not \(2, 8\)"),
        (dict(offsets=ends(5)), "where each of the 2 groups ends, not 1"),
        (dict(offsets=ends(2, 5).long()), "a vector of int32"),
        (dict(offsets=ends(2, 6)), "rise up to at most the 5 rows"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    codes = pack_int4(torch.zeros(2, 8, 32, dtype=torch.uint8))
    given = dict(x=torch.ones(5, 32), weight=codes, scale=torch.ones(2, 8, 1), offsets=ends(2, 5), zero=None)
    with pytest.raises(ValueError, match=message):
        ops.grouped_linear_weight_only(**given | change)
