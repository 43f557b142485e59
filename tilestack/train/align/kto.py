"""KTO: learn from answers that were judged one by one, good or bad, rather than in pairs.

An answer's gain over the reference is held against what the policy has gained on answers that have nothing to do with
their prompts: each prompt with the answer to the next one. What is raised everywhere is no merit of an answer. Who follows
whom is fixed for the run, so the reference is asked once about both, as in DPO. The gain is a mean over the micro-batches of all
processes, which together are one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestack.data import Tokenizer, corpora, formats
from tilestack.parallel.placement import Placement
from tilestack.train.align import examples
from tilestack.train.align.losses import Judgements, kto_losses
from tilestack.train.align.pairs import Pair, PairObjective, PreferenceData, spoken_pairs
from tilestack.train.evaluation.log_probs import Rows, log_probs
from tilestack.train.objective import Loss
from tilestack.train.settings import setting


@dataclass(frozen=True)
class KTOSettings:
    beta: float = setting(0.1, "how dear it is to leave the reference", above=0)
    weight_good: float = setting(1.0, "what a good answer counts; with few of them, more than a bad one", above=0)
    weight_bad: float = setting(1.0, "what a bad answer counts", above=0)


@dataclass(frozen=True)
class KTORecipe(examples.AlignmentRecipe):
    data: PreferenceData = field(default_factory=PreferenceData)
    kto: KTOSettings = field(default_factory=KTOSettings)


@dataclass(frozen=True)
class Case(Pair):
    """A judged answer, then the answer to another prompt in its place."""

    good: bool


@dataclass(frozen=True)
class CaseBatch:
    """Answers as rows, strangers below them, with what the reference says of each row."""

    rows: Rows  # 2 · answers
    reference: Tensor  # [2 · answers]
    good: Tensor  # [answers]


class KTO(PairObjective[Case]):
    """Judged answers as an objective; see `tilestack.train.objective`."""

    def __init__(
        self,
        recipe: KTORecipe,
        placement: Placement,
        tokenizer: Tokenizer,
        device: torch.device,
        cache: Path | None = None,
    ):
        self.settings = recipe.kto
        found = judgements(recipe.data, recipe.run.seed)
        cases = lambda some: cases_of(tokenizer, some)
        super().__init__(recipe, placement, tokenizer, device, cache, found, cases, "judged answers")

    def next_batch(self) -> CaseBatch:
        return self.collated(*self.dealt())

    def collated(self, cases: Sequence[Case], reference: Tensor) -> CaseBatch:
        good = torch.tensor([case.good for case in cases], device=self.device)
        return CaseBatch(*self.in_rows(cases, reference), good)

    def loss(self, model: Any, batch: CaseBatch) -> Loss:
        found, kinds = self.judged(model, batch), {"reward_good": batch.good, "reward_bad": ~batch.good}
        answers = len(found.losses)
        metrics = {name: (found.rewards * some).sum() for name, some in kinds.items()}
        metrics["kl"] = found.divergence * answers
        weights = {name: some.sum() for name, some in kinds.items()}
        return Loss(found.losses.sum(), answers, metrics, tokens=batch.rows.ids.numel(), weights=weights)

    def judged(self, model: Any, batch: CaseBatch) -> Judgements:
        ids, labels = batch.rows.ids.chunk(2), batch.rows.labels.chunk(2)
        reference, reference_strangers = batch.reference.chunk(2)
        with torch.no_grad():
            strangers = log_probs(model, Rows(ids[1], labels[1])).sum(-1)
        gained = strangers - reference_strangers
        sums = self.mesh.sums({"gained": gained.sum(), "answers": torch.ones_like(gained).sum()}, "data")
        return kto_losses(
            log_probs(model, Rows(ids[0], labels[0])).sum(-1),
            reference,
            batch.good,
            (sums["gained"] / sums["answers"]).to(gained.dtype),
            beta=self.settings.beta,
            weight_good=self.settings.weight_good,
            weight_bad=self.settings.weight_bad,
        )

    def evaluate(self, model: Any) -> dict[str, float]:
        """The loss on answers held out, and how often a good one has gained more than the divergence and a bad one less."""
        if not self.held:
            return {}
        total, right = 0.0, 0
        for part in self.held_parts():
            batch = self.collated(*part)
            found = self.judged(model, batch)
            total += float(found.losses.sum())
            right += int(((found.rewards > self.settings.beta * found.divergence) == batch.good).sum())
        return {"validation_loss": total / len(self.held), "validation_accuracy": right / len(self.held)}


def cases_of(tokenizer: Tokenizer, found: Sequence[formats.Judged]) -> Iterator[Case]:
    """Judged answers as sequences, each prompt also with an answer that is not its own."""
    others = iter(strangers(found))
    pairs = spoken_pairs(tokenizer, found, lambda each: (each.answer, next(others)))
    return (Case(pair.first, pair.second, each.good) for pair, each in zip(pairs, found, strict=True))


def strangers(found: Sequence[formats.Judged]) -> list[str]:
    """For each answer the next one to another prompt; where there is one prompt alone, the next answer."""
    made: list[str] = [""] * len(found)
    for number in reversed(range(len(found))):
        following = found[(number + 1) % len(found)]
        if following.messages != found[number].messages:
            made[number] = following.answer
        else:  # the neighbour's stranger is one here too, or else the first answer that is
            others = (each.answer for each in found if each.messages != found[number].messages)
            made[number] = made[number + 1] if number + 1 < len(found) else next(others, following.answer)
    return made


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
