"""Activation kernels: one forward and one backward for all of them, told apart by a constant.

    forward   out = activate(x)           read x, write out
    backward  dx = grad · slope(kept)     read grad and what the operator keeps, write dx

What is kept is x, or the output where the derivative can be had from it: sigmoid, tanh, and relu, for which a bit an
element is enough where its forward can make it (`bits`). The blocks lie as in `elementwise`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.elementwise.arithmetic import exp_of, one_over
from tilestack.kernels.elementwise.bits import backward_of_bits, empty_bits, relu_and_bits
from tilestack.kernels.elementwise.vectors import BLOCK, block_of, flat, grid_over, load_block, store_block
from tilestack.kernels.tiles import wide


@triton.jit
def activation_fwd_kernel(x_ptr, out_ptr, n, cap, KIND: tl.constexpr, BLOCK: tl.constexpr):
    offsets, whole = block_of(n, BLOCK)
    x = wide(load_block(x_ptr, offsets, whole, n))
    HALF: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    if KIND == "softcap":
        y = softcap_of(x, cap, HALF)
    else:
        y = activate(x, KIND, HALF)
    store_block(out_ptr, offsets, y.to(out_ptr.dtype.element_ty), whole, n)


@triton.jit
def activation_bwd_kernel(grad_ptr, kept_ptr, out_ptr, n, cap, KIND: tl.constexpr, BLOCK: tl.constexpr):
    offsets, whole = block_of(n, BLOCK)
    grad = wide(load_block(grad_ptr, offsets, whole, n))
    kept = wide(load_block(kept_ptr, offsets, whole, n))
    HALF: tl.constexpr = kept_ptr.dtype.element_ty.primitive_bitwidth == 16
    if KIND == "softcap":
        twice = kept * (2 / cap) if HALF else 2 * kept / cap
        d = 4 * sigmoid_slope(twice, HALF)  # 1 - tanh²(u) without the cancellation
    else:
        d = slope(kept, KIND, HALF)
    store_block(out_ptr, offsets, (grad * d).to(out_ptr.dtype.element_ty), whole, n)


@triton.jit
def activate(x, KIND: tl.constexpr, HALF: tl.constexpr):
    if KIND == "relu":
        y = relu_of(x)
    elif KIND == "squared_relu":
        y = relu_of(x) * relu_of(x)
    elif KIND == "sigmoid":
        y = sigmoid_of(x, HALF)
    elif KIND == "tanh":
        y = tanh_of(x, HALF)
    elif KIND == "silu":
        y = x * sigmoid_of(x, HALF)
    elif KIND == "gelu":
        y = x * normal_cdf(x, exp_of(-0.5 * x * x, HALF), HALF)
    else:  # gelu_tanh, as x * sigmoid(2u): 1 + tanh(u) without cancellation
        y = x * sigmoid_of(1.5957691216057308 * (x + 0.044715 * x * x * x), HALF)
    return y


@triton.jit
def slope(x, KIND: tl.constexpr, HALF: tl.constexpr):
    """The derivative at x; for relu, sigmoid and tanh, x is the output."""
    if KIND == "relu":
        d = tl.where(x <= 0, 0.0, 1.0)
    elif KIND == "squared_relu":
        d = 2 * relu_of(x)
    elif KIND == "sigmoid":
        d = x * (1 - x)
    elif KIND == "tanh":
        d = (1 - x) * (1 + x)
    elif KIND == "silu":
        s = sigmoid_of(x, HALF)
        d = s * (1 + x * (1 - s))
    elif KIND == "gelu":
        bell = exp_of(-0.5 * x * x, HALF)
        # Of two products a compiler rounds either, another one in each specialisation; here it is said which.
        d = tl.fma(x * 0.3989422804014327, bell, normal_cdf(x, bell, HALF))
    else:
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = sigmoid_of(u, HALF)
        # In half precision what 1 - s cancels is out of sight, and the function and its slope can share one exponential.
        bend = s * (1 - s) if HALF else sigmoid_slope(u, HALF)
        d = s + x * bend * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return d


@triton.jit
def relu_of(x):
    return tl.where(x < 0, 0.0, x)  # this way round a NaN stays one


@triton.jit
def sigmoid_of(x, HALF: tl.constexpr):
    return one_over(1 + exp_of(-x, HALF), HALF)


@triton.jit
def sigmoid_slope(x, HALF: tl.constexpr):
    """s · (1 - s) for s = sigmoid(x), without the cancellation in 1 - s."""
    t = exp_of(-tl.abs(x), HALF)
    return t * one_over((1 + t) * (1 + t), HALF)


@triton.jit
def tanh_of(x, HALF: tl.constexpr):
    """1 - 2 / (exp(2x) + 1), and near zero, where that cancels, something in odd powers of x.

    For half precisions a term of the series below 0.08 is enough. For float32 it is a polynomial fitted up to 0.8, right
    to 4e-9, and for float64 Lambert's continued fraction. Both walk away from zero by |x|, which keeps the last digit.
    """
    square = x * x
    if HALF:
        near = x * (1 - square * 0.3332)
        y = tl.where(tl.abs(x) < 0.08, near, 1 - 2 * one_over(tl.exp2(2.8853900817779268 * x) + 1, HALF))
    else:
        t = tl.exp(-2 * tl.abs(x))
        if x.dtype == tl.float64:
            near = x * (135135 + square * (17325 + square * (378 + square)))
            near = near / (135135 + square * (62370 + square * (3150 + square * 28)))
        else:
            series = -0.053852309 + square * (0.021302923 + square * (-0.0074094628 + square * 0.0015847073))
            near = x + x * square * (-0.33333297 + square * (0.13332221 + square * series))
        far = 1 - 2 * (t / (1 + t))
        near = tl.where(x == 0, x, near)  # which keeps the sign of -0
        y = tl.where(tl.abs(x) < 0.8, near, tl.where(x < 0, -far, far))
    return y


@triton.jit
def softcap_of(x, cap, HALF: tl.constexpr):
    """cap · tanh(x / cap), in half precision by a product, for a division an element is more than memory can hide."""
    u = x * (1 / cap) if HALF else x / cap
    return cap * tanh_of(u, HALF)


@triton.jit
def normal_cdf(x, bell, HALF: tl.constexpr):
    """Φ(x), given exp(-x²/2). Half precisions take the rational form 7.1.26 of Abramowitz and Stegun, right to 1e-7.

    The exact erf costs more arithmetic than the memory can hide.
    """
    if HALF:
        t = one_over(1 + 0.23164190 * tl.abs(x), HALF)
        tail = (
            t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * bell
        )
        phi = tl.where(x >= 0, 1 - tail, tail)
    else:
        phi = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    return phi


def activation(x: Tensor, kind: str, cap: float = 1.0) -> Tensor:
    (x,) = flat(x)
    out = torch.empty_like(x)
    launch(activation_fwd_kernel, grid_over(x), x, out, x.numel(), float(cap), KIND=kind, BLOCK=BLOCK)
    return out


def activation_backward(grad: Tensor, kept: Tensor, kind: str, cap: float = 1.0) -> Tensor:
    grad, kept = flat(grad, kept)
    out = torch.empty_like(grad)
    launch(activation_bwd_kernel, grid_over(grad), grad, kept, out, grad.numel(), float(cap), KIND=kind, BLOCK=BLOCK)
    return out


def gelu_name(approximate: str) -> str:
    return "gelu" if approximate == "none" else "gelu_tanh"


@implements(
    ops.relu,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, out: activation_backward(grad, out, "relu"),
    extras=Extras(relu_and_bits, backward_of_bits, when=lambda x: x.is_contiguous(), fake=empty_bits),
)
def relu(x: Tensor) -> Tensor:
    return activation(x, "relu")


@implements(
    ops.squared_relu,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, x: activation_backward(grad, x, "squared_relu"),
)
def squared_relu(x: Tensor) -> Tensor:
    return activation(x, "squared_relu")


@implements(
    ops.sigmoid,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, out: activation_backward(grad, out, "sigmoid"),
)
def sigmoid(x: Tensor) -> Tensor:
    return activation(x, "sigmoid")


@implements(
    ops.tanh,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, out: activation_backward(grad, out, "tanh"),
)
def tanh(x: Tensor) -> Tensor:
    return activation(x, "tanh")


@implements(
    ops.softcap,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, x, cap: activation_backward(grad, x, "softcap", cap),
)
def softcap(x: Tensor, cap: float) -> Tensor:
    return activation(x, "softcap", cap)


@implements(
    ops.silu,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, x: activation_backward(grad, x, "silu"),
)
def silu(x: Tensor) -> Tensor:
    return activation(x, "silu")


@implements(
    ops.gelu,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=lambda grad, x, approximate: activation_backward(grad, x, gelu_name(approximate)),
)
def gelu(x: Tensor, approximate: str) -> Tensor:
    return activation(x, gelu_name(approximate))
