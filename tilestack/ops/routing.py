"""Routing: from a router's logits to the experts of each token and their weights."""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import wide

SCORINGS = ("softmax", "sigmoid")
NOT_ZERO = 1e-20  # added to the sum that weights are divided by


def routing_case(make, tokens, experts, k, scoring="softmax", parts="normalise", groups=1, top_groups=1):
    """`parts` names what there is: bias, below (which no score makes up for), normalise, joined by +."""
    made = dict(logits=make.normal(tokens, experts))
    if "bias" in parts:
        made |= dict(bias=make.normal(experts, scale=0.2) - 2 * ("below" in parts))
    options = dict(k=k, scoring=scoring, normalise="normalise" in parts, groups=groups, top_groups=top_groups)
    return made | options | dict(scale=1.0 if scoring == "softmax" else 2.5)


def routing_fits(logits: Tensor, bias: Tensor | None, k: int, scoring: str, groups: int, top_groups: int) -> bool | str:
    if logits.ndim != 2 or logits.shape[1] == 0:
        return f"logits must be [tokens, experts], not {tuple(logits.shape)}"
    experts = logits.shape[1]
    if scoring not in SCORINGS:
        return f"scoring must be {' or '.join(SCORINGS)}, not {scoring!r}"
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups:
        return f"groups must divide the {experts} experts and hold top_groups, but they are {groups} and {top_groups}"
    if not 1 <= k <= top_groups * (experts // groups):
        return f"k must be between 1 and the {top_groups * (experts // groups)} experts to choose from, not {k}"
    return bias is None or bias.shape == (experts,) or f"bias must have shape ({experts},), not {tuple(bias.shape)}"


def ranks_by_logits(bias: Tensor | None, scoring: str, groups: int) -> bool:
    """Whether logits have the order of what experts are chosen by: scores grow with them, but their sums need not."""
    return bias is None and (scoring == "softmax" or groups == 1)


def choose(ranking: Tensor, k: int, counted: int, groups: int, top_groups: int) -> Tensor:
    """The k largest of each row, the first of equals first, from the groups whose `counted` largest are largest in sum."""
    ordered = lambda x: x.sort(dim=-1, descending=True, stable=True)[1]
    chosen = ordered(ranking)
    if groups > 1:
        of_group = ranking.unflatten(1, (groups, -1)).sort(-1, descending=True)[0][..., :counted].sum(-1)
        open_groups = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, ordered(of_group)[:, :top_groups], True)
        # Those of open groups first, each in its order: experts that are ranked at -inf are better than closed ones.
        is_open = open_groups.repeat_interleave(ranking.shape[1] // groups, 1).gather(1, chosen)
        chosen = chosen.gather(1, ordered(is_open))
    return chosen[:, :k].contiguous()


def route_gradient(
    grad_weights: Tensor, grad_scores: Tensor, logits: Tensor, scoring: str, normalise: bool, scale: float,
    chosen: Tensor, weights: Tensor, scores: Tensor,
) -> tuple[Tensor, None]:  # fmt: skip
    own = grad_weights * scale
    if normalise:  # a weight grows with its score, and all shrink with their sum
        total = scores.gather(1, chosen).sum(-1, keepdim=True) + NOT_ZERO
        own = (own - (grad_weights * weights).sum(-1, keepdim=True)) / total
    grad = grad_scores.scatter_add(1, chosen, own)
    if scoring == "softmax":
        return (scores * (grad - (grad * scores).sum(-1, keepdim=True))).to(logits.dtype), None
    return (grad * scores * (1 - scores)).to(logits.dtype), None


@operator(
    cases=cases(
        routing_case,
        check=[
            (1, 1, 1),
            (5, 6, 2),
            (33, 40, 8, "softmax", "plain"),
            (7, 16, 3, "sigmoid", "normalise"),
            (9, 8, 2, "sigmoid", "bias+normalise"),
            (6, 16, 3, "softmax", "normalise", 4, 2),
            (6, 32, 4, "sigmoid", "bias+normalise", 8, 3),
            (30, 4, 2, "sigmoid", "normalise", 2, 1),
            (5, 5, 5, "sigmoid", "bias+below+normalise"),
            (0, 8, 2),
        ],
        bench=[
            (8192, 8, 2),  # Mixtral 8x7B
            (8192, 128, 8),  # Qwen3-30B-A3B
            (8192, 256, 8, "sigmoid", "bias+normalise", 8, 4),  # DeepSeek-V3
        ],
    ),
    cost=lambda logits: Cost(flops=8 * logits.numel()),
    check=routing_fits,
    outputs=("chosen", "weights", "scores"),
    gradient=route_gradient,
)
def route(
    logits: Tensor, bias: Tensor | None = None, k: int = 1, scoring: str = "softmax", normalise: bool = True,
    scale: float = 1.0, groups: int = 1, top_groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The k experts of each token, best first and the first of equals before the others, their weights, and all scores.

    Scores are the softmax or the sigmoid of the logits, in at least float32. Experts are chosen by score plus bias, where
    there is one; with groups of neighbours, only from the `top_groups` best, a group being as good as its best expert
    (softmax) or its two best (sigmoid). Weights are the chosen scores, made to add up to one with `normalise`, times
    `scale`. The bias has a say in the choice alone, and no gradient.
    """
    x = wide(logits)
    scores = x.softmax(-1) if scoring == "softmax" else x.sigmoid()
    ranking = x if ranks_by_logits(bias, scoring, groups) else scores
    ranking = ranking.detach() if bias is None else ranking.detach() + bias.detach()
    counted = 1 if scoring == "softmax" else 2
    chosen = choose(ranking, k, counted, groups, top_groups)
    weights = scores.gather(1, chosen)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + NOT_ZERO)
    return chosen, weights * scale, scores
