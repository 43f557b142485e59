"""What processes do that share the experts of a mixture: one layer, steps of a decoder, and whole runs."""

import dataclasses
from pathlib import Path

import pretraining
import torch
import torch.distributed as dist
from small_runs import train

from tilestack import nn
from tilestack.parallel.experts import expert_cuts, split_experts
from tilestack.parallel.mesh import Layout, Mesh
from tilestack.train.pretrain import pretrain

HIDDEN, EXPERTS, CHOSEN, TOKENS = 12, 6, 2, 9
MODEL = pretraining.MODEL | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
BIASED = {"balance": {"bias_rate": 0.05, "auxiliary_loss": 0.02}}
NO_LOSS = {"balance": {"bias_rate": 0.0, "auxiliary_loss": 0.0, "z_loss": 0.0}}  # which is of each process's own tokens


def mixture(only: int | None = None) -> nn.MoE:
    """A mixture; with `only`, one whose tokens all choose that expert and the next."""
    torch.manual_seed(3)
    made = nn.MoE(HIDDEN, 7, EXPERTS, CHOSEN, shared_intermediate=5).double()
    if only is not None:
        made.router.bias = torch.zeros(EXPERTS, dtype=torch.float64)
        made.router.bias[only : only + 2] = 10.0
    return made


def tokens_of(rank: int) -> torch.Tensor:
    """Other tokens, and another number of them, on every rank."""
    numbers = torch.Generator().manual_seed(rank)
    return torch.randn(TOKENS + 2 * rank, HIDDEN, dtype=torch.float64, generator=numbers).requires_grad_()


def one_layer(group: dist.ProcessGroup, only: int | None) -> dict[str, torch.Tensor]:
    """What comes out of a layer whose experts are shared, the gradients, and what it makes of the same tokens on all ranks; what
    comes out in training without gradients, and in evaluation with them, when ranks have tokens of their own as before."""
    layer, rank, ranks = mixture(only), group.rank(), group.size()
    for name, cut in expert_cuts(layer).items():
        getattr(layer, name).data = cut.part(getattr(layer, name).data, rank, ranks)
    split_experts(layer, group)
    x = tokens_of(rank)
    out = layer(x)
    (out.square().sum() + layer.balance.auxiliary_loss).backward()
    found = {"out": out, "dx": x.grad, "dgate_up": layer.gate_up.grad, "ddown": layer.down.grad}
    found["drouter"] = layer.router.weight.grad
    found["eval"] = layer.eval()(x)
    with torch.no_grad():
        found["same tokens"] = layer(tokens_of(0))
        found["no gradients"] = layer.train()(x)
    return found


def sent_by(work) -> tuple[dict[str, torch.Tensor], int]:
    """What `work` finds, and the bytes that this process sends to others by all-to-all meanwhile."""
    sent, real = [], dist.all_to_all_single

    def counted(out, given, received=None, parts=None, group=None):
        parts = parts or [len(given) // group.size()] * group.size()
        others = sum(size for rank, size in enumerate(parts) if rank != group.rank())
        sent.append(others * given[:1].numel() * given.element_size() if len(given) else 0)
        return real(out, given, received, parts, group=group)

    dist.all_to_all_single = counted
    try:
        return work(), sum(sent)
    finally:
        dist.all_to_all_single = real


def sent_in_halves(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The bytes that a forward sends of rows in float32, and where products are of bfloat16; rows are as many on all."""
    layer = mixture().float()
    split_experts(layer, group)
    for name, cut in expert_cuts(layer).items():
        getattr(layer, name).data = cut.part(getattr(layer, name).data, group.rank(), group.size())
    found = {}
    for name, halves in {"float32": False, "bfloat16": True}.items():
        with torch.autocast("cpu", torch.bfloat16, enabled=halves):
            _, sent = sent_by(lambda: layer(tokens_of(0).float()))
        found[f"rows in {name}"] = torch.tensor(sent - 4 * EXPERTS // group.size())  # beside counts, which are int32
    return found


def pairs(group: dist.ProcessGroup, texts: Path, folder: Path) -> dict[str, torch.Tensor]:
    """All that two processes do."""
    found = {}
    for name, only in (("even", None), ("one rank", 0)):
        found |= {f"{name} {key}": x for key, x in one_layer(group, only).items()}
    data, rows = Mesh(Layout.fit(2, expert=2)), Mesh(Layout.fit(2, expert=2, context=2))
    kinds = {
        "lora": (data, {"expert": 2}, {"lora": 2}),
        "context": (rows, {"expert": 2, "context": 2}, NO_LOSS),
    }
    for name, (mesh, parallel, settings) in kinds.items():
        found |= {f"{name} {key}": x for key, x in train("qwen3_moe", mesh, parallel, 1, **settings).items()}
    all_chosen = {"num_experts": 4, "num_experts_per_tok": 4, "steps": range(1)}
    _, sent = sent_by(lambda: train("qwen3_moe", data, {"expert": 2}, 2, **all_chosen))
    found |= {"sent": torch.tensor(sent)} | sent_in_halves(group)
    for name, steps in (("at once", (4,)), ("in two", (2, 4)), ("moving", (2,))):
        for end in steps:
            run(texts, folder / name, end, expert=2)
    for optimizer in ("adamw", "muon"):
        for name, steps in ((f"{optimizer} at once", (4,)), (f"{optimizer} in two", (2, 4))):
            for end in steps:
                run(texts, folder / name, end, expert=2, optimizer=optimizer)
    return found


def run(texts: Path, folder: Path, steps: int, **how) -> None:
    """A run of a mixture, as `pretraining` has them of a dense model."""
    recipe = pretraining.recipe(texts, steps, 1, **how)
    model = dataclasses.replace(recipe.model, config=MODEL, auxiliary_loss=0.01)
    pretrain(dataclasses.replace(recipe, model=model), folder, console=pretraining.Console(quiet=True))


def first_half(_) -> dict[str, torch.Tensor]:
    """On four processes, pairs that share experts: two steps, and who is in which group."""
    mesh = Mesh(Layout.fit(4, expert=2))
    found = train("qwen3_moe", mesh, {"expert": 2}, 1, steps=range(2), **BIASED)
    for name, layout in {"data": mesh, "tensor": Mesh(Layout.fit(4, tensor=2, expert=2))}.items():
        for side in ("expert", "copies"):
            found[f"{name} {side}"] = torch.tensor(dist.get_process_group_ranks(layout.group(side)))
        told = layout.texts(f"{layout.rank}", name)  # of this process and those beside it
        found[f"{name} told"] = torch.tensor(list(map(int, told)))
    return found


def second_half(_, saved: Path) -> dict[str, torch.Tensor]:
    """Two more, by four processes each of which has some experts, and by four that share nothing but texts."""
    found = {}
    for name, parallel in {"expert": {"expert": 4}, "shard": {"shard": True, "expert": 2}, "data": {}}.items():
        mesh = Mesh(Layout.fit(4, expert=parallel.get("expert", 1)))
        made = train("qwen3_moe", mesh, parallel, 1, steps=range(2, 4), saved=saved, **BIASED)
        found |= {f"{name}: {key}": x for key, x in made.items()}
    return found
