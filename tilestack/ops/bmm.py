"""A stack of matrix products: each matrix of one stack with its own of the other, where `linear` has one weight for all."""

from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.autocast import lower_when_traced, lowered

HEADS, NOPE, RANK = 128, 128, 512  # of DeepSeek-V3's latent attention, whose heads each have a weight of their own


def stacks_case(make, stack, rows, columns, inner, layout="plain"):
    """`turned`: both are transposes of what lies in memory; `weight`: only the second is, as a layer's weight would be."""
    scale = max(inner, 1) ** -0.5
    turned_a, turned_b = layout == "turned", layout in ("turned", "weight")
    a = make.normal(stack, inner, rows).mT if turned_a else make.normal(stack, rows, inner)
    b = (
        make.normal(stack, columns, inner, scale=scale).mT
        if turned_b
        else make.normal(stack, inner, columns, scale=scale)
    )
    return dict(a=a, b=b)


def stacks_agree(a: Tensor, b: Tensor) -> bool | str:
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return f"a is [B, M, K] and b [B, K, N], but a is {tuple(a.shape)} and b is {tuple(b.shape)}"
    return a.dtype == b.dtype or f"a and b must have one dtype, but a is {a.dtype} and b is {b.dtype}"


@operator(
    cases=cases(
        stacks_case,
        check=[
            (1, 1, 1, 1),
            (3, 5, 17, 33),
            (2, 70, 40, 64),
            (2, 33, 130, 16, "turned"),
            (4, 3, 48, 32, "weight"),
            (0, 4, 4, 4),
            (2, 0, 8, 8),
            (2, 8, 0, 8),
            (2, 8, 8, 0),
        ],
        gpu=[(3, 300, 200, 96), (2, 129, 257, 48, "turned")],
        bench=[
            (16, 1024, 1024, 1024),
            (8, 4096, 4096, 4096),
            *((HEADS, rows, RANK, NOPE) for rows in (1, 64, 4096)),
            *((HEADS, rows, NOPE, RANK, "weight") for rows in (1, 64, 4096)),
        ],
    ),
    cost=lambda a, b: Cost(flops=2 * a.numel() * b.shape[2], backward_read=[a, b]),
    check=stacks_agree,
    tuning_key=lambda a, b: (*a.shape[:2], b.shape[2], a.shape[2]),
)
def bmm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for two stacks of matrices, [B, M, K] and [B, K, N]. Under autocast both are in its dtype."""
    a, b = lowered(a, b)
    return a @ b


lower_when_traced(bmm)
