"""New keys and values into their pages: a program for each token, which finds the slot and copies or quantises its heads.

    k [T, heads, dim] ── token t ──► slots[t] ──► keys[slot / page, slot % page]      codes and a scale where pages hold them

What is written must be what the definition writes, bit for bit, for it lies in the cache of every later token: quotients
are those of IEEE, not their approximations.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.implementation import FLOATS
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.quantised.codes import NO_FRACTION, SMALLEST_ROW, magnitudes, writes_fp8
from tilestack.kernels.tiles import next_power
from tilestack.ops.quantised import LARGEST_CODE


@triton.jit
def exact_scale(largest, LARGEST_CODE: tl.constexpr):
    scale = tl.div_rn(tl.maximum(largest, SMALLEST_ROW), tl.full(largest.shape, LARGEST_CODE, tl.float32))
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def exact_codes(x, scale, CODES: tl.constexpr):
    """x / scale, to the nearest integer where codes are integers, of which none stands for NaN."""
    x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    if tl.int8 == CODES:
        x = (tl.where(x == x, x, 0.0) + NO_FRACTION) - NO_FRACTION
    return x


@triton.jit
def store_in_page(
    x, pages_ptr, scale_ptr, offset_ptr, page, in_page, head, inside,
    page_stride, stride, head_stride, dim_stride, scale_page_stride, scale_stride, scale_head_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    """Heads of one token, x [HEADS, WIDTH], to their place, as codes where there is room for a scale."""
    element = tl.arange(0, WIDTH)[None, :]
    place = pages_ptr + page * page_stride + in_page * stride + head * head_stride + element * dim_stride
    if scale_ptr is not None:
        x = x.to(tl.float32)
        if offset_ptr is not None:
            x -= tl.load(offset_ptr + head * DIM + element, mask=inside & (element < DIM), other=0.0)
        scale = exact_scale(tl.max(magnitudes(x), 1, keep_dims=True), LARGEST_CODE)
        scale_at = page * scale_page_stride + in_page * scale_stride + head * scale_head_stride
        tl.store(scale_ptr + scale_at, scale, mask=inside)
        x = exact_codes(x, scale, pages_ptr.dtype.element_ty)
    tl.store(place, x.to(pages_ptr.dtype.element_ty), mask=inside & (element < DIM))


@triton.jit
def kv_write_kernel(
    k_ptr, v_ptr, slots_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr,  # [T, heads, …], [T], pages, scales
    key_offset_ptr,  # [heads, DIM]
    heads, k_token_stride, k_new_head_stride, k_new_dim_stride, v_token_stride, v_new_head_stride, v_new_dim_stride,
    k_page_stride, k_stride, k_head_stride, k_dim_stride, v_page_stride, v_stride, v_head_stride, v_dim_stride,
    k_scale_page_stride, k_scale_stride, k_scale_head_stride, v_scale_page_stride, v_scale_stride, v_scale_head_stride,
    PAGE: tl.constexpr, LARGEST_CODE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS)[:, None]
    inside = head < heads
    element = tl.arange(0, WIDTH)[None, :]
    new_at = token * k_token_stride + head * k_new_head_stride + element * k_new_dim_stride
    k = tl.load(k_ptr + new_at, mask=inside & (element < DIM), other=0.0)
    store_in_page(
        k, keys_ptr, key_scale_ptr, key_offset_ptr, slot // PAGE, slot % PAGE, head, inside,
        k_page_stride, k_stride, k_head_stride, k_dim_stride, k_scale_page_stride, k_scale_stride, k_scale_head_stride, DIM, WIDTH, LARGEST_CODE,
    )  # fmt: skip
    if values_ptr is not None:
        element = tl.arange(0, VALUE_WIDTH)[None, :]
        new_at = token * v_token_stride + head * v_new_head_stride + element * v_new_dim_stride
        v = tl.load(v_ptr + new_at, mask=inside & (element < VALUE_DIM), other=0.0)
        store_in_page(
            v, values_ptr, value_scale_ptr, None, slot // PAGE, slot % PAGE, head, inside,
            v_page_stride, v_stride, v_head_stride, v_dim_stride, v_scale_page_stride, v_scale_stride, v_scale_head_stride, VALUE_DIM, VALUE_WIDTH, LARGEST_CODE,
        )  # fmt: skip


def takes_new_rows(keys: Tensor, k: Tensor) -> bool | str:
    if keys.dtype not in LARGEST_CODE:
        return True
    if k.dtype == torch.float64:
        return "it makes no codes of float64"
    return writes_fp8(keys) if keys.dtype == torch.float8_e4m3fn else True


def strides_or_none(x: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else x.stride()


@implements(
    ops.kv_write,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    dtypes=(*FLOATS, torch.float8_e4m3fn),
    when=takes_new_rows,
)
def kv_write(
    k: Tensor,
    v: Tensor | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    key_offset: Tensor | None,
) -> None:
    _, page, heads, dim = keys.shape
    value_dim = 0 if values is None else values.shape[3]
    launch(
        kv_write_kernel, (len(slots),), k, v, slots.contiguous(), keys, values, key_scale, value_scale,
        None if key_offset is None else key_offset.contiguous(),
        heads, *k.stride(), *strides_or_none(v, 3), *keys.stride(), *strides_or_none(values, 4),
        *strides_or_none(key_scale, 3), *strides_or_none(value_scale, 3),
        PAGE=page, LARGEST_CODE=LARGEST_CODE.get(keys.dtype, 0), HEADS=next_power(heads),
        DIM=dim, WIDTH=next_power(dim), VALUE_DIM=value_dim, VALUE_WIDTH=next_power(value_dim), num_warps=4,
    )  # fmt: skip
