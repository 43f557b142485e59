"""RMSNorm and LayerNorm kernels: one pair for both, RMSNorm being LayerNorm that neither centres nor shifts.

With x̂ = (x - mean) · rstd, the forward is y = x̂ · weight + bias. With g = grad · weight and averages over the row,

    dx = rstd · (g - x̂ · avg(g · x̂) - avg(g))        dweight = Σ_rows grad · x̂        dbias = Σ_rows grad

(RMSNorm drops the mean and avg(g)). Nothing is kept from the forward but x: the backward has the row in registers
anyway and finds its statistics again for free. The input may be a sum, x + residual, which is then written as well: the
backward reads it in place of x and adds the gradient that arrives at it to dx. A fixed set of backward programs stride over the rows,

    program 0: row 0, row P, row 2P, …      each adds its share of dweight in registers
    program 1: row 1, row P+1, …            and writes it once, to line p of a [P, columns] buffer

which a second kernel sums down: no atomics, so the result is the same in every run. Rows too wide for registers are in
`wide.py` and `long.py`, those that start off 16 bytes in `ragged.py`.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.backends import wants_invariance
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.early import early, wait_for_last
from tilestack.kernels.memory.columns import sum_columns
from tilestack.kernels.norm import long, ragged
from tilestack.kernels.norm import wide as wide_rows
from tilestack.kernels.norm.order_free import extremes, farthest, largest, sum_of_rows
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE, codes_of, magnitudes, scale_of, writes_fp8
from tilestack.kernels.tiles import (
    accumulator,
    cdiv,
    multiprocessors,
    rows_of,
    shared_memory,
    sum_three,
    sum_two,
    tile_of_rows,
    wide,
    widened,
)
from tilestack.ops.quantised import LARGEST_CODE

WIDEST_FORWARD = 32768  # columns the forward keeps in registers
WIDEST_TWO_SUMS = 8192  # and the backward, beside the running sums of dweight and dbias;
WIDEST_BACKWARD = 16384  # up to here without that of dbias, where rows start off 16 bytes and other ways would be slow


SHORT_CENTRED = 512  # columns up to which centred rows have tiles of their own in the backward:
SHORT_ELEMENTS, SHORT_WARPS, SHORT_STAGES = 1024, 2, 3
SHORT_PROGRAMS = 4  # on each multiprocessor


@triton.jit
def statistics(x, inside, columns, eps, CENTRED: tl.constexpr):
    """(x - mean, or x itself) and 1 / std of each row of a tile."""
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 1, keep_dims=True) / columns, 0.0)
    return x, tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / columns + eps)


@triton.jit
def order_free_statistics(x, inside, columns, eps, CENTRED: tl.constexpr, FINE: tl.constexpr):
    """The same, to the bit as of rows that start off 16 bytes, in `ragged.py`."""
    if CENTRED:
        high, low = extremes(tl.where(inside, x, float("-inf")), tl.where(inside, x, float("inf")), 1, True)
        centre = sum_of_rows(x, farthest(high, low, 0.0), False, FINE) / columns
        x = tl.where(inside, x - centre, 0.0)
        reach = farthest(high, low, centre)
    else:
        reach = largest(tl.abs(x), 1, True)
    return x, tl.rsqrt(sum_of_rows(x, reach * reach, True, FINE) / columns + eps)


@triton.jit
def norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, scale_ptr,
    rows, columns, x_stride, residual_stride, eps,
    CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    LARGEST_CODE: tl.constexpr,  # 0 where the output is not quantised
    EARLY: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (column < columns)
    x = wide(tl.load(x_ptr + row * x_stride + column, mask=inside, other=0))
    if HAS_RESIDUAL:
        x += wide(tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0))
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * columns + column, rounded, mask=inside)
        x = wide(rounded)  # as the backward, and whoever reads the sum, will see it
    if RAGGED:
        FINE: tl.constexpr = x_ptr.dtype.element_ty != tl.bfloat16
        x, rstd = order_free_statistics(x, inside, columns, eps, CENTRED, FINE)
    else:
        x, rstd = statistics(x, inside, columns, eps, CENTRED)
    y = x * rstd
    if HAS_WEIGHT:
        y = y * tl.load(weight_ptr + column, mask=column < columns, other=0)
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + column, mask=column < columns, other=0)
    if LARGEST_CODE:
        scale = scale_of(tl.max(magnitudes(y), 1, keep_dims=True), LARGEST_CODE)
        tl.store(scale_ptr + row, scale, mask=row < rows)
        codes = codes_of(y, scale, out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * columns + column, codes, mask=inside)
    else:
        tl.store(out_ptr + row * columns + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_bwd_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, dx_ptr, partial_ptr,
    rows, columns, grad_stride, grad_sum_stride, x_stride, eps,
    CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, COLS)[None, :]
    dweight = tl.zeros([ROWS, COLS], ACC)
    dbias = tl.zeros([ROWS, COLS], ACC)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(ACC)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0).to(ACC)
        g = grad
        if HAS_WEIGHT:
            # Loaded here, where the cache has it, rather than held: a wide row leaves no registers for it.
            g = grad * tl.load(weight_ptr + column, mask=column < columns, other=0).to(ACC)
        if CENTRED:
            x = tl.where(inside, x - tl.sum(x, 1, keep_dims=True) / columns, 0.0)
            squares, product, total = sum_three(x * x, g * x, g, 1, True)
        else:
            squares, product = sum_two(x * x, g * x, 1, True)
        rstd = tl.rsqrt(squares / columns + eps)
        x = x * rstd
        if HAS_WEIGHT:
            dweight += grad * x
        if HAS_BIAS:
            dbias += grad
        dx = g - x * (product * rstd / columns)
        if CENTRED:
            dx = dx - total / columns
        dx = dx * rstd
        if HAS_RESIDUAL:
            dx += tl.load(grad_sum_ptr + row * grad_sum_stride + column, mask=inside, other=0).to(ACC)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    line = tl.arange(0, COLS)
    if HAS_WEIGHT:
        tl.store(partial_ptr + program * columns + line, tl.sum(dweight, 0), mask=line < columns)
    if HAS_BIAS:
        tl.store(partial_ptr + (tl.num_programs(0) + program) * columns + line, tl.sum(dbias, 0), mask=line < columns)


def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    residual: Tensor | None = None,
    codes: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The norm, its scales if it is wanted as codes, and the sum if there is a residual."""
    source, added = rows_of(x), None if residual is None else rows_of(residual)
    rows, columns = source.shape
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    dtype = codes or (x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype))
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    scale = None if codes is None else torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    summed = None if added is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    tensors = source, added, weight, bias, out, summed, scale
    strides = source.stride(0), 0 if added is None else added.stride(0)
    flags = dict(
        CENTRED=centred, HAS_RESIDUAL=added is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
        LARGEST_CODE=LARGEST_CODE[codes] if codes else 0,
    )  # fmt: skip
    size = min(x.element_size(), out.element_size())
    if columns > WIDEST_FORWARD:
        long.forward(tensors, columns, strides, float(eps), flags)
    elif granule := ragged.granule(columns, size, source, added):
        ragged.forward(tensors, columns, strides, float(eps), flags, granule)
    else:
        height, width, warps = tile_of_rows(columns)
        if odd(columns):
            warps = min(2 * warps, 32)
        elif centred and width > WIDEST_TWO_SUMS:
            warps = 8  # measured fastest
        launch(
            norm_fwd_kernel, (cdiv(rows, height),), *tensors, rows, columns, *strides, float(eps),
            **flags, RAGGED=ragged.granule(columns, size) > 0, ROWS=height, COLS=width, num_warps=warps, **early(x),
        )  # fmt: skip
    return tuple(result for result in (out, scale, summed) if result is not None)


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    has_bias: bool,
    eps: float,
    centred: bool,
    grad_sum: Tensor | None = None,
    invariant: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight and bias; where x is a sum that was handed on, with the gradient that arrives at it.

    Where they must be `invariant`, all rows are added up in one order, whether they start on 16 bytes or not.
    """
    source, arriving = rows_of(x), rows_of(grad)
    arriving_too = None if grad_sum is None else rows_of(grad_sum)
    weight = None if weight is None else weight.contiguous()
    rows, columns = source.shape
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    tensors = arriving, arriving_too, source, weight
    strides = arriving.stride(0), 0 if arriving_too is None else arriving_too.stride(0), source.stride(0)
    beyond = WIDEST_BACKWARD if odd(columns) else WIDEST_TWO_SUMS
    bias_too = has_bias and not WIDEST_TWO_SUMS < columns <= beyond
    flags = dict(
        CENTRED=centred, HAS_RESIDUAL=grad_sum is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias_too,
        ACC=accumulator(x.dtype),
    )  # fmt: skip
    if columns > beyond and not (centred or odd(columns)) and wide_rows.fits(columns, x.dtype, grad_sum is not None):
        partial = wide_rows.backward(tensors, dx, strides, float(eps), flags)
    elif columns > beyond:
        partial = long.backward(tensors, dx, strides, float(eps), flags)
    elif granule := 0 if invariant else ragged.granule(columns, x.element_size(), arriving, arriving_too, source):
        partial = ragged.backward(tensors, dx, strides, float(eps), flags, granule)
    else:
        height, width, _ = tile_of_rows(columns, elements=backward_elements(columns, centred))
        narrow = height * width <= 4096
        resident = backward_programs(columns, centred) if narrow else 1
        programs = min(cdiv(rows, height), multiprocessors(x.device) * resident)
        partial = torch.empty(
            (flags["HAS_WEIGHT"] + bias_too, programs, columns), dtype=widened(x.dtype), device=x.device
        )
        warps, ahead = backward_shape(height, width, centred)
        if odd(columns) and not narrow:  # no copies ahead of single elements, nor registers for many in a thread
            warps, ahead = width // 512, 1
        stage = height * width * x.element_size() * (2 if grad_sum is None else 3)
        stages = min(ahead, shared_memory(x.device) // (resident * stage))
        launch(
            norm_bwd_kernel, (programs,), *tensors, dx, partial, rows, columns, *strides, float(eps),
            **flags, ROWS=height, COLS=width, STAGES=max(stages, 1), num_warps=warps,
        )  # fmt: skip
    if weight is None:
        return dx, None, None
    summed = sum_columns(partial, weight.dtype)
    if not has_bias:
        return dx, summed[0], None
    return dx, summed[0], summed[1] if bias_too else sum_columns(arriving[None], weight.dtype)[0]


def odd(columns: int) -> bool:
    """Whether rows start off 16 bytes, so that elements are loaded one by one: more threads then, with fewer of them each."""
    return columns % 8 != 0


def backward_elements(columns: int, centred: bool) -> int:
    """Of a tile: fewer where the rows are short and centred, for half the registers."""
    return SHORT_ELEMENTS if centred and columns <= SHORT_CENTRED else 4096


def backward_programs(columns: int, centred: bool) -> int:
    """Programs of narrow tiles on each multiprocessor."""
    return SHORT_PROGRAMS if centred and columns <= SHORT_CENTRED else 2


def backward_shape(height: int, width: int, centred: bool) -> tuple[int, int]:
    """(warps, tiles loaded ahead) that measured fastest: as few warps as hold a tile and its running sums."""
    if centred and width <= SHORT_CENTRED:
        return SHORT_WARPS, SHORT_STAGES
    if height * width > 4096:
        return 8, 3
    # Short rows have four warps for their number of instructions: with eight twice as many, of passing sums around.
    return (8, 3) if centred and 1 < height <= 4 else (4, 3)


def in_one_order(forward: Callable, backward: Callable) -> Extras:
    """For the batch-invariant mode, chosen with the forward: nothing is handed on, but the backward is another."""
    return Extras(forward, backward, when=wants_invariance)


def rms_norm_backward(invariant: bool) -> Callable:
    def backward(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor | None, ...]:
        return norm_backward(grad, x, weight, False, eps, centred=False, invariant=invariant)[:2]

    return backward


@implements(
    ops.rms_norm,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=rms_norm_backward(False),
    extras=in_one_order(lambda *given: rms_norm(*given), rms_norm_backward(True)),
)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return norm_forward(x, weight, None, eps, centred=False)[0]


def layer_norm_backward(invariant: bool) -> Callable:
    def backward(
        grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor | None, ...]:
        return norm_backward(grad, x, weight, bias is not None, eps, centred=True, invariant=invariant)

    return backward


@implements(
    ops.layer_norm,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=layer_norm_backward(False),
    extras=in_one_order(lambda *given: layer_norm(*given), layer_norm_backward(True)),
)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return norm_forward(x, weight, bias, eps, centred=True)[0]


def add_rms_norm_backward(invariant: bool) -> Callable:
    def backward(
        grad_out: Tensor, grad_residual_out: Tensor, weight: Tensor | None, eps: float, residual_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        dsum, dweight, _ = norm_backward(
            grad_out, residual_out, weight, False, eps, False, grad_residual_out, invariant=invariant
        )
        return dsum, dsum, dweight

    return backward


@implements(
    ops.add_rms_norm,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=add_rms_norm_backward(False),
    extras=in_one_order(lambda *given: add_rms_norm(*given), add_rms_norm_backward(True)),
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    return norm_forward(x, weight, None, eps, centred=False, residual=residual)


def add_layer_norm_backward(invariant: bool) -> Callable:
    def backward(
        grad_out: Tensor, grad_residual_out: Tensor, weight: Tensor | None, eps: float, residual_out: Tensor, needs
    ) -> tuple[Tensor | None, ...]:
        dsum, *rest = norm_backward(
            grad_out, residual_out, weight, needs[3], eps, True, grad_residual_out, invariant=invariant
        )
        return dsum, dsum, *rest

    return backward


@implements(
    ops.add_layer_norm,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=add_layer_norm_backward(False),
    extras=in_one_order(lambda *given: add_layer_norm(*given), add_layer_norm_backward(True)),
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    return norm_forward(x, weight, bias, eps, centred=True, residual=residual)


@implements(ops.rms_norm_int8, backend="triton", invariant=True, repeat=straight_line, dtypes=HALVES_AND_SINGLE)
def rms_norm_int8(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    return norm_forward(x, weight, None, eps, centred=False, codes=torch.int8)


@implements(
    ops.rms_norm_fp8, backend="triton", invariant=True, repeat=straight_line, dtypes=HALVES_AND_SINGLE, when=writes_fp8
)
def rms_norm_fp8(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    return norm_forward(x, weight, None, eps, centred=False, codes=torch.float8_e4m3fn)


@implements(ops.add_rms_norm_int8, backend="triton", invariant=True, repeat=straight_line, dtypes=HALVES_AND_SINGLE)
def add_rms_norm_int8(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    return norm_forward(x, weight, None, eps, centred=False, residual=residual, codes=torch.int8)


@implements(
    ops.add_rms_norm_fp8,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    dtypes=HALVES_AND_SINGLE,
    when=writes_fp8,
)
def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    return norm_forward(x, weight, None, eps, centred=False, residual=residual, codes=torch.float8_e4m3fn)
