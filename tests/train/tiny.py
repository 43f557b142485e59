"""A model and an objective of a few hundred weights, for tests of the loop: it learns to count."""

import torch
from torch import Tensor, nn

from tilestack.train import Loss, Recipe
from tilestack.train.settings import read


class TinyModel(nn.Module):
    def __init__(self, vocabulary: int = 16, hidden: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(2)])
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Counting:
    """Predict the next number; batches come from a generator of its own and from the process-wide one."""

    def __init__(self, batch: int = 4, length: int = 6, vocabulary: int = 16, noise: float = 0.1, spoil: int = -1):
        self.batch, self.length, self.vocabulary, self.noise, self.spoil = batch, length, vocabulary, noise, spoil
        self.drawn = 0

    def next_batch(self):
        source = torch.Generator().manual_seed(self.drawn)
        start = torch.randint(self.vocabulary, (self.batch, 1), generator=source)
        ids = (start + torch.arange(self.length + 1)) % self.vocabulary
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape) < self.noise] = -100  # the process-wide generator: resume must restore it
        self.drawn += 1
        return {
            "ids": ids[:, :-1],
            "labels": labels,
            "factor": torch.tensor(torch.nan if self.drawn == self.spoil else 1.0),
        }

    def loss(self, model, batch) -> Loss:
        logits = model(batch["ids"])
        total = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        valid = (batch["labels"] >= 0).sum()
        right = ((logits.argmax(-1) == batch["labels"]) & (batch["labels"] >= 0)).sum()
        return Loss(total * batch["factor"], valid, {"accuracy": right}, batch["ids"].numel())

    def evaluate(self, model) -> dict[str, float]:
        ids = torch.arange(self.vocabulary)[None]
        loss = nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
        return {"validation_loss": float(loss) + 0 * float(torch.rand(()))}  # draws, and must not disturb the run

    def sample(self, model) -> list[str]:
        return [str(model(torch.tensor([[3]])).argmax().item())]

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


def recipe(**sections) -> Recipe:
    small = {"run": {"steps": 12, "device": "cpu", "log_every": 5}, "checkpoint": {"every": 4}}
    table = {name: {**small.get(name, {}), **sections.get(name, {})} for name in {**small, **sections}}
    return read(Recipe, table)
