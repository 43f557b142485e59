"""A gated pair, or its gradient, as fp8 codes both ways: what the products around it take, without the numbers between.

    gate_up [rows, 2 · columns] ──▶ silu(gate) · up      as codes, as it lies and turned: x of the down projection
    grad, gate_up               ──▶ [dgate | dup]        the same: what arrives at the gate-up projection

The numbers that are coded are those of float32; nothing rounds them to the inputs' dtype before. Tiles and scales are those
of `fp8_tiles`. No gradients.
"""

from torch import Tensor
from torch.nn.functional import silu

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.fp8_tiles import codes_by, tiles_fit
from tilestack.ops.gated import halves, has_halves
from tilestack.ops.numerics import wide
from tilestack.ops.quantised_linear import E4M3

CHECKS = [
    (1, 1, "rows", "rows"),
    (130, 40, "rows", "blocks"),
    (64, 132, "blocks", "blocks"),
    (144, 128, "rows", "rows"),
    (160, 272, "rows", "blocks"),
    (131, 5, "blocks", "rows"),
    (256, 256, "rows", "rows"),
]


def gate_up_case(make, rows, columns, by, turned_by):
    return dict(x=make.normal(rows, 2 * columns, scale=2), by=by, turned_by=turned_by)


def gradient_case(make, rows, columns, by, turned_by):
    return dict(grad=make.normal(rows, columns)) | gate_up_case(make, rows, columns, by, turned_by)


def pair_fits(x: Tensor, by: str, turned_by: str) -> bool | str:
    if x.ndim != 2:
        return f"x must be a matrix, [rows, gate and up], not {tuple(x.shape)}"
    return found if (found := has_halves(x)) is not True else tiles_fit(x, by, turned_by)


def gradient_fits(grad: Tensor, x: Tensor, by: str, turned_by: str) -> bool | str:
    if (found := pair_fits(x, by, turned_by)) is not True:
        return found
    like = (x.shape[0], x.shape[1] // 2)
    return (grad.shape == like and grad.dtype == x.dtype) or (
        f"grad must be {x.dtype} {like}, as the gated pair of x is, not {grad.dtype} {tuple(grad.shape)}"
    )


@operator(
    cases=cases(gate_up_case, check=CHECKS, bench=[(65536, 3072, "rows", "blocks")]),
    cost=lambda x: Cost(flops=4.5 * x.numel()),
    check=pair_fits,
    outputs=("codes", "scale", "turned", "turned_scale"),
)
def swiglu_fp8_tiles(x: Tensor, by: str = "rows", turned_by: str = "blocks") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fp8_tiles` of silu(gate) * up for the two halves of the last dimension, which is coded unrounded."""
    gate, up = halves(wide(x), False)
    made = silu(gate) * up
    return *codes_by(made, by, E4M3), *codes_by(made.mT, turned_by, E4M3)


@operator(
    cases=cases(gradient_case, check=CHECKS, bench=[(65536, 3072, "rows", "rows")]),
    cost=lambda x: Cost(flops=8 * x.numel()),
    check=gradient_fits,
    outputs=("codes", "scale", "turned", "turned_scale"),
)
def swiglu_gradient_fp8_tiles(
    grad: Tensor, x: Tensor, by: str = "rows", turned_by: str = "rows"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fp8_tiles` of the gradient of swiglu(x), [dgate | dup], which is coded unrounded."""
    (gate, up), grad = halves(wide(x), False), wide(grad)
    share = gate.sigmoid()
    made = x.new_empty(x.shape, dtype=gate.dtype)
    dgate, dup = halves(made, False)
    dgate.copy_(grad * up * share * (1 + gate * (1 - share)))
    dup.copy_(grad * gate * share)
    return *codes_by(made, by, E4M3), *codes_by(made.mT, turned_by, E4M3)
