"""A mixture whose experts are codes, for inference.

The experts of a mixture are almost all of its weights, and a token reads few of them, so they are what codes make small. A
projection of all experts is one stack of codes, as `nn.MoE` keeps its weight: [experts, out, in] with a scale for each part of
each row. The router keeps its numbers, as which experts are chosen hangs on small differences between them.

Rows of inputs stay as they are, also where the scheme has codes of inputs: experts have few rows each, but of the largest
batches.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from tilestack import ops
from tilestack.nn import MoE
from tilestack.quant.schemes import Codes, Scheme

PROJECTIONS = MoE.ADAPTABLE  # the parameters of a mixture that hold its experts


class QuantisedMoE(MoE):
    """A mixture of which one projection of the experts is codes, or both; made by `put_codes`."""

    ADAPTABLE: ClassVar[tuple[str, ...]] = ()  # adapters are made beside numbers

    schemes: dict[str, Scheme]  # of the projections that are codes
    stacks: dict[str, Codes]  # theirs, [experts, out, in], each tensor with the experts as its first dimension

    def base_product(self, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        stack = self.stacks.get("gate_up" if weight is self.gate_up else "down")
        if stack is None:
            return super().base_product(rows, weight, offsets)
        return ops.grouped_linear_weight_only(rows, stack.codes, stack.scale, offsets, stack.zero)


def stacked(parts: Sequence[Codes]) -> Codes:
    """The codes of all experts as one stack."""
    return Codes(*(None if some[0] is None else torch.stack(some) for some in zip(*parts, strict=True)))  # type: ignore[arg-type]


def put_codes(mixture: MoE, projection: str, scheme: Scheme, stack: Codes) -> None:
    """Let a projection of a mixture's experts be codes, in place. It keeps the shape of its weight and not the weight."""
    if not isinstance(mixture, QuantisedMoE):
        mixture.__class__ = QuantisedMoE
        assert isinstance(mixture, QuantisedMoE)
        mixture.schemes, mixture.stacks = {}, {}
    mixture.schemes[projection], mixture.stacks[projection] = scheme, stack
    kept = torch.empty_like(getattr(mixture, projection), device="meta")
    setattr(mixture, projection, torch.nn.Parameter(kept, requires_grad=False))


@torch.no_grad()
def quantise_experts(mixture: MoE, scheme: Scheme) -> None:
    """Make codes of all of a mixture's experts, rounded to the nearest, one expert after another."""
    own = scheme_of_experts(mixture, scheme)
    for projection in PROJECTIONS:
        weight = getattr(mixture, projection).detach()
        put_codes(mixture, projection, own, stacked([own.round_to_nearest(each) for each in weight]))


def scheme_of_experts(mixture: MoE, scheme: Scheme) -> Scheme:
    """A scheme as a mixture's experts take it: parts of one size in all projections, as others read one size for all experts,
    and inputs of int8 codes stay as they are."""
    inner = [getattr(mixture, projection).shape[-1] for projection in PROJECTIONS]
    group = scheme.group
    for each in inner if not scheme.blocks else ():
        group = replace(scheme, group=group).group_of(each)
    return replace(scheme, group=group, activations=None if scheme.activations == "int8" else scheme.activations)
