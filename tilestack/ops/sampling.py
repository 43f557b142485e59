"""The next token from the logits: argmax, the k largest, and sampling with temperature, top-k, top-p and min-p.

Sampling is Gumbel-max: add to each scaled logit a noise of its own, take the largest. The noise of a token depends on
its row's seed and the token's number alone, so a row gives the same token whatever the batch, and filtering a token
out changes nothing about the others.
"""

import math

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import wide
from tilestack.ops.random import random_words

MOST = 256  # of top-k
SIZES = [(1, 1), (3, 33), (2, 128), (2, 1000), (3, 4097), (2, 9000), (0, 16)]
BENCHES = [(64, 151936), (256, 151936), (64, 262144)]


def has_vocabulary(logits: Tensor) -> bool | str:
    return (
        logits.ndim > 0 and logits.shape[-1] > 0
    ) or f"logits must have a vocabulary as last dimension, not shape {tuple(logits.shape)}"


def tied(make, rows, vocabulary):
    """Logits in quarters up to 0, 1 or 2, with zeros of both signs: the k-th is one of several, in some rows the largest."""
    drawn = (make.normal(rows, vocabulary, dtype=torch.float32) * 4).round() / 4
    row, token = torch.arange(rows, device=drawn.device)[:, None], torch.arange(vocabulary, device=drawn.device)
    drawn = torch.minimum(drawn, row % 3)
    return torch.where((row % 2 > 0) & (token == 0), 2.25, drawn).to(make.dtype)


def greedy_case(make, *size):
    """Logits of any size; `below` zero all of them where it ends so, or `tied`."""
    *shape, last = size
    if last == "tied":
        return dict(logits=tied(make, *shape))
    return dict(logits=make.normal(*shape, scale=3, mean=-20) if last == "below" else make.normal(*size, scale=3))


@operator(
    cases=cases(
        greedy_case,
        check=[*SIZES, (2, 3, 40), (6, 40, "tied")],
        bench=[(1, 151936), *BENCHES],
    ),
    check=has_vocabulary,
)
def argmax(logits: Tensor) -> Tensor:
    """The number of each row's largest logit, the first of equals; a NaN counts as largest."""
    return torch.argmax(logits, -1)


def topk_takes(logits: Tensor, k: int) -> bool | str:
    if (reason := has_vocabulary(logits)) is not True:
        return reason
    most = min(MOST, logits.shape[-1])
    return 0 < k <= most or f"k must lie between 1 and {most} for {logits.shape[-1]} logits, not {k}"


def topk_case(make, *size):
    *shape, k = size
    return dict(greedy_case(make, *shape), k=k)


@operator(
    cases=cases(
        topk_case,
        check=[
            *[(1, 1, 1), (2, 33, 4), (1, 128, 128), (2, 1, 1000, 7), (1, 5000, 40), (0, 16, 2)],
            (4, 300, "tied", 3),
            (4, 1000, "below", 2),
            (1, 5000, 30),
        ],
        bench=[(*size, 50) for size in BENCHES],
    ),
    check=topk_takes,
    outputs=("values", "indices"),
)
def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row, largest first and the first of equals before the others, and their numbers."""
    values, indices = torch.sort(logits, dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), indices[..., :k].contiguous()


def exponential(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponentially distributed numbers from uniform words, exact to the digits that dtype has also where they are small.

    -log(1 - u) would round 1 - u to 24 bits just where the race between tokens is won, so a series takes over there.
    """
    u = (words.to(dtype) + 0.5) * 2.0**-32
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    return torch.where(u < 0.1, series, -torch.log((1 - u).clamp_min(2.0**-33)))


def sample_case(make, rows, vocabulary, filters):
    """Rows that differ in everything; `filters` says which of the filters are used."""
    kinds = dict(
        none="", all="tkpm", greedy="g", topk="tk", topp="tp", minp="tm", mixed="tkpmg", tail="p", faint="p", edge="", tied="tkp", close="tkpm", race="t"
    )[filters]  # fmt: skip

    def drawn(kind, low, high, off):
        used = make.uniform(rows, low=low, high=high, dtype=torch.float32)
        return used if kind in kinds else torch.full_like(used, off)

    logits = make.normal(rows, vocabulary, scale=3)
    if filters == "tail":  # much of the mass lies with many tokens a thousand times less likely than the likeliest
        logits = logits / 10
        logits[:, vocabulary // 2] = 7
    if filters == "faint":  # less likely than 1 / vocabulary of the likeliest, and within every top_p all the same
        logits = torch.full_like(logits, math.log(0.7 / vocabulary))
        logits[:, vocabulary // 2] = 0
    k = make.integers(rows, low=1, high=min(vocabulary, 60) + 1, dtype=torch.int32)
    temperature = drawn("t", 0.5, 1.5, 1.0)
    if "g" in kinds:
        temperature = temperature * (torch.arange(rows, device=temperature.device) % 2)
    case = dict(
        logits=logits,
        seeds=make.integers(rows, low=-(2**62), high=2**62),
        temperature=temperature,
        top_k=k if "k" in kinds else torch.zeros_like(k),
        top_p=drawn("p", 0.3 if filters != "faint" else 0.7, 0.95, 1.0),
        min_p=drawn("m", 0.01, 0.1, 0.0),
    )
    return SHARP[filters](make, case) if filters in SHARP else case


def at_an_edge(make, case):
    """All but the likeliest, which is among the last, weigh 1.004 times what top_p leaves out: they are within it by a hair,
    and just less likely than whole half nats, where an estimate by those is nearly exact."""
    vocabulary = case["logits"].shape[1]
    depth = math.ceil(2 * math.log(vocabulary))
    logits = torch.full_like(case["logits"], 3 - depth / 2 - 2e-6)
    logits[:, vocabulary - 3] = 3
    others = (vocabulary - 1) * math.exp(-depth / 2)
    return case | dict(logits=logits, top_p=torch.full_like(case["top_p"], 1 - others / (1 + others) / 1.004))


def close_to_min_p(make, case):
    """All but the likeliest are a little more or less likely than min_p keeps, and top_k and top_p keep nearly all."""
    vocabulary = case["logits"].shape[1]
    place = torch.arange(vocabulary, device=make.device)
    likelihood = case["min_p"][:, None] * torch.where(place % 2 > 0, 1.02, 0.98)
    logits = likelihood.log() * case["temperature"][:, None]
    logits[:, vocabulary // 3] = 0
    logits += 2
    kept = dict(top_k=torch.full_like(case["top_k"], vocabulary - 1), top_p=torch.full_like(case["top_p"], 0.9999))
    return case | kept | dict(logits=logits.to(make.dtype))


def close_race(make, case):
    """Logits that outweigh the noise, so that all tokens are about equal and the last digits of their noise decide; rows
    without filters, and with one that keeps everything."""
    rows, vocabulary = case["logits"].shape
    spent = exponential(random_words(case["seeds"], vocabulary), torch.float64)
    # The one closest to where the logarithm takes over from the series wins in every second row, and is second in the others.
    by_series = torch.where(spent < 0.1, spent, 0.0).argmax(1, keepdim=True)
    row = torch.arange(rows, device=make.device)
    ahead = -4e-6 * (1 + torch.arange(vocabulary, device=make.device, dtype=torch.float64)).expand(rows, -1)
    ahead = ahead.scatter(1, by_series, torch.where(row % 2 > 0, 0.0, -6e-6).double()[:, None])
    logits = (spent.log() + ahead) * case["temperature"][:, None].double()
    keeping_all = torch.where(row > 1, 1e-30, 0.0).to(case["min_p"].dtype)
    return case | dict(logits=logits.to(make.dtype), min_p=keeping_all)


def with_ties(make, case):
    row = torch.arange(len(case["top_k"]), device=make.device)
    k = torch.where(row % 2 > 0, 1, row + 1)
    return case | dict(logits=tied(make, *case["logits"].shape), top_k=k.to(case["top_k"].dtype))


SHARP = dict(edge=at_an_edge, close=close_to_min_p, race=close_race, tied=with_ties)


def sample_takes(
    logits: Tensor, seeds: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> bool | str:
    if logits.ndim != 2 or logits.shape[1] == 0:
        return f"logits must be [rows, vocabulary], not {tuple(logits.shape)}"
    settings = dict(seeds=seeds, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for name, value in settings.items():
        if value.shape != logits.shape[:1]:
            return f"{name} must have one value per row, shape ({logits.shape[0]},), not {tuple(value.shape)}"
        if value.is_floating_point() == (name in ("seeds", "top_k")):
            return f"{name} must be {'integers' if name in ('seeds', 'top_k') else 'floating'}, not {value.dtype}"
    return seeds.dtype == torch.int64 or f"seeds must be int64, not {seeds.dtype}"


@operator(
    cases=cases(
        sample_case,
        check=[
            *((2, 40, kind) for kind in ("none", "all", "greedy", "topk", "topp", "minp")),
            (2, 5000, "mixed"),
            *((1, vocabulary, "none") for vocabulary in (5500, 6500, 7500, 9000)),  # that end in each of the four slabs
            (8, 5000, "tail"),
            (5, 200, "faint"),
            (3, 4200, "edge"),
            (4, 40, "race"),
            (4, 60, "close"),
            (4, 40, "tied"),
            (1, 1, "all"),
            (0, 16, "all"),
        ],
        bench=[(64, 151936, "none"), (64, 151936, "topk"), (64, 151936, "all"), (256, 151936, "all")],
    ),
    cost=lambda logits: Cost(flops=4 * logits.numel()),
    check=sample_takes,
)
def sample(logits: Tensor, seeds: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """One token per row, drawn from softmax(logits / temperature) after the row's filters; temperature 0 is argmax.

    top_k keeps the k largest logits (0 for all); top_p the most likely of those until their share of the kept mass
    reaches p (1 for all); min_p those at least that fraction as likely as the likeliest (0 for all). Equal logits stay
    or go together, and the likeliest always stays. A row whose largest logit is not finite gives -1.
    """
    x = wide(logits)
    vocabulary = x.shape[1]
    setting = lambda value: value.to(x.dtype)[:, None]
    top = torch.where(x.isnan(), math.inf, x).amax(1, keepdim=True)
    greedy = setting(temperature) <= 0
    scaled = (x - top) / torch.where(greedy, 1.0, setting(temperature))
    likelihood = torch.exp(scaled)

    order = torch.sort(x, dim=1, descending=True, stable=True)[1]
    descending, mass = x.gather(1, order), likelihood.gather(1, order)
    limit = torch.where(top_k > 0, top_k, vocabulary).clamp_max(vocabulary).long()[:, None]
    in_top_k = descending >= descending.gather(1, limit - 1)
    mass = torch.where(in_top_k, mass, 0)
    above = mass.cumsum(1) - mass
    # Equal logits share the mass above the first of them.
    new_value = torch.cat((torch.ones_like(in_top_k[:, :1]), descending[:, 1:] != descending[:, :-1]), 1)
    above = torch.where(new_value, above, -math.inf).cummax(1)[0]
    in_top_p = (setting(top_p) >= 1) | (above < setting(top_p) * mass.sum(1, keepdim=True))
    kept = torch.zeros_like(in_top_k).scatter(1, order, in_top_k & in_top_p) & (likelihood >= setting(min_p))
    kept = torch.where(greedy, x == top, kept | (x == top))

    noise = -torch.log(exponential(random_words(seeds, vocabulary), x.dtype))
    score = torch.where(kept, torch.where(greedy, 0.0, scaled + noise), -math.inf)
    return torch.where(top[:, 0].isfinite(), score.argmax(1), -1)
