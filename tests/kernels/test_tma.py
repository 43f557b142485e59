"""How matrices must lie for the copy engine, and what is done with those that do not."""

import pytest
import torch

from tilestack.kernels.matmul.tma import empty_rows, lies_in_rows, movable


def drawn(*shape):
    return torch.randn(shape).half()


@pytest.mark.parametrize(
    "matrix",
    [drawn(5, 16), drawn(5, 40)[:, 8:24], drawn(5, 24)[:, :19], drawn(9, 16)[::2]],
    ids=["dense", "a part of rows", "rows cut short", "every other row"],
)
def test_rows_on_16_bytes_are_moved_as_they_lie_and_columns_turned(matrix):
    assert movable(matrix) == (matrix, False)
    rows, turned = movable(matrix.T)
    assert turned
    assert rows.data_ptr() == matrix.data_ptr()
    assert rows.stride() == matrix.stride()


@pytest.mark.parametrize(
    "matrix",
    [
        drawn(5, 17),
        drawn(81)[1:].view(5, 16),
        drawn(1, 16).expand(5, 16),
        drawn(5, 32)[:, ::2],
        drawn(3, 1, 8)[:, 0].T[1:],
    ],
    ids=["odd rows", "off 16 bytes", "expanded", "strided", "columns off 16 bytes"],
)
def test_what_lies_otherwise_is_copied_into_padded_rows(matrix):
    rows, turned = movable(matrix)
    assert not turned
    assert lies_in_rows(rows)
    assert torch.equal(rows, matrix)
    assert rows.data_ptr() != matrix.data_ptr()


def test_new_rows_are_contiguous_where_that_suffices():
    assert empty_rows(3, 16, like=drawn(1)).is_contiguous()
    assert empty_rows(3, 17, like=drawn(1)).stride() == (24, 1)


def test_a_stack_of_matrices_lies_as_its_matrices_do():
    stack = drawn(3, 5, 16)
    assert movable(stack) == (stack, False)
    assert movable(stack.mT).turned
    assert movable(stack[:, 1:3]).rows.data_ptr() == stack[:, 1:3].data_ptr()
    for lies_otherwise in (drawn(3, 5, 17), drawn(1, 5, 16).expand(3, 5, 16), drawn(3, 81)[:, 1:].view(3, 5, 16)):
        copy, turned = movable(lies_otherwise)
        assert not turned
        assert lies_in_rows(copy)
        assert torch.equal(copy, lies_otherwise)
