"""How a tile of scores is made, the same in every kernel of attention: products, changed, and hidden where nothing is seen.

    products = q kᵀ  ─scale, cap─▶  − slope · distance  ─▶  + bias  ─▶  -inf where a key is not seen

Of halves, scores are in powers of two, log₂ e being in the scale: a multiplication less for each. In wider formats queries are
SCALED before the product and scores are natural, as in the definition, whose roundings are then all there are: with log₂ e in
them, queries would be rounded once more, and of scores in the thousands that is what gradients see. A tile is [queries, keys] or its transpose: what belongs to its sides
comes broadcast against each other. `Rules` are constants of a kernel, `Terms` are tensors, and what is None costs nothing.
Of a mask by blocks (ops/block_mask.py), a kernel walks over lists of the blocks that are seen.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.elementwise.activation import tanh_of
from tilestack.kernels.tiles import next_power, widened
from tilestack.ops.random import dropped_below

LOG2_E = tl.constexpr(1.4426950408889634)
WIDEST_HEAD = 256
WIDE_LOAD = 16  # elements of a bias
# A stride that may be another for a row alone, 0 or its own: compiled for its divisors, a kernel would read the bias in
# another layout, and add up rows in another order. What divides it is said by BIAS_UNIT, so many of which it counts.
OF_THE_BATCH = ["bias_batch_stride"]


@triton.jit
def batch_and_head(number, heads):
    """(batch, head) of the head with this number in the whole batch. In 64 bits, for strides are multiplied with them: a bias
    of 16 heads and 16,384 tokens has more elements than 32 bits count."""
    return (number // heads).to(tl.int64), (number % heads).to(tl.int64)


@triton.jit
def load_tile(ptr, row, row_stride, dim_stride, there, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH] of a head, whose first DIM elements exist; zero where nothing is."""
    element = tl.arange(0, WIDTH)
    inside = there[:, None]
    if DIM != WIDTH:
        inside = inside & (element < DIM)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * row_stride + element[None, :] * dim_stride, mask=inside, other=0.0)


@triton.jit
def store_tile(ptr, row, row_stride, value, there, DIM: tl.constexpr, WIDTH: tl.constexpr):
    element = tl.arange(0, WIDTH)
    inside = there[:, None] & (element < DIM)[None, :]
    place = ptr + row.to(tl.int64)[:, None] * row_stride + element[None, :]
    tl.store(place, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_queries(ptr, row, row_stride, dim_stride, there, FACTOR: tl.constexpr, SCALED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Queries, where SCALED already times what scores are multiplied by: of large scores that keeps a rounding away."""
    q = load_tile(ptr, row, row_stride, dim_stride, there, DIM, WIDTH)
    return q * FACTOR if SCALED else q


@triton.jit
def halves_of_rows(x):
    """The elements at even places of each row, and those at odd ones."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def sum_in_parts(a, b, ACC: tl.constexpr, PARTS: tl.constexpr):
    """a bᵀ, each sum of it made in so many parts."""
    if PARTS == 1:
        # Any number but 0 keeps Triton from making one sum of several.
        return tl.dot(a, tl.trans(b), input_precision="ieee", out_dtype=ACC, max_num_imprecise_acc=1)
    else:
        a_even, a_odd = halves_of_rows(a)
        b_even, b_odd = halves_of_rows(b)
        return sum_in_parts(a_even, b_even, ACC, PARTS // 2) + sum_in_parts(a_odd, b_odd, ACC, PARTS // 2)


@triton.jit
def rows_times_rows(a, b, ACC: tl.constexpr):
    """a bᵀ, sums along a head. Without tensor cores a product is added after the other, and the longer the sum, the more it
    loses: in float32 some are made in parts. For 64 and beyond 128, registers have no room for these."""
    if a.dtype == tl.float32 and (a.shape[1] == 32 or a.shape[1] == 128):
        return sum_in_parts(a, b, ACC, 4 if a.shape[1] == 128 else 2)
    else:
        return tl.dot(a, tl.trans(b), input_precision="ieee", out_dtype=ACC)


@triton.jit
def exponential(difference, SCALED: tl.constexpr):
    """What a difference of scores stands for: e to its power where they are natural, else 2 to it."""
    return tl.exp2(difference * LOG2_E) if SCALED else tl.exp2(difference)


@triton.jit
def masked_scores(
    products, query, key, start, end, offset, queries, keys,
    slopes_ptr, slope_at, bias_ptr, bias_at, bias_stride, bias_key_stride,
    blocks_ptr, tiles_ptr, mask_at, first_query, first_key,
    FACTOR: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(scores, what a gradient is multiplied by on its way back through the cap).

    `start` and `end` are those of a query's document. `slope_at`, `bias_at` and `mask_at` are where those of a head begin; the tile begins at `first_query` and `first_key`.
    """
    UNIT: tl.constexpr = 1.0 if SCALED else LOG2_E
    if not SCALED:
        products = products * FACTOR
    slope = 1.0
    scores = products
    if SOFTCAP is not None:
        bent = tanh_of(products, False)
        scores, slope = bent * (SOFTCAP * UNIT), (1 - bent) * (1 + bent)
    seen = (query < queries) & (key < keys)
    ahead = key - query - offset
    if CAUSAL:
        seen = seen & (ahead <= 0)
    if WINDOW is not None:
        seen = seen & (ahead > -WINDOW)
        if not CAUSAL:
            seen = seen & (ahead < WINDOW)
    if DOCUMENTS:
        seen = seen & (key >= start) & (key < end)
    if slopes_ptr is not None:
        steepness = tl.load(slopes_ptr + slope_at).to(scores.dtype) * UNIT
        scores = tl.fma(-steepness, tl.abs(ahead).to(scores.dtype), scores)  # which product is fused is not left open
    if bias_ptr is not None:
        place = bias_at + query.to(tl.int64) * bias_stride + key.to(tl.int64) * bias_key_stride
        bias = tl.load(bias_ptr + place, mask=seen, other=0.0).to(scores.dtype)
        scores = tl.fma(bias, UNIT, scores)
    if blocks_ptr is not None:
        block = first_query // BLOCK_Q * tl.cdiv(keys, BLOCK_K) + first_key // BLOCK_K
        number = tl.load(blocks_ptr + mask_at + block).to(tl.int64)
        place = (number - 1) * (BLOCK_Q * BLOCK_K) + query % BLOCK_Q * BLOCK_K + key % BLOCK_K
        seen = seen & (number >= 0) & (tl.load(tiles_ptr + place, mask=seen & (number > 0), other=1) != 0)
    return tl.where(seen, scores, float("-inf")), slope


@triton.jit
def keys_seen_by(
    first_query, start, end, offset, queries, keys,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(the first key, on a tile, and the one after the last) that some of ROWS queries see."""
    last_query = tl.minimum(first_query + ROWS, queries) - 1
    low = 0
    high = keys
    if CAUSAL:
        high = tl.minimum(high, last_query + offset + 1)
    if WINDOW is not None:
        low = tl.maximum(first_query + offset - WINDOW + 1, 0)
        if not CAUSAL:
            high = tl.minimum(high, last_query + offset + WINDOW)
    if DOCUMENTS:
        low = tl.maximum(low, tl.min(start, 0))
        high = tl.minimum(high, tl.max(end, 0))
    return low // KEYS * KEYS, high


@triton.jit
def at_step(step, order_ptr, line, BLOCK: tl.constexpr):
    """Where the tile of a step starts, of a walk over the blocks that are seen."""
    return tl.load(order_ptr + line + step // BLOCK) * BLOCK + step % BLOCK


@triton.jit
def seen_blocks_kernel(
    blocks_ptr, order_ptr, counts_ptr,  # [matrices, rows, columns], [matrices, lines, length], [matrices, lines]
    lines, length, line_stride, stride, LENGTH: tl.constexpr,
):  # fmt: skip
    """Grid (lines of all matrices,): a line's blocks that are seen, in their order, and how many they are."""
    matrix, line = (tl.program_id(0) // lines).to(tl.int64), tl.program_id(0) % lines
    place = tl.arange(0, LENGTH)
    inside = place < length
    blocks = tl.load(blocks_ptr + matrix * lines * length + line * line_stride + place * stride, mask=inside, other=-1)
    seen = tl.where(blocks >= 0, 1, 0)
    before = tl.cumsum(seen, 0) - seen
    tl.store(order_ptr + (matrix * lines + line) * length + before, place, mask=seen > 0)
    tl.store(counts_ptr + matrix * lines + line, tl.sum(seen, 0))


def seen_blocks(blocks: Tensor | None, transposed: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """(order, counts): for each line of a contiguous map, or of its transpose, the blocks that are seen, and their number."""
    if blocks is None:
        return None, None
    rows, columns = blocks.shape[2:]
    lines, length, *strides = (columns, rows, 1, columns) if transposed else (rows, columns, columns, 1)
    order = torch.empty((*blocks.shape[:2], lines, length), dtype=torch.int32, device=blocks.device)
    counts = torch.empty((*blocks.shape[:2], lines), dtype=torch.int32, device=blocks.device)
    launch(
        seen_blocks_kernel, (counts.numel(),), blocks, order, counts, lines, length, *strides, LENGTH=next_power(length)
    )  # fmt: skip
    return order, counts


class Rules(NamedTuple):
    """What decides on scores and who sees what, as constants of the kernels."""

    scale: float
    softcap: float | None
    window: int | None
    causal: bool

    def constants(self, dtype: torch.dtype) -> dict:
        scaled = dtype == widened(dtype)  # a half would be rounded
        unit = 1.0 if scaled else LOG2_E.value
        return dict(
            FACTOR=self.scale * unit
            if self.softcap is None
            else self.scale / self.softcap,  # of products, before a cap
            SCALED=scaled,
            SOFTCAP=self.softcap,
            WINDOW=self.window,
            CAUSAL=self.causal,
        )


def width_of(dim: int) -> int:
    """Elements of a tile's row: a power of two, and no fewer than tensor cores multiply."""
    return max(next_power(dim), 16)


class Terms(NamedTuple):
    """The tensors that change scores and weights, as `ops.flex_attention` has them; None where there is none."""

    slopes: Tensor | None = None
    bias: Tensor | None = None
    blocks: Tensor | None = None
    tiles: Tensor | None = None
    seed: Tensor | None = None
    dropout: float = 0.0

    @classmethod
    def of(cls, q: Tensor, slopes: Tensor | None, bias: Tensor | None, blocks: Tensor | None, tiles: Tensor | None, seed: Tensor | None, dropout: float) -> "Terms":  # fmt: skip
        slopes, blocks, tiles = (None if x is None else x.contiguous() for x in (slopes, blocks, tiles))
        if tiles is not None:
            # From 64 bits that a byte was mixed into, Triton's tensor cores cannot multiply.
            tiles = tiles.to(torch.int32) if q.dtype == torch.float64 else tiles.view(torch.uint8)
        return cls(slopes, bias, blocks, tiles, seed if dropout else None, dropout)

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        return self.slopes, self.bias, self.blocks, self.tiles, self.seed

    @property
    def numbers(self) -> tuple[int, ...]:
        """Strides, zero along what is shared: slopes' between batches, bias's (the first in `bias_unit`s), blocks' between
        batches and heads; then the word below which a weight is dropped."""
        slopes = self.slopes.stride(0) if self.slopes is not None and self.slopes.ndim == 2 else 0
        bias: tuple[int, ...] = (0, 0, 0, 0)
        blocks: tuple[int, ...] = (0, 0, 0, 0)
        shared = lambda x: tuple(step if size > 1 else 0 for step, size in zip(x.stride(), x.shape, strict=True))
        if self.bias is not None:
            batch, *others = shared(self.bias)[:3]
            bias = batch // self.bias_unit, *others, self.bias.stride(3)
        if self.blocks is not None:
            blocks = shared(self.blocks)
        return slopes, *bias, *blocks[:2], dropped_below(self.dropout) if self.seed is not None else 0

    @property
    def bias_unit(self) -> int:
        """What the bias's stride between batches is counted in, whether or not there is more than one."""
        aligned = self.bias is not None and all(stride % WIDE_LOAD == 0 for stride in self.bias.stride()[:3])
        return WIDE_LOAD if aligned else 1

    @property
    def load_more(self) -> bool:
        """Whether a tile loads more than keys and values, which keeps WGMMA from waiting for these alone."""
        return self.bias is not None or self.blocks is not None

    @property
    def constants(self) -> dict:
        _, block_q, block_k = (None, None, None) if self.tiles is None else self.tiles.shape
        return dict(BLOCK_Q=block_q, BLOCK_K=block_k, BIAS_UNIT=self.bias_unit)

    def tile(self, rows: int, keys: int) -> tuple[int, int]:
        """No more rows and keys of a tile than these, in whole parts of a block."""
        if self.tiles is None:
            return rows, keys
        parts = lambda block, most: min(most, block & -block)  # the largest power of two that divides it
        return parts(self.tiles.shape[1], rows), parts(self.tiles.shape[2], keys)


NO_TERMS = Terms()


def tile_length(length: int, most: int) -> int:
    """Queries or keys of a tile: a power of two, no fewer than tensor cores multiply."""
    return min(max(next_power(length), 16), most)
