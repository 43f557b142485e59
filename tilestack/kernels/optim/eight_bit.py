"""AdamW with 8-bit moments over all tensors in one launch; the codes are described in optim/dynamic_map.py.

A program takes a tile of ROWS blocks of 256 elements, decodes both moments, updates, finds each block's new largest
magnitude (a row maximum in registers) and encodes again:

    one row of the tile = one block       p 4 + 4    g 4    codes 2 · (1 + 1)    scales 4 · 4 / 256    16.1 bytes an
    ├──────────── 256 ────────────┤                                                                    element in float32

The step is bound by instructions, not by memory. Codes are decoded by a table in shared memory (in the first-level cache,
the same table took twice the time of all else), and encoded without exponentials or conversions, by comparisons.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.optim.multi_tensor import Table, address, fetch, place, put, triton_dtype
from tilestack.kernels.optim.rounding import random_bits, round_stochastically
from tilestack.kernels.optim.steps import (
    ADAM_RECORD,
    FIRST,
    GRAD,
    LAST,
    PARAM,
    SECOND,
    aligned,
    is_skipped,
    item,
    moments,
)

ROWS = 8
WARPS = 4  # a block is one warp's, so that its maximum needs no shared memory, and a warp has two of them
QUANTISED = 256  # elements that share a scale
BLOCK = ROWS * QUANTISED
FIRST_SCALE, SECOND_SCALE, MASTER_COPY = LAST, tl.constexpr(LAST.value + 1), tl.constexpr(LAST.value + 2)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def borders(most: int) -> tuple[float, ...]:
    """Where each decade ends and the next lower one begins: halfway between their nearest values."""
    lowest = lambda e: 10.0**-e * (0.1 + 0.45 / 2 ** (most - e))
    highest = lambda e: 10.0**-e * (1 - 0.45 / 2 ** (most - e))
    return tuple((lowest(e - 1) + highest(e)) / 2 for e in range(1, 7))


SIGNED, UNSIGNED = borders(6), borders(7)
INTEGER = tl.constexpr(
    12582912.0
)  # 1.5 · 2²³: what is added to it is rounded to an integer, in the lower bits of the sum


@triton.jit
def decoded(values_ptr, codes):
    """The values of codes, from a table of all 256 in shared memory."""
    table = tl.load(values_ptr + tl.arange(0, 256))
    return tl.reshape(tl.gather(table, tl.reshape(codes, [codes.numel]), 0), codes.shape)


@triton.jit
def encoded(size, MOST: tl.constexpr, BORDERS: tl.constexpr):
    """The magnitude, in the lower 8 bits of an int32, whose value is nearest to a size in [0, 1]; never zero.

    Decade d has 2^(MOST - d) codes, `parts`, that are linear in size · 10^d; a chain of comparisons finds both factors,
    for exponentials and conversions go through a unit that takes eight cycles for each.
    """
    parts = tl.full(size.shape, 2.0**MOST, tl.float32)
    slope = tl.full(size.shape, 2.0**MOST / 0.9, tl.float32)
    for decade in tl.static_range(1, 7):
        lower = size < BORDERS[decade - 1]
        parts = tl.where(lower, 2.0 ** (MOST - decade), parts)
        slope = tl.where(lower, 2.0 ** (MOST - decade) * 10.0**decade / 0.9, slope)
    # Half below the code with its fraction, and held half of that off its neighbours', so that rounding cuts the fraction off.
    code = size * slope + (parts * 0.8888888888888888 - 0.5)
    code = tl.minimum(tl.maximum(code, parts - 0.25), 2 * parts - 0.75)
    return (code + INTEGER).to(tl.int32, bitcast=True)


@triton.jit
def signed_codes(x, inverse, BORDERS: tl.constexpr):
    relative = x * inverse
    size = tl.abs(relative)
    code = (encoded(size, 6, BORDERS) & 127) | ((relative.to(tl.int32, bitcast=True) >> 24) & 128)
    code = tl.where(size < 2.75e-7, 0, code)
    return tl.where(relative > 1 - 0.225 / 64, 128, code)


@triton.jit
def unsigned_codes(x, inverse, BORDERS: tl.constexpr):
    relative = x * inverse
    code = tl.where(relative > 0, encoded(relative, 7, BORDERS) & 255, 0)
    return tl.where(relative > 1 - 0.225 / 128, 1, code)


@triton.jit
def row_scale(x):
    scale = tl.max(tl.abs(x), 1, keep_dims=True)
    return tl.where(scale < TINY, 0.0, scale)


@triton.jit
def inverse_of(scale):
    """What values are multiplied by before they are encoded; a block of zeros has zeros."""
    return tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)


@triton.jit
def adam8_block(
    table_ptr, values_ptr, record, seed, tensors, tensor, start, length,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr, UNSIGNED: tl.constexpr, QUANTISED: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    lane = row * QUANTISED + tl.arange(0, QUANTISED)[None, :]
    scale_start, scale_length = start // QUANTISED, tl.cdiv(length, QUANTISED)
    p_at = address(table_ptr, tensors, tensor, PARAM)
    m_at = address(table_ptr, tensors, tensor, FIRST)
    v_at = address(table_ptr, tensors, tensor, SECOND)
    m_scale_at = address(table_ptr, tensors, tensor, FIRST_SCALE)
    v_scale_at = address(table_ptr, tensors, tensor, SECOND_SCALE)
    if MASTER:
        master_at = address(table_ptr, tensors, tensor, MASTER_COPY)
        p = fetch(master_at, start, lane, length, tl.float32, WHOLE)
    else:
        p = fetch(p_at, start, lane, length, PARAM_TYPE, WHOLE).to(tl.float32)
    g = fetch(address(table_ptr, tensors, tensor, GRAD), start, lane, length, GRAD_TYPE, WHOLE).to(tl.float32)
    m_code = fetch(m_at, start, lane, length, tl.uint8, WHOLE).to(tl.int32)
    v_code = fetch(v_at, start, lane, length, tl.uint8, WHOLE).to(tl.int32)
    m_scale = fetch(m_scale_at, scale_start, row, scale_length, tl.float32, False)
    v_scale = fetch(v_scale_at, scale_start, row, scale_length, tl.float32, False)

    m = decoded(values_ptr, m_code) * m_scale
    v = decoded(values_ptr + 256, v_code) * v_scale
    p, m, v = moments(record, p, g, m, v, True, tl.float32)
    root = tl.sqrt(v) * item(record, 6, tl.float32)
    p = p - item(record, 5, tl.float32) * m / (root + item(record, 7, tl.float32))

    if MASTER:
        put(master_at, start, lane, length, p, tl.float32, WHOLE)
    if STOCHASTIC:
        bits, _ = random_bits(seed, item(record, 8, tl.float64).to(tl.int64), tensor, start + lane)
        p = round_stochastically(p, bits)
    put(p_at, start, lane, length, p, PARAM_TYPE, WHOLE)
    if not WHOLE:
        m, v = tl.where(lane < length - start, m, 0.0), tl.where(lane < length - start, v, 0.0)
    m_scale, v_scale = row_scale(m), row_scale(v)
    put(m_at, start, lane, length, signed_codes(m, inverse_of(m_scale), SIGNED), tl.uint8, WHOLE)
    put(v_at, start, lane, length, unsigned_codes(v, inverse_of(v_scale), UNSIGNED), tl.uint8, WHOLE)
    put(m_scale_at, scale_start, row, scale_length, m_scale, tl.float32, False)
    put(v_scale_at, scale_start, row, scale_length, v_scale, tl.float32, False)


@triton.jit
def adam8_kernel(
    table_ptr, blocks_ptr, records_ptr, values_ptr, found_inf_ptr,  # values [2, 256]: those of signed codes, of unsigned
    seed, tensors, blocks,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr, UNSIGNED: tl.constexpr, QUANTISED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if is_skipped(found_inf_ptr):
        return
    tensor, start, length = place(table_ptr, blocks_ptr, tl.program_id(0), blocks, ROWS * QUANTISED)
    record = records_ptr + tensor * ADAM_RECORD
    if (start + ROWS * QUANTISED <= length) & aligned(table_ptr, tensors, tensor, PARAM, LAST + 2 + MASTER):
        adam8_block(
            table_ptr, values_ptr, record, seed, tensors, tensor, start, length, PARAM_TYPE, GRAD_TYPE, MASTER, STOCHASTIC, SIGNED,
            UNSIGNED, QUANTISED, ROWS, True,
        )  # fmt: skip
    else:
        adam8_block(
            table_ptr, values_ptr, record, seed, tensors, tensor, start, length, PARAM_TYPE, GRAD_TYPE, MASTER, STOCHASTIC, SIGNED,
            UNSIGNED, QUANTISED, ROWS, False,
        )  # fmt: skip


def step_adam8(
    table: Table, values: Tensor, dtypes: tuple[torch.dtype, torch.dtype], found_inf: Tensor | None, seed: int,
    master: bool, stochastic: bool,
) -> None:  # fmt: skip
    """Update all tensors of a table whose rows are step, param, grad, both moments' codes, their scales[, master]."""
    param, grad = dtypes
    launch(
        adam8_kernel, (table.programs,), table.entries, table.blocks, table.records, values, found_inf, seed, table.tensors,
        table.programs, PARAM_TYPE=triton_dtype(param), GRAD_TYPE=triton_dtype(grad), MASTER=master,
        STOCHASTIC=stochastic, SIGNED=SIGNED, UNSIGNED=UNSIGNED, QUANTISED=QUANTISED, ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
