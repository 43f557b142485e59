"""Rows between tokens and experts: where each token's copies lie when sorted by expert, there, and back with weights.

    chosen [T, K]     places [T, K]       sorted by expert [T * K]
    t0: e2 e0         t0: 3 0             e0: t0 t3
    t1: e1 e2         t1: 2 4             e1: t1
    …                                     e2: t0 t1 …

A token knows the places of its copies, so neither way has to search or to add with atomics.
"""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import named_rows_exist, wide

BENCHES = [(8192, 4096, 8, 2), (8192, 2048, 128, 8)]  # Mixtral 8x7B, Qwen3-30B-A3B: tokens, hidden, experts, chosen


def choice_of(make, tokens, experts, k):
    """k different experts for each token."""
    return make.uniform(tokens, experts, dtype=torch.float32).argsort(1)[:, :k].contiguous()


def choice_fits(chosen: Tensor, experts: int) -> bool | str:
    if chosen.ndim != 2 or chosen.dtype != torch.int64:
        return f"chosen must be int64 [tokens, K], not {chosen.dtype} {tuple(chosen.shape)}"
    return experts >= 1 or f"there must be an expert, not {experts}"


@operator(
    cases=cases(
        lambda make, tokens, experts, k: dict(chosen=choice_of(make, tokens, experts, k), experts=experts),
        check=[(1, 1, 1), (5, 3, 2), (70, 4, 3), (33, 40, 8), (200, 7, 2), (0, 4, 2)],
        bench=[(tokens, experts, k) for tokens, _, experts, k in BENCHES],
    ),
    check=choice_fits,
    check_values=lambda chosen, experts: named_rows_exist("chosen", chosen, experts),
    outputs=("places", "offsets"),
)
def expert_places(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Where each of a token's copies lies when all are sorted by expert, then token: places [T, K]; and where each
    expert's end: offsets [experts], int32, as `grouped_linear` takes them."""
    by_expert, order = chosen.flatten().sort(stable=True)
    places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    every = torch.arange(experts, device=chosen.device)
    return places.view(chosen.shape), torch.searchsorted(by_expert, every, right=True, out_int32=True)


def places_of(make, tokens, k):
    return make.uniform(tokens * k, dtype=torch.float64).argsort().view(tokens, k)


def dispatch_case(make, tokens, columns, k):
    return dict(x=make.normal(tokens, columns), places=places_of(make, tokens, k))


def combine_case(make, tokens, columns, k):
    rows, weights = make.normal(tokens * k, columns), make.uniform(tokens, k, low=0.1, high=0.9)
    return dict(rows=rows, weights=weights, places=places_of(make, tokens, k))


def are_places(places: Tensor) -> bool | str:
    return (places.ndim == 2 and places.dtype == torch.int64) or (
        f"places must be int64 [tokens, K], not {places.dtype} {tuple(places.shape)}"
    )


def tokens_have_places(x: Tensor, places: Tensor) -> bool | str:
    if (reason := are_places(places)) is not True:
        return reason
    fits = x.ndim == 2 and x.shape[0] == places.shape[0]
    return (
        fits
        or f"x is [tokens, columns] and places [tokens, K], but they are {tuple(x.shape)} and {tuple(places.shape)}"
    )


def rows_have_places(rows: Tensor, weights: Tensor, places: Tensor) -> bool | str:
    if (reason := are_places(places)) is not True:
        return reason
    if rows.ndim != 2 or rows.shape[0] != places.numel():
        return f"rows must have a row for each of the {places.numel()} places, not {tuple(rows.shape)}"
    return weights.shape == places.shape or (
        f"weights must have a number for each of the places {tuple(places.shape)}, not {tuple(weights.shape)}"
    )


def each_place_once(places: Tensor) -> bool | str:
    ordered = places.flatten().sort().values
    return bool((ordered == torch.arange(len(ordered), device=places.device)).all()) or (
        f"places must name each of {len(ordered)} rows once"
    )


SIZES = [(1, 1, 1), (5, 33, 2), (40, 70, 3), (7, 1100, 8), (0, 4, 2), (4, 0, 2)]


@operator(
    cases=cases(dispatch_case, check=SIZES, bench=[(tokens, columns, k) for tokens, columns, _, k in BENCHES]),
    cost=lambda x, places: Cost(backward_flops=places.numel() * x.shape[1]),
    check=tokens_have_places,
    check_values=each_place_once,
    gradient=lambda grad, places: (wide(grad)[places].sum(1).to(grad.dtype), None),
)
def dispatch_rows(x: Tensor, places: Tensor) -> Tensor:
    """[T * K, columns]: row places[t, j] is x[t]. places names each row once, as `expert_places` makes them."""
    return x[places.flatten().argsort() // max(places.shape[1], 1)]


def combine_rows_gradient(grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor) -> tuple[Tensor, Tensor, None]:
    spread = wide(grad)[:, None] * wide(weights)[..., None]
    drows = torch.zeros_like(rows).index_copy(0, places.flatten(), spread.flatten(0, 1).to(rows.dtype))
    return drows, (wide(rows)[places] * wide(grad)[:, None]).sum(-1).to(weights.dtype), None


@operator(
    cases=cases(combine_case, check=SIZES, bench=[(tokens, columns, k) for tokens, columns, _, k in BENCHES]),
    cost=lambda rows: Cost(flops=2 * rows.numel(), backward_flops=3 * rows.numel()),
    check=rows_have_places,
    check_values=lambda places: each_place_once(places),
    gradient=combine_rows_gradient,
)
def combine_rows(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """[T, columns]: Σ_j weights[t, j] · rows[places[t, j]], added up in at least float32 and rounded once to rows' dtype."""
    return (wide(rows)[places] * wide(weights)[..., None]).sum(1).to(rows.dtype)
