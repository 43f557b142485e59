"""Linear layers of codes: exact sums of integers up to the last one that int32 holds, and errors for people."""

import pytest
import torch

from tilestack import backend, ops
from tilestack.kernels.quantised import aten
from tilestack.kernels.quantised.fp8 import rounds_to_halves
from tilestack.kernels.quantised.fp8_tiles import code_tiles
from tilestack.ops.fp8_tiles import codes_by
from tilestack.ops.quantised_linear import spread_over_blocks


def integers(*shape, seed=0):
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def ones(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize("chosen", ["torch", "triton"])
@pytest.mark.parametrize("zeros", [False, True])
def test_sums_of_codes_are_exact(chosen, zeros):
    x, weight = integers(3, 5, 96), integers(40, 96, seed=1)
    x_zero, weight_zero = (integers(3, 5, seed=2), integers(40, seed=3)) if zeros else (None, None)
    with backend(linear_int8=chosen):
        out = ops.linear_int8(x, weight, ones(3, 5), ones(40), None, x_zero, weight_zero)
    left = x.long() - (x_zero.long()[..., None] if zeros else 0)
    right = weight.long() - (weight_zero.long()[:, None] if zeros else 0)
    assert out.dtype == torch.float32
    assert torch.equal(out, (left @ right.T).float())  # below 2^24: float32 holds each of them


def test_terms_that_wrap_around_wrap_back():
    """The largest sum that int32 holds, of whose terms with zero points none fits."""
    x = torch.full((1, 33024), -128, dtype=torch.int8)
    zero = torch.full((1,), 127, dtype=torch.int8)
    with backend(linear_int8="triton:16x64"):
        out = ops.linear_int8(x, x, ones(1), ones(1), None, zero, zero)
    assert out.item() == torch.tensor(255 * 255 * 33024).float().item()


def test_results_come_in_the_dtype_asked_for():
    x, weight = integers(2, 16), integers(4, 16)
    assert ops.linear_int8(x, weight, ones(2), ones(4), dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight=integers(4, 5)), "x ends in K and weight is"),
        (dict(bias=ones(3)), r"bias must have shape \(4,\), not \(3,\)"),
        (dict(x_scale=ones(2, 1)), r"x_scale has one number for each row, shape \(2,\), not \(2, 1\)"),
        (dict(weight_zero=integers(1)), r"weight_zero has one number for each column, shape \(4,\), not \(1,\)"),
        (dict(dtype="int8"), "dtype must be float16, bfloat16, float32 or '', not 'int8'"),
        (
            dict(x=integers(2, 40000), weight=integers(4, 40000), x_zero=integers(2)),
            "sums over 40000 products may pass what int32 holds; at most 33025 do not",
        ),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    given = dict(x=integers(2, 16), weight=integers(4, 16), x_scale=ones(2), weight_scale=ones(4))
    with pytest.raises(ValueError, match=message):
        ops.linear_int8(**given | change)


def test_codes_are_int8():
    with pytest.raises(TypeError, match="x must be int8, not float32"):
        ops.linear_int8(ones(2, 16), integers(4, 16), ones(2), ones(4))


def fp8(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("chosen", ["torch", "triton"])
def test_each_block_of_codes_has_its_scale(chosen):
    """Scales that are powers of two of blocks that hold one number each: nothing is rounded, so all is exact."""
    x, weight = torch.zeros(2, 3, 300), torch.zeros(140, 300)
    places = torch.tensor([0, 127, 128, 255, 256, 299])
    x[..., places], weight[:, places] = 1.5, 1.75
    x_scale, scale = 2.0 ** torch.arange(18).view(2, 3, 3), 2.0 ** -torch.arange(6.0).view(2, 3)
    with backend(linear_fp8=chosen):
        out = ops.linear_fp8(x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn), x_scale, scale)
    of_output = scale[torch.arange(140) // 128]
    assert torch.equal(out, 2 * 1.5 * 1.75 * x_scale @ of_output.T)


@pytest.mark.parametrize("chosen", ["torch", "triton"])
@pytest.mark.parametrize(("of_x", "of_weight"), [((), (40,)), ((3,), ()), ((3,), (40,)), ((), ())])
def test_one_scale_or_one_for_each_row(chosen, of_x, of_weight):
    x, weight = fp8(3, 96), fp8(40, 96, seed=1)
    x_scale, scale = 0.5 + torch.rand(of_x), 0.5 + torch.rand(of_weight)
    with backend(linear_fp8=chosen):
        out = ops.linear_fp8(x, weight, x_scale, scale)
    torch.testing.assert_close(out, x.float() @ weight.float().T * (x_scale.view(-1, 1) * scale))


@pytest.mark.parametrize("lies", [lambda s: s.repeat_interleave(2)[::2], lambda s: s[:1].expand(len(s))])
def test_pytorchs_product_of_fp8_gets_scales_that_lie_together(monkeypatch, lies):
    """`torch._scaled_mm` refuses others; it is heard here rather than run."""
    seen = {}
    stand_in = lambda a, b, **options: seen.update(options) or torch.zeros(len(a), b.shape[1], dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "_scaled_mm", stand_in)
    x_scale, scale = lies(torch.rand(32)), lies(torch.rand(16))
    out = aten.linear_fp8(fp8(32, 16), fp8(16, 16), x_scale, scale, None, "bfloat16")
    assert out.shape == (32, 16)
    assert seen["scale_a"].is_contiguous()
    assert seen["scale_b"].is_contiguous()
    assert torch.equal(seen["scale_a"][:, 0], x_scale)


def test_pytorchs_product_of_fp8_gets_codes_on_16_bytes(monkeypatch):
    """cuBLAS refuses others, as a slice of a larger tensor has them."""
    seen = []
    stand_in = lambda a, b, **_: seen.extend((a, b.T)) or torch.zeros(len(a), b.shape[1], dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "_scaled_mm", stand_in)
    given = [fp8(1, rows * 16 + 1)[0, 1:].view(rows, 16) for rows in (32, 48)]
    assert all(codes.data_ptr() % 16 for codes in given)
    aten.linear_fp8(*given, torch.tensor(1.0), torch.tensor(1.0), None, "bfloat16")
    for codes, handed in zip(given, seen, strict=True):
        assert handed.data_ptr() % 16 == 0
        assert torch.equal(handed.float(), codes.float())


def test_float32_is_more_than_tensor_cores_add_up():
    on_gpu = [t.to("meta") for t in (fp8(3, 96), ones(40))]
    assert "too few for a result in float32" in rounds_to_halves(*on_gpu, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x_scale=ones(2)), r"one for each of \(3,\) rows and 40 outputs, not x_scale \(2,\)"),
        (dict(weight_scale=ones(1, 2)), r"blocks of 128 codes have scales \(3, 2\) and \(1, 2\), not x_scale \(3,\)"),
        (dict(weight_scale=ones(2, 2), x_scale=ones(3, 2)), "blocks of 128 codes have scales"),
    ],
)
def test_scales_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ops.linear_fp8(**dict(x=fp8(3, 160), weight=fp8(40, 160), x_scale=ones(3), weight_scale=ones(40)) | change)


@pytest.mark.parametrize("by", ["rows", "blocks"])
@pytest.mark.parametrize("turned_by", ["rows", "blocks"])
@pytest.mark.parametrize("shape", [(130, 40), (64, 260), (144, 272), (2, 160, 16), (3, 131, 5)])
@pytest.mark.parametrize("lies", [torch.Tensor.contiguous, lambda x: x.mT.contiguous().mT], ids=["rows", "columns"])
def test_a_tile_is_written_both_ways(by, turned_by, shape, lies):
    """In int8, which the interpreter rounds to as a GPU does; the kernels are those of fp8. One tile holds an infinity."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[..., -1, -1] = torch.inf
    codes, scale, turned, turned_scale = code_tiles(lies(x), by, turned_by, torch.int8)
    for made, kind, (wanted, wanted_scale) in (
        ((codes, scale), by, codes_by(x, by, torch.int8)),
        ((turned, turned_scale), turned_by, codes_by(x.mT, turned_by, torch.int8)),
    ):
        assert made[0].is_contiguous(), kind
        torch.testing.assert_close(made[1], wanted_scale, equal_nan=True)
        assert made[1].isnan().any(), kind
        assert (made[0].int() - wanted.int()).abs().max() <= 1  # ties may fall to either side
        assert (made[0] != wanted).float().mean() < 0.001


@pytest.mark.parametrize("columns", [40, 33000])
def test_rows_are_coded_whatever_their_length(columns):
    """In int8, which the interpreter rounds to as a GPU does; a row of zeros, one with a NaN, and one in the last column."""
    x = torch.randn(4, columns, generator=torch.Generator().manual_seed(0))
    x[1], x[2, 3], x[3, -1] = 0, torch.nan, 100
    with backend(quantise_rows_int8="triton"):
        codes, scale = ops.quantise_rows_int8(x)
    wanted, wanted_scale = ops.quantise_rows_int8(x)
    torch.testing.assert_close(scale, wanted_scale, equal_nan=True)
    assert (codes.int() - wanted.int()).abs().max() <= 1  # ties may fall to either side
    assert codes[3, -1] == 127
    assert not codes[1:3].any()
    assert scale.isnan().tolist() == [False, False, True, False]


def test_a_row_without_elements_has_no_scale():
    with pytest.raises(ValueError, match=r"has no scale, but x has shape \(2, 0\)"):
        ops.quantise_rows_int8(torch.ones(2, 0))


def test_a_stack_is_coded_matrix_by_matrix():
    stack = torch.randn(3, 40, 130, generator=torch.Generator().manual_seed(0))
    made, each = ops.fp8_tiles(stack, "rows", "blocks"), [ops.fp8_tiles(x, "rows", "blocks") for x in stack]
    for number, found in enumerate(made):
        assert torch.equal(found.float(), torch.stack([tiles[number] for tiles in each]).float())


def test_operands_of_training_are_what_fp8_products_take():
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    codes, scale, turned, turned_scale = ops.fp8_tiles(x, "rows", "blocks")
    assert (scale.shape, turned_scale.shape) == ((200, 3), (3, 2))
    torch.testing.assert_close(codes.float() * spread_over_blocks(scale, 300), x, rtol=2**-4, atol=1e-2)
    back = turned.float() * spread_over_blocks(turned_scale, 300, 200)
    torch.testing.assert_close(back.T, x, rtol=2**-4, atol=1e-2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.ones(2, 0),), "not empty"),
        ((torch.ones(3),), "a matrix, or a stack"),
        ((torch.ones(2, 3), "columns"), "shared by rows or blocks, not 'columns'"),
    ],
)
def test_tiles_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ops.fp8_tiles(*given)
