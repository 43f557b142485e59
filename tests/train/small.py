"""A decoder of a few thousand weights and its tokenizer, for tests of the objectives."""

import functools
import json

import torch

from tilestack import models
from tilestack.data import Tokenizer, corpora
from tilestack.train.settings import read

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train((task.prompt for task in corpora.arithmetic(200)), 280)


def decoder(seed: int = 0) -> models.Decoder:
    torch.manual_seed(seed)
    model = models.Decoder(models.ModelConfig.from_hf({**CONFIG, "vocab_size": tokenizer().vocabulary}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # far from uniform, so that tokens differ in likelihood
    return model


def recipe(kind, **sections):
    """A recipe of a kind with few and short examples."""
    small = {
        "run": {"steps": 3, "device": "cpu", "log_every": 1},
        "data": {"examples": 40, "validation": 0.1, "sequence": 128, "batch": 3},
        "evaluation": {"batches": 2, "sample_tokens": 4},
    }
    table = {name: {**small.get(name, {}), **sections.get(name, {})} for name in {**small, **sections}}
    return read(kind, table)


@torch.no_grad()
def log_prob(model, ids, mask) -> torch.Tensor:
    """The log-probability of the marked tokens, one sequence at a time from all of its logits."""
    scores = model(torch.tensor([ids]))[0].log_softmax(-1)
    return sum(scores[place - 1, ids[place]] for place in range(1, len(ids)) if mask[place])


def through_json(state):
    return json.loads(json.dumps(state))


def evaluated_around_steps(objective, model, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """What evaluation finds before and after some steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with torch.no_grad():
        before = objective.evaluate(model)
    for _ in range(steps):
        loss = objective.loss(model, objective.next_batch())
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    with torch.no_grad():
        return before, objective.evaluate(model)


def batches_after_a_saved_place(objective, twin):
    """Pairs of batches: of an objective that went on, and of its twin that was given its place by way of a file."""
    for _ in range(7):
        objective.next_batch()
    twin.load_state_dict(through_json(objective.state_dict()))
    return [(objective.next_batch(), twin.next_batch()) for _ in range(12)]
