"""The order of tiles: the same linear layer, kinder to the cache.

Programs begin in the order of their numbers, some hundred at a time. Row by row, those running together need a few
rows of x, and all of weight. In groups of GROUP rows of tiles, and column by column within a group, they share both:

    row by row                      in groups of 2 rows
     0  1  2  3  4  5                0  2  4  6  8 10
     6  7  8  9 10 11                1  3  5  7  9 11
    12 13 14 15 16 17               12 14 16 …
    18 19 …                         13 15 17 …

    the first six programs read     the first six programs read
    1 row and 6 columns of tiles    2 rows and 3 columns of tiles: 5 instead of 7

What they share comes from the L2 cache. The grid has one dimension now, and a program finds its tile from its number:

    programs in a group   = GROUP · blocks_n
    the group's first row = number // that · GROUP          the last group may have fewer rows: min(blocks_m - first, GROUP)
    within the group      = the remainder: the row changes first, then the column

The check sees that each tile is made once, which is where people go wrong, in the last group above all. What the order
gains is seen on a GPU: `tilestack learn compare ordered_linear`, and `compare linear` for the other.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def ordered_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K,
    HAS_BIAS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    blocks_m, blocks_n = tl.cdiv(M, TILE), tl.cdiv(N, TILE)
    # begin: yours
    # | # Yours: the tile of this program, in groups of GROUP rows of tiles.
    # | block_m, block_n = 0, 0
    in_a_group = GROUP * blocks_n
    first = program // in_a_group * GROUP
    height = tl.minimum(blocks_m - first, GROUP)
    within = program % in_a_group
    block_m, block_n = first + within % height, within // height
    # end
    m = block_m * TILE + tl.arange(0, TILE).to(tl.int64)
    n = block_n * TILE + tl.arange(0, TILE).to(tl.int64)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, STEP):
        k = start + tl.arange(0, STEP)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        weight = tl.load(weight_ptr + n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
        total += tl.dot(x, weight, input_precision="ieee", max_num_imprecise_acc=1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))


@implements(ops.linear, backend="mine", dtypes=[torch.float16, torch.bfloat16, torch.float32])
def ordered_linear(x, weight, bias):
    x, weight = x.contiguous(), weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    N, K = weight.shape
    out = x.new_empty(*x.shape[:-1], N)
    if out.numel():
        M = out.numel() // N
        grid = (triton.cdiv(M, 32) * triton.cdiv(N, 32),)
        ordered_linear_kernel[grid](
            x, weight, bias, out, M, N, K, HAS_BIAS=bias is not None, TILE=32, STEP=32, GROUP=2
        )  # fmt: skip
    return out


# begin: tutor
HINTS = [
    "Begin with row by row, to see the rest work: block_m = program // blocks_n, block_n = program % blocks_n. It passes.",
    "in_a_group = GROUP * blocks_n programs make a group. program // in_a_group is the group, program % in_a_group the "
    "place within it.",
    "first = program // in_a_group * GROUP; height = tl.minimum(blocks_m - first, GROUP), since the last group may be "
    "lower; block_m = first + within % height, block_n = within // height.",
]
# end
