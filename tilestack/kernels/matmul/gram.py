"""Products of a matrix with itself, X Xᵀ, and the Newton–Schulz iteration made of them; stacks of matrices in one launch.

X Xᵀ is symmetric, so programs are given the tiles on and below the diagonal alone, counted row by row, and each stores
its tile twice, the second time transposed: half of the arithmetic for the same result.

    0                  program 4 of a matrix owns tile (2, 1): rows of tile 2 times rows of tile 1,
    1  2               stored at (2, 1) and, transposed, at (1, 2)
    3  4  5

A step of Newton–Schulz is three launches, all tiles of all matrices in each:

    G = X Xᵀ                  symmetric
    U = b G + c G Gᵀ          symmetric too, for G is
    X = a X + U X             the one whole product; a tall X has G = Xᵀ X instead, and X = a X + X U

Dividing X by its norm is left to the first of them: G is the square of a factor too large, and the new X the factor
itself, which costs nothing where a tile is stored. So X is read once more only to find its norm.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.matmul.naive import add_product
from tilestack.kernels.tiles import accumulator, cdiv, widened
from tilestack.ops.autocast import lowered

SQUARED = 4096  # elements that a program squares and adds up
LEFT, RIGHT = 0, 1  # on which side of X the symmetric factor stands


@triton.jit
def lower_triangle(index):
    """(row, column) of a tile on or below the diagonal; the root may be off by one either way, and is set right."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row -= (row * (row + 1) // 2 > index).to(tl.int32)
    row += ((row + 1) * (row + 2) // 2 <= index).to(tl.int32)
    return row, index - row * (row + 1) // 2


@triton.jit
def ratio(x, y):
    """x / y, correctly rounded, so that a number divided by itself is 1."""
    if x.dtype == tl.float64:
        z = x / y
    else:
        z = tl.div_rn(x, y)
    return z


@triton.jit
def gram_fwd_kernel(
    x_ptr, plus_ptr, norm_ptr, out_ptr,  # [stack, M, K], [stack, M, M] or None, [stack] or None, [stack, M, M]
    M, K, x_stride_s, x_stride_m, x_stride_k, tiles, alpha: tl.float64, beta: tl.float64,
    ACC: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """alpha · X Xᵀ, with X divided by its norm where that is given; plus beta times a symmetric matrix where there is one."""
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    row, column = lower_triangle(tl.program_id(0) % tiles)
    m = row.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = column.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptr += matrix * x_stride_s
    a_ptr = x_ptr + m * x_stride_m + k[None, :] * x_stride_k
    b_ptr = x_ptr + k[:, None] * x_stride_k + n * x_stride_m
    total = tl.zeros([BLOCK, BLOCK], ACC)
    for start in range(0, K, BLOCK_K):
        left = K - start
        a = tl.load(a_ptr, mask=(m < M) & (k[None, :] < left), other=0)
        b = tl.load(b_ptr, mask=(k[:, None] < left) & (n < M), other=0)
        total = add_product(total, a, b)
        a_ptr += tl.cast(x_stride_k, tl.int64) * BLOCK_K
        b_ptr += tl.cast(x_stride_k, tl.int64) * BLOCK_K
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + matrix)
        total = ratio(total, tl.broadcast_to(norm * norm, total.shape))
    total *= tl.full([], alpha, ACC)
    inside = (m < M) & (n < M)
    place = matrix * M * M + m * M + n
    if plus_ptr is not None:
        total += tl.full([], beta, ACC) * tl.load(plus_ptr + place, mask=inside, other=0).to(ACC)
    result = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, result, mask=inside)
    if row > column:
        mirrored = out_ptr + matrix * M * M + tl.trans(n) * M + tl.trans(m)
        tl.store(mirrored, tl.trans(result), mask=tl.trans(inside))


@triton.jit
def gram_bwd_kernel(
    grad_ptr, x_ptr, dx_ptr,  # [stack, M, M], [stack, M, K], [stack, M, K]
    M, K, grad_stride_s, grad_stride_m, grad_stride_n, x_stride_s, x_stride_m, x_stride_k, tiles_m, tiles_k,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(grad + gradᵀ) X, each half a product of its own, so that their sum is never rounded."""
    tile = tl.program_id(0) % (tiles_m * tiles_k)
    matrix = (tl.program_id(0) // (tiles_m * tiles_k)).to(tl.int64)
    m = (tile // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    k = (tile % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    n = tl.arange(0, BLOCK_N).to(tl.int64)
    grad_ptr += matrix * grad_stride_s
    x_ptr += matrix * x_stride_s
    total = tl.zeros([BLOCK_M, BLOCK_K], ACC)
    for start in range(0, M, BLOCK_N):
        across, down = start + n[None, :], start + n[:, None]
        inside = (m < M) & (across < M)
        grad = tl.load(grad_ptr + m * grad_stride_m + across * grad_stride_n, mask=inside, other=0)
        turned = tl.load(grad_ptr + across * grad_stride_m + m * grad_stride_n, mask=inside, other=0)
        x = tl.load(x_ptr + down * x_stride_m + k * x_stride_k, mask=(down < M) & (k < K), other=0)
        total = add_product(total, grad, x)
        total = add_product(total, turned, x)
    tl.store(dx_ptr + matrix * M * K + m * K + k, total.to(dx_ptr.dtype.element_ty), mask=(m < M) & (k < K))


@triton.jit
def newton_schulz_product_kernel(
    a_ptr, b_ptr, plus_ptr, norm_ptr, out_ptr,  # contiguous [stack, M, K], [stack, K, N], [stack, M, N], [stack], [stack, M, N]
    M, N, K, tiles_m, tiles_n, beta: tl.float64,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A B + beta · plus, all divided by the norm where it is given. GROUP rows of tiles go together, so that what is read of
    A and B by programs that run at a time is small enough to stay in the cache."""
    matrix = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    first = tile // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    inner = tile % (GROUP * tiles_n)
    m = (first + inner % rows).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = (inner // rows).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptr += matrix * M * K + m * K + k[None, :]
    b_ptr += matrix * K * N + k[:, None] * N + n
    total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(0, K, BLOCK_K):
        left = K - start
        a = tl.load(a_ptr, mask=(m < M) & (k[None, :] < left), other=0)
        b = tl.load(b_ptr, mask=(k[:, None] < left) & (n < N), other=0)
        total = add_product(total, a, b)
        a_ptr += BLOCK_K
        b_ptr += tl.cast(N, tl.int64) * BLOCK_K
    inside = (m < M) & (n < N)
    place = matrix * M * N + m * N + n
    total += tl.full([], beta, ACC) * tl.load(plus_ptr + place, mask=inside, other=0).to(ACC)
    if norm_ptr is not None:
        total = ratio(total, tl.broadcast_to(tl.load(norm_ptr + matrix), total.shape))
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def squares_of_matrices_kernel(x_ptr, partial_ptr, elements, parts, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of squares of each part of each matrix of a contiguous stack."""
    matrix = (tl.program_id(0) // parts).to(tl.int64)
    lane = (tl.program_id(0) % parts).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + matrix * elements + lane, mask=lane < elements, other=0).to(ACC)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(x * x, 0))


@triton.jit
def norm_of_matrices_kernel(partial_ptr, norm_ptr, parts, eps: tl.float64, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """One program per matrix: max(norm, eps), from the sums of squares of its parts, added in their order."""
    total = tl.zeros([BLOCK], ACC)
    for start in range(0, parts, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + tl.program_id(0).to(tl.int64) * parts + lane, mask=lane < parts, other=0)
    squares = tl.sum(total, 0)
    if squares.dtype == tl.float64:
        norm = tl.sqrt(squares)
    else:
        norm = tl.sqrt_rn(squares)
    least = tl.full([], eps, ACC)
    tl.store(norm_ptr + tl.program_id(0), tl.where(norm < least, least, norm))  # this way round a NaN stays one


def tile_for(dtype: torch.dtype, *sizes: int) -> tuple[int, int, dict[str, int]]:
    """(side, step along the sum, how to launch) of a tile: large where the matrices are."""
    side, step, warps, stages = (128, 64, 8, 3) if dtype.itemsize == 2 else (64, 32, 8, 2)
    if any(size < side for size in sizes):
        side, step, warps = 32, min(32, step), 4
    return side, step, dict(num_warps=warps, num_stages=stages)


def gram_of_stack(
    x: Tensor, plus: Tensor | None = None, norm: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """alpha · x xᵀ / norm² + beta · plus for a stack [stack, M, K] of any strides; `plus` is symmetric and contiguous."""
    stack, M, K = x.shape
    out = torch.empty((stack, M, M), dtype=x.dtype, device=x.device)
    block, block_k, pace = tile_for(x.dtype, M)
    tiles = cdiv(M, block) * (cdiv(M, block) + 1) // 2
    launch(
        gram_fwd_kernel, (stack * tiles,), x, plus, norm, out, M, K, *x.stride(), tiles, alpha, beta,
        ACC=accumulator(x.dtype), BLOCK=block, BLOCK_K=block_k, **pace,
    )  # fmt: skip
    return out


def newton_schulz_product(x: Tensor, symmetric: Tensor, side: int, norm: Tensor | None, beta: float) -> Tensor:
    """(beta · x + the product of x with a symmetric matrix on its `side`) / norm, of contiguous stacks."""
    a, b = (symmetric, x) if side == LEFT else (x, symmetric)
    stack, M, K, N = *a.shape, b.shape[2]
    out = torch.empty_like(x)
    block, block_k, pace = tile_for(x.dtype, M, N)
    tiles = cdiv(M, block), cdiv(N, block)
    launch(
        newton_schulz_product_kernel, (stack * tiles[0] * tiles[1],), a, b, x, norm, out, M, N, K, *tiles, beta,
        ACC=accumulator(x.dtype), BLOCK_M=block, BLOCK_N=block, BLOCK_K=block_k, GROUP=8, **pace,
    )  # fmt: skip
    return out


def norms_of(partial: Tensor, eps: float) -> Tensor:
    """max(norm, eps) of each matrix, from the sums of squares [stack, parts] of its parts."""
    stack, parts = partial.shape
    norms = torch.empty(stack, dtype=partial.dtype, device=partial.device)
    launch(
        norm_of_matrices_kernel, (stack,), partial, norms, parts, eps, ACC=accumulator(partial.dtype), BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return norms


def iterate(x: Tensor, norms: Tensor, steps: int, a: float, b: float, c: float) -> Tensor:
    """The steps on a contiguous stack [stack, M, N] whose matrices are to be divided by `norms` [stack] first."""
    side = RIGHT if x.shape[1] > x.shape[2] else LEFT
    for step in range(steps):
        norm = norms if step == 0 else None
        squares = gram_of_stack(x.mT if side == RIGHT else x, norm=norm)
        update = gram_of_stack(squares, plus=squares, alpha=c, beta=b)
        x = newton_schulz_product(x, update, side, norm, a)
    return x


def gram_backward(grad: Tensor, x: Tensor) -> Tensor:
    """What arrives has the dtype of the product, which autocast may have lowered; the gradient has that of x."""
    M, K = x.shape[-2:]
    grads, rows = grad.flatten(0, -3) if grad.ndim > 2 else grad[None], x.to(grad.dtype)
    rows = rows.flatten(0, -3) if x.ndim > 2 else rows[None]
    dx = torch.empty(x.shape, dtype=grad.dtype, device=x.device)
    block, block_n, pace = tile_for(grad.dtype, M, K)
    tiles = cdiv(M, block), cdiv(K, block)
    launch(
        gram_bwd_kernel, (len(rows) * tiles[0] * tiles[1],), grads, rows, dx, M, K, *grads.stride(), *rows.stride(), *tiles,
        ACC=accumulator(grad.dtype), BLOCK_M=block, BLOCK_K=block, BLOCK_N=min(block_n, 32), **pace,
    )  # fmt: skip
    return dx.to(x.dtype)


@implements(ops.gram, backend="triton", repeat=straight_line, backward=gram_backward)
def gram(x: Tensor) -> Tensor:
    (x,) = lowered(x)
    return gram_of_stack(x.flatten(0, -3) if x.ndim > 2 else x[None]).view(*x.shape[:-1], x.shape[-2])


@implements(ops.newton_schulz, backend="triton", repeat=straight_line)
def newton_schulz(x: Tensor, steps: int, a: float, b: float, c: float, eps: float) -> Tensor:
    (x,) = lowered(x)
    stack = x.contiguous().view(-1, *x.shape[-2:]) if x.numel() else x.reshape(0, 1, 1)
    matrices, elements = stack.shape[0], stack.shape[1] * stack.shape[2]
    parts = cdiv(elements, SQUARED)
    partial = torch.empty((matrices, parts), dtype=widened(x.dtype), device=x.device)
    launch(
        squares_of_matrices_kernel, (matrices * parts,), stack, partial, elements, parts,
        ACC=accumulator(x.dtype), BLOCK=SQUARED, num_warps=8,
    )  # fmt: skip
    norms = norms_of(partial, eps)
    if steps == 0:
        return (x / norms.view(*x.shape[:-2], 1, 1)).to(x.dtype)
    return iterate(stack, norms, steps, a, b, c).view(x.shape)
