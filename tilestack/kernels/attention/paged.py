"""Attention over pages: one kernel for prompts, chunks of them and decoding, side by side in one batch.

What limits decoding is reading the keys and values once, so a program reads them for all the queries that share them.
The rows of a tile are the new tokens of a sequence times the heads of its group, and a program owns ROWS of them, one head
of keys, and a part of what they see:

    sequence 0: 1 token  × 4 heads   |████            |                keys  0 ──────── split 0 ──┬── split 1 ──── length
    sequence 1: 9 tokens × 4 heads   |████████████████|                      page 7 · page 2 · …  │  page 9 · …
                                     |████████████████|                              KEYS at a time, by the block table
                                     |████            |
    padding                          |zeros

Where sequences are few, what they see is split, so that there is work for the whole GPU: every program leaves the sum of
its exponentials, the largest score they are relative to, and its weighted values. The program that comes last, by a
counter, merges them in one order, so that bits do not depend on who was last. The grid follows from shapes
alone: how long sequences are, and so where splits begin, is read in the kernel.

Where pages hold codes, queries meet them in half precision, or, CODED, as codes: then keys are multiplied as they lie there,
one product in 8 bits in the place of a conversion and one in 16.

Tiles of sequence s begin at tile cu_queries[s] · group / ROWS + s, which leaves room for the last tile of each; a program
finds its sequence by bisection. Where sequences are too short for that to save tiles, each has the same number of them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.implementation import FLOATS
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.contract.workspace import workspace
from tilestack.kernels.attention.kv_write import exact_codes, exact_scale
from tilestack.kernels.attention.parts import comes_last, finite_or_zero, merged_parts, store_part
from tilestack.kernels.early import early, wait_for_last
from tilestack.kernels.elementwise.activation import tanh_of
from tilestack.kernels.elementwise.arithmetic import INTERPRETED
from tilestack.kernels.quantised.codes import magnitudes, reads_fp8
from tilestack.kernels.tiles import accumulator, cdiv, multiprocessors, next_power, shared_memory, widened
from tilestack.ops.quantised import LARGEST_CODE

PROGRAMS = 4  # for each multiprocessor, below which what a tile sees is split; of a single warp, four times as many
# Keys at a time, warps and loads under way of tiles of few queries. Where programs outnumber multiprocessors, small ones
# that share them hide each other's waits; of codes, of which a key is half as long, those of a single warp wait least.
FEW_PROGRAMS, MANY_PROGRAMS, OF_CODES, MANY_OF_WIDE_GROUPS = (128, 4, 2), (64, 2, 2), (32, 1, 2), (64, 1, 2)
LEAST_SPAN = 128  # keys that are worth a program of their own
HOPPER_SHARED = 200_000  # bytes of shared memory that GPUs before it do not have
# Where the largest of what is brought to float16 goes: near its end, at 65,504, so that what is small has room below.
TOP_OF_HALVES = tl.constexpr(16384.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_tile(sequence, cu_ptr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    return tl.load(cu_ptr + sequence).to(tl.int32) * GROUP // ROWS + sequence


@triton.jit
def sequence_of_tile(tile, cu_ptr, sequences, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """(the sequence that a tile belongs to, `sequences` for padding; its first row there)."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high + 1) // 2
        starts_before = first_tile(middle, cu_ptr, GROUP, ROWS) <= tile
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle - 1)
    return low, (tile - first_tile(low, cu_ptr, GROUP, ROWS)) * ROWS


@triton.jit
def power_of_two(x):
    """The largest power of two that is not above x, at least 2^-112: dividing by it, or by 2^-14 of it, loses no bits."""
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(exponent, 0x07800000).to(tl.float32, bitcast=True)


@triton.jit
def load_rows(ptr, at, stride, there, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH]: COUNT elements from FIRST on of the rows that lie at these places, zero where nothing is."""
    element = tl.arange(0, WIDTH)
    inside = there[:, None] & (element < COUNT)[None, :]
    return tl.load(ptr + at[:, None] + (FIRST + element)[None, :] * stride, mask=inside, other=0.0)


@triton.jit
def numbers_of(codes, DTYPE: tl.constexpr):
    """Codes as numbers. For int8, in five instructions for four: 128 more than a code, as the last byte of a float16 whose
    first is that of 1024, is 1152 more than the code."""
    if INTERPRETED or tl.int8 != codes.dtype or tl.float16 != DTYPE:
        return codes.to(DTYPE)
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 above, two, base;
            mov.b32 base, 0x64806480;
            xor.b32 above, $2, 0x80808080;
            prmt.b32 two, above, 0x64646464, 0x4140;
            sub.rn.f16x2 $0, two, base;
            prmt.b32 two, above, 0x64646464, 0x4342;
            sub.rn.f16x2 $1, two, base; }""",
            "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def codes_of_pairs(pairs, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """The first and the second codes of pairs that were loaded as integers of 16 bits, as numbers."""
    if INTERPRETED or tl.float8e4nv != CODE or tl.float16 != DTYPE:
        pairs = pairs.to(tl.uint16, bitcast=True)
        first, second = (pairs & 255).to(tl.uint8), (pairs >> 8).to(tl.uint8)
        first, second = first.to(CODE, bitcast=True).to(DTYPE), second.to(CODE, bitcast=True).to(DTYPE)
    else:  # the same in four instructions for four codes: the two first ones side by side, and the two second ones
        first, second = tl.inline_asm_elementwise(
            """{ .reg .b32 sorted; .reg .b16 firsts, seconds;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {firsts, seconds}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds; }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second


@triton.jit
def paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,  # [T, heads, DIM], [pages, PAGE, kv_heads, …] and their scales
    tables_ptr, lengths_ptr, cu_ptr, out_ptr,  # [S, blocks], [S], [S + 1], [T, heads, VALUE_DIM]
    parts_ptr, sums_ptr, counts_ptr,  # [tiles, kv_heads, SPLITS, ROWS, VALUE_WIDTH], […, ROWS, 2], [tiles, kv_heads]
    tokens, sequences, tiles_each, kv_heads, table_stride, block_stride, q_stride, q_head_stride, q_dim_stride,
    k_page_stride, k_stride, k_head_stride, k_dim_stride, v_page_stride, v_stride, v_head_stride, v_dim_stride,
    k_scale_page_stride, k_scale_stride, k_scale_head_stride, v_scale_page_stride, v_scale_stride, v_scale_head_stride,
    EARLY: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, LEAST_SPAN: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr,
    KEYS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    PAIRS: tl.constexpr, CODED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Grid (tiles · heads of keys, splits): the heads of a page lie side by side and are read at the same time.

    Without v_ptr, the first VALUE_DIM elements of a key are its value, and REST is the width of the others; the keys are then
    read in two parts, of which one is both."""
    wait_for_last(EARLY)
    LATENT: tl.constexpr = v_ptr is None
    EACH: tl.constexpr = 2 if PAIRS else 1
    FIRST_DIM: tl.constexpr = VALUE_DIM if LATENT else DIM  # of the part of keys that is read first
    FIRST_WIDTH: tl.constexpr = VALUE_WIDTH if LATENT else WIDTH
    tile, kv_head, split = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads, tl.program_id(1)
    if tiles_each == 0:
        sequence, first_row = sequence_of_tile(tile, cu_ptr, sequences, GROUP, ROWS)
    else:
        sequence = tl.minimum(tile // tiles_each, sequences)
        first_row = (tile - sequence * tiles_each) * ROWS
    start = tl.load(cu_ptr + sequence)
    end = tl.load(cu_ptr + sequence + 1, mask=sequence < sequences, other=tokens)
    rows = ((end - start) * GROUP).to(tl.int32)
    if first_row >= rows:
        return
    row = first_row + tl.arange(0, ROWS)
    inside = row < rows
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    place = (start + query).to(tl.int64)
    element = tl.arange(0, VALUE_WIDTH)
    out_at = out_ptr + (place * kv_heads * GROUP + head)[:, None] * VALUE_DIM + element[None, :]
    out_inside = inside[:, None] & (element < VALUE_DIM)[None, :]
    if sequence == sequences:
        if split == 0:
            tl.store(out_at, tl.zeros([ROWS, VALUE_WIDTH], out_ptr.dtype.element_ty), mask=out_inside)
        return

    before = (tl.load(lengths_ptr + sequence) - (end - start)).to(tl.int32)  # tokens that are not new
    position = before + query
    stop = before + (tl.minimum(first_row + ROWS, rows) - 1) // GROUP + 1
    low = 0
    if WINDOW is not None:
        low = tl.maximum(before + first_row // GROUP - WINDOW + 1, 0) // KEYS * KEYS
    span = tl.maximum(tl.cdiv(tl.cdiv(stop - low, SPLITS), KEYS) * KEYS, LEAST_SPAN)
    splits = tl.cdiv(stop - low, span)  # those that have any keys
    if split >= splits:
        return
    low += split * span
    high = tl.minimum(low + span, stop)

    q_at = place * q_stride + head * q_head_stride
    q = load_rows(q_ptr, q_at, q_dim_stride, inside, 0, FIRST_DIM, FIRST_WIDTH)
    if LATENT and REST:
        q_rest = load_rows(q_ptr, q_at, q_dim_stride, inside, VALUE_DIM, DIM - VALUE_DIM, REST)
    # Queries that lose nothing by it are scaled instead of scores, of which each rounding is a factor in a weight.
    UNIT: tl.constexpr = SCALE * LOG2_E if SOFTCAP is None else SCALE / SOFTCAP
    IS_SCALED: tl.constexpr = q_ptr.dtype.element_ty == ACC
    if IS_SCALED:
        q *= UNIT
        if LATENT and REST:
            q_rest *= UNIT
    # Codes become float16 in one instruction for two, where bfloat16 takes four; so do queries, relative to their largest.
    IN_HALVES: tl.constexpr = k_scale_ptr is not None and q_ptr.dtype.element_ty == tl.bfloat16
    NUMBER: tl.constexpr = tl.float16 if IN_HALVES else q.dtype  # of weights, and of values beside them
    OPERAND: tl.constexpr = k_ptr.dtype.element_ty if CODED else NUMBER  # of queries, and of keys beside them
    INTEGERS: tl.constexpr = tl.int8 == OPERAND
    SUM: tl.constexpr = tl.int32 if INTEGERS else ACC
    if CODED:
        most = tl.max(magnitudes(q.to(tl.float32)), 1)
        if LATENT and REST:
            most = tl.maximum(most, tl.max(magnitudes(q_rest.to(tl.float32)), 1))
        factor = exact_scale(most, LARGEST)
        q = exact_codes(q.to(tl.float32), factor[:, None], OPERAND).to(OPERAND)
        if LATENT and REST:
            q_rest = exact_codes(q_rest.to(tl.float32), factor[:, None], OPERAND).to(OPERAND)
    elif IN_HALVES:
        most = tl.max(tl.abs(q.to(tl.float32)), 1)
        if LATENT and REST:
            most = tl.maximum(most, tl.max(tl.abs(q_rest.to(tl.float32)), 1))
        factor = power_of_two(most) / TOP_OF_HALVES
        q = (q.to(tl.float32) / factor[:, None]).to(tl.float16)
        if LATENT and REST:
            q_rest = (q_rest.to(tl.float32) / factor[:, None]).to(tl.float16)
    largest = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    values = tl.zeros([ROWS, VALUE_WIDTH // EACH], ACC)
    if PAIRS:
        seconds = tl.zeros([ROWS, VALUE_WIDTH // EACH], ACC)
    for first_key in range(low, high, KEYS):
        key = first_key + tl.arange(0, KEYS)
        there = key < high
        block = tl.load(
            tables_ptr + sequence.to(tl.int64) * table_stride + key // PAGE * block_stride, mask=there, other=0
        )
        page, in_page = block.to(tl.int64), key % PAGE
        k_at = page * k_page_stride + in_page * k_stride + kv_head * k_head_stride
        k = numbers_of(load_rows(k_ptr, k_at, k_dim_stride, there, 0, FIRST_DIM, FIRST_WIDTH), OPERAND)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=SUM)
        if LATENT and REST:
            k_rest = load_rows(k_ptr, k_at, k_dim_stride, there, VALUE_DIM, DIM - VALUE_DIM, REST)
            scores = tl.dot(
                q_rest, tl.trans(numbers_of(k_rest, OPERAND)), scores, input_precision="ieee", out_dtype=SUM
            )
        if INTEGERS:
            scores = scores.to(ACC)
        if k_scale_ptr is not None:
            scale_at = page * k_scale_page_stride + in_page * k_scale_stride + kv_head * k_scale_head_stride
            k_scale = tl.load(k_scale_ptr + scale_at, mask=there, other=0).to(ACC)
            scores *= k_scale[None, :]
        if CODED or IN_HALVES:
            scores *= factor[:, None]
        if not IS_SCALED:
            scores *= UNIT
        if SOFTCAP is not None:
            scores = SOFTCAP * LOG2_E * tanh_of(scores, False)
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW is not None:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        at = finite_or_zero(top)  # a row may see none of these keys, nor any before
        weights = tl.exp2(scores - at[:, None])
        weights_total = tl.sum(weights, 1)
        if LATENT:
            v = k
        else:
            v_at = page * v_page_stride + in_page * v_stride + kv_head * v_head_stride
            v = load_rows(v_ptr, v_at, v_dim_stride, there, 0, VALUE_DIM // EACH, VALUE_WIDTH // EACH)
        fade = tl.exp2(largest - at)
        values *= fade[:, None]
        if k_scale_ptr is None:
            values = tl.dot(weights.to(NUMBER), v.to(NUMBER), values, input_precision="ieee", out_dtype=ACC)
        else:
            # Scales go with the weights, by their largest here, lest a half precision lose small ones.
            if not LATENT:
                scale_at = page * v_scale_page_stride + in_page * v_scale_stride + kv_head * v_scale_head_stride
                k_scale = tl.load(v_scale_ptr + scale_at, mask=there, other=0).to(ACC)
            unit = tl.maximum(tl.max(k_scale, 0), 1e-33) / TOP_OF_HALVES
            weights *= (k_scale * (1 / unit))[None, :]
            weights = weights.to(NUMBER)
            if PAIRS:
                first, second = codes_of_pairs(v, k_ptr.dtype.element_ty, NUMBER)
                values += unit * tl.dot(weights, first, input_precision="ieee", out_dtype=ACC)
                seconds = seconds * fade[:, None] + unit * tl.dot(
                    weights, second, input_precision="ieee", out_dtype=ACC
                )
            else:
                values += unit * tl.dot(weights, numbers_of(v, NUMBER), input_precision="ieee", out_dtype=ACC)
        total = total * fade + weights_total
        largest = top

    if PAIRS:
        values = tl.interleave(values, seconds)
    is_whole = True
    if SPLITS > 1:
        is_whole = splits == 1
        if not is_whole:
            line = (tile.to(tl.int64) * kv_heads + kv_head) * SPLITS * ROWS
            store_part(largest, total, values, inside, parts_ptr, sums_ptr, line + split * ROWS, ROWS, VALUE_WIDTH)
            if comes_last(counts_ptr + tile * kv_heads + kv_head, splits):
                sums, sum_of_values = merged_parts(
                    rows - first_row, parts_ptr, sums_ptr, line, splits, SPLITS, ACC, ROWS, FEW, VALUE_WIDTH
                )
                few = first_row + tl.arange(0, FEW)
                few_place = (start + few // GROUP).to(tl.int64) * kv_heads + kv_head
                few_at = out_ptr + (few_place * GROUP + few % GROUP)[:, None] * VALUE_DIM + element[None, :]
                few_inside = (few < rows)[:, None] & (element < VALUE_DIM)[None, :]
                tl.store(few_at, (sum_of_values / sums[:, None]).to(out_ptr.dtype.element_ty), mask=few_inside)
    if is_whole:
        tl.store(out_at, (values / total[:, None]).to(out_ptr.dtype.element_ty), mask=out_inside)


class ManyRows(NamedTuple):
    """A tile of many queries, of heads that leave room for it: its rows, keys at a time, warps and loads under way."""

    rows: int
    keys: int
    warps: int
    stages: int


USUAL = ManyRows(64, 64, 4, 3)
# A longer tile of codes of fp8 is converted in half the time.
USUAL_OF_FP8 = ManyRows(64, 128, 4, 2)
# Where codes are multiplied as they are, more rows share a conversion of values.
MANY_ROWS = {"128 by 64": ManyRows(128, 64, 8, 3), "64 by 64": USUAL}


class PagedTile(NamedTuple):
    """How a batch is cut, from shapes alone."""

    rows: int
    few: int  # that have a query, of a sequence that has fewer
    keys: int
    warps: int
    stages: int
    tiles: int
    each: int  # tiles of a sequence; 0 where programs look for theirs
    splits: int


def paged_tile(
    q: Tensor, keys: Tensor, most_queries: int, sequences: int, longest: int, width: int, many_rows: ManyRows = USUAL
) -> PagedTile:
    """Tiles for so many sequences of at most so many tokens, whose keys and values are `width` wide at most."""
    tokens, kv_heads, half = q.shape[0], keys.shape[2], q.element_size() == 2
    group = q.shape[1] // kv_heads
    most_rows = min(most_queries, tokens) * group
    rows = min(max(next_power(most_rows), 16), 64 if half and width <= 256 else 32 if half else 16)
    roomy = (
        half and width <= 128 and shared_memory(q.device) >= HOPPER_SHARED and next_power(most_rows) >= many_rows.rows
    )
    rows = many_rows.rows if roomy else rows
    # What multiplies without tensor cores holds its operands in registers; before Hopper, so do tiles of many rows.
    crowded = rows == 64 and width > 64 and shared_memory(q.device) < HOPPER_SHARED
    at_a_time = 16 if not half else 32 if width > 128 or crowded else 64
    warps = 8 if width > 256 or not (half or keys.dtype == q.dtype) else 4
    stages = 2 if width > 256 or not half else 3
    if roomy:
        _, at_a_time, warps, stages = many_rows
    each = max(cdiv(most_rows, rows), 1)
    alike, sought = sequences * each + cdiv(tokens * group, rows), tokens * group // rows + sequences + 1
    tiles = min(alike, sought)
    units, gpu, programs = max(tiles * kv_heads, 1), multiprocessors(q.device), PROGRAMS
    if rows == 16 and half and width <= 128:
        of_codes, enough = keys.dtype != q.dtype, units > 2 * PROGRAMS * gpu
        if of_codes and group < 4 and 2 * units > gpu:
            (at_a_time, warps, stages), programs = OF_CODES, 4 * PROGRAMS
        else:
            many = MANY_OF_WIDE_GROUPS if of_codes else MANY_PROGRAMS
            at_a_time, warps, stages = many if enough else FEW_PROGRAMS
    splits = next_power(cdiv(programs * gpu, units))
    return PagedTile(
        rows,
        min(rows, next_power(max(most_rows, 1))),
        at_a_time,
        warps,
        stages,
        tiles=tiles,
        each=each if alike <= sought else 0,
        splits=min(splits, next_power(cdiv(longest, LEAST_SPAN))),
    )


def in_pairs(values: Tensor) -> bool:
    """Whether codes can be read two at a time. Tensor cores take values by columns, and shared memory gives columns of 16
    bits at once but those of 8 byte by byte."""
    *strides, last = values.stride()
    even = all(n % 2 == 0 for n in (*strides, values.storage_offset(), values.shape[3]))
    return values.element_size() == 1 and values.shape[3] >= 32 and last == 1 and even


def takes_pages(q: Tensor, keys: Tensor) -> bool | str:
    if q.dtype == torch.float64 and keys.dtype != q.dtype:
        return "Triton multiplies no codes in float64"
    if keys.dtype == torch.float8_e4m3fn:
        return reads_fp8(keys)
    return keys.dtype in (q.dtype, torch.int8) or f"pages of {keys.dtype} and queries of {q.dtype} do not multiply"


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    cu_queries: Tensor,
    most_queries: int,
    value_dim: int | None,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    *,
    coded: bool = False,
    many_rows: ManyRows = USUAL,
) -> Tensor:
    """Attention over pages, with queries as they are, or `coded` as codes of the pages' dtype."""
    (tokens, heads, dim), (_, page, kv_heads, _) = q.shape, keys.shape
    sequences, blocks = block_tables.shape
    value_dim = value_dim if values is None else values.shape[3]
    assert value_dim is not None
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    width = lambda size: max(next_power(size), 32 if coded else 16)  # the least that tensor cores multiply
    wide_value, rest = width(value_dim), width(dim - value_dim) if values is None and dim > value_dim else 0
    widest = wide_value if values is None else max(wide_value, width(dim))
    tile = paged_tile(q, keys, most_queries, sequences, blocks * page, widest, many_rows)
    parts = sums = counts = None
    if tile.splits > 1:
        many = tile.tiles, kv_heads, tile.splits, tile.rows
        parts, sums = (torch.empty((*many, last), dtype=widened(q.dtype), device=q.device) for last in (wide_value, 2))
        counts = workspace("paged_attention", many[:2], torch.int32, q.device)
    pairs = tile.rows == 16 and values is not None and in_pairs(values)
    if pairs:
        values = values.view(torch.int16)  # type: ignore[union-attr]
    strides = lambda x, most: (0,) * most if x is None else x.stride()[:most]
    launch(
        paged_attention_kernel, (tile.tiles * kv_heads if tokens else 0, tile.splits),
        q, keys, values, key_scale, value_scale, block_tables, lengths.contiguous(), cu_queries.contiguous(), out,
        parts, sums, counts,
        tokens, sequences, tile.each, kv_heads, *block_tables.stride(), *q.stride(), *keys.stride(), *strides(values, 4),
        *strides(key_scale, 3), *strides(value_scale, 3),
        SCALE=dim**-0.5 if scale is None else scale, SOFTCAP=softcap, WINDOW=window, PAGE=page, GROUP=heads // kv_heads,
        SPLITS=tile.splits, LEAST_SPAN=LEAST_SPAN, ACC=accumulator(q.dtype), ROWS=tile.rows, FEW=tile.few,
        KEYS=tile.keys, VALUE_DIM=value_dim, VALUE_WIDTH=wide_value, DIM=dim, WIDTH=width(dim), REST=rest, PAIRS=pairs,
        CODED=coded, LARGEST=LARGEST_CODE[keys.dtype] if coded else 0,
        num_warps=tile.warps, num_stages=tile.stages, **early(q),
    )  # fmt: skip
    return out


@implements(
    ops.paged_attention,
    backend="triton",
    repeat=straight_line,
    dtypes=(*FLOATS, torch.float8_e4m3fn),
    when=takes_pages,
)
def paged_attention(q: Tensor, keys: Tensor, *arguments: Any) -> Tensor:
    of_fp8 = keys.dtype == torch.float8_e4m3fn
    return attend_pages(q, keys, *arguments, many_rows=USUAL_OF_FP8 if of_fp8 else USUAL)


@implements(
    ops.paged_attention_codes,
    backend="triton",
    repeat=straight_line,
    dtypes=dict(q=(torch.float16, torch.bfloat16)),
    when=takes_pages,
    configs=MANY_ROWS,
)
def paged_attention_codes(*arguments: Any, config: ManyRows) -> Tensor:
    return attend_pages(*arguments, coded=True, many_rows=config)
