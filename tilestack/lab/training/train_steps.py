"""A training step of one model, as each candidate of `tilestack bench train` takes it: ours, plain PyTorch's, transformers'.

All do the same work: the same weights to start from, random tokens, micro-batch and length, full causal attention, parameters
and gradients in one dtype, AdamW at one rate, no clipping. Peers are at their best: SDPA attention and PyTorch's fused AdamW.
Ours is the very step that `tilestack train` takes: kernel by kernel, as CUDA graphs (`run.graph`), compiled, or with its
products in fp8, in graphs where a run would take them.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestack.lab.bench.peers import importable

ADAMW = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


Step = Callable[[], Tensor]  # takes a training step and answers its loss, which nobody has waited for


@dataclass(frozen=True)
class Work:
    """What every candidate does."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)  # in Hugging Face's words
    batch: int = 8
    sequence: int = 2048
    dtype: str = "bfloat16"
    device: str = "cuda"
    backend: str = ""  # of our operators, as a recipe says it
    warmup: int = 4
    steps: int = 10
    weights: str = ""  # the folder that every candidate loads
    seconds: float = 0.0  # on a CPU: further rounds until the steps took so long together, at most MOST_ROUNDS

    @property
    def case(self) -> str:
        return f"{self.name}, {self.batch}x{self.sequence}"

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def ids(self) -> Tensor:
        shape = (self.batch, self.sequence)
        return torch.randint(self.config["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(
            self.device
        )


def write_weights(work: Work, folder: Path) -> Work:
    """The work with weights to start from, in a folder that transformers opens too."""
    from tilestack import models

    torch.manual_seed(0)
    with torch.device(work.device):
        model = models.Decoder(models.ModelConfig.from_hf(work.config)).to(getattr(torch, work.dtype))
    models.save(model, folder / "weights")
    del model
    torch.cuda.empty_cache()  # it belongs to the candidates now
    return replace(work, weights=str(folder / "weights"))


def our_step(work: Work, way: str) -> Step:
    """The training step of `tilestack train`."""
    from tilestack import configure_backend, models
    from tilestack.data import NO_LABEL
    from tilestack.train import Loss, Recipe, Trainer
    from tilestack.train.next_token import loss_of_labels
    from tilestack.train.settings import read

    configure_backend(work.backend)
    model = models.load(work.weights, device=work.device)
    ids = work.ids()
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], NO_LABEL)], 1)

    class RandomTokens:
        """The same batch again and again."""

        fixed_shapes = True

        def next_batch(self):
            return ids

        def loss(self, model, batch):
            total = loss_of_labels(model, model.hidden(batch), labels)
            return Loss(total, work.batch * (work.sequence - 1), tokens=work.tokens)

        def evaluate(self, model):
            return {}

        def sample(self, model):
            return []

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    recipe = read(
        Recipe,
        {
            "run": {
                "device": work.device, "compile": "default" if way == "compile" else "off",
                "graph": {"graph": "on", "fp8": "auto", "fp8-head": "auto"}.get(way, "off"), "deterministic": False,
                "steps": 10**6,
            },
            "precision": {
                "parameters": work.dtype, "compute": work.dtype,
                "fp8": way in ("fp8", "fp8-head"), "fp8_head": way == "fp8-head",
            },
            "optimizer": {"clip": 0, **ADAMW},
            "schedule": {"name": "constant"},
        },
    )  # fmt: skip
    trainer = Trainer(recipe, model, RandomTokens(), tempfile.mkdtemp())
    trainer.model.train()

    def step() -> Tensor:
        trainer.train_step()
        return trainer.pending.pop().figure("loss")

    return step


def transformers_step(work: Work, way: str) -> Step:
    """A training step of transformers, as its users write it."""
    importable("liger_kernel")  # finds what is installed beside the environment
    import transformers

    kind = work.config["model_type"]
    if way == "liger":
        from liger_kernel import transformers as liger

        getattr(liger, f"apply_liger_kernel_to_{kind}")()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        work.weights, attn_implementation="sdpa", dtype=getattr(torch, work.dtype)
    )
    model.to(work.device).train()
    model.config.use_cache = False
    run = torch.compile(model) if way == "compile" else model
    ids = work.ids()
    return stepping(model, lambda: run(input_ids=ids, labels=ids).loss)


def stepping(model: torch.nn.Module, loss_of_a_batch: Step) -> Step:
    """A training step as PyTorch's users write it."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)  # type: ignore[arg-type]

    def step() -> Tensor:
        loss = loss_of_a_batch()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain_step(work: Work, way: str) -> Step:
    """A training step in plain PyTorch."""
    from tilestack.lab.training.plain_model import PlainDecoder

    model = PlainDecoder.load(Path(work.weights)).to(work.device, getattr(torch, work.dtype))
    run = torch.compile(model) if way == "compile" else model
    ids = work.ids()

    def loss() -> Tensor:
        logits = run(ids)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return stepping(model, loss)


def step_of(candidate: str, work: Work) -> Step:
    framework, _, way = candidate.partition("-")
    return {"tilestack": our_step, "plain": plain_step, "transformers": transformers_step}[framework](work, way)
