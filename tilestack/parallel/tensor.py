"""Tensor parallelism: each rank of a group has some of a decoder's heads, of its feed-forward's width, and of its words.

    rank 0   x ─► qkv of heads 0, 1 ─► output, their columns ─┐          ┌─► gate, up: half ─► down, its columns ─┐
                                                              ├─ sum ─ x ┤                                         ├─ sum ─ x
    rank 1   x ─► qkv of heads 2, 3 ─► output, their columns ─┘          └─► gate, up: half ─► down, its columns ─┘

A rank's decoder is a decoder with fewer heads and a narrower feed-forward: its blocks are the modules they were, fused
operators included, over smaller weights. Hooks around each block do what the ranks have to tell each other: what enters is the
same on all, so its gradient is a sum over them; what leaves is a sum. Embedding and head are divided by words
(vocabulary.py). Norms are on every rank, with the same gradients, but for those of single queries and keys, of which a
rank sees its own heads' alone: `partial` names them, and their gradients have to be summed.

`cuts` says how each parameter is divided, following `models.weights.layout`: it takes parts for a rank, and joins them again.
An adapter (LoRA) beside a weight is divided as that is: of B A, B has the weight's rows and A its columns.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilestack import ops
from tilestack.models.config import ModelConfig
from tilestack.models.decoder import Decoder
from tilestack.models.weights import layout
from tilestack.nn import Linear
from tilestack.nn.autocast import lowered
from tilestack.nn.lora import LoRALinear, lora_layers
from tilestack.parallel.collectives import entered, joined_columns, summed
from tilestack.parallel.vocabulary import vocabulary_loss, vocabulary_losses

BY_ROWS = ("qkv", "gate_up", "embedding", "head")
BY_COLUMNS = ("output", "down")


class CannotSplit(ValueError):
    """A model that tensor parallelism does not take; the message says what of it."""


def bounds(size: int, ranks: int) -> list[int]:
    """Where the part of each rank begins, and the end: as even as can be."""
    return [size * rank // ranks for rank in range(ranks + 1)]


@dataclass(frozen=True)
class Cut:
    """How a tensor is divided: along a dimension it is `pieces`, one behind the other, and a rank has its part of each."""

    dim: int
    pieces: tuple[int, ...]

    def sizes(self, rank: int, ranks: int) -> list[int]:
        """What a rank has of each piece."""
        return [bounds(size, ranks)[rank + 1] - bounds(size, ranks)[rank] for size in self.pieces]

    def shape(self, whole: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
        return (*whole[: self.dim], sum(self.sizes(rank, ranks)), *whole[self.dim + 1 :])

    def part(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        pieces = whole.split(self.pieces, self.dim)
        places = [(bounds(size, ranks)[rank], bounds(size, ranks)[rank + 1]) for size in self.pieces]
        parts = [piece.narrow(self.dim, at, end - at) for piece, (at, end) in zip(pieces, places, strict=True)]
        return torch.cat(parts, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole of every rank's part."""
        split = [part.split(self.sizes(rank, len(parts)), self.dim) for rank, part in enumerate(parts)]
        return torch.cat([torch.cat(same, self.dim) for same in zip(*split, strict=True)], self.dim)


def cuts(config: ModelConfig) -> dict[str, Cut]:
    """How each parameter that is divided is, by its name in the decoder."""
    inner = {"output": config.heads * config.head_dim, "down": config.intermediate}
    found = {}
    for name, pieces in layout(config, fused=()).items():
        module, kind = name.split(".")[-2:]
        if module in BY_ROWS:
            found[name] = Cut(0, tuple(piece.rows for piece in pieces))
        elif module in BY_COLUMNS and kind == "weight":
            found[name] = Cut(1, (inner[module],))
    return found


def adapter_cuts(decoder: Decoder) -> dict[str, Cut]:
    """How the adapters of a decoder are divided, those that are."""
    of_weights = cuts(decoder.config)
    halves = {0: "lora_B", 1: "lora_A"}  # by the dimension in which the weight is divided
    return {
        f"{path}.{halves[cut.dim]}": cut
        for path in lora_layers(decoder)
        if (cut := of_weights.get(f"{path}.weight")) is not None
    }


def partial(decoder: Decoder) -> set[str]:
    """Parameters that every rank has, and of whose gradient it has a part: the sum is over its own heads, or its part of the
    adapter's other half."""
    config = decoder.config
    per_head = ("q_norm.weight", "k_norm.weight") if config.qk_norm == "head" else ()
    norms = {f"layers.{layer}.attention.{name}" for layer in range(config.layers) for name in per_head}
    divided = adapter_cuts(decoder)
    halves = [(f"{path}.lora_A", f"{path}.lora_B") for path in lora_layers(decoder)]
    return norms | {one for a, b in halves for one, other in ((a, b), (b, a)) if other in divided}


def what_cannot_split(config: ModelConfig) -> str:
    """The kinds of layers of a model that are not divided among ranks, in words; empty where there are none."""
    kinds = {
        "a mixture of experts (num_experts)": config.experts,
        "latent attention (MLA, kv_lora_rank)": config.kv_rank,
        "norms over all queries of a token": config.qk_norm == "projection",
    }
    return " and ".join(kind for kind, there in kinds.items() if there)


def what_does_not_divide(config: ModelConfig, ranks: int) -> str:
    """The first of a model's sizes that so many ranks do not divide, in words; empty where they divide all."""
    sizes = ((field, getattr(config, field)) for field in ("heads", "kv_heads", "intermediate"))
    return next((f"{config.spelt(field)}, {size}" for field, size in sizes if size % ranks), "")


def refuse_split(config: ModelConfig, ranks: int) -> None:
    """Refuse a model that so many ranks cannot share in training."""
    if found := what_cannot_split(config):
        raise CannotSplit(
            f"parallel.tensor = {ranks} cannot split this {config.family} model, which has {found}; "
            "use parallel.tensor=1, and parallel.shard=true "
            + ("or parallel.expert " if config.experts else "")
            + "to divide its memory"
        )
    if size := what_does_not_divide(config, ranks):
        fitting = [str(n) for n in range(2, ranks) if not what_does_not_divide(config, n)]
        raise CannotSplit(
            f"parallel.tensor = {ranks} does not divide the model's {size}; "
            + (f"{' or '.join(fitting)} would, " if fitting else "set parallel.tensor=1, ")
            + "and parallel.shard=true divides its memory too"
        )


class PartialLinear(Linear):
    """A linear layer whose result is a part of a sum over ranks. Its bias is added to the sum, once, by `leave_block`."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(*lowered(input, self.weight, None))


class PartialLoRALinear(LoRALinear):
    """The same with an adapter beside it."""

    def base(self, input: Tensor) -> Tensor:
        return ops.linear(*lowered(input, self.weight, None))


class TensorDecoder(Decoder):
    """A decoder with a rank's share of heads, width and words; what comes out is that of the whole one."""

    group: dist.ProcessGroup
    words: list[int]  # where each rank's words begin, and the end
    rank: int

    def embedded(self, ids: Tensor) -> Tensor:
        start, end = self.words[self.rank], self.words[self.rank + 1]
        unknown = (ids < 0) | (ids >= self.words[-1])  # a row of NaN on every rank, as in one process
        mine = ((ids >= start) & (ids < end)) | unknown
        found = super().embedded(torch.where(mine, torch.where(unknown, -1, ids - start), 0))
        return summed(torch.where(mine[..., None], found, 0), self.group)

    def logits(self, hidden: Tensor) -> Tensor:
        scores = super().logits(entered(hidden, self.group))
        sizes = [end - start for start, end in zip(self.words, self.words[1:], strict=False)]
        return joined_columns(scores, sizes, self.group)

    def head_loss(self, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float) -> Tensor:
        """The sum of -log p over labels, of hidden states that are the same on all ranks."""
        hidden, weight, _ = lowered(entered(hidden, self.group), weight, None)
        place = self.words[self.rank], self.words[-1]
        return vocabulary_loss(hidden, weight, labels, softcap, *place, self.group)

    def head_losses(self, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float) -> Tensor:
        """The terms of that sum, of the shape of the labels."""
        hidden, weight, _ = lowered(entered(hidden, self.group), weight, None)
        place = self.words[self.rank], self.words[-1]
        return vocabulary_losses(hidden, weight, labels, softcap, *place, self.group)


def split_decoder(decoder: Decoder, group: dist.ProcessGroup) -> None:
    """Turn a decoder in place into this rank's part of it; its parameters are cut by whoever has them (`cuts`)."""
    config, ranks = decoder.config, dist.get_world_size(group)
    local = dataclasses.replace(
        config,
        heads=config.heads // ranks,
        kv_heads=config.kv_heads // ranks,
        intermediate=config.intermediate // ranks,
    )
    decoder.__class__ = TensorDecoder  # as torch's fully_shard does: all that was said of the model stays true of it
    assert isinstance(decoder, TensorDecoder)
    decoder.config, decoder.group = local, group
    decoder.words, decoder.rank = bounds(config.vocabulary, ranks), dist.get_rank(group)
    layers: Any = decoder.layers
    for layer in layers:
        layer.attention.config = local
        layer.attention.split = local.heads, local.kv_heads, local.kv_heads
        surround(layer.attention, layer.attention.output, group)
        surround(layer.mlp, layer.mlp.down, group)


def surround(block: nn.Module, last: Linear, group: dist.ProcessGroup) -> None:
    """Let a block take what is the same on all ranks, and leave the sum of what each of them makes of it."""
    if last.bias is not None:
        last.__class__ = PartialLoRALinear if isinstance(last, LoRALinear) else PartialLinear

    def enter_block(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return entered(args[0], group), *args[1:]

    def leave_block(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        made = summed(out, group)
        return made if last.bias is None else made + last.bias.to(made.dtype)

    block.register_forward_pre_hook(enter_block)
    block.register_forward_hook(leave_block)
