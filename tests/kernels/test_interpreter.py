"""What Triton's interpreter would get wrong without a word is mended, or CPU users would train on noise."""

import pytest
import torch
import triton
import triton.language as tl

from tilestack import ops
from tilestack.contract import backend
from tilestack.contract.cases import Make


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", ["triton", "triton_naive", "triton_split_k"])
def test_half_precisions_multiply(dtype, chosen):
    make = Make(dtype)
    x, weight = make.normal(3, 64), make.normal(40, 64)
    with backend(chosen):
        found = ops.linear(x, weight)
    torch.testing.assert_close(found, torch.nn.functional.linear(x.float(), weight.float()).to(dtype))


def test_attention_of_bfloat16():
    make = Make(torch.bfloat16)
    q, k, v = (make.normal(1, 20, 2, 16) for _ in range(3))
    with backend("triton"):
        found = ops.attention(q, k, v, causal=True)
    expected = ops.attention(q.float(), k.float(), v.float(), causal=True)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


@triton.jit
def square_dot_kernel(a_ptr, b_ptr, out_ptr, SIDE: tl.constexpr):
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    tl.store(
        out_ptr + at,
        tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), input_precision="ieee").to(out_ptr.dtype.element_ty),
    )


def square_dot(a, b):
    out = torch.empty(a.shape, dtype=torch.float64 if a.dtype == torch.float64 else torch.float32)
    square_dot_kernel[(1,)](a, b, out, SIDE=len(a))
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])  # fmt: skip
def test_equal_rows_and_columns_of_a_product_have_equal_bits(dtype):
    numbers = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    product = square_dot(*numbers)
    torch.testing.assert_close(product.double(), torch.matmul(*numbers.double()), rtol=1e-5, atol=1e-4)
    rows, columns = numbers.clone(), numbers.clone()
    rows[0] = numbers[0, 37]  # the same row at every place
    columns[1] = numbers[1, :, 37:38]
    assert square_dot(*rows).equal(product[37].expand(64, 64))
    assert square_dot(*columns).equal(product[:, 37:38].expand(64, 64))


@pytest.mark.parametrize(("dtype", "largest", "step"), [(torch.float16, 2.0**12, 16), (torch.bfloat16, 2.0**12, 16), (torch.float8_e5m2, 2.0**12, 32)])  # fmt: skip
def test_products_of_halves_and_codes_are_rounded_after_each_step_and_not_before(dtype, largest, step):
    a, b = torch.zeros(2, 64, 64)
    a[0], b[:, 0] = 1, 1 / 2
    a[0, 0] = b[0, 0] = largest
    at_once = largest**2 + step // 2  # of 2²⁴ and one half, float32 would keep the first
    last = at_once + (64 - step) / 2
    assert square_dot(a.to(dtype), b.to(dtype))[0, 0] == last
    b[step:, 0] = 0
    b[step + 1, 0] = 1 / 2  # in a step by itself
    assert square_dot(a.to(dtype), b.to(dtype))[0, 0] == at_once


@triton.jit
def extremes_kernel(x_ptr, y_ptr, out_ptr, NAN: tl.constexpr):
    at = tl.arange(0, 4)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, tl.minimum(x, y, propagate_nan=NAN))
    tl.store(out_ptr + 4 + at, tl.maximum(x, y, propagate_nan=NAN))


@pytest.mark.parametrize("kept", [tl.PropagateNan.NONE, tl.PropagateNan.ALL])
def test_extremes_are_nan_where_a_gpu_has_nan(kept):
    nan = float("nan")
    x, y = torch.tensor([1.0, nan, 3.0, nan]), torch.tensor([2.0, 2.0, nan, nan])
    out = torch.empty(8)
    extremes_kernel[(1,)](x, y, out, NAN=kept)
    expected = [1.0, 2.0, 3.0, nan, 2.0, 2.0, 3.0, nan] if kept == tl.PropagateNan.NONE else [1.0, nan, nan, nan, 2.0, nan, nan, nan]  # fmt: skip
    torch.testing.assert_close(out, torch.tensor(expected), equal_nan=True)


@triton.jit
def fp8_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0).to(tl.float8e4nv), mask=at < n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fp8_is_rounded_to_nearest_and_ends_at_the_largest_code(dtype):
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    between = (codes[1:] + codes[:-1]) / 2  # halfway, a little below and a little above
    x = torch.cat([codes, between, between * (1 - 2**-9), between * (1 + 2**-9), torch.tensor([460.0, 1e4])]).to(dtype)
    x = torch.cat([x, -x, torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)])
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    fp8_kernel[(-(-x.numel() // 128),)](x, out, x.numel(), BLOCK=128)
    torch.testing.assert_close(out.float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float(), equal_nan=True)
    assert out[: codes.numel()].to(dtype).equal(codes)


@triton.jit
def bfloat16_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16))


def test_bfloat16_is_rounded_to_nearest_and_ties_to_even():
    numbers = torch.randn(1016, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38, torch.inf, torch.nan, 1e-40, -0.0])
    x, out = torch.cat([numbers, ends]), torch.empty(1024, dtype=torch.bfloat16)
    bfloat16_kernel[(1,)](x, out, BLOCK=1024)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@triton.autotune(
    [triton.Config(dict(BLOCK=64)), triton.Config(dict(BLOCK=32), num_warps=8)], key=["n"], restore_value=["x_ptr"]
)
@triton.jit
def tuned_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + BLOCK, mask=at < n)


def test_what_is_tuned_on_a_gpu_takes_its_first_configuration():
    for n in (100, 100, 70):
        x = torch.arange(float(n))
        tuned_kernel[lambda chosen: (triton.cdiv(n, chosen["BLOCK"]),)](x, n)
        torch.testing.assert_close(x, torch.arange(float(n)) + 64)
