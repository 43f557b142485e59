"""Memory patterns beyond what the proof harness sees: how a view is merged and walked, and what moves unchanged."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestack import contract, ops
from tilestack.contract.backends import interpreting
from tilestack.kernels.memory import permute as memory
from tilestack.kernels.memory import rows as rows_by_number
from tilestack.kernels.memory.permute import MOST_DIMENSIONS, merged, walk_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_triton = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreting(), reason="Triton kernels need a GPU, or TRITON_INTERPRET=1"
)


@st.composite
def views(draw, most: int = 5, longest: int = 5) -> torch.Tensor:
    """A tensor of some dimensions in some order, some of them sliced with a step and some expanded."""
    sizes = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    x = torch.arange(math.prod(sizes)).view(sizes)
    x = x.permute(draw(st.permutations(range(x.ndim))))
    x = x[tuple(slice(None, None, draw(st.integers(1, 2))) for _ in sizes)]
    if draw(st.booleans()) and x.ndim < most:
        x = x.unsqueeze(draw(st.integers(0, x.ndim)))
        x = x.expand(
            [3 if stride == 0 or size == 1 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
        )
    return x


def offsets(sizes, strides) -> list[int]:
    places = itertools.product(*map(range, sizes))
    return [sum(i * stride for i, stride in zip(place, strides, strict=True)) for place in places]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(views())
def test_merging_keeps_every_element_in_its_place(x):
    assert offsets(*merged(x.shape, x.stride())) == offsets(x.shape, x.stride())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(views())
def test_nothing_is_left_to_merge(x):
    sizes, strides = merged(x.shape, x.stride())
    if len(sizes) > 1:
        assert 1 not in sizes
        assert all(strides[d] != sizes[d + 1] * strides[d + 1] for d in range(len(sizes) - 1))


@pytest.mark.parametrize(
    ("sizes", "dims", "expected"),
    [
        ((2, 3, 4, 5), (0, 1, 2, 3), [120]),
        ((2, 3, 4, 5), (2, 3, 0, 1), [20, 6]),
        ((2, 3, 4, 5), (0, 2, 1, 3), [2, 4, 3, 5]),
        ((2, 1, 4, 5), (1, 0, 2, 3), [40]),
        ((2, 3, 4, 5), (1, 2, 3, 0), [60, 2]),
    ],
)
def test_dimensions_that_stay_together_are_one(sizes, dims, expected):
    x = torch.empty(sizes, device="meta").permute(dims)
    assert merged(x.shape, x.stride())[0] == expected


def walk(x: torch.Tensor) -> memory.Walk:
    found = walk_of(tuple(x.shape), x.stride(), x.itemsize)
    assert found is not None
    return found


def half(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.float16, device="meta")


def test_what_lies_in_order_already_is_copied_flat():
    stored = half(64, 128).mT  # its transpose is how it lies in memory
    assert walk(stored.mT).kernel is memory.copy_kernel
    assert walk(half(4, 32, 8).permute(2, 0, 1).permute(1, 2, 0)).kernel is memory.copy_kernel
    assert walk(half(64, 128)[10:20]).kernel is memory.copy_kernel


def test_a_transpose_is_turned_in_tiles_dense_on_both_sides():
    found = walk(half(512, 256).mT)
    assert found.kernel is memory.copy_tiles_kernel
    assert found.constants["TURNED"]
    assert min(found.constants["ROWS"], found.constants["COLS"]) * 2 >= memory.TILE_SIDE
    rows, columns, x_row, _, out_row, *_ = found.numbers
    assert (rows, columns, x_row, out_row) == (256, 512, 1, 512)


def test_a_permutation_that_keeps_the_last_dimension_turns_nothing():
    found = walk(half(2, 64, 8, 128).permute(0, 2, 1, 3))  # tokens by heads to heads by tokens
    assert found.kernel is memory.copy_tiles_kernel
    assert not found.constants["TURNED"]
    rows, columns, *_ = found.numbers
    assert (rows, columns) == (64, 128)


@pytest.mark.parametrize("sizes", [(3, 100_000), (100_000, 3)])
def test_a_short_side_leaves_the_tile_to_the_long_one(sizes):
    found = walk(half(*sizes).mT)
    assert found.kernel is memory.copy_tiles_kernel
    assert found.constants["ROWS"] * found.constants["COLS"] * 2 == memory.TILE_BYTES


def test_tiny_dimensions_are_decoded_and_a_strided_vector_is_not():
    assert walk(half(1000, 3, 5).mT).kernel is memory.copy_decoded_kernel
    assert walk(half(8, 1000)[:, ::4]).numbers == (2000, 4)
    assert walk(half(8, 1000)[:, ::4]).kernel is memory.copy_kernel


def test_places_are_in_32_bits_wherever_they_fit():
    index = lambda n: walk(half(n, 3, 5).mT).constants["INDEX"].primitive_bitwidth
    assert index(2**31 // 15 - memory.ONE_BY_ONE) == 32
    assert index(2**31 // 15) == 64
    within_a_tile = lambda n: walk(half(n, 256).mT).constants["INDEX"].primitive_bitwidth
    assert within_a_tile(2**23) == 32
    assert within_a_tile(2**25) == 64


@on_triton
@settings(max_examples=40, deadline=None, derandomize=True)
@given(views(longest=9), st.data())
def test_permute_moves_every_element_of_any_view(x, data):
    dims = data.draw(st.permutations(range(x.ndim)))
    x = x.to(DEVICE)
    with contract.backend("triton"):
        out = ops.permute(x, dims)
    assert out.is_contiguous()
    assert torch.equal(out, x.permute(dims))


@on_triton
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bfloat16,
        torch.float8_e4m3fn,
    ],
)
def test_any_dtype_is_moved_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (2, 40, 24 * dtype.itemsize), generator=generator)
    x = raw.to(torch.uint8).view(dtype).to(DEVICE)
    bits = lambda t: t.contiguous().view(torch.uint8)
    with contract.backend("triton"):
        for ours, theirs in (
            (ops.copy(x), x),
            (ops.transpose(x), x.mT),
            (ops.permute(x, (1, 2, 0)), x.permute(1, 2, 0)),
            (ops.strided_copy(x, 3), x[..., ::3]),
        ):
            assert ours.dtype == dtype
            assert torch.equal(bits(ours), bits(theirs))


@on_triton
@pytest.mark.parametrize(
    ("sizes", "dims"),
    [
        ((2, 3, 2, 40, 33), (2, 0, 4, 1, 3)),
        ((2, 3, 2, 40, 33), (4, 2, 1, 0, 3)),
        ((2, 3, 40, 2, 33), (3, 1, 0, 2, 4)),
        ((2, 3, 4, 2, 20, 16), (3, 5, 1, 2, 0, 4)),
        ((2, 3, 4, 2, 20, 16), (3, 2, 4, 1, 0, 5)),
        ((2, 20, 3, 2, 4, 16), (5, 3, 2, 0, 4, 1)),
    ],
)
def test_the_batch_of_a_tile_is_taken_apart(sizes, dims):
    x = torch.arange(math.prod(sizes), device=DEVICE).view(sizes)
    assert walk(x.permute(dims)).kernel is memory.copy_tiles_kernel
    with contract.backend("triton"):
        assert torch.equal(ops.permute(x, dims), x.permute(dims))


@on_triton
@pytest.mark.parametrize("step", [1, 2, 3, 16, 24, 5000])
@pytest.mark.parametrize("columns", [1, 48, 5000])  # rows that lie as one for some steps, and not for others
@pytest.mark.parametrize("apart", [False, True])
def test_a_strided_copy_and_its_gradient_for_any_step(columns, step, apart):
    x = torch.randn(3, columns, device=DEVICE, dtype=torch.float16, requires_grad=True)
    with contract.backend("triton"):
        out = ops.strided_copy(x, step)
    assert torch.equal(out, x[:, ::step])
    grad = torch.randn(3, out.shape[1] * 2 if apart else out.shape[1], device=DEVICE, dtype=torch.float16)
    grad = grad[:, : out.shape[1]]
    out.backward(grad)
    expected = torch.zeros_like(x)
    expected[:, ::step] = grad
    assert torch.equal(x.grad, expected)


@on_triton
def test_one_element_expanded_fills_more_than_a_block():
    x = torch.randn(1, device=DEVICE).expand(3 * memory.ONE_BY_ONE + 1)
    with contract.backend("triton"):
        assert torch.equal(ops.copy(x), x)


@on_triton
def test_the_gradient_of_a_permutation_is_a_view_of_what_arrives():
    x = torch.randn(2, 3, 4, device=DEVICE, requires_grad=True)
    with contract.backend("triton"):
        for out in (ops.transpose(x), ops.permute(x, (2, 0, 1))):
            grad = torch.randn_like(out)
            (found,) = torch.autograd.grad(out, x, grad)
            assert found.data_ptr() == grad.data_ptr()
            assert found.shape == x.shape


@on_triton
def test_more_dimensions_than_a_launch_takes():
    x = torch.arange(3**8, device=DEVICE).view([3] * 8)
    dims = (7, 5, 3, 1, 6, 4, 2, 0)
    assert len(merged(x.permute(dims).shape, x.permute(dims).stride())[0]) > MOST_DIMENSIONS
    with contract.backend("triton"):
        assert torch.equal(ops.permute(x, dims), x.permute(dims))


@on_triton
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_dims_as_a_list_keep_the_gradient(name):
    x = torch.randn(3, 4, 5, device=DEVICE, requires_grad=True)
    grad = torch.randn(5, 3, 4, device=DEVICE)
    with contract.backend(name):
        ops.permute(x, [-1, 0, 1]).backward(grad)
    assert torch.equal(x.grad, grad.permute(1, 2, 0))


@on_triton
def test_a_number_without_a_row_reads_nothing_and_shows():
    x = torch.randn(4, 3, device=DEVICE)
    index = torch.tensor([3, 4, -1, 0, 2**40], device=DEVICE)
    with contract.backend("triton"):
        out = ops.gather_rows(x, index)
    assert torch.equal(out[[0, 3]], x[[3, 0]])
    assert out[[1, 2, 4]].isnan().all()


@on_triton
def test_scatter_is_the_transpose_of_gather():
    whole = lambda *shape: torch.randint(-8, 8, shape, device=DEVICE).double()  # whose sums are exact
    x, y = whole(7, 3, 4), whole(50, 3, 4)
    index = torch.randint(0, 7, (50,), device=DEVICE)
    with contract.backend("triton"):
        assert (ops.gather_rows(x, index) * y).sum() == (x * ops.scatter_rows(y, index, 7)).sum()


@on_triton
def test_scatter_drops_a_number_without_a_place():
    x = torch.ones(3, 2, device=DEVICE)
    with contract.backend("triton"):
        out = ops.scatter_rows(x, torch.tensor([-1, 1, 2], device=DEVICE), 2)
    assert out.tolist() == [[0, 0], [1, 1]]


@on_triton
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 40_000])  # keys of one byte, of two and of four
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_inputs_are_sorted_by_place_and_those_without_one_left_out(rows, count):
    index = torch.randint(-2, rows + 2, (count,), device=DEVICE)
    index[:: max(count // 4, 1)] = 2**40
    order, bounds = rows_by_number.sorted_by_place(index, rows)
    ordered, expected = index.sort(stable=True)
    start = torch.searchsorted(ordered, torch.arange(rows + 1, device=DEVICE))
    assert torch.equal(bounds, start)
    assert torch.equal(order[start[0] : start[-1]], expected[start[0] : start[-1]])


@on_triton
def test_one_place_may_have_most_of_the_inputs_where_others_have_few():
    x = torch.randint(-8, 8, (70, 33), device=DEVICE).double()  # whose sums are exact
    index = torch.arange(0, 210, 3, device=DEVICE)
    index[10:60] = 34
    with contract.backend("triton"):
        out = ops.scatter_rows(x, index, 211)
    assert len(index) < rows_by_number.FEW * 211
    assert torch.equal(out, torch.zeros(211, 33, device=DEVICE, dtype=torch.float64).index_add(0, index, x))


@on_triton
@pytest.mark.parametrize(("shape", "dim"), [((3, 40_000), 1), ((40_000, 3), 0), ((2, 20_001, 2), 1), ((70_000,), 0)])
def test_few_long_sums_are_split_and_exact(shape, dim):
    x = torch.randint(-4, 5, shape, device=DEVICE).float()
    with contract.backend("triton"):
        assert torch.equal(ops.reduce_sum(x, dim), x.sum(dim))


def test_what_is_kept_for_its_shape_is_not_counted_as_read():
    x = torch.empty(100, 50)
    _, moved = ops.reduce_sum.cost(ops.reduce_sum.bind(x, 0), "backward")
    assert moved == (50 + 100 * 50) * 4
    index = torch.zeros(10, dtype=torch.int64)
    _, moved = ops.gather_rows.cost(ops.gather_rows.bind(x, index), "backward")
    assert moved == 10 * 50 * 4 + 10 * 8 + 100 * 50 * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.permute(x, (0, 0)), r"permute: dims must name each of the 2 dimensions once, not \(0, 0\)"),
        (lambda x: ops.permute(x, (0,)), r"not \(0,\)"),
        (lambda x: ops.strided_copy(x, 0), "strided_copy: step must be at least 1, not 0"),
        (lambda x: ops.transpose(x[0]), "transpose: x needs two dimensions, not 1"),
        (lambda x: ops.gather_rows(x, torch.zeros(2)), "index must be int32 or int64, not torch.float32"),
        (lambda x: ops.scatter_rows(x, torch.zeros(2, dtype=torch.int64), 5), "a row for each of the 3 of x, not 2"),
        (lambda x: ops.reduce_sum(x, 2), "dim 2 is out of range for a tensor of 2 dimensions"),
        (lambda x: ops.reduce_sum(x.long(), 0), "x must be floating-point, not torch.int64"),
    ],
)
def test_errors_say_what_was_given(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 4))
