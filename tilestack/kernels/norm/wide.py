"""The backward of RMSNorm where rows are too wide for registers beside the sums of dweight, but those sums are not.

A program strides over the rows as in `rows.py`, but holds of a row only what the sums along it need, and reads it twice:

    a row     |   chunk 0   |   chunk 1   | … |   chunk C-1   |     each a tile of COLS columns
    visit 1       ↓ x, grad     ↓             rstd and an average, in `averages.py`
    visit 2       ↓ x, grad     ↓             from the caches: dx written, dweight of each chunk kept

so that registers hold C tiles of running sums and little else. While the second visit runs on the caches, the next row is
on its way from memory to L2. Centred rows would have twice the sums; those go the way of `long.py`, which measured faster.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.norm.averages import row_averages
from tilestack.kernels.tiles import cdiv, multiprocessors, next_power

COLS = 2048  # of a chunk
WARPS = 16
STAGES = 5  # a chunk at work and the others on their way, in the first visit
MOST_CHUNKS = 14  # whose sums are kept without spills,
MOST_WITH_RESIDUAL, MOST_OF_SINGLES = 8, 7  # where a third tensor is read, and in float32
SECTOR = 32  # bytes that a prefetch brings


@triton.jit
def prefetch_row(row_ptr, columns, PLACES: tl.constexpr):
    """Ask L2 for a row, a sector at a time; its first element is on a sector's border or nearly."""
    STEP: tl.constexpr = 256 // row_ptr.dtype.element_ty.primitive_bitwidth
    place = tl.arange(0, PLACES) * STEP
    addresses = row_ptr + tl.minimum(place, columns - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def norm_wide_bwd_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, dx_ptr, partial_ptr,
    rows, columns, grad_stride, grad_sum_stride, x_stride, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ACC: tl.constexpr,
    COLS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, COLS)
    dweight: tl.tuple = ()
    for _chunk in tl.static_range(CHUNKS):
        dweight += (tl.zeros([COLS], ACC),)
    for row in range(program.to(tl.int64), rows, programs):
        x_row, grad_row = x_ptr + row * x_stride, grad_ptr + row * grad_stride
        _mean, rstd, product, _average = row_averages(
            x_row, grad_row, weight_ptr, columns, eps, False, HAS_WEIGHT, ACC, COLS, STAGES
        )
        if PREFETCH:  # noqa: SIM102, the first is known to the compiler
            if row + programs < rows:
                prefetch_row(x_ptr + (row + programs) * x_stride, columns, PREFETCH)
                prefetch_row(grad_ptr + (row + programs) * grad_stride, columns, PREFETCH)
        summed: tl.tuple = ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLS + lane
            inside = column < columns
            x = tl.load(x_row + column, mask=inside, other=0, eviction_policy="evict_first").to(ACC) * rstd
            grad = tl.load(grad_row + column, mask=inside, other=0, eviction_policy="evict_first").to(ACC)
            g = grad
            if HAS_WEIGHT:
                summed += (dweight[chunk] + grad * x,)
                g = grad * tl.load(weight_ptr + column, mask=inside, other=0, eviction_policy="evict_last").to(ACC)
            dx = (g - x * product) * rstd
            if HAS_RESIDUAL:
                dx += tl.load(grad_sum_ptr + row * grad_sum_stride + column, mask=inside, other=0).to(ACC)
            tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if HAS_WEIGHT:
            dweight = summed
    if HAS_WEIGHT:
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLS + lane
            tl.store(partial_ptr + program * columns + column, dweight[chunk], mask=column < columns)


def fits(columns: int, dtype: torch.dtype, residual: bool) -> bool:
    """Whether registers hold the running sums of dweight of rows this wide."""
    most = MOST_OF_SINGLES if dtype.itemsize > 2 else MOST_WITH_RESIDUAL if residual else MOST_CHUNKS
    return COLS <= columns <= most * COLS and dtype.itemsize <= 4


def backward(
    tensors: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    dx: Tensor,
    strides: tuple[int, int, int],
    eps: float,
    flags: dict,
) -> Tensor:
    """Writes dx; returns dweight, if there is any, in shares still to be summed: [0 or 1, P, columns]."""
    x = tensors[2]
    rows, columns = x.shape
    programs = min(rows, multiprocessors(x.device))
    partial = torch.empty((int(flags["HAS_WEIGHT"]), programs, columns), dtype=torch.float32, device=x.device)
    prefetched = 0 if x.device.type == "cpu" else next_power(cdiv(columns * x.element_size(), SECTOR))
    constants = {name: flags[name] for name in ("HAS_RESIDUAL", "HAS_WEIGHT", "ACC")}
    launch(
        norm_wide_bwd_kernel, (programs,), *tensors, dx, partial, rows, columns, *strides, eps,
        **constants, COLS=COLS, CHUNKS=cdiv(columns, COLS), STAGES=STAGES, PREFETCH=prefetched, num_warps=WARPS,
    )  # fmt: skip
    return partial
