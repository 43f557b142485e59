"""An activation, or a gated pair, and dropout of its result in one pass, as the feed-forward layers of training have them.

The dropped elements are those that `dropout` would drop of the same result with the same seed. Whatever is there, also
NaN, their results and gradients are zero, which is why the definitions hide them from the activation.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops import activation
from tilestack.ops.elementwise import BENCHES
from tilestack.ops.gated import alike, two_halves
from tilestack.ops.numerics import wide
from tilestack.ops.random import dropped, kept, one_seed

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": activation.relu.definition,
    "squared_relu": activation.squared_relu.definition,
    "silu": activation.silu.definition,
    "gelu": activation.gelu.definition,
    "gelu_tanh": lambda x: activation.gelu.definition(x, "tanh"),
}
SIZES = [(33, 0.1), (4097, 0.5), (3, 1500, 0.9), (50, 0.0), (130, 1.0), (0, 0.5), (2, 3, 7, 0.25)]


def chances(make, kind, p):
    return dict(seed=make.integers(low=-(2**62), high=2**62), p=p, kind=kind)


def check_kind(seed: Tensor, kind: str) -> bool | str:
    if kind not in KINDS:
        return f"kind must be one of {', '.join(KINDS)}, not {kind!r}"
    return one_seed(seed)


@operator(
    cases=cases(
        lambda make, kind, *size: dict(x=make.normal(*size[:-1], scale=2)) | chances(make, kind, size[-1]),
        check=[*(("gelu", *size) for size in SIZES), *((kind, 3, 41, 0.5) for kind in KINDS)],
        bench=[(kind, *shape, 0.1) for kind in ("relu", "gelu") for shape in BENCHES],
    ),
    cost=lambda x: Cost(flops=9 * x.numel()),
    check=check_kind,
)
def activation_dropout(x: Tensor, seed: Tensor, p: float, kind: str) -> Tensor:
    """dropout(activation(x), seed, p), rounded once; kind: relu, squared_relu, silu, gelu or gelu_tanh."""
    seen = torch.where(kept(x, seed, p), wide(x), 0)
    return dropped(KINDS[kind](seen), seed, p).to(x.dtype)


@operator(
    cases=cases(
        lambda make, kind, *size: two_halves(make, *size[:-1]) | chances(make, kind, size[-1]),
        check=[*(("silu", *size) for size in SIZES), *((kind, 3, 41, 0.5) for kind in KINDS)],
        bench=[(kind, *shape, 0.1) for kind in ("silu", "gelu_tanh") for shape in BENCHES],
    ),
    cost=lambda gate: Cost(flops=10 * gate.numel()),
    check=lambda gate, up, seed, kind: reason if (reason := alike(gate, up)) is not True else check_kind(seed, kind),
)
def gated_dropout(gate: Tensor, up: Tensor, seed: Tensor, p: float, kind: str) -> Tensor:
    """dropout(activation(gate) * up, seed, p), rounded once; kind as for activation_dropout."""
    seen = torch.where(kept(gate, seed, p), wide(gate), 0)
    return dropped(KINDS[kind](seen) * wide(up), seed, p).to(gate.dtype)
