"""A few steps of SFT, DPO, KTO and GRPO of a tiny decoder in float64, on any layout, with examples of uneven lengths."""

import functools
from pathlib import Path
from types import SimpleNamespace

import torch
from small_runs import CPU, after_steps, decoder

from tilestack.data import Tokenizer, corpora
from tilestack.nn.lora import add_lora
from tilestack.parallel.mesh import Layout, Mesh
from tilestack.parallel.placement import Placement
from tilestack.train.align import KINDS
from tilestack.train.align.reference import shared_log_probs
from tilestack.train.evaluation.log_probs import Scored
from tilestack.train.settings import read

BATCH = 3  # examples of a process in a micro-batch


def case(kind: str, family: str = "qwen3", lora: int = 0, parallel: dict | None = None, **settings) -> SimpleNamespace:
    """A kind of run on a layout; `settings` are those of its own section."""
    return SimpleNamespace(kind=kind, family=family, lora=lora, parallel=parallel or {}, settings=settings)


SHARD, TENSOR = {"shard": True}, {"tensor": 2}
CASES = {
    "sft": case("sft"),
    "sft sharded": case("sft", parallel=SHARD),
    "sft tensor": case("sft", parallel=TENSOR),
    "sft ring": case("sft", parallel={"context": 2, "context_by": "ring"}),
    "sft sharded adapters": case("sft", lora=2, parallel=SHARD),
    "sft tensor adapters": case("sft", lora=2, parallel=TENSOR),
    "dpo": case("dpo"),
    "dpo sharded": case("dpo", parallel=SHARD),
    "dpo sharded by length": case("dpo", "phi4_mini", parallel=SHARD),
    "dpo tensor": case("dpo", "gemma2", parallel=TENSOR, loss="ipo"),
    "dpo adapters": case("dpo", lora=2),
    "kto": case("kto"),
    "kto sharded": case("kto", parallel=SHARD),
    "kto tensor": case("kto", parallel=TENSOR),
    "grpo": case("grpo", reuse=2),
    "grpo sharded": case("grpo", parallel=SHARD, reuse=2),
    "grpo by answers": case("grpo", average="sequence", mask_truncated=True, beta=0.0),
    "grpo sharded adapters": case("grpo", lora=2, parallel=SHARD, temperature=0.7),
    "grpo tensor adapters": case("grpo", "llama_biased", lora=2, parallel=TENSOR),
}  # fmt: skip


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train((task.prompt for task in corpora.arithmetic(200)), 280)


def recipe_of(of: SimpleNamespace, batch: int):
    table = {
        "data": {"examples": 24, "validation": 0.2, "sequence": 96, "batch": batch, "accumulate": 2},
        "evaluation": {"sample_tokens": 3},
        "optimizer": {"name": "sgd", "clip": 0.5},
        "parallel": of.parallel,
    }
    own = {"group": 3, "max_new_tokens": 6} if of.kind == "grpo" else {}
    if own | of.settings:
        table[of.kind] = own | of.settings
    return read(KINDS[of.kind].recipe, table)


def aligned(of: SimpleNamespace, mesh: Mesh, batch: int, cache: Path | None = None) -> dict[str, torch.Tensor]:
    """What `after_steps` finds, and what evaluation does before."""
    recipe = recipe_of(of, batch)
    model = decoder(of.family, vocab_size=tokenizer().vocabulary, max_position_embeddings=256)
    if of.lora:
        add_lora(model, ["layers.*"], of.lora)
    placement = Placement(model, mesh, recipe.parallel.shard)
    objective = KINDS[of.kind].objective(recipe, placement, tokenizer(), CPU, cache)
    if of.kind == "grpo":
        objective.reward = reward
    move(placement)
    with torch.no_grad():
        model.eval()
        figures = objective.evaluate(model)
        model.train()
        placement.reshard()
    if mesh.index("tensor"):
        objective.reward = None  # of ranks that share a model, the first alone asks about answers to learn from
    found = after_steps(recipe, placement, objective)
    return found | {"evaluation": torch.tensor(list(figures.values()), dtype=torch.float64)}


def reward(task, text: str) -> float:
    return float(len(text) % 3)  # the answers of random weights are never right


@torch.no_grad()
def move(placement: Placement) -> None:
    """Leave the reference, which is the model as it was, on every layout alike."""
    for number, (name, part) in enumerate(placement.parameters.items()):
        noise = torch.randn(placement.shapes[name], generator=torch.Generator().manual_seed(number), dtype=part.dtype)
        part.add_(placement.part(name, noise), alpha=-0.02)


def in_two_processes(_, folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for name, of in CASES.items():
        sides = {side: of.parallel.get(side, 1) for side in ("tensor", "context")}
        made = aligned(of, Mesh(Layout.fit(2, **sides)), BATCH, folder / "references")
        found |= {f"{name}: {what}": x for what, x in made.items()}
    return found


def reference_in_two_processes(_) -> dict[str, torch.Tensor]:
    return {name: reference(Mesh(Layout.fit(2)), name == "sharded") for name in ("replicated", "sharded")}


def reference(mesh: Mesh, shard: bool) -> torch.Tensor:
    """What a model says of five sequences, in three batches, so that of two processes one has none left in the end."""
    placement = Placement(decoder("qwen3"), mesh, shard)
    sequences = [Scored(list(range(7, 7 + length)), [1] * length) for length in (5, 19, 12, 30, 17)]
    return shared_log_probs(placement, sequences, CPU, budget=40)


def alone(name: str) -> dict[str, torch.Tensor]:
    """What the two processes should find, from one that has all of their examples."""
    of = CASES[name]
    shared = {"tensor", "context"} & of.parallel.keys()
    return alone_with(of.kind, of.family, of.lora, BATCH if shared else 2 * BATCH, **of.settings)


@functools.cache
def alone_with(kind: str, family: str, lora: int, batch: int, **settings) -> dict[str, torch.Tensor]:
    return aligned(case(kind, family, lora, **settings), Mesh(), batch)
