"""Quantise the experts of a mixture, each by the tokens that the router sends to it.

What the mixture reads is kept while a layer is calibrated, with the experts that each token chose; so an expert's statistics
are made when its turn comes, and those of one expert are there at a time:

    tokens of the expert ──► gate_up ──► silu(gate) · up ──► down
          └─ statistics of gate_up          └─ statistics of down

Gate and up are rounded as one matrix, as they read the same, and share no scale, since scales are of rows. Experts get fewer
tokens than a layer, so what these show counts less, the fewer they are (`shrunk`), and an expert that hardly any reach is
rounded to the nearest. AWQ may make down's large inputs smaller, which up makes and this expert's down alone reads. What the
mixture reads is read by all experts and by the router, so nothing is folded into the norm before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilestack import ops
from tilestack.nn import MoE
from tilestack.ops.numerics import wide
from tilestack.quant.experts import put_codes, scheme_of_experts, stacked
from tilestack.quant.methods import METHODS, Method
from tilestack.quant.schemes import Codes, Scheme
from tilestack.quant.statistics import InputStatistics, scaled_statistics, shrunk

FEWEST = 16  # tokens of an expert that say something about its inputs


@dataclass
class ExpertCount:
    """How many experts became codes, and how many of them had too few tokens for the method that was asked for."""

    experts: int = 0
    nearest: int = 0


class RoutedInputs:
    """What a mixture read, and the experts that each token chose."""

    def __init__(self, mixture: MoE):
        self.mixture = mixture
        self.tokens: list[Tensor] = []  # of each batch, [T, hidden]
        self.chosen: list[Tensor] = []  # [T, K]

    def add(self, x: Tensor) -> None:
        tokens = x.reshape(-1, x.shape[-1])
        self.tokens.append(tokens)
        self.chosen.append(self.mixture.router(tokens)[0])

    def count(self, expert: int) -> int:
        return sum(int((chosen == expert).sum()) for chosen in self.chosen)

    def statistics(self, expert: int, kind: str, path: str) -> dict[str, Tensor]:
        """Statistics of what an expert's projections read, by their names."""
        kept = {"gate_up": InputStatistics(kind), "down": InputStatistics(kind)}
        gate_up = self.mixture.gate_up[expert]
        for tokens, chosen in zip(self.tokens, self.chosen, strict=True):
            mine = tokens[(chosen == expert).any(-1)]
            if len(mine):
                kept["gate_up"].add(mine)
                kept["down"].add(ops.swiglu(ops.linear(mine, gate_up)))
        found = {name: each.result(f"{path}.{name} of expert {expert}") for name, each in kept.items()}
        return {name: shrunk(each, kept[name].count) for name, each in found.items()}


def quantise_mixture(
    mixture: MoE, chosen: Sequence[str], inputs: RoutedInputs | None, scheme: Scheme, way: Method, path: str
) -> ExpertCount:
    """Make codes of the chosen projections of all experts of a mixture that is called `path`."""
    own, counted = scheme_of_experts(mixture, scheme), ExpertCount()
    parts: dict[str, list[Codes]] = {name: [] for name in chosen}
    for expert in range(mixture.router.experts):
        enough = inputs is not None and inputs.count(expert) >= FEWEST
        known = inputs.statistics(expert, way.statistics or "", path) if inputs is not None and enough else {}
        weights = {name: wide(getattr(mixture, name)[expert].detach()) for name in chosen}
        if way.behind == "all" and len(weights) == 2 and known:
            fold_up(weights, known, own, way)
        rounding = METHODS["nearest"] if inputs is not None and not enough else way
        for name, weight in weights.items():
            parts[name].append(rounding.round(weight, known.get(name), own))
        counted.experts += 1
        counted.nearest += rounding is not way
    for name, codes in parts.items():
        put_codes(mixture, name, own, stacked(codes))
    return counted


def fold_up(weights: dict[str, Tensor], known: dict[str, Tensor], scheme: Scheme, way: Method) -> None:
    """Multiply the columns of an expert's down, and divide what makes its inputs, the rows of up."""
    assert way.scale is not None
    scale = way.scale(weights["down"], known["down"], scheme, lambda squares: squares)
    gate, up = weights["gate_up"].chunk(2)
    weights["gate_up"] = torch.cat([gate, up / scale[:, None]])
    weights["down"] = weights["down"] * scale
    known["down"] = scaled_statistics(known["down"], scale)
