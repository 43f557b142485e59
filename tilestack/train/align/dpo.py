"""Direct preference optimisation: raise answers people chose above those they rejected, without a reward model.

The policy is compared with a frozen reference: the model as the run found it. What the reference says of every answer
does not change, so it is asked once, before the first step, and only the policy runs after that. No second model is
held. SimPO, which compares the policy's two answers alone, has no reference.
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
from tilestack.train.align.losses import PREFERENCE_LOSSES, Preferences, preference_losses, simpo_losses
from tilestack.train.align.reference import reference_log_probs
from tilestack.train.evaluation.answers import prompt_ids, shown_answers
from tilestack.train.evaluation.log_probs import Rows, Scored, in_rows, log_probs
from tilestack.train.objective import Loss
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError, setting


@dataclass(frozen=True)
class PreferenceData(examples.ExampleData):
    """Pairs of answers: built-in ones, or rows of files in the formats of `data.formats`."""

    corpus: str = setting("preferences", "what to learn from", choices=("preferences", "files"))


@dataclass(frozen=True)
class DPOSettings:
    loss: str = setting("sigmoid", "how a pair is judged", choices=PREFERENCE_LOSSES)
    beta: float = setting(0.1, "how dear it is to leave the reference; for simpo, of the order of 2", above=0)
    label_smoothing: float = setting(0.0, "the share of pairs taken to be the wrong way round", low=0, high=0.5)
    gamma: float = setting(0.5, "the margin that simpo asks for", low=0)

    def __post_init__(self) -> None:
        if self.loss != "sigmoid" and self.label_smoothing:
            raise RecipeError(f'dpo.label_smoothing has no meaning where dpo.loss is "{self.loss}"')


@dataclass(frozen=True)
class DPORecipe(Recipe):
    data: PreferenceData = field(default_factory=PreferenceData)
    dpo: DPOSettings = field(default_factory=DPOSettings)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, as sequences of which the answers are scored."""

    chosen: Scored
    rejected: Scored


@dataclass(frozen=True)
class PairBatch:
    """Pairs as rows, the chosen answers above the rejected ones, with what the reference says of each row."""

    rows: Rows  # 2 · pairs
    reference: Tensor  # [2 · pairs]


class DPO:
    """Preferences as an objective; see `tilestack.train.objective`."""

    def __init__(
        self,
        recipe: DPORecipe,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        device: torch.device,
        cache: Path | None = None,
    ):
        self.recipe, self.settings, self.tokenizer, self.device = recipe, recipe.dpo, tokenizer, device
        found = preferences(recipe.data, recipe.run.seed)
        self.prompts = [prompt_ids(tokenizer, each.messages, each.tools) for each in found.held[:2]]
        self.pairs, sources = self.fitting(found.learned, found.sources)
        self.held, _ = self.fitting(found.held, [0] * len(found.held))
        self.counts = {
            "pairs": len(found.learned), "too long for data.sequence": len(found.learned) - len(self.pairs),
            "held out": len(found.held), "held out and too long": len(found.held) - len(self.held),
        }  # fmt: skip
        if not self.pairs:
            raise RecipeError(
                f"none of {len(found.learned)} pairs of answers fits into data.sequence = {recipe.data.sequence}"
            )
        self.reference, self.held_reference = self.asked_reference(model, cache)
        self.deck = Deck(len(self.pairs), recipe.run.seed, sources, recipe.data.weights)

    def asked_reference(self, model: torch.nn.Module, cache: Path | None) -> tuple[Tensor, Tensor]:
        """What the reference says of all answers, [pairs, 2] each for those to learn from and those held out."""
        everything = self.pairs + self.held
        if self.settings.loss == "simpo":
            asked = torch.zeros(len(everything), 2)
        else:
            sequences = [sequence for pair in everything for sequence in (pair.chosen, pair.rejected)]
            with execution.autocast(self.recipe.precision, self.device):  # as the policy will be asked
                asked = reference_log_probs(model, sequences, self.device, cache).view(-1, 2)
        return asked[: len(self.pairs)], asked[len(self.pairs) :]

    def fitting(self, found: Sequence[corpora.Preference], sources: Sequence[int]) -> tuple[list[Pair], list[int]]:
        """The pairs of which both answers fit into a row, and the sources of each."""
        longest = self.recipe.data.sequence
        pairs = zip(pairs_of(self.tokenizer, found), sources, strict=True)
        fitting = [both for both in pairs if max(len(both[0].chosen.ids), len(both[0].rejected.ids)) <= longest]
        return [pair for pair, _ in fitting], [source for _, source in fitting]

    def next_batch(self) -> PairBatch:
        numbers = self.deck.deal(self.recipe.data.batch)
        return self.collated([self.pairs[number] for number in numbers], self.reference[numbers])

    def collated(self, pairs: Sequence[Pair], reference: Tensor) -> PairBatch:
        rows = in_rows([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs])
        return PairBatch(rows.to(self.device), reference.T.reshape(-1).float().to(self.device))

    def loss(self, model: Any, batch: PairBatch) -> Loss:
        found = self.compared(model, batch)
        pairs = len(found.losses)
        margin = found.chosen - found.rejected
        metrics = {
            "accuracy": (margin > 0).sum(),
            "margin": margin.sum(),
            "reward_chosen": found.chosen.sum(),
            "reward_rejected": found.rejected.sum(),
        }
        return Loss(found.losses.sum(), pairs, metrics, tokens=batch.rows.ids.numel())

    def compared(self, model: Any, batch: PairBatch) -> Preferences:
        policy, reference = log_probs(model, batch.rows).sum(-1), batch.reference
        if self.settings.loss != "sigmoid":  # as their authors use them: long answers would dominate otherwise
            policy, reference = policy / batch.rows.tokens, reference / batch.rows.tokens
        (chosen, rejected), (reference_chosen, reference_rejected) = policy.chunk(2), reference.chunk(2)
        if self.settings.loss == "simpo":
            return simpo_losses(chosen, rejected, self.settings.beta, self.settings.gamma)
        return preference_losses(
            chosen,
            rejected,
            reference_chosen,
            reference_rejected,
            beta=self.settings.beta,
            kind=self.settings.loss,
            label_smoothing=self.settings.label_smoothing,
        )

    def evaluate(self, model: Any) -> dict[str, float]:
        """The same figures on pairs held out."""
        if not self.held:
            return {}
        size = self.recipe.data.batch
        sums: dict[str, float] = {}
        for first in range(0, len(self.held), size):
            part = slice(first, first + size)
            loss = self.loss(model, self.collated(self.held[part], self.held_reference[part]))
            for name, value in {"loss": loss.total, **loss.metrics}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return {f"validation_{name}": value / len(self.held) for name, value in sums.items()}

    def sample(self, model: Any) -> list[str]:
        return shown_answers(model, self.tokenizer, self.prompts, self.recipe.evaluation, self.device)

    def state_dict(self) -> dict[str, Any]:
        return self.deck.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.deck.load_state_dict(state)


def pairs_of(tokenizer: Tokenizer, found: Sequence[corpora.Preference]) -> Iterator[Pair]:
    """Preferences as sequences; answers earlier in a conversation do not count."""
    for part in examples.in_parts(found):
        both = [
            Conversation([*each.messages, {"role": "assistant", "content": answer}], each.tools)
            for each in part
            for answer in (each.chosen, each.rejected)
        ]
        sequences = [Scored(ids, mask) for ((ids, mask),) in tokenizer.chat_ids(both, last_only=True)]
        yield from (Pair(*answers) for answers in zip(sequences[::2], sequences[1::2], strict=True))


def preferences(settings: PreferenceData, seed: int) -> examples.Examples[corpora.Preference]:
    """Preferences to learn from and preferences held out."""
    read = lambda row: [formats.preference(row)]
    make = lambda count: corpora.preferences(count, seed)
    return examples.gathered(settings, seed, read, make, lambda preference: preference.messages)


def texts(recipe: DPORecipe) -> Iterator[str]:
    """What a new tokenizer is trained on."""
    for preference in preferences(recipe.data, recipe.run.seed).learned:
        yield from (message["content"] for message in preference.messages)
        yield from (preference.chosen, preference.rejected)
