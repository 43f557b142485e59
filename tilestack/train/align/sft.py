"""Supervised fine-tuning: conversations in which only the assistant's answers are learned.

Conversations are packed into rows side by side and kept apart: attention stays within each, positions restart, and no
label crosses from one to the next. They are packed anew in every round, in an order that follows from seed and round.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tilestack.data import Batch, Message, Tokenizer, answer_labels, corpora, pack
from tilestack.data.packing import best_fit, collate
from tilestack.train.align import examples
from tilestack.train.evaluation.answers import answers, prompt_ids, shown_answers
from tilestack.train.objective import Loss
from tilestack.train.pretrain import next_token_loss
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError, setting


@dataclass(frozen=True)
class ConversationData(examples.ArithmeticData):
    """Conversations: built-in ones, solved arithmetic, or files with {"messages": […]} in each row."""

    corpus: str = setting("conversations", choices=("conversations", "arithmetic", "files"))


@dataclass(frozen=True)
class SFTRecipe(Recipe):
    data: ConversationData = field(default_factory=ConversationData)


def conversations(settings: ConversationData, seed: int) -> tuple[list[list[Message]], list[list[Message]]]:
    """Conversations to learn from and conversations held out."""
    if settings.corpus == "files":
        found = examples.from_files(settings.files, examples.conversation, settings.examples)
    elif settings.corpus == "arithmetic":
        found = [examples.solved(task) for task in examples.arithmetic(settings, seed)]
    else:
        found = list(corpora.conversations(settings.examples, seed))
    return examples.split(found, lambda messages: messages[:-1], settings.validation, seed)


def texts(recipe: SFTRecipe) -> Iterator[str]:
    """What a new tokenizer is trained on."""
    for messages in conversations(recipe.data, recipe.run.seed)[0]:
        yield from (message["content"] for message in messages)


class SFT:
    """Answers as an objective; see `tilestack.train.objective`."""

    def __init__(self, recipe: SFTRecipe, tokenizer: Tokenizer, device: torch.device):
        self.recipe, self.tokenizer, self.device = recipe, tokenizer, device
        learned, self.held = conversations(recipe.data, recipe.run.seed)
        self.sequences = self.tokenised(learned)
        if not self.sequences:
            raise RecipeError(f"none of {len(learned)} conversations fits into data.sequence = {recipe.data.sequence}")
        self.most = max(recipe.data.sequence // 16, 1)  # conversations in a row; short ones are common here
        self.round, self.taken = 0, 0
        self.rows = self.packed()

    def tokenised(self, found: Sequence[list[Message]]) -> list[tuple[list[int], list[int]]]:
        """Ids and labels of those conversations that fit into a row: one cut short would teach to stop anywhere."""
        pairs = (self.tokenizer.chat_ids(messages) for messages in found)
        return [(ids, answer_labels(ids, mask)) for ids, mask in pairs if len(ids) <= self.recipe.data.sequence]

    def packed(self) -> list[list[int]]:
        """This round's rows, as numbers of sequences. Packing puts the long ones first, so rows are shuffled after it."""
        random = np.random.default_rng([self.recipe.run.seed, self.round])
        order = random.permutation(len(self.sequences))
        sizes = [len(self.sequences[number][0]) for number in order]
        rows = best_fit(sizes, self.recipe.data.sequence, self.most)
        return [[int(order[place]) for place in rows[number]] for number in random.permutation(len(rows))]

    def next_batch(self) -> Batch:
        rows: list[list[int]] = []
        while len(rows) < self.recipe.data.batch:
            rows.append(self.rows[self.taken])
            self.taken += 1
            if self.taken == len(self.rows):
                self.round, self.taken = self.round + 1, 0
                self.rows = self.packed()
        return self.collated([[self.sequences[number] for number in row] for row in rows])

    def collated(self, rows: Sequence[Sequence[tuple[list[int], list[int]]]]) -> Batch:
        return collate(rows, self.recipe.data.sequence, self.most).to(self.device)

    def loss(self, model: Any, batch: Batch) -> Loss:
        return Loss(next_token_loss(model, batch), batch.valid, tokens=batch.ids.numel())

    def evaluate(self, model: Any) -> dict[str, float]:
        """Loss per answer token on conversations held out, and how many last answers are right to the letter."""
        settings, limit = self.recipe.data, self.recipe.evaluation.batches * self.recipe.data.batch
        if not self.held:
            return {}
        batches = pack(self.tokenised(self.held), settings.sequence, settings.batch, most=self.most)
        batches = batches[: self.recipe.evaluation.batches]
        nats = sum(float(next_token_loss(model, batch.to(self.device))) for batch in batches)
        loss = nats / max(sum(batch.valid for batch in batches), 1)
        asked = [messages for messages in self.held[:limit] if messages[-1]["role"] == "assistant"]
        return {
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700)),
            "exact_answers": self.share_exact(model, asked),
        }

    def share_exact(self, model: Any, asked: Sequence[list[Message]]) -> float:
        prompts = [prompt_ids(self.tokenizer, messages[:-1]) for messages in asked]
        found = answers(
            model,
            prompts,
            max_new_tokens=self.recipe.evaluation.sample_tokens,
            stop=self.tokenizer.stops,
            device=self.device,
        )
        texts = (self.tokenizer.decode(answer).strip() for answer in found)
        exact = [text == messages[-1]["content"].strip() for text, messages in zip(texts, asked, strict=True)]
        return sum(exact) / max(len(exact), 1)

    def sample(self, model: Any) -> list[str]:
        prompts = [prompt_ids(self.tokenizer, messages[:-1]) for messages in self.held[:3]]
        return shown_answers(model, self.tokenizer, prompts, self.recipe.evaluation, self.device)

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.round, self.taken = state["round"], state["taken"]
        self.rows = self.packed()
        if self.taken >= len(self.rows):
            raise ValueError(f"the saved place {self.taken} is not among {len(self.rows)} rows: the data has changed")
