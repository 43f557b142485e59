"""From the projection into the pages: queries and keys normalised and turned, keys and values stored, in one launch.

    heads [T, q + k + v heads, D]    | q          | k      | v      |
                                       ↓ norm, turn  ↓ norm, turn  ↓
                                     turned q       keys[slot]    values[slot]        codes and a scale where pages hold them

Tiles of heads are those of `kernels/attention/rope.py`, a token to a program; what becomes of a tile is decided by the head
it begins with.
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
from tilestack.kernels.attention.kv_write import exact_codes, exact_scale, strides_or_none, takes_new_rows
from tilestack.kernels.attention.rope import (
    heads_of,
    load_angles,
    load_heads,
    norm_heads,
    rotate,
    rows_of_tile,
    store_heads,
    tile_of_heads,
)
from tilestack.kernels.early import early, wait_for_last
from tilestack.kernels.quantised.codes import magnitudes
from tilestack.ops.quantised import LARGEST_CODE

ELEMENTS, WARPS = 2048, 4  # of a tile at most, and of the program that turns it


@triton.jit
def store_pairs_in_page(
    pages_ptr, scale_ptr, slot, head, first, second, rest, inside,
    page_stride, stride, head_stride, scale_page_stride, scale_stride, scale_head_stride,
    PAGE: tl.constexpr, LARGEST_CODE: tl.constexpr, INTERLEAVED: tl.constexpr, DIM: tl.constexpr,
    PAIRS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Heads of a token to their place, as codes where there is a scale; nowhere without a slot."""
    kept = inside & (slot >= 0)
    page, in_page = slot // PAGE, slot % PAGE
    if scale_ptr is not None:
        largest = tl.maximum(
            tl.max(magnitudes(first), 1, keep_dims=True), tl.max(magnitudes(second), 1, keep_dims=True)
        )
        if REST:
            largest = tl.maximum(largest, tl.max(magnitudes(rest), 1, keep_dims=True))
        scale = exact_scale(largest, LARGEST_CODE)
        scale_at = page * scale_page_stride + in_page * scale_stride + head * scale_head_stride
        tl.store(scale_ptr + scale_at, scale, mask=kept)
        first = exact_codes(first, scale, pages_ptr.dtype.element_ty)
        second = exact_codes(second, scale, pages_ptr.dtype.element_ty)
        rest = exact_codes(rest, scale, pages_ptr.dtype.element_ty)
    place = pages_ptr + page * page_stride + in_page * stride + head * head_stride
    store_heads(place, first, second, rest, kept, False, INTERLEAVED, DIM, PAIRS, WIDTH, REST)


@triton.jit
def qkv_rope_write_kernel(
    heads_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr,
    keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, key_offset_ptr,  # pages, their scales, [k_heads, DIM]
    tokens, q_heads, k_heads, table, heads_stride, head_stride,
    k_page_stride, k_stride, k_head_stride, v_page_stride, v_stride, v_head_stride,
    k_scale_page_stride, k_scale_stride, k_scale_head_stride, v_scale_page_stride, v_scale_stride, v_scale_head_stride, eps,
    EARLY: tl.constexpr, PAGE: tl.constexpr, LARGEST_CODE: tl.constexpr, INTERLEAVED: tl.constexpr, ACC: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of heads)."""
    wait_for_last(EARLY)
    _, token, row, inside = rows_of_tile(tl.program_id(0), tokens, HEADS, 1)
    first_head = tl.program_id(1) * HEADS
    here = heads_ptr + token * heads_stride + (first_head + row) * head_stride
    inside = inside & (row >= 0)  # [HEADS, 1]: a mask for every head
    first, second, rest = load_heads(here, inside, False, INTERLEAVED, ACC, DIM, PAIRS, WIDTH, REST)
    cos, sin = load_angles(cos_ptr, sin_ptr, positions_ptr, 0, token, token < tokens, 0, table, True, ACC, PAIRS, WIDTH)
    if first_head < q_heads:
        if q_weight_ptr is not None:
            first, second, rest = norm_heads(
                first, second, rest, q_weight_ptr, eps, INTERLEAVED, ACC, DIM, PAIRS, WIDTH, REST
            )
        first, second = rotate(first, second, cos, sin)
        q_at = q_ptr + (token * q_heads + first_head + row) * DIM
        store_heads(q_at, first, second, rest, inside, False, INTERLEAVED, DIM, PAIRS, WIDTH, REST)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)  # [1, 1]
        if first_head < q_heads + k_heads:
            if k_weight_ptr is not None:
                first, second, rest = norm_heads(
                    first, second, rest, k_weight_ptr, eps, INTERLEAVED, ACC, DIM, PAIRS, WIDTH, REST
                )
            # What is stored is what the model's dtype holds, as if it had been in memory between.
            turned = (first * cos - second * sin).to(heads_ptr.dtype.element_ty).to(ACC)
            other = (second * cos + first * sin).to(heads_ptr.dtype.element_ty).to(ACC)
            rest = rest.to(heads_ptr.dtype.element_ty).to(ACC)
            if key_offset_ptr is not None:
                offset_at = key_offset_ptr + (first_head - q_heads + row) * DIM
                a, b, c = load_heads(offset_at, inside, False, INTERLEAVED, ACC, DIM, PAIRS, WIDTH, REST)
                turned, other, rest = turned - a, other - b, rest - c
            store_pairs_in_page(
                keys_ptr, key_scale_ptr, slot, first_head - q_heads + row, turned, other, rest, inside,
                k_page_stride, k_stride, k_head_stride, k_scale_page_stride, k_scale_stride, k_scale_head_stride,
                PAGE, LARGEST_CODE, INTERLEAVED, DIM, PAIRS, WIDTH, REST,
            )  # fmt: skip
        else:
            store_pairs_in_page(
                values_ptr, value_scale_ptr, slot, first_head - q_heads - k_heads + row, first, second, rest, inside,
                v_page_stride, v_stride, v_head_stride, v_scale_page_stride, v_scale_stride, v_scale_head_stride,
                PAGE, LARGEST_CODE, INTERLEAVED, DIM, PAIRS, WIDTH, REST,
            )  # fmt: skip


def takes_heads(heads: Tensor, keys: Tensor, values: Tensor) -> bool | str:
    if keys.stride(3) != 1 or values.stride(3) != 1:
        return "it writes pages whose heads lie side by side"
    return takes_new_rows(keys, heads)


@implements(
    ops.qkv_rope_write,
    backend="triton",
    repeat=straight_line,
    dtypes=(*FLOATS, torch.float8_e4m3fn),
    when=takes_heads,
)
def qkv_rope_write(
    heads: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    q_heads: int,
    interleaved: bool,
    eps: float,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    key_offset: Tensor | None,
) -> Tensor:
    (tokens, count, dim), (_, page, k_heads, _) = heads.shape, keys.shape
    rows = heads_of(heads[None])[0]
    q, k, _ = rows[None].split((q_heads, k_heads, k_heads), 2)
    tile = tile_of_heads(q, k, 1, cos.shape[1], interleaved, ELEMENTS)
    out = torch.empty((tokens, q_heads, dim), dtype=heads.dtype, device=heads.device)
    dense = lambda x: None if x is None else x.contiguous()
    named = {name: tile[name] for name in ("INTERLEAVED", "ACC", "HEADS", "DIM", "PAIRS", "WIDTH", "REST")}
    launch(
        qkv_rope_write_kernel, (tokens, count // tile["HEADS"]),
        rows, dense(q_weight), dense(k_weight), dense(cos), dense(sin), dense(positions), dense(slots), out,
        keys, values, key_scale, value_scale, dense(key_offset),
        tokens, q_heads, k_heads, cos.shape[0], *rows.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        *strides_or_none(key_scale, 3), *strides_or_none(value_scale, 3), float(eps),
        PAGE=page, LARGEST_CODE=LARGEST_CODE.get(keys.dtype, 0), **named, num_warps=WARPS, **early(heads),
    )  # fmt: skip
    return out
