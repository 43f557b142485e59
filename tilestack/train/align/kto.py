"""KTO: learn from answers that were judged one by one, good or bad, rather than in pairs.

An answer's gain over the reference is held against what the policy has gained on answers that have nothing to do with
their prompts: each prompt with the answer to the next one. What is raised everywhere is no merit of an answer. Who follows
whom is fixed for the run, so the reference is asked once about both, as in DPO.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestack.data import Conversation, Tokenizer, corpora, formats
from tilestack.train import execution
from tilestack.train.align import examples
from tilestack.train.align.deck import Deck
from tilestack.train.align.dpo import PreferenceData
from tilestack.train.align.losses import Judgements, kto_losses
from tilestack.train.align.reference import reference_log_probs
from tilestack.train.evaluation.answers import prompt_ids, shown_answers
from tilestack.train.evaluation.log_probs import Rows, Scored, in_rows, log_probs
from tilestack.train.objective import Loss
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError, setting


@dataclass(frozen=True)
class KTOSettings:
    beta: float = setting(0.1, "how dear it is to leave the reference", above=0)
    weight_good: float = setting(1.0, "what a good answer counts; with few of them, more than a bad one", above=0)
    weight_bad: float = setting(1.0, "what a bad answer counts", above=0)


@dataclass(frozen=True)
class KTORecipe(Recipe):
    data: PreferenceData = field(default_factory=PreferenceData)
    kto: KTOSettings = field(default_factory=KTOSettings)


@dataclass(frozen=True)
class Case:
    """A judged answer, and the answer to another prompt in its place."""

    answer: Scored
    stranger: Scored
    good: bool


@dataclass(frozen=True)
class CaseBatch:
    """Answers as rows, strangers below them, with what the reference says of each row."""

    rows: Rows  # 2 · answers
    reference: Tensor  # [2 · answers]
    good: Tensor  # [answers]


class KTO:
    """Judged answers as an objective; see `tilestack.train.objective`."""

    def __init__(
        self,
        recipe: KTORecipe,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        device: torch.device,
        cache: Path | None = None,
    ):
        self.recipe, self.settings, self.tokenizer, self.device = recipe, recipe.kto, tokenizer, device
        found = judgements(recipe.data, recipe.run.seed)
        self.prompts = [prompt_ids(tokenizer, each.messages, each.tools) for each in found.held[:2]]
        self.cases, sources = self.fitting(found.learned, found.sources)
        self.held, _ = self.fitting(found.held, [0] * len(found.held))
        self.counts = {
            "answers": len(found.learned), "too long for data.sequence": len(found.learned) - len(self.cases),
            "held out": len(found.held), "held out and too long": len(found.held) - len(self.held),
        }  # fmt: skip
        if not self.cases:
            raise RecipeError(f"none of {len(found.learned)} answers fits into data.sequence = {recipe.data.sequence}")
        sequences = [sequence for case in self.cases + self.held for sequence in (case.answer, case.stranger)]
        with execution.autocast(recipe.precision, device):  # as the policy will be asked
            asked = reference_log_probs(model, sequences, device, cache).view(-1, 2)
        self.reference, self.held_reference = asked[: len(self.cases)], asked[len(self.cases) :]
        self.deck = Deck(len(self.cases), recipe.run.seed, sources, recipe.data.weights)

    def fitting(self, found: Sequence[formats.Judged], sources: Sequence[int]) -> tuple[list[Case], list[int]]:
        """The cases that fit into a row, and the sources of each."""
        longest = self.recipe.data.sequence
        cases = zip(cases_of(self.tokenizer, found), sources, strict=True)
        fitting = [both for both in cases if max(len(both[0].answer.ids), len(both[0].stranger.ids)) <= longest]
        return [case for case, _ in fitting], [source for _, source in fitting]

    def next_batch(self) -> CaseBatch:
        numbers = self.deck.deal(self.recipe.data.batch)
        return self.collated([self.cases[number] for number in numbers], self.reference[numbers])

    def collated(self, cases: Sequence[Case], reference: Tensor) -> CaseBatch:
        rows = in_rows([case.answer for case in cases] + [case.stranger for case in cases])
        good = torch.tensor([case.good for case in cases], device=self.device)
        return CaseBatch(rows.to(self.device), reference.T.reshape(-1).float().to(self.device), good)

    def loss(self, model: Any, batch: CaseBatch) -> Loss:
        found = self.judged(model, batch)
        metrics = {
            "reward_good": (found.rewards * batch.good).sum() / batch.good.float().mean().clamp(min=1e-9),
            "reward_bad": (found.rewards * ~batch.good).sum() / (~batch.good).float().mean().clamp(min=1e-9),
            "kl": found.divergence * len(found.losses),
        }
        return Loss(found.losses.sum(), len(found.losses), metrics, tokens=batch.rows.ids.numel())

    def judged(self, model: Any, batch: CaseBatch) -> Judgements:
        answers, strangers = (
            Rows(*half) for half in zip(batch.rows.ids.chunk(2), batch.rows.labels.chunk(2), strict=True)
        )
        (reference, reference_strangers) = batch.reference.chunk(2)
        with torch.no_grad():
            gained = log_probs(model, strangers).sum(-1)
        return kto_losses(
            log_probs(model, answers).sum(-1),
            reference,
            batch.good,
            gained,
            reference_strangers,
            beta=self.settings.beta,
            weight_good=self.settings.weight_good,
            weight_bad=self.settings.weight_bad,
        )

    def evaluate(self, model: Any) -> dict[str, float]:
        """The loss on answers held out, and how often a good one has gained more than the divergence and a bad one less."""
        if not self.held:
            return {}
        size, total, right = self.recipe.data.batch, 0.0, 0
        for first in range(0, len(self.held), size):
            part = slice(first, first + size)
            batch = self.collated(self.held[part], self.held_reference[part])
            found = self.judged(model, batch)
            total += float(found.losses.sum())
            right += int(((found.rewards > self.settings.beta * found.divergence) == batch.good).sum())
        return {"validation_loss": total / len(self.held), "validation_accuracy": right / len(self.held)}

    def sample(self, model: Any) -> list[str]:
        return shown_answers(model, self.tokenizer, self.prompts, self.recipe.evaluation, self.device)

    def state_dict(self) -> dict[str, Any]:
        return self.deck.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.deck.load_state_dict(state)


def cases_of(tokenizer: Tokenizer, found: Sequence[formats.Judged]) -> Iterator[Case]:
    """Judged answers as sequences, each prompt also with the next answer that is not its own."""
    spoken = lambda each, answer: Conversation([*each.messages, {"role": "assistant", "content": answer}], each.tools)
    for part in examples.in_parts(found):
        both = [
            spoken(each, answer) for number, each in enumerate(part) for answer in (each.answer, stranger(part, number))
        ]
        sequences = [Scored(ids, mask) for ((ids, mask),) in tokenizer.chat_ids(both, last_only=True)]
        for each, own, other in zip(part, sequences[::2], sequences[1::2], strict=True):
            yield Case(own, other, each.good)


def stranger(found: Sequence[formats.Judged], number: int) -> str:
    """The next answer to another prompt; where there is one prompt alone, the next answer."""
    following = [*found[number + 1 :], *found[: number + 1]]
    others = (each.answer for each in following if each.messages != found[number].messages)
    return next(others, following[0].answer)


def judgements(settings: PreferenceData, seed: int) -> examples.Examples[formats.Judged]:
    """Judged answers to learn from and judged answers held out; a pair is a good one and a bad one."""

    def make(count: int) -> Iterator[formats.Judged]:
        for pair in corpora.preferences(count, seed):
            yield from formats.judged_both(pair)

    return examples.gathered(settings, seed, formats.judged, make, lambda each: each.messages)


def texts(recipe: KTORecipe) -> Iterator[str]:
    """What a new tokenizer is trained on."""
    for each in judgements(recipe.data, recipe.run.seed).learned:
        yield from (message["content"] for message in each.messages)
        yield each.answer
