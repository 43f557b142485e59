"""Linear layers with what follows them: activation, dropout and residual, or the gate of a feed-forward layer."""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import operator
from tilestack.ops.activation_dropout import KINDS
from tilestack.ops.autocast import lower_when_traced, lowered
from tilestack.ops.gated import swiglu
from tilestack.ops.matmul import linear, linear_case, multiply_adds, shapes_agree
from tilestack.ops.random import dropped, kept, one_seed, random_words

ACTIVATIONS = ("none", *KINDS)


def fused_case(make, rows, columns, inner, parts):
    """`parts` names what there is: bias, an activation, dropout (at an `edge` of it), residual, joined by +."""
    named = parts.split("+")
    arguments = linear_case(make, rows, columns, inner, "bias" if "bias" in named else "plain")
    if "residual" in named:
        arguments |= dict(residual=make.normal(rows, columns))
    if "dropout" in named:
        arguments |= dict(seed=make.integers(low=-(2**62), high=2**62), p=0.25)
    if "edge" in named:  # the first element's word is just the one below which elements are dropped
        arguments |= dict(seed=make.integers(low=2, high=3), p=random_words(torch.tensor(2), 1).item() / 2**32)
    return arguments | dict(activation=next((name for name in named if name in ACTIVATIONS), "none"))


def parts_agree(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seed: Tensor | None,
    activation: str,
    p: float,
) -> bool | str:
    if (reason := shapes_agree(x, weight, bias)) is not True:
        return reason
    if activation not in ACTIVATIONS:
        return f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}"
    shape = (*x.shape[:-1], weight.shape[0])
    if residual is not None and (residual.shape != shape or residual.dtype != x.dtype):
        return f"residual must be {x.dtype} {shape}, not {residual.dtype} {tuple(residual.shape)}"
    if p and seed is None:
        return f"dropout of p = {p} needs a seed, one int64 number in a tensor"
    return True if seed is None else one_seed(seed)


@operator(
    cases=cases(
        fused_case,
        check=[
            (1, 1, 1, "gelu"),
            (5, 17, 33, "bias+gelu_tanh"),
            (64, 64, 64, "bias+relu"),
            (33, 40, 16, "silu+residual"),
            (70, 130, 40, "bias+gelu+dropout+residual"),
            (6, 20, 8, "squared_relu+dropout"),
            (6, 20, 8, "edge"),
            (530, 70, 8, "relu"),  # more than a band of tiles
            (9, 33, 16, "residual"),
            (20, 144, 72, "bias+gelu+residual"),
            (0, 8, 8, "bias+relu+residual"),
            (8, 0, 8, "relu"),
            (8, 8, 0, "bias+silu+dropout"),
        ],
        bench=[
            (8192, 4096, 4096, "bias+gelu_tanh"),
            (8192, 14336, 4096, "bias+relu"),
            (8192, 4096, 14336, "residual"),
            (2048, 3072, 1024, "bias+silu"),
            (8192, 4096, 4096, "bias+gelu_tanh+dropout+residual"),
        ],
    ),
    cost=multiply_adds,
    check=parts_agree,
    tuning_key=lambda x, weight, activation: (x.shape[:-1].numel(), *weight.shape, activation),
)
def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    seed: Tensor | None = None,
    activation: str = "none",
    p: float = 0.0,
) -> Tensor:
    """dropout(activation(x @ weight.T + bias)) + residual, of which all but the product may be left out.

    activation: none, relu, squared_relu, silu, gelu or gelu_tanh. With a seed, `dropout` of probability p follows; it drops
    what `ops.dropout` would, and any p but 0 asks for one. Under autocast all tensors are in its dtype.
    """
    x, weight, bias, residual = lowered(x, weight, bias, residual)
    out = linear.definition(x, weight, bias)
    if seed is not None:
        out = torch.where(kept(out, seed, p), out, 0)  # what is dropped is zero, and so is its gradient, also of NaN
    out = KINDS[activation](out) if activation != "none" else out
    out = out if seed is None else dropped(out, seed, p)
    return out if residual is None else out + residual


def gate_up_case(make, rows, columns, inner, bias="plain"):
    return linear_case(make, rows, 2 * columns, inner, bias)


def two_projections(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool | str:
    if weight.ndim == 2 and weight.shape[0] % 2:
        return f"weight must hold two projections, one on the other, but has {weight.shape[0]} rows"
    return shapes_agree(x, weight, bias)


@operator(
    cases=cases(
        gate_up_case,
        check=[
            (1, 1, 1),
            (5, 17, 33),
            (64, 64, 64),
            (40, 48, 32, "bias"),
            (70, 130, 40),
            (5, 9, 200),
            (0, 8, 8),
            (8, 0, 8),
            (8, 8, 0, "bias"),
        ],
        bench=[(rows, 3072, 1024) for rows in (1, 8, 16, 32, 64, 128, 256, 512, 16384)]  # Qwen3-0.6B
        + [(8192, 14336, 4096), (512, 14336, 4096)],  # Llama-3-8B
    ),
    cost=multiply_adds,
    check=two_projections,
    tuning_key=lambda x, weight: (x.shape[:-1].numel(), *weight.shape),
)
def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """swiglu(x @ weight.T + bias), the first half of a gated feed-forward layer; weight has the gate's rows, then those of
    the other projection. Under autocast all three are in its dtype."""
    x, weight, bias = lowered(x, weight, bias)
    return swiglu.definition(linear.definition(x, weight, bias))


lower_when_traced(fused_linear)
lower_when_traced(linear_swiglu)
