"""Grouped products that stream codes of 8 or 4 bits: the sums of `weight_only.py` over groups of rows whose sizes only the
GPU knows.

    out[m, n] = Σ_part scale[g, n, part] · Σ_{k in part} x[m, k] · (code[g, n, k] - zero[g, n, part])      g: the group of row m

Tiles are laid over groups as in `matmul/grouped.py`, so a tile has the codes of one expert, and makes numbers of them on the
way to the tensor cores:

        K                          N
    +--------+ offsets        +--------+
    | rows 0 |  ← 5         0 | codes  |     A step along K never reaches over the end of a part, and what it adds up is
    +--------+                +--------+     scaled in float32: nothing is rounded but sums.
    | rows 1 |              1 | codes  |
    |        |  ← 14          +--------+

When a token is decoded, each of its experts has a row or a few: the time is that of reading the codes of the experts that were
chosen, and of no others. Each such expert has a row of tiles of its own, so N is shared out over enough programs without
sharing K.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.grouped import most_tiles, span_of_tile
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE
from tilestack.kernels.quantised.weight_only import (
    CENTRE,
    NIBBLES,
    groups_are_steps,
    load_codes,
    load_columns,
    number_of_nibble,
)
from tilestack.kernels.tiles import cdiv, next_power
from tilestack.tuning.model import Gpu, product_us


class Config(NamedTuple):
    """A tile of the result, the longest step along K, steps in flight, and warps."""

    m: int
    n: int
    k: int
    stages: int
    warps: int

    def model_us(self, rows: int, groups: int, N: int, bytes_of_a_row: int, gpu: Gpu) -> float:
        # As if all groups with rows were one, each of them ending with half a tile that is empty.
        return product_us(rows + min(groups, rows) * self.m // 2, N, bytes_of_a_row, self.m, self.n, gpu, itemsize=1)


CONFIGS = {
    "16x64": Config(16, 64, 128, 4, 4),
    "16x128": Config(16, 128, 128, 3, 4),
    "64x64": Config(64, 64, 64, 3, 4),
    "64x128": Config(64, 128, 64, 3, 8),
    "128x128": Config(128, 128, 32, 3, 8),
}


@triton.jit
def grouped_weight_only_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, ends_ptr, out_ptr,  # [M, K], [groups, N, K] or [groups, N, K / 2], scales, …, [M, N]
    M, N, K, x_stride_m, x_stride_k, weight_stride_g, weight_stride_n, weight_stride_k, part, parts, groups,
    PACKED: tl.constexpr, EVEN_K: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group, first_row, end = span_of_tile(tl.program_id(0), ends_ptr, M, groups, GROUPS, BLOCK_M)
    if group > groups:
        return
    steps = tl.where(group < groups, K, 0)  # rows past the last group are multiplied with nothing
    m = first_row.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    weight_ptr += group.to(tl.int64) * weight_stride_g
    line = (group.to(tl.int64) * N + n) * parts
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, steps, BLOCK_K):
        place = line + first // part
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + place, mask=n < N, other=0).to(tl.int16)
        elif PACKED:
            zero = tl.full([1, BLOCK_N], CENTRE, tl.int16)
        if PACKED:
            byte = tl.arange(0, BLOCK_K // 2)
            k = first + byte // NIBBLES * (2 * NIBBLES) + byte % NIBBLES
            codes = load_codes(weight_ptr, first // 2 + byte, n, weight_stride_k, weight_stride_n, N, K // 2, EVEN_K)
            x = load_columns(x_ptr, m, k, x_stride_m, x_stride_k, end, K, EVEN_K)
            sums = tl.dot(x, number_of_nibble(codes & 15, zero, x.dtype), input_precision="ieee")
            x = load_columns(x_ptr, m, k + NIBBLES, x_stride_m, x_stride_k, end, K, EVEN_K)
            sums = tl.dot(x, number_of_nibble(codes >> 4, zero, x.dtype), sums, input_precision="ieee")
        else:
            k = first + tl.arange(0, BLOCK_K)
            codes = load_codes(weight_ptr, k, n, weight_stride_k, weight_stride_n, N, K, EVEN_K)
            x = load_columns(x_ptr, m, k, x_stride_m, x_stride_k, end, K, EVEN_K)
            if zero_ptr is not None:
                codes = codes.to(tl.int16) - zero
            sums = tl.dot(x, codes.to(x.dtype), input_precision="ieee")
        total += sums * tl.load(scale_ptr + place, mask=n < N, other=0).to(tl.float32)
    tl.store(out_ptr + m * N + n, total.to(out_ptr.dtype.element_ty), mask=(m < end) & (n < N))


def parts_are_steps(x: Tensor, weight: Tensor, scale: Tensor) -> bool | str:
    return groups_are_steps(x, weight, scale[0]) if len(scale) else True


@implements(
    ops.grouped_linear_weight_only,
    backend="triton",
    repeat=straight_line,
    dtypes=dict(x=HALVES_AND_SINGLE, scale=HALVES_AND_SINGLE),
    configs=CONFIGS,
    when=parts_are_steps,
)
def grouped_linear_weight_only(
    x: Tensor, weight: Tensor, scale: Tensor, offsets: Tensor, zero: Tensor | None, config: Config
) -> Tensor:
    (M, K), (groups, N, parts) = x.shape, scale.shape
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if groups == 0:
        return out.zero_()
    if x.dtype == torch.float32:
        config = config._replace(
            m=16, n=32, k=32, stages=2, warps=4
        )  # without tensor cores, what is multiplied lies in registers
    part = K // parts
    step = config.k if parts == 1 else min(config.k, part & -part)
    zero = None if zero is None else zero.contiguous()
    launch(
        grouped_weight_only_kernel, (most_tiles(M, groups, config.m), cdiv(N, config.n)),
        x, weight, scale.contiguous(), zero, offsets.contiguous(), out,
        M, N, K, *x.stride(), *weight.stride(), max(part, 1), parts, groups,
        PACKED=weight.dtype == torch.uint8, EVEN_K=K % step == 0, GROUPS=next_power(groups + 1),
        BLOCK_M=config.m, BLOCK_N=config.n, BLOCK_K=step, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
