"""Sparse matrices against the dense ones they stand for: products, gradients, conversions."""

import pytest
import torch

from tilestack import backend, contract, ops
from tilestack.contract import BackendError
from tilestack.kernels.sparse import blocks
from tilestack.nn.sparse import BlockSparse, CompressedRows, prune_2_4, semi_structured


def holes(rows, columns, side, seed=0):
    """A float64 matrix of which about half of the blocks are zero, one line of them wholly."""
    generator = torch.Generator().manual_seed(seed)
    there = torch.rand(rows // side, columns // side, generator=generator) < 0.5
    there[0] = False
    dense = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return dense * there.repeat_interleave(side, 0).repeat_interleave(side, 1)


@pytest.mark.parametrize("chosen", ["torch", "triton"])
@pytest.mark.parametrize("side", [16, 64, 128])
def test_products_and_gradients_are_those_of_the_dense_matrix(chosen, side):
    dense = holes(3 * side, 2 * side, side, seed=1)
    sparse = BlockSparse.from_dense(dense, side)
    assert 0 < len(sparse.values) < 6
    right, left = torch.randn(2 * side, 5).double(), torch.randn(7, 3 * side).double()
    for product in (lambda m: m @ right, lambda m: left @ m, lambda m: m.T @ left.T):
        results = []
        for matrix, leaf in ((sparse, sparse.values), (dense, dense)):
            leaf.requires_grad_()
            with backend(chosen):
                out = product(matrix)
                (gradient,) = torch.autograd.grad(out.square().sum(), leaf)
            results.append((out.detach(), gradient))
            leaf.requires_grad_(False)
        (out, gradient), (expected, whole) = results
        torch.testing.assert_close(out, expected)
        spread = BlockSparse(gradient, sparse.rows, sparse.columns, sparse.shape).to_dense()
        torch.testing.assert_close(spread, whole * (dense != 0))


@pytest.mark.parametrize("chosen", ["torch", "triton"])
def test_sampled_products_have_the_wanted_blocks_alone(chosen):
    dense = holes(48, 32, 16)
    sparse = BlockSparse.from_dense(dense, 16)
    a, b = torch.randn(48, 21).double(), torch.randn(21, 32).double()
    with backend(chosen):
        found = sparse.sample(a, b)
    torch.testing.assert_close(found.to_dense(), (a @ b) * (dense != 0))


def test_blocks_at_one_place_add_up():
    values = torch.randn(2, 16, 16).double()
    place = torch.zeros(2, dtype=torch.int32)
    twice = BlockSparse(values, place, place, (16, 16))
    x = torch.randn(16, 3).double()
    for chosen in ("torch", "triton"):
        with backend(chosen):
            torch.testing.assert_close(twice @ x, values.sum(0) @ x)
    torch.testing.assert_close(twice.to_dense(), values.sum(0))


@pytest.mark.parametrize("chosen", ["torch", "triton"])
def test_a_line_without_blocks_is_zero_whatever_it_would_have_met(chosen):
    place = torch.tensor([1], dtype=torch.int32)
    sparse = BlockSparse(torch.ones(1, 16, 16), place, place, (32, 32))
    x = torch.ones(32, 3)
    x[:16] = torch.nan
    with backend(chosen):
        found = sparse @ x
    assert found[:16].eq(0).all()
    assert found[16:].eq(16).all()


@pytest.mark.parametrize("compared", [0, 2**26])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_blocks_are_sorted_by_line_and_keep_their_order_in_it(monkeypatch, compared, index):
    """By counting and by PyTorch's sort: more blocks than a program looks at in one go, lines without any, columns apart."""
    monkeypatch.setattr(blocks, "MOST_COMPARED", compared)
    monkeypatch.setattr(blocks, "PLACES_AT_ONCE", 64)
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.randint(0, 9, (2, 300), generator=generator, dtype=index)
    rows[rows == 4] = 5
    order, met, offsets = blocks.sorted_by_line(rows, columns, 9)
    expected = rows.sort(stable=True)
    assert torch.equal(order, expected.indices.to(order.dtype))
    assert torch.equal(met, columns[expected.indices].to(met.dtype))
    assert offsets.tolist() == [int((rows < line).sum()) for line in range(10)]


def test_conversions_round_trip():
    dense = holes(64, 96, 16)
    sparse = BlockSparse.from_dense(dense, 16)
    assert torch.equal(sparse.to_dense(), dense)
    assert torch.equal(sparse.to_torch().to_dense(), dense)
    for other in (
        dense.to_sparse_bsr((16, 16)),
        dense.to_sparse(),
        dense.to_sparse_csr(),
        dense.to_sparse_bsr((32, 32)),
    ):
        assert torch.equal(BlockSparse.from_torch(other, 16).to_dense(), dense)
        assert torch.equal(CompressedRows.from_torch(other).to_dense(), dense)
    assert torch.equal(CompressedRows.from_dense(dense).to_torch().to_dense(), dense)


@pytest.mark.parametrize("chosen", ["torch", "triton"])
@pytest.mark.parametrize("columns", [None, 3, 130])
def test_compressed_rows_times_matrices_and_vectors(chosen, columns):
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(9, 40, generator=generator, dtype=torch.float64)
    dense = dense * (torch.rand(9, 40, generator=generator) < 0.2)
    dense[4] = 0
    sparse = CompressedRows.from_dense(dense)
    x = torch.randn(40, *([] if columns is None else [columns]), generator=generator, dtype=torch.float64)
    values, x = sparse.values.requires_grad_(), x.requires_grad_()
    whole = dense.clone().requires_grad_()
    with backend(chosen):
        out = sparse @ x
        found = torch.autograd.grad(out.square().sum(), (values, x))
    expected = whole @ x
    torch.testing.assert_close(out, expected)
    dense_gradient, x_gradient = torch.autograd.grad(expected.square().sum(), (whole, x))
    torch.testing.assert_close(found[0], dense_gradient[dense != 0])
    torch.testing.assert_close(found[1], x_gradient)


def test_two_of_four():
    x = torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 4.0, 4.0]])
    assert prune_2_4(x).tolist() == [[0.0, -3.0, 2.0, 0.0, 0.0, 0.0, 4.0, 4.0]]
    with pytest.raises(ValueError, match="multiples of four"):
        prune_2_4(torch.ones(2, 6))
    with pytest.raises(BackendError, match=r"sparse tensor cores .* this matrix is on cpu"):
        semi_structured(prune_2_4(torch.randn(64, 64)))


def test_refusals_say_what_does_not_fit():
    values, place = torch.randn(1, 16, 16), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="multiples of 16"):
        BlockSparse.from_dense(torch.randn(20, 16), 16)
    with pytest.raises(ValueError, match="blocks have sides of 16, 32, 64, 128"):
        BlockSparse(torch.randn(1, 8, 8), place, place, (8, 8))
    with pytest.raises(ValueError, match="there are 1 blocks, but rows are"):
        ops.block_sparse_dsd(values, place[:0], place, torch.randn(16, 2), 1)
    contract.check_values(True)
    try:
        with pytest.raises((ValueError, IndexError), match=r"rows\[0\] is 3, which names none of 1 rows"):
            ops.block_sparse_dsd(values, place + 3, place, torch.randn(16, 2), 1)
    finally:
        contract.check_values(None)
    with pytest.raises(ValueError, match="the inner sides differ"):
        CompressedRows.from_dense(torch.eye(3)) @ torch.randn(4)


def test_a_compiler_keeps_the_order_of_sparse_and_dense():
    """Square matrices, of which a product in the wrong order has the right shape."""
    dense, x = holes(32, 32, 16), torch.randn(32, 32).double()
    sparse, rows = BlockSparse.from_dense(dense, 16), CompressedRows.from_dense(dense)
    for product in (lambda m, x: m @ x, lambda m, x: x @ m, lambda m, x: m.T @ x):
        compiled = torch.compile(lambda x, product=product: product(sparse, x), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), product(dense, x))
    compiled = torch.compile(lambda x: rows @ x, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), dense @ x)


def test_products_with_other_inner_sides_are_refused():
    sparse = BlockSparse.from_dense(holes(48, 32, 16), 16)
    for product in (
        lambda: sparse @ torch.ones(48, 2),  # has all the rows that the blocks name, and more
        lambda: sparse @ torch.ones(32),
        lambda: torch.ones(2, 64) @ sparse,
        lambda: torch.ones(2, 3, 48) @ sparse,
    ):
        with pytest.raises(ValueError, match="both must be matrices, and their inner sides equal"):
            product()
    with pytest.raises(ValueError, match=r"sampled where a matrix of \(48, 32\) has blocks, but a is \(64, 4\)"):
        sparse.sample(torch.ones(64, 4), torch.ones(4, 32))


def test_parts_that_make_no_matrix_are_refused():
    place = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"values are \(2, 32, 16\)"):
        BlockSparse(torch.ones(2, 32, 16), place, place, (32, 32))
    with pytest.raises(ValueError, match=r"there are 2 blocks, but rows are \(1,\)"):
        BlockSparse(torch.ones(2, 16, 16), place[:1], place, (32, 32))
    with pytest.raises(ValueError, match=r"\(5, 3\) has values and columns of one length and 6 offsets"):
        CompressedRows(torch.ones(2), place, torch.tensor([0, 1, 2]), (5, 3))
    for stack in (torch.ones(2, 3, 4).to_sparse(), torch.ones(1, 3, 4).to_sparse_csr()):
        with pytest.raises(ValueError, match="a matrix, not"):
            CompressedRows.from_torch(stack)


@pytest.fixture
def checked_values():
    contract.check_values(True)
    yield
    contract.check_values(None)


@pytest.mark.parametrize("offsets", [[1, 2, 3], [0, 1, 2], [0, 2, 1, 3], [0, 1, 4]])
def test_offsets_that_leave_elements_in_no_row_are_refused(checked_values, offsets):
    """The definition put such elements into some row; kernels left them out, or read beyond the last."""
    values, columns, offsets = torch.ones(3), torch.arange(3), torch.tensor(offsets)
    with pytest.raises(IndexError, match="offsets must rise from 0 to the 3 elements"):
        ops.csr_matmul(values, columns, offsets, torch.eye(3))
    with pytest.raises(IndexError, match="offsets must rise from 0 to the 3 elements"):
        CompressedRows(values, columns, offsets, (len(offsets) - 1, 3)).to_dense()


@pytest.mark.parametrize("column", [2, -1])
def test_a_block_beside_the_matrix_does_not_come_back_in_another_row(checked_values, column):
    sparse = BlockSparse(torch.ones(1, 16, 16), torch.tensor([1]), torch.tensor([column]), (48, 32))
    with pytest.raises(IndexError, match=rf"columns\[0\] is {column}, which names none of 2 rows"):
        sparse.to_dense()


@pytest.mark.parametrize("chosen", ["torch", "triton"])
@pytest.mark.parametrize("activations", [torch.float32, torch.float16])
def test_products_under_autocast(chosen, activations):
    """As dense ones have it: values that learn in float32, beside what comes from a layer before in half precision."""
    dense, x = holes(32, 32, 16).float(), torch.randn(32, 32).to(activations)
    sparse, rows = BlockSparse.from_dense(dense, 16), CompressedRows.from_dense(dense)
    sparse.values.requires_grad_()
    with torch.autocast("cpu", torch.float16), backend(chosen):
        found = [sparse @ x, x @ sparse, sparse.sample(x, x).to_dense(), rows @ x]
        (gradient,) = torch.autograd.grad((sparse @ x).float().sum(), sparse.values)
    half, there = dense.half(), dense != 0
    expected = [half.float() @ x.half().float(), x.half().float() @ half.float(), (x.half() @ x.half()).float() * there]
    for product, truth in zip(found, [*expected, expected[0]], strict=True):
        assert product.dtype == torch.float16
        torch.testing.assert_close(product.float(), truth, rtol=1e-3, atol=1e-2)
    assert gradient.dtype == torch.float32
