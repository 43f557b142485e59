"""C++ products with codes on a CPU: as exact as the definition in float32, at every number of rows, groups and zero points."""

import pytest
import torch
from fenced_memory import Fences

from tilestack import ops
from tilestack.kernels.cpu import build
from tilestack.kernels.cpu.decode_step import Matrix, groups_refused, matrix_product
from tilestack.ops.weight_only import pack_int4, quantise_weight

pytestmark = pytest.mark.skipif(bool(build.missing_compiler()), reason="there is no C++ compiler")

COLUMNS = 192
KINDS = [
    ("int4", 32, True),
    ("int4", 64, False),
    ("int4", 96, False),
    ("int4", 0, True),
    ("int8", 0, True),
    ("int8", 0, False),
    ("int8", 16, False),
    ("int8", 48, False),  # of which 32 columns may be of two groups
    ("int8", 48, True),
    ("fp8", 0, True),
    ("fp8", 32, True),
]


def made(format, group, symmetric, rows=45, columns=COLUMNS):
    """A weight whose groups have sizes and centres of their own, as codes."""
    torch.manual_seed(0)
    weight = torch.randn(rows, columns) * torch.rand(rows, columns // 16).exp().repeat_interleave(16, 1) + 0.3
    return Matrix(*quantise_weight(weight, format, group, symmetric))


def product(matrix, x, threads=2):
    return matrix_product(matrix, x, matrix.functions(x.dtype), threads)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 4, 9, 16, 17, 40])
def test_products_are_as_exact_as_the_definition_in_float32(kind, dtype, tokens):
    matrix = made(*kind)
    x = torch.randn(tokens, COLUMNS).to(dtype)
    truth = ops.linear_weight_only(x.double(), matrix.rows, matrix.scale, matrix.zero)
    by_definition = ops.linear_weight_only(x.float(), matrix.rows, matrix.scale, matrix.zero)
    assert (product(matrix, x) - truth).norm() <= 1.2 * (by_definition - truth).norm()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_the_definition_bit_for_bit(kind, dtype):
    matrix, x = made(*kind), torch.eye(COLUMNS, dtype=dtype)  # a sum of one number and zeros
    weight = ops.linear_weight_only(torch.eye(COLUMNS), matrix.rows, matrix.scale, matrix.zero)
    assert torch.equal(torch.cat([product(matrix, some) for some in x.split(8)]), weight)
    assert torch.equal(product(matrix, x), weight)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_small_batch(kind, dtype):
    matrix, x = made(*kind), torch.randn(16, COLUMNS).to(dtype)
    alone = torch.cat([product(matrix, row) for row in x.split(1)])
    assert torch.equal(product(matrix, x), alone)
    assert torch.equal(product(matrix, x, threads=1), alone)


@pytest.mark.parametrize(
    "kind", [("int4", 32, False, 96), ("int8", 16, False, 80), ("int8", 0, False, 48), ("fp8", 16, True, 80)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 40])
def test_nothing_behind_codes_scales_and_zero_points_is_read(kind, dtype, tokens):
    """Also of rows that end in the middle of what is read at once."""
    *kind, columns = kind
    matrix, x, fences = made(*kind, rows=33, columns=columns), torch.randn(tokens, columns).to(dtype), Fences()
    fenced = Matrix(
        *(None if each is None else fences.around(each) for each in (matrix.rows, matrix.scale, matrix.zero))
    )
    assert torch.equal(product(fenced, x), product(matrix, x))
    assert fences.are_whole()


@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 40])
def test_every_code_of_fp8_is_its_number(groups, dtype, tokens):
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).repeat(3, 1)
    numbers = codes.float()
    matrix, x = Matrix(codes, torch.ones(3, groups)), torch.zeros(tokens, 256, dtype=dtype)
    is_number = ~numbers[0].isnan()
    assert int(is_number.sum()) == 254
    assert product(matrix, x).isnan().all()
    codes.view(torch.uint8)[:, ~is_number] = 0
    whole = torch.cat([product(matrix, one.repeat(tokens, 1))[:1] for one in torch.eye(256, dtype=dtype).split(1)])
    assert torch.equal(whole.T, codes.float())


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_farthest_codes_and_zero_points_are_exact(format, tokens):
    low, high = (0, 15) if format == "int4" else (-128, 127)
    codes = torch.tensor([[low, high] * 16, [high, low] * 16])
    codes = pack_int4(codes) if format == "int4" else codes.to(torch.int8)
    zero = torch.tensor([[high], [low]]).to(torch.int8)
    x = torch.eye(32, dtype=torch.bfloat16)[:2].repeat(tokens, 1)[:tokens]
    matrix = Matrix(codes, torch.tensor([[0.3], [0.7]]), zero)
    assert torch.equal(product(matrix, x), ops.linear_weight_only(x.float(), matrix.rows, matrix.scale, zero))


def test_groups_that_are_no_whole_vectors_are_refused_by_size():
    assert not groups_refused(96, 6)
    assert groups_refused(96, 12) == "groups of codes must be multiples of 16, not 8"
