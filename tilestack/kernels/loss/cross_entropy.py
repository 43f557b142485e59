"""Cross-entropy kernels: a program per row of logits, which reads it once for the loss and once more for the gradient.

With s = logits, or softcap · tanh(logits / softcap), p = softmax(s), ε the smoothing, z the weight of the z-loss, and V classes:

    loss     = lse - (1-ε) · s[label] - ε · avg(s) + z · lse²              lse = log Σ exp(s)
    dlogits  = scale · (p · (1 + 2z·lse) - ε/V - (1-ε) · [column = label]) · (1 - (s / softcap)²)

    a row →  |■■■■■■■■|■■■■■■■■|■■■■■■■■|■■■     tiles of DEPTH x WIDTH, lane w of a tile holding columns w, WIDTH + w, …
    first    1 ─────→ 2 ─────→ 3 ─────→ 4        a running max and sum in each of the WIDTH lanes, merged at the end
    then     4 ←───── 3 ←───── 2 ←───── 1        the gradient, walking back: what was read last is still in the cache

A gradient needs the sum before its first element, so a row is visited twice, but the second visit comes within
microseconds and finds its columns in the first- or second-level cache: one row in flight per multiprocessor is 40 MB at
152 k classes. So where what arrives from above will be a scalar, the gradient is made in the forward, on that same visit,
and memory sees the logits read once and the gradient written once. The backward multiplies it by the scalar and, where
that is one, as it is for a loss itself, finds on the device that there is nothing to do.

Lanes of depth DEPTH take one exponential per element, and one per DEPTH elements to move a lane's sum to its new max.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.launch import launch
from tilestack.kernels.elementwise.activation import softcap_of
from tilestack.kernels.tiles import accumulator, cdiv, multiprocessors, next_power, rows_of

DEPTH = 4
SHORT_WIDTH = 1024
LONG = 65536  # classes from which a row that is read twice gets more warps, so that few rows compete for the caches
LONG_WIDTH, LONG_DEPTH = 4096, 2
SCALE_BLOCK = 8192


@triton.jit
def capped(x, softcap, SOFTCAP: tl.constexpr, HALF: tl.constexpr):
    if SOFTCAP:
        x = softcap_of(x, softcap, HALF)
    return x


@triton.jit
def cross_entropy_kernel(
    logits_ptr, labels_ptr, scale_ptr, loss_ptr, dlogits_ptr,  # [rows, V], [rows], [rows] or [], [rows], [rows, V]
    columns, logits_stride, scale_stride, ignore_index, smoothing, z_loss, softcap,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, LOSS: tl.constexpr, GRADIENT: tl.constexpr, ACC: tl.constexpr,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = DEPTH * WIDTH
    HALF: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth == 16
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    if GRADIENT:
        dlogits_ptr += row * columns
    lane = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    label = tl.load(labels_ptr + row).to(tl.int64)
    if label == ignore_index:
        if LOSS:
            tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, columns, TILE):
                zero = tl.zeros([DEPTH, WIDTH], dlogits_ptr.dtype.element_ty)
                tl.store(dlogits_ptr + start + lane, zero, mask=start + lane < columns)
    else:
        known = (label >= 0) & (label < columns)
        # Read before any lane may write over it.
        target = capped(tl.load(logits_ptr + label, mask=known, other=float("nan")).to(ACC), softcap, SOFTCAP, HALF)
        largest = tl.full([WIDTH], -float("inf"), ACC)
        total = tl.zeros([WIDTH], ACC)
        plain = tl.zeros([WIDTH], ACC)
        for start in range(0, columns, TILE):
            inside = start + lane < columns
            s = capped(tl.load(logits_ptr + start + lane, mask=inside, other=0).to(ACC), softcap, SOFTCAP, HALF)
            if SMOOTHING:
                plain += tl.sum(s, 0)  # softcap leaves the zeros outside what they are
            s = tl.where(inside, s, -float("inf"))
            new = tl.maximum(largest, tl.max(s, 0))
            reference = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(largest - reference) + tl.sum(tl.exp(s - reference[None, :]), 0)
            largest = new
        top = tl.max(largest, 0)
        total = tl.sum(total * tl.exp(largest - top), 0)
        lse = top + tl.log(total)
        if LOSS:
            loss = lse - (1 - smoothing) * target + z_loss * lse * lse
            if SMOOTHING:
                loss -= smoothing * (tl.sum(plain, 0) / columns)
            tl.store(loss_ptr + row, loss)
        if GRADIENT:
            scale = tl.where(known, tl.load(scale_ptr + row * scale_stride).to(ACC), float("nan"))
            per_exp = scale * (1 + 2 * z_loss * lse) / total
            hit = scale * (1 - smoothing)
            last = (tl.cdiv(columns, TILE) - 1) * TILE
            for back in range(0, columns, TILE):
                column = last - back + lane
                inside = column < columns
                x = tl.load(logits_ptr + column, mask=inside, other=0, eviction_policy="evict_first").to(ACC)
                s = capped(x, softcap, SOFTCAP, HALF)
                d = tl.exp(s - top) * per_exp - tl.where(column == label, hit, 0.0)
                if SMOOTHING:
                    d -= scale * smoothing / columns
                if SOFTCAP:
                    d *= 1 - (s / softcap) * (s / softcap)
                tl.store(dlogits_ptr + column, d.to(dlogits_ptr.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def scale_in_place_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    """x *= factor by a few programs that share the blocks, so that a factor of one costs a launch and nothing more."""
    factor = tl.load(factor_ptr)
    if factor != 1:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
            tl.store(x_ptr + offsets, (x * factor).to(x_ptr.dtype.element_ty), mask=offsets < n)


def scale_in_place(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor, a scalar on the device, written over x, which is contiguous."""
    programs = min(cdiv(x.numel(), SCALE_BLOCK), 4 * multiprocessors(x.device))
    launch(scale_in_place_kernel, (programs,), x, factor, x.numel(), BLOCK=SCALE_BLOCK, num_warps=8)
    return x


class Options(NamedTuple):
    """What cross_entropy and linear_cross_entropy are told about the loss."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str

    def losses_for(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Where the loss of each row goes."""
        return torch.empty(labels.shape, dtype=torch.promote_types(dtype, torch.float32), device=labels.device)

    def reduce(self, losses: Tensor, labels: Tensor) -> Tensor:
        if self.reduction == "none":
            return losses
        return losses.sum() / self.valid(labels) if self.reduction == "mean" else losses.sum()

    def row_scale(self, grad: Tensor, labels: Tensor) -> Tensor:
        """The gradient that arrives at each row's loss, a scalar where it is the same for all."""
        return grad / self.valid(labels) if self.reduction == "mean" else grad.reshape(-1 if grad.ndim else ())

    def valid(self, labels: Tensor) -> Tensor:
        return (labels != self.ignore_index).sum()


def losses_and_gradients(
    logits: Tensor,
    labels: Tensor,
    scale: Tensor | None,
    losses: Tensor | None,
    dlogits: Tensor | None,
    options: Options,
) -> None:
    """Fill losses and dlogits, where wanted, from a matrix of logits, over which dlogits may lie; scale is for the latter."""
    rows, columns = logits.shape
    smoothing, z_loss, softcap = map(float, options[1:4])
    visits_twice = dlogits is not None and columns >= LONG
    most_width, most_depth = (LONG_WIDTH, LONG_DEPTH) if visits_twice else (SHORT_WIDTH, DEPTH)
    width = min(next_power(columns), most_width)
    # A third sum or a tanh takes registers, of which the warps of a long row have few each.
    deepest = most_depth // 2 if smoothing or softcap else most_depth
    depth = min(next_power(cdiv(columns, width)), deepest)
    scale_stride = scale.stride(0) if scale is not None and scale.ndim else 0
    launch(
        cross_entropy_kernel, (rows,), logits, labels, scale, losses, dlogits,
        columns, logits.stride(0), scale_stride, options.ignore_index, smoothing, z_loss, softcap,
        SMOOTHING=smoothing != 0, SOFTCAP=softcap != 0, LOSS=losses is not None, GRADIENT=dlogits is not None,
        ACC=accumulator(logits.dtype), DEPTH=depth, WIDTH=width, num_warps=max(width // 256, 1),
    )  # fmt: skip


def loss_and_gradient(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, reduction: str,
    inplace: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss and its gradient, in one visit to the logits."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    source, labels = rows_of(logits), labels.contiguous()
    losses = options.losses_for(labels, logits.dtype)
    scale = options.row_scale(losses.new_ones(()), labels)
    if inplace and logits.is_contiguous():
        torch.autograd.graph.increment_version(logits)  # so that autograd refuses to use the logits that were
        dlogits = logits.detach()
    else:
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    losses_and_gradients(source, labels, scale, losses, dlogits, options)
    return options.reduce(losses, labels), dlogits


def scaled_gradient(grad: Tensor, dlogits: Tensor) -> tuple[Tensor, None]:
    return scale_in_place(dlogits, grad), None


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
    reduction: str,
) -> tuple[Tensor, None]:  # fmt: skip
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    labels = labels.contiguous()
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    losses_and_gradients(rows_of(logits), labels, options.row_scale(grad, labels), None, dlogits, options)
    return dlogits, None


def one_scalar_arrives(reduction: str, dtype: torch.dtype) -> bool:
    """Whether a gradient can be made before the scalar that scales it arrives.

    Not in float16: the gradient of a mean underflows unless it is made with the large scalar that loss scaling sends.
    """
    return reduction != "none" and dtype != torch.float16


@implements(
    ops.cross_entropy,
    backend="triton",
    backward=cross_entropy_backward,
    # Not for a compiler: to scale the gradient into a new tensor costs more than to make it in the backward.
    extras=Extras(
        loss_and_gradient,
        scaled_gradient,
        when=lambda logits, reduction: one_scalar_arrives(reduction, logits.dtype),
        overwrites=("dlogits",),
    ),
)
def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, reduction: str,
    inplace: bool,
) -> Tensor:  # fmt: skip
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    labels = labels.contiguous()
    losses = options.losses_for(labels, logits.dtype)
    losses_and_gradients(rows_of(logits), labels, None, losses, None, options)
    return options.reduce(losses, labels)
