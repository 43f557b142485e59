"""Supervised fine-tuning: conversations in which only the assistant's answers are learned.

Conversations are packed into rows side by side and kept apart: attention stays within each, positions restart, and no
label crosses from one to the next. They are packed anew in every round, in an order that follows from seed and round. All
processes pack the same rows, and those with other texts take their share of them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from tilestack.data import Batch, Conversation, Tokenizer, answer_labels, corpora, formats, pack
from tilestack.data.packing import best_fit, collate
from tilestack.parallel.placement import Placement
from tilestack.parallel.sequence import cut_batch
from tilestack.train.align import examples
from tilestack.train.align.deck import Deck, digest_of
from tilestack.train.evaluation.answers import answers, prompt_ids, shown_answers
from tilestack.train.next_token import next_token_loss
from tilestack.train.objective import Loss
from tilestack.train.settings import RecipeError, setting

Sequences = list[tuple[list[int], list[int]]]  # ids and labels of each


@dataclass(frozen=True)
class ConversationData(examples.ArithmeticData):
    """Conversations: built-in ones, solved arithmetic, or rows of files in the formats of `data.formats`."""

    corpus: str = setting(
        "conversations", "what to learn from", choices=("conversations", "arithmetic", "files")
    )  # fmt: skip


@dataclass(frozen=True)
class SFTRecipe(examples.AlignmentRecipe):
    rows_can_be_shared: ClassVar[bool] = True
    data: ConversationData = field(default_factory=ConversationData)


def conversations(settings: ConversationData, seed: int) -> examples.Examples[Conversation]:
    """Conversations to learn from and conversations held out."""

    def make(count: int) -> Iterator[Conversation]:
        if settings.corpus == "arithmetic":
            return map(examples.solved, examples.arithmetic(settings, seed, count))
        return map(Conversation, corpora.conversations(count, seed))

    read = lambda row: [formats.conversation(row)]
    return examples.gathered(settings, seed, read, make, lambda each: each.messages[:-1])


def texts(recipe: SFTRecipe) -> Iterator[str]:
    """What a new tokenizer is trained on."""
    for conversation in conversations(recipe.data, recipe.run.seed).learned:
        yield from (message["content"] for message in conversation.messages)


class SFT:
    """Answers as an objective; see `tilestack.train.objective`."""

    fixed_shapes = True

    def __init__(self, recipe: SFTRecipe, placement: Placement, tokenizer: Tokenizer, device: torch.device):
        self.recipe, self.tokenizer, self.device = recipe, tokenizer, device
        self.placement, self.mesh = placement, placement.mesh
        found = conversations(recipe.data, recipe.run.seed)
        self.held = found.held
        with self.mesh.first_alone():  # the others find what it has tokenised
            self.sequences, sources, left_out = self.tokenised(found.learned, found.sources)
            self.held_sequences, _, held_left_out = self.tokenised(self.held, [0] * len(self.held))
        self.counts = {
            "conversations": len(found.learned), "sequences": len(self.sequences), "too long for data.sequence": left_out,
            **found.left_out,
            "held out": len(self.held), "held out and too long": held_left_out,
        }  # fmt: skip
        if not self.sequences:
            raise RecipeError(
                f"none of {len(found.learned)} conversations fits into data.sequence = {recipe.data.sequence}"
            )
        self.most = max(recipe.data.sequence // 16, 1)  # conversations in a row; short ones are common here
        made_of = digest_of(self.sequences, self.held_sequences)
        self.deck = Deck(len(self.sequences), recipe.run.seed, sources, found.weights, made_of)
        self.taken = 0
        self.rows = self.packed()

    def tokenised(self, found: Sequence[Conversation], sources: Sequence[int]) -> tuple[Sequences, list[int], int]:
        """Ids and labels of what fits into a row (what is cut short would teach to stop anywhere), the sources of each, and
        how many were too long."""
        fitting: Sequences = []
        kept, too_long = [], 0
        for part, numbers in zip(examples.in_parts(found), examples.in_parts(sources), strict=True):
            for sequences, source in zip(self.tokenizer.chat_ids(part), numbers, strict=True):
                for ids, mask in sequences:
                    if len(ids) > self.recipe.data.sequence:
                        too_long += 1
                    else:
                        fitting.append((ids, answer_labels(ids, mask)))
                        kept.append(source)
        return fitting, kept, too_long

    def packed(self) -> list[list[int]]:
        """This round's rows, as numbers of sequences. Packing puts the long ones first, so rows are shuffled after it."""
        order = self.deck.cards
        rows = best_fit([len(self.sequences[number][0]) for number in order], self.recipe.data.sequence, self.most)
        shuffled = np.random.default_rng([self.recipe.run.seed, self.deck.round, 1]).permutation(len(rows))
        return [[order[place] for place in rows[number]] for number in shuffled]

    def next_batch(self) -> Batch:
        rows: list[list[int]] = []
        while len(rows) < self.recipe.data.batch * self.mesh.size("data"):
            rows.append(self.rows[self.taken])
            self.taken += 1
            if self.taken == len(self.rows):
                self.deck.next_round()
                self.taken, self.rows = 0, self.packed()
        mine = [[self.sequences[number] for number in row] for row in self.mesh.share(rows, "data")]
        batch = collate(mine, self.recipe.data.sequence, self.most)
        if (ranks := self.mesh.size("context")) > 1:
            batch = cut_batch(batch, self.recipe.parallel.context_by, self.mesh.index("context"), ranks)
        return batch.to(self.device)

    def loss(self, model: Any, batch: Batch) -> Loss:
        return Loss(next_token_loss(model, batch), batch.valid, tokens=batch.ids.numel())

    def evaluate(self, model: Any) -> dict[str, float]:
        """Loss per answer token on conversations held out, and how many last answers are right to the letter; what nothing
        held out can be measured by has no figure."""
        settings, limit = self.recipe.data, self.recipe.evaluation.batches * self.recipe.data.batch
        figures = {}
        batches = pack(self.held_sequences, settings.sequence, settings.batch, most=self.most)
        if batches := batches[: self.recipe.evaluation.batches]:
            nats = sum(float(next_token_loss(model, batch.to(self.device))) for batch in batches)
            loss = nats / sum(int(batch.valid) for batch in batches)
            figures = {"validation_loss": loss, "validation_perplexity": math.exp(min(loss, 700))}
        reads = lambda each: len(self.prompt(each)) < model.config.positions
        if asked := [each for each in self.held[:limit] if is_answered(each) and reads(each)]:
            figures["exact_answers"] = self.share_exact(model, asked)
        return figures

    def share_exact(self, model: Any, asked: Sequence[Conversation]) -> float:
        found = answers(
            self.placement.whole_copy(model),
            [self.prompt(each) for each in asked],
            max_new_tokens=self.recipe.evaluation.sample_tokens,
            stop=self.tokenizer.stops,
        )
        texts = (self.tokenizer.decode(answer).strip() for answer in found)
        exact = [text == each.messages[-1]["content"].strip() for text, each in zip(texts, asked, strict=True)]
        return sum(exact) / len(exact)

    def sample(self, model: Any) -> list[str]:
        prompts = [self.prompt(each) for each in self.held[:3] if is_answered(each)]
        return shown_answers(self.placement.whole_copy(model), self.tokenizer, prompts, self.recipe.evaluation)

    def prompt(self, conversation: Conversation) -> list[int]:
        return prompt_ids(self.tokenizer, conversation.messages[:-1], conversation.tools)

    def state_dict(self) -> dict[str, Any]:
        return {**self.deck.state_dict(), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.deck.load_state_dict({**state, "dealt": 0})
        self.taken, self.rows = state["taken"], self.packed()
        if self.taken >= len(self.rows):
            raise ValueError(f"the saved place {self.taken} is not among {len(self.rows)} rows: the data has changed")


def is_answered(conversation: Conversation) -> bool:
    """Whether a conversation ends with an answer in words."""
    last = conversation.messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and len(conversation.messages) > 1
