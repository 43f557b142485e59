"""The linear layer: the operator that most of a model's arithmetic goes through."""

from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.autocast import lower_when_traced, lowered

# The rows of a step: decoding one sequence, some, many; a short prompt, a long one, a training step. And the layers that
# they meet: [out, in] of Llama-3-8B's projections, of Qwen3-0.6B's, and the latter's head.
ROWS = (1, 16, 64, 512, 2048, 8192)
LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336), (3072, 1024), (151936, 1024))
QWEN3_ROWS, QWEN3 = (1, 8, 64, 256), ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))  # decoding its 0.6B


def linear_case(make, rows, columns, inner, bias="bias"):
    # A weight of scale 1/sqrt(K) keeps outputs near one, as in a model at initialisation.
    arguments = dict(x=make.normal(rows, inner), weight=make.normal(columns, inner, scale=max(inner, 1) ** -0.5))
    return arguments | (dict(bias=make.normal(columns)) if bias == "bias" else {})


def batched_case(make, *shape):
    *leading, inner, columns = shape
    return dict(x=make.normal(*leading, inner), weight=make.normal(columns, inner, scale=inner**-0.5))


def shapes_agree(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool | str:
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        return f"x ends in K and weight is [N, K], but x is {tuple(x.shape)} and weight is {tuple(weight.shape)}"
    if not x.dtype == weight.dtype == (weight if bias is None else bias).dtype:
        return f"x, weight and bias must have one dtype, but x is {x.dtype} and weight is {weight.dtype}" + (
            "" if bias is None else f" and bias is {bias.dtype}"
        )
    return (
        bias is None
        or bias.shape == weight.shape[:1]
        or f"bias must have shape {tuple(weight.shape[:1])}, not {tuple(bias.shape)}"
    )


def multiply_adds(x: Tensor, weight: Tensor) -> Cost:
    return Cost(flops=2 * x.numel() * weight.shape[0], backward_read=[x, weight])


@operator(
    cases=cases(
        linear_case,
        check=[
            (1, 1, 1),
            (5, 17, 33),
            (64, 64, 64),
            (70, 130, 40, "plain"),
            (3, 24, 304),
            (16, 40, 304, "plain"),
            (0, 8, 8),
            (8, 0, 8),
            (8, 8, 0),
        ],
        gpu=[(2, 150, 1104), (290, 70, 16, "plain")],
        bench=[
            *((side, side, side, "plain") for side in (4096, 8192)),
            (8192, 8192, 1024, "plain"),
            *((rows, *layer, "plain") for layer in LAYERS for rows in ROWS),
            *((rows, *layer, "plain") for layer in QWEN3 for rows in (*QWEN3_ROWS, 16, 32, 128)),
            (8, *LAYERS[-1], "plain"),
        ],
    )
    + cases(batched_case, check=[(2, 3, 16, 20), (16, 20)]),
    cost=multiply_adds,
    check=shapes_agree,
    tuning_key=lambda x, weight: (x.shape[:-1].numel(), *weight.shape),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; weight is [out, in], as torch.nn.Linear keeps it. Under autocast all three are in its dtype."""
    x, weight, bias = lowered(x, weight, bias)
    product = x @ weight.T
    return product if bias is None else product + bias


lower_when_traced(linear)
