"""Expert parallelism: each rank of a group has some of a mixture's experts, and the group's tokens go where their experts are.

    rank 0   tokens a b c ─ router ─ sorted by expert ─┐ all-to-all ┌─ rows of experts 0, 1 ─ experts ─┐ all-to-all ┌─ combined
    rank 1   tokens d e f ─ router ─ sorted by expert ─┘            └─ rows of experts 2, 3 ─ experts ─┘            └─ combined

Ranks read other tokens each, and everything but the experts is on all of them. Rows sorted by expert are sorted by rank too, as
a rank has experts that are neighbours; so what goes to a rank lies together. First the ranks tell each other how many rows each
expert gets, then they send the rows. What a rank receives is sorted by sender, then by expert, and once more by expert alone.
Results take the same way back, and gradients both ways in reverse. No row is dropped, and none is padded.

The sizes of messages are the host's, so a forward waits for the device once in each mixture.

Shapes: R rows of a rank (tokens times the experts of each), G rows it is given, H hidden, N ranks, L experts of a rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilestack import ops
from tilestack.models.config import ModelConfig
from tilestack.nn.autocast import lowered
from tilestack.nn.moe import MoE
from tilestack.parallel.tensor import Cut


class ExchangedRows(torch.autograd.Function):
    """Rows to other ranks: the first `sent[0]` go to rank 0, the next `sent[1]` to rank 1, and so `received` from each. Its
    transpose sends back as many as came."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ExchangedRows.apply(grad, ctx.received, ctx.sent, ctx.group), None, None, None


class ExpertParallelMoE(MoE):
    """A mixture of which this rank has some experts.

    In evaluation (`eval()`, without gradients) all ranks are given the same tokens, as samples and held-out texts are: each
    computes what its own experts make of them, and the sum is the same on all, to the bit."""

    expert_group: dist.ProcessGroup

    def experts(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """The experts of all ranks on this rank's rows, [R, H], sorted by expert; `offsets` are of all experts."""
        (rows,) = lowered(rows)  # which experts do anyway, and less is sent
        if not self.training and not torch.is_grad_enabled():
            return self.experts_of_all_on_the_same(rows, offsets)
        group = self.expert_group
        counts = offsets.diff(prepend=offsets.new_zeros(1)).view(group.size(), -1)  # [N, L], of my rows for each expert
        given = torch.empty_like(counts)  # [N, L], of each rank's rows for my experts
        dist.all_to_all_single(given, counts, group=group)
        sent, received = torch.stack((counts.sum(1), given.sum(1))).tolist()
        rows = ExchangedRows.apply(rows, sent, received, group)
        places, ends = places_by_expert(given, len(rows))
        out = super().experts(ops.dispatch_rows(rows, places), ends)
        return ExchangedRows.apply(ops.dispatch_rows(out, inverse(places)), received, sent, group)

    def experts_of_all_on_the_same(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """The same where every rank has the same rows: nothing but results is sent."""
        local, group = self.gate_up.shape[0], self.expert_group
        first = group.rank() * local
        edges = torch.cat((offsets.new_zeros(1), offsets))
        start, end = edges[[first, first + local]].tolist()
        mine = super().experts(rows[start:end], offsets[first : first + local] - start)
        out = mine.new_zeros(len(rows), mine.shape[1])
        out[start:end] = mine
        dist.all_reduce(out, group=group)
        return out


def places_by_expert(given: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Of rows sorted by sender and then by expert, `given` [N, L] of each: the place of every row when sorted by expert, [G, 1],
    and where the rows of each expert end, [L]."""
    ranks, local = given.shape
    numbers = torch.arange(local, device=given.device).repeat(ranks)
    return ops.expert_places(numbers.repeat_interleave(given.flatten(), output_size=rows)[:, None], local)


def inverse(places: Tensor) -> Tensor:
    """Where each of the sorted rows, [G, 1], came from."""
    order = torch.arange(len(places), device=places.device)
    return torch.empty_like(places).scatter(0, places, order[:, None])


def split_experts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the mixtures of a model meet the other ranks' experts; their parameters are cut by whoever has them (`expert_cuts`)."""
    for module in model.modules():
        if isinstance(module, MoE):
            assert type(module) is MoE, "a mixture that computes in another way cannot be divided by its class"
            module.__class__ = ExpertParallelMoE  # as torch's fully_shard does
            assert isinstance(module, ExpertParallelMoE)
            module.expert_group = group


def expert_cuts(model: nn.Module) -> dict[str, Cut]:
    """How the experts of a model, and the adapters beside them, are divided, by name: an expert is whole."""
    return {
        f"{path}.{name}" if path else name: Cut(0, (len(param),))
        for path, module in model.named_modules()
        if isinstance(module, MoE)
        for name, param in module.named_parameters()
        if name.partition(".")[0].removesuffix("_lora") in MoE.ADAPTABLE
    }


def refuse_experts(config: ModelConfig, ranks: int) -> None:
    """Refuse a model whose experts so many ranks cannot share evenly."""
    asked = f"parallel.expert = {ranks}"
    if not config.experts:
        raise ValueError(
            f"{asked} divides the experts of a mixture, and this {config.family} model has none; set parallel.expert=1, and "
            "parallel.shard=true or parallel.tensor to divide the model"
        )
    if config.experts % ranks:
        fitting = [str(number) for number in range(2, config.experts + 1) if config.experts % number == 0]
        raise ValueError(
            f"{asked} does not divide the model's {config.spelt('experts')}, {config.experts}; take {' or '.join(fitting)}, or "
            "set parallel.expert=1 and parallel.shard=true"
        )
