"""AdamW with 8-bit moments over all tensors in one launch; the codes are described in optim/dynamic_map.py.

A program takes a tile of ROWS blocks of 256 elements, decodes both moments, updates, finds each block's new largest
magnitude (a row maximum in registers) and encodes again:

    one row of the tile = one block       p 4 + 4    g 4    codes 2 · (1 + 1)    scales 4 · 4 / 256    16.1 bytes an
    ├──────────── 256 ────────────┤                                                                    element in float32

So few bytes are moved that the step is bound by instructions as much as by memory, and is written to need few. Codes are
decoded by a table in shared memory (in the first-level cache, the same table took twice the time of all else). They are
encoded without one: in each decade the code is a line over the value, cut off to an integer. The next lower decade's line is
five times as steep, and both meet where the decade ends. So the least of all seven lines is the right one:

    code │    ╱ decade 1       . · ´   decade 0
         │   ╱         . · ´
         │  ╱  . · ´
         │ ╱ ´
         │╱
         └──────────────────────────── value, as a share of the block's largest
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
)

ROWS = 8
WARPS = 4  # a block is one warp's, so that its maximum needs no shared memory, and a warp has two of them
QUANTISED = 256  # elements that share a scale
DECADES = 7
BLOCK = ROWS * QUANTISED
FIRST_SCALE, SECOND_SCALE, MASTER_COPY = LAST, tl.constexpr(LAST.value + 1), tl.constexpr(LAST.value + 2)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def lines(most: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Slopes and offsets of the decades' lines, for maps with `most` bits of fraction in the uppermost decade."""
    parts = [2.0 ** (most - decade) for decade in range(DECADES)]
    slopes = [count * 10.0**decade / 0.9 for decade, count in enumerate(parts)]
    offsets = [count * 8 / 9 for count in parts]
    # The lowest decade's first code is nearest to all that is smaller; its second begins in the middle, at 0.55 millionths.
    slopes[-1], offsets[-1] = (1 - 0.24) / 0.55e-6, parts[-1] + 0.24
    return tuple(slopes), tuple(offsets)


SIGNED, UNSIGNED = lines(6), lines(7)


@triton.jit
def decoded(values_ptr, signed, unsigned):
    """The values of signed and of unsigned codes, from a table of all 512 in shared memory."""
    table = tl.load(values_ptr + tl.arange(0, 512))
    codes = tl.join(signed, unsigned + 256)
    return tl.split(tl.reshape(tl.gather(table, tl.reshape(codes, [codes.numel]), 0), codes.shape))


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def encoded(size, LINES: tl.constexpr):
    """The magnitude, in int32, whose value is nearest to a size in [0, 1]; never zero.

    Positive floats are ordered like their bits, and of integers Hopper finds the least of three in one instruction.
    """
    code = bits_of(size * LINES[0][0] + LINES[1][0])
    for decade in tl.static_range(1, 7):
        code = tl.minimum(code, bits_of(size * LINES[0][decade] + LINES[1][decade]))
    # A decade's values are the middles of its parts, and the parts below are a fifth as wide. So its first value is half a
    # part above the edge, the last one below a tenth under it, and half way between them is 0.2: what is under that keeps
    # to the codes before the power of two at which a decade's codes begin.
    last = bits_of(code.to(tl.float32, bitcast=True) - 0.2) | 0x7FFFFF
    return tl.minimum(code, last).to(tl.float32, bitcast=True).to(tl.int32)


@triton.jit
def signed_codes(x, inverse, LINES: tl.constexpr):
    relative = x * inverse
    size = tl.abs(relative)
    code = encoded(size, LINES) | ((bits_of(relative) >> 24) & 128)
    code = tl.where(size < 2.75e-7, 0, code)
    return tl.where(relative > 1 - 0.225 / 64, 128, code)


@triton.jit
def unsigned_codes(x, inverse, LINES: tl.constexpr):
    relative = x * inverse
    code = tl.where(relative > 0, encoded(relative, LINES), 0)
    return tl.where(relative > 1 - 0.225 / 128, 1, code)


@triton.jit
def reciprocal(x):
    """1 / x of a positive number, off by three units in the last place at most; a division also handles what would
    overflow on the way, in four times the instructions."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def row_scale(size):
    """The largest size of each row, found among their bits, so that a NaN is larger than all else."""
    scale = tl.max(bits_of(size), 1, keep_dims=True).to(tl.float32, bitcast=True)
    return tl.where(scale < TINY, 0.0, scale)


@triton.jit
def inverse_of(scale):
    """What values are multiplied by before they are encoded; a block of zeros has zeros."""
    return tl.where(scale > 0, reciprocal(tl.maximum(scale, TINY)), 0.0)


@triton.jit
def adam8_block(
    table_ptr, values_ptr, record, seed, tensors, tensor, start, length,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, DECOUPLED: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
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

    factor, decay = item(record, 0, tl.float32), item(record, 1, tl.float32)
    m_share, v_kept, v_share = item(record, 2, tl.float32), item(record, 3, tl.float32), item(record, 4, tl.float32)
    step, correction, eps = item(record, 5, tl.float32), item(record, 6, tl.float32), item(record, 7, tl.float32)

    m, v = decoded(values_ptr, m_code, v_code)
    g = g * factor
    if DECOUPLED:
        p = p * decay
    else:
        g = g + p * decay
    m = m * (m_scale * (1 - m_share)) + g * m_share
    v = v * (v_scale * v_kept) + g * g * v_share
    p = p - step * m * reciprocal(tl.sqrt(v) * correction + eps)

    if MASTER:
        put(master_at, start, lane, length, p, tl.float32, WHOLE)
    if STOCHASTIC:
        bits, _ = random_bits(seed, item(record, 8, tl.float64).to(tl.int64), tensor, start + lane)
        p = round_stochastically(p, bits)
    put(p_at, start, lane, length, p, PARAM_TYPE, WHOLE)
    if not WHOLE:
        m, v = tl.where(lane < length - start, m, 0.0), tl.where(lane < length - start, v, 0.0)
    m_scale, v_scale = row_scale(tl.abs(m)), row_scale(v)
    put(m_at, start, lane, length, signed_codes(m, inverse_of(m_scale), SIGNED), tl.uint8, WHOLE)
    put(v_at, start, lane, length, unsigned_codes(v, inverse_of(v_scale), UNSIGNED), tl.uint8, WHOLE)
    put(m_scale_at, scale_start, row, scale_length, m_scale, tl.float32, False)
    put(v_scale_at, scale_start, row, scale_length, v_scale, tl.float32, False)


@triton.jit
def adam8_kernel(
    table_ptr, blocks_ptr, records_ptr, values_ptr, found_inf_ptr,  # values [2, 256]: those of signed codes, of unsigned
    seed, tensors, blocks,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, DECOUPLED: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr, UNSIGNED: tl.constexpr, QUANTISED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if is_skipped(found_inf_ptr):
        return
    tensor, start, length = place(table_ptr, blocks_ptr, tl.program_id(0), blocks, ROWS * QUANTISED)
    record = records_ptr + tensor * ADAM_RECORD
    if (start + ROWS * QUANTISED <= length) & aligned(table_ptr, tensors, tensor, PARAM, LAST + 2 + MASTER):
        adam8_block(
            table_ptr, values_ptr, record, seed, tensors, tensor, start, length, PARAM_TYPE, GRAD_TYPE, DECOUPLED, MASTER, STOCHASTIC,
            SIGNED, UNSIGNED, QUANTISED, ROWS, True,
        )  # fmt: skip
    else:
        # Row by row, for the registers that a masked tile holds its addresses in would be taken from the whole ones, too.
        for row in range(ROWS):
            if start + row * QUANTISED < length:
                adam8_block(
                    table_ptr, values_ptr, record, seed, tensors, tensor, start + row * QUANTISED, length, PARAM_TYPE, GRAD_TYPE,
                    DECOUPLED, MASTER, STOCHASTIC, SIGNED, UNSIGNED, QUANTISED, 1, False,
                )  # fmt: skip


def step_adam8(
    table: Table, values: Tensor, dtypes: tuple[torch.dtype, torch.dtype], found_inf: Tensor | None, seed: int,
    decoupled: bool, master: bool, stochastic: bool,
) -> None:  # fmt: skip
    """Update all tensors of a table whose rows are step, param, grad, both moments' codes, their scales[, master]."""
    param, grad = dtypes
    launch(
        adam8_kernel, (table.programs,), table.entries, table.blocks, table.records, values, found_inf, seed, table.tensors,
        table.programs, PARAM_TYPE=triton_dtype(param), GRAD_TYPE=triton_dtype(grad), DECOUPLED=decoupled,
        MASTER=master, STOCHASTIC=stochastic, SIGNED=SIGNED, UNSIGNED=UNSIGNED, QUANTISED=QUANTISED, ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
