"""Parts of parallel training one by one, as a process of a group runs them."""

import os
import signal
from pathlib import Path

import pretraining
import torch
import torch.distributed as dist
from rich.console import Console
from small_runs import batch, decoder

from tilestack.parallel.mesh import Layout, Mesh
from tilestack.parallel.placement import Placement, local_part
from tilestack.parallel.replicas import GradientBuckets
from tilestack.parallel.tensor import bounds
from tilestack.parallel.vocabulary import vocabulary_loss
from tilestack.train.errors import Interrupted
from tilestack.train.next_token import next_token_loss
from tilestack.train.pretrain import Pretraining, pretrain

WORDS, HIDDEN = 23, 8
LABELS = [0, 22, 11, 12, -100, 7, 10, -100]
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}


def head(dtype: torch.dtype):
    """Hidden states, a head, and their labels."""
    numbers = torch.Generator().manual_seed(5)
    make = lambda *shape: torch.randn(*shape, generator=numbers, dtype=torch.float64).to(dtype)
    return make(len(LABELS), HIDDEN), make(WORDS, HIDDEN), torch.tensor(LABELS)


def divided_heads(group) -> dict[str, torch.Tensor]:
    """Losses and gradients of a head whose words are divided, with and without a cap, and with a label that is none."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    start, end = bounds(WORDS, ranks)[rank : rank + 2]
    found = {}
    for name, dtype in DTYPES.items():
        for cap in (0.0, 2.0):
            x, weight, labels = head(dtype)
            x, weight = x.requires_grad_(), weight[start:end].clone().requires_grad_()
            loss = vocabulary_loss(x, weight, labels, cap, start, WORDS, group)
            (loss * 3).backward()
            dist.all_reduce(x.grad, group=group)
            found |= {f"{name} {cap} loss": loss, f"{name} {cap} dx": x.grad, f"{name} {cap} dweight": weight.grad}
    x, weight, labels = head(torch.float64)
    labels[3] = WORDS
    found["unknown"] = vocabulary_loss(x, weight[start:end], labels, 0.0, start, WORDS, group)
    return found


def late_gradients(group) -> dict[str, torch.Tensor]:
    """Sums in buckets of a few bytes, of parameters one of which has a gradient on one rank alone."""
    rank = dist.get_rank(group)
    params = [torch.nn.Parameter(torch.arange(3.0 + n)) for n in range(4)]
    buckets = GradientBuckets(params, group, size=16)
    used = [p for n, p in enumerate(params) if n != 2 or rank == 0]
    total = sum((p * (rank + 1)).sum() for p in used)
    total.backward(retain_graph=True)  # an earlier micro-batch, which sends nothing
    before = params[0].grad.clone()
    buckets.start()
    total.backward()
    buckets.finish()
    return {"before": before} | {f"grad {n}": p.grad for n, p in enumerate(params)}


def unknown_words(mesh: Mesh) -> dict[str, torch.Tensor]:
    model = decoder("qwen2")
    Placement(model, mesh)
    with torch.no_grad():
        return {"embedded": model.embedded(torch.tensor([[0, 96, 97, -1, 48]]))}


def half_mixtures() -> dict[str, torch.Tensor]:
    """Gradients of a mixture of experts in bfloat16, its router in float32, whole on both processes and sharded; and whether
    what an optimizer steps is what the sharded model has."""
    mesh, found = Mesh(Layout(data=2)), {}
    for shard in (False, True):
        model = decoder("qwen3_moe").float().bfloat16()
        placement = Placement(model, mesh, shard)
        model.to(torch.bfloat16)  # again, as a trainer does
        placement.start_backward(last=True)
        next_token_loss(model, batch(dist.get_rank())).backward()
        placement.finish_backward()
        for name, param in placement.parameters.items():
            found[f"{shard} {name}"] = placement.whole(name, param.grad)
    shared = [param.data_ptr() == local_part(of_model).data_ptr() for param, of_model in zip(
        placement.parameters.values(), model.parameters(), strict=True)]  # fmt: skip
    return found | {"shared": torch.tensor(shared)}


class AskedOnce(Pretraining):
    """One process is asked to stop in its third step; the others are not."""

    def next_batch(self):
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().next_batch()


def stopped_by_one(texts: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The texts are there for the first process alone, which prepares them."""
    from tilestack.train import pretrain as module

    module.Pretraining = AskedOnce
    try:
        texts = texts if dist.get_rank() == 0 else texts.with_name("not on this machine.jsonl")
        pretrain(pretraining.recipe(texts, 50, 1), folder / "stopped", console=Console(quiet=True))
    except Interrupted as stopped:
        return {"code": torch.tensor(stopped.code)}
    finally:
        module.Pretraining = Pretraining
    return {}


def pieces(group, texts: Path, folder: Path) -> dict[str, torch.Tensor]:
    mesh = Mesh(Layout(tensor=dist.get_world_size(group)))
    found = divided_heads(group) | late_gradients(group) | unknown_words(mesh)
    found["largest"] = torch.tensor(mesh.largest(dist.get_rank(group) * 7))
    found |= {f"mixture {name}": x for name, x in half_mixtures().items()}
    return found | stopped_by_one(texts, folder)
