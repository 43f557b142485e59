"""A linear layer of up to 16 rows with a weight of 8 or 4 bits in CUDA C++: how much of it each warp, block and cluster has.

A warp has 32 rows of the weight and some stages of K, 64 bytes of each row. What a block keeps in shared memory:

    a ring of stages for every warp | x in its part of K | scales and zero points of the groups there | biases

The shorter a block's part of K is, the less it keeps, so where a configuration keeps too much, more blocks share K.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.kernels.cuda.build import DTYPES, call, library
from tilestack.kernels.cuda.matmul import rows_of_vectors
from tilestack.kernels.matmul.products import HALVES, has_at_most
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE
from tilestack.kernels.tiles import as_matrix, cdiv, shared_memory

MOST_ROWS = 16  # of x
ROWS, PIECE, PIECES, SLOTS = 32, 16, 4, 4  # as in weight_only.cu; a piece in bytes
FORMATS = {torch.uint8: 0, torch.int8: 1, torch.float8_e4m3fn: 2}  # as weight_only.cu numbers them
MOST_SHARED = 227 * 1024  # bytes of a block on Hopper
MOST_SPLITS = 8  # blocks of a cluster that any GPU with clusters has room for


class Config(NamedTuple):
    """Warps of a block side by side, warps that share K, and blocks that share K."""

    row_warps: int
    k_warps: int
    splits: int


# 8 or 16 warps, so that a multiprocessor has 16. The fewer outputs there are, the more warps share K; the more rows x has,
# the more blocks do, each of which then reads less of x.
SHAPES = (
    (4, 4, 4),
    (8, 2, 2),
    (16, 1, 4),
    (4, 4, 1),
    (1, 16, 1),
    (2, 8, 2),
    (8, 1, 4),
    (4, 2, 2),
    (2, 4, 2),
    (2, 4, 4),
)
CONFIGS = {"x".join(map(str, shape)): Config(*shape) for shape in SHAPES}
SMALLEST = Config(1, 1, MOST_SPLITS)


class Plan(NamedTuple):
    """What the kernel is told beside M, N, K and groups, as it takes it."""

    group_pieces: int
    row_warps: int
    k_warps: int
    splits: int
    stages: int  # of a warp
    ring_bytes: int  # of a warp
    groups_nearby: int
    shared_bytes: int


def plan_of(config: Config, M: int, K: int, groups: int, format: int) -> Plan:
    row_warps, k_warps, splits = config
    codes = codes_of_piece(format)
    all_stages = cdiv(K, codes * PIECES)
    group_pieces = max(all_stages, 1) * PIECES if groups == 1 or not K else K // groups // codes
    stages = cdiv(all_stages, k_warps * splits)
    sums = (8 if M <= 8 else 16) * (ROWS + 4) * 4
    ring_bytes = max(min(stages, SLOTS) * ROWS * PIECES * PIECE, sums)
    pieces = k_warps * stages * PIECES  # of a row, of a block
    # A block's part of K may begin amid one group and end amid another.
    groups_nearby = cdiv(pieces, group_pieces) + bool(pieces % group_pieces)
    x_bytes = 2 * M * (pieces * codes + 8)
    scale_bytes, bias_bytes = 8 * groups_nearby * ROWS * row_warps, 4 * ROWS * row_warps
    shared_bytes = row_warps * k_warps * ring_bytes + x_bytes + scale_bytes + bias_bytes
    return Plan(group_pieces, *config, stages, ring_bytes, groups_nearby, shared_bytes)


def fitting_plan(config: Config, *sizes: int) -> Plan:
    """With more blocks that share K, and then fewer warps, until a block has room for what it keeps."""
    while (plan := plan_of(config, *sizes)).shared_bytes > MOST_SHARED and config != SMALLEST:
        if config.splits < MOST_SPLITS:
            config = config._replace(splits=2 * config.splits)
        elif config.row_warps > 1:
            config = config._replace(row_warps=config.row_warps // 2)
        else:
            config = config._replace(k_warps=config.k_warps // 2)
    return plan


def codes_of_piece(format: int) -> int:
    return 2 * PIECE if format == FORMATS[torch.uint8] else PIECE


def sizes_of(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[int, int, int, int]:
    return x.shape[:-1].numel(), x.shape[-1], scale.shape[1], FORMATS[weight.dtype]


def takes(x: Tensor, weight: Tensor, scale: Tensor) -> bool | str:
    if (few := has_at_most(MOST_ROWS, x)) is not True:
        return few
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return "its blocks meet in clusters, which need compute capability 9.0"
    if x.is_cuda and shared_memory(x.device) < MOST_SHARED:
        return f"its blocks keep up to {MOST_SHARED} bytes in shared memory, which this GPU has not"
    inner, group = x.shape[-1], x.shape[-1] // scale.shape[1]
    if weight.dtype != torch.uint8 and (inner % PIECE or group % PIECE):
        return f"it takes K and groups of multiples of {PIECE} codes of 8 bits, not {inner} and {group}"
    if plan_of(SMALLEST, *sizes_of(x, weight, scale)).shared_bytes > MOST_SHARED:
        return f"{x.shape[:-1].numel()} rows of {inner} numbers and their scales find no room in shared memory"
    return True


@implements(
    ops.linear_weight_only,
    backend="cuda",
    dtypes=dict(x=HALVES, scale=HALVES_AND_SINGLE, bias=HALVES_AND_SINGLE),
    configs=CONFIGS,
    when=takes,
)
def linear_weight_only(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, config: Config
) -> Tensor:
    (N, groups), K = scale.shape, x.shape[-1]
    out = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    if out.numel():
        rows, weight, scale = rows_of_vectors(as_matrix(x)), rows_of_vectors(weight), scale.contiguous()
        zero, bias = (None if tensor is None else tensor.contiguous() for tensor in (zero, bias))
        plan = fitting_plan(config, *sizes_of(x, weight, scale))
        product = library("weight_only.cu", CODES=FORMATS[weight.dtype], FOLD=fold_of(plan)).weight_only
        dtypes = (DTYPES[x.dtype], DTYPES[scale.dtype], DTYPES[scale.dtype if bias is None else bias.dtype])
        call(product, x.device, rows, weight, scale, zero, bias, out, rows.shape[0], N, K, groups, *plan, *dtypes)
    return out


def fold_of(plan: Plan) -> int:
    """Pieces of a stage whose sums have one scale: as many as divide a group."""
    return min(plan.group_pieces & -plan.group_pieces, PIECES)
