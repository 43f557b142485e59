"""Elementwise kernels: one program per block of a flat vector, read once and written once.

    program 0      program 1      program 2
    |--- BLOCK ---|--- BLOCK ---|--- BLO      the tail program masks what lies past the end

Only the tail is masked: a mask that is not provably uniform over 16 bytes would cut every load into single elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.kernels.launch import launch, wide
from tilestack.ops import implements

BLOCK = 2048


def flat(*tensors: Tensor) -> list[Tensor]:
    """The tensors in one memory order in which each is dense, so that a kernel can walk them as vectors."""
    first = tensors[0]
    if first.is_contiguous() or not all(is_dense(t) and t.stride() == first.stride() for t in tensors):
        return [t.contiguous() for t in tensors]
    return list(tensors)


def is_dense(x: Tensor) -> bool:
    """Whether x fills its memory without gaps or overlaps, in whatever order of dimensions; empty_like keeps just those."""
    return torch.empty_like(x, device="meta").stride() == x.stride()


def grid_over(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), BLOCK),)


@triton.jit
def block_of(n, BLOCK: tl.constexpr):
    """Offsets of this program's block, in 64 bits, and whether all of it lies inside the vector."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    return start + tl.arange(0, BLOCK), start + BLOCK <= n


@triton.jit
def load(pointer, offsets, whole, n):
    if whole:
        x = tl.load(pointer + offsets)
    else:
        x = tl.load(pointer + offsets, mask=offsets < n, other=0)
    return x


@triton.jit
def store(pointer, offsets, value, whole, n):
    if whole:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=offsets < n)


@triton.jit
def axpy_fwd_kernel(x_ptr, y_ptr, out_ptr, n, alpha, BLOCK: tl.constexpr):
    offsets, whole = block_of(n, BLOCK)
    x = wide(load(x_ptr, offsets, whole, n))
    y = wide(load(y_ptr, offsets, whole, n))
    store(out_ptr, offsets, (alpha * x + y).to(out_ptr.dtype.element_ty), whole, n)


@triton.jit
def add_fwd_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets, whole = block_of(n, BLOCK)
    store(out_ptr, offsets, load(x_ptr, offsets, whole, n) + load(y_ptr, offsets, whole, n), whole, n)


@triton.jit
def scale_kernel(x_ptr, out_ptr, n, alpha, BLOCK: tl.constexpr):
    offsets, whole = block_of(n, BLOCK)
    store(out_ptr, offsets, (alpha * wide(load(x_ptr, offsets, whole, n))).to(out_ptr.dtype.element_ty), whole, n)


@triton.jit
def activation_fwd_kernel(x_ptr, out_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    offsets, whole = block_of(n, BLOCK)
    x = wide(load(x_ptr, offsets, whole, n))
    HALF: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    store(out_ptr, offsets, activate(x, KIND, HALF).to(out_ptr.dtype.element_ty), whole, n)


@triton.jit
def activation_bwd_kernel(grad_ptr, kept_ptr, out_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    offsets, whole = block_of(n, BLOCK)
    grad = wide(load(grad_ptr, offsets, whole, n))
    kept = wide(load(kept_ptr, offsets, whole, n))
    HALF: tl.constexpr = kept_ptr.dtype.element_ty.primitive_bitwidth == 16
    store(out_ptr, offsets, (grad * slope(kept, KIND, HALF)).to(out_ptr.dtype.element_ty), whole, n)


@triton.jit
def activate(x, KIND: tl.constexpr, HALF: tl.constexpr):
    if KIND == "relu":
        y = tl.where(x < 0, 0.0, x)  # this way round a NaN stays one
    elif KIND == "silu":
        y = x * sigmoid(x)
    elif KIND == "gelu":
        y = x * normal_cdf(x, tl.exp(-0.5 * x * x), HALF)
    else:  # gelu_tanh, as x * sigmoid(2u): 1 + tanh(u) without cancellation
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def slope(x, KIND: tl.constexpr, HALF: tl.constexpr):
    """The derivative at x; for relu, x is the output."""
    if KIND == "relu":
        d = tl.where(x <= 0, 0.0, 1.0)
    elif KIND == "silu":
        s = sigmoid(x)
        d = s * (1 + x * (1 - s))
    elif KIND == "gelu":
        bell = tl.exp(-0.5 * x * x)
        d = normal_cdf(x, bell, HALF) + x * 0.3989422804014327 * bell
    else:
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        t = tl.exp(-tl.abs(u))  # s * (1 - s) = t / (1 + t)², without the cancellation in 1 - s
        d = sigmoid(u) + x * t / ((1 + t) * (1 + t)) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return d


@triton.jit
def normal_cdf(x, bell, HALF: tl.constexpr):
    """Φ(x), given exp(-x²/2). Half precisions take the rational form 7.1.26 of Abramowitz and Stegun, right to 1e-7.

    The exact erf costs more arithmetic than the memory can hide.
    """
    if HALF:
        t = 1 / (1 + 0.23164190 * tl.abs(x))
        tail = (
            t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * bell
        )
        phi = tl.where(x >= 0, 1 - tail, tail)
    else:
        phi = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    return phi


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@implements(ops.add, backend="triton", backward=lambda grad: (grad, grad))
def add(x: Tensor, y: Tensor) -> Tensor:
    x, y = flat(x, y)
    out = torch.empty_like(x)
    launch(add_fwd_kernel, grid_over(x), x, y, out, x.numel(), BLOCK=BLOCK)
    return out


def axpy_backward(grad: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    (grad,) = flat(grad)
    scaled = torch.empty_like(grad)
    launch(scale_kernel, grid_over(grad), grad, scaled, grad.numel(), float(alpha), BLOCK=BLOCK)
    return scaled, grad


@implements(ops.axpy, backend="triton", backward=axpy_backward)
def axpy(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    x, y = flat(x, y)
    out = torch.empty_like(x)
    launch(axpy_fwd_kernel, grid_over(x), x, y, out, x.numel(), float(alpha), BLOCK=BLOCK)
    return out


def activation(x: Tensor, kind: str) -> Tensor:
    (x,) = flat(x)
    out = torch.empty_like(x)
    launch(activation_fwd_kernel, grid_over(x), x, out, x.numel(), KIND=kind, BLOCK=BLOCK)
    return out


def activation_backward(grad: Tensor, kept: Tensor, kind: str) -> Tensor:
    grad, kept = flat(grad, kept)
    out = torch.empty_like(grad)
    launch(activation_bwd_kernel, grid_over(grad), grad, kept, out, grad.numel(), KIND=kind, BLOCK=BLOCK)
    return out


def gelu_name(approximate: str) -> str:
    return "gelu" if approximate == "none" else "gelu_tanh"


@implements(ops.relu, backend="triton", backward=lambda grad, out: activation_backward(grad, out, "relu"))
def relu(x: Tensor) -> Tensor:
    return activation(x, "relu")


@implements(ops.silu, backend="triton", backward=lambda grad, x: activation_backward(grad, x, "silu"))
def silu(x: Tensor) -> Tensor:
    return activation(x, "silu")


@implements(
    ops.gelu,
    backend="triton",
    backward=lambda grad, x, approximate: activation_backward(grad, x, gelu_name(approximate)),
)
def gelu(x: Tensor, approximate: str) -> Tensor:
    return activation(x, gelu_name(approximate))
