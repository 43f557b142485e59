"""Direct preference optimisation: raise answers people chose above those they rejected, without a reward model.

The policy is compared with a frozen reference: the model as the run found it. What the reference says of every answer
does not change, so it is asked once, before the first step, and only the policy runs after that. No second model is
held.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestack.data import Tokenizer, corpora
from tilestack.train import execution
from tilestack.train.align import examples
from tilestack.train.align.deck import Deck
from tilestack.train.align.losses import PREFERENCE_LOSSES, Preferences, preference_losses
from tilestack.train.align.reference import reference_log_probs
from tilestack.train.evaluation.answers import prompt_ids, shown_answers
from tilestack.train.evaluation.log_probs import Rows, Scored, in_rows, log_probs
from tilestack.train.objective import Loss
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError, setting


@dataclass(frozen=True)
class PreferenceData(examples.ExampleData):
    """Pairs of answers: built-in ones, or files with {"prompt": …, "chosen": …, "rejected": …} in each row."""

    corpus: str = setting("preferences", choices=("preferences", "files"))


@dataclass(frozen=True)
class DPOSettings:
    loss: str = setting("sigmoid", choices=PREFERENCE_LOSSES)
    beta: float = setting(0.1, above=0)  # how dear it is to leave the reference
    label_smoothing: float = setting(0.0, low=0, high=0.5)  # the share of pairs taken to be the wrong way round

    def __post_init__(self) -> None:
        if self.loss == "ipo" and self.label_smoothing:
            raise RecipeError('dpo.label_smoothing has no meaning where dpo.loss is "ipo"')


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
        learned, held = preferences(recipe.data, recipe.run.seed)
        self.prompts = [prompt_ids(tokenizer, preference.messages) for preference in held[:2]]
        self.pairs, self.held = (self.fitting(part) for part in (learned, held))
        if not self.pairs:
            raise RecipeError(
                f"none of {len(learned)} pairs of answers fits into data.sequence = {recipe.data.sequence}"
            )
        sequences = [sequence for pair in self.pairs + self.held for sequence in (pair.chosen, pair.rejected)]
        with execution.autocast(recipe.precision, device):  # as the policy will be asked
            asked = reference_log_probs(model, sequences, device, cache).view(-1, 2)
        self.reference, self.held_reference = asked[: len(self.pairs)], asked[len(self.pairs) :]
        self.deck = Deck(len(self.pairs), recipe.run.seed)

    def fitting(self, found: Sequence[corpora.Preference]) -> list[Pair]:
        pairs = (pair_of(self.tokenizer, preference) for preference in found)
        longest = self.recipe.data.sequence
        return [pair for pair in pairs if max(len(pair.chosen.ids), len(pair.rejected.ids)) <= longest]

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
        if self.settings.loss == "ipo":  # as its authors use it: long answers would dominate otherwise
            policy, reference = policy / batch.rows.tokens, reference / batch.rows.tokens
        (chosen, rejected), (reference_chosen, reference_rejected) = policy.chunk(2), reference.chunk(2)
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


def pair_of(tokenizer: Tokenizer, preference: corpora.Preference) -> Pair:
    prompt = len(prompt_ids(tokenizer, preference.messages))
    sequences = []
    for answer in (preference.chosen, preference.rejected):
        ids, mask = tokenizer.chat_ids([*preference.messages, {"role": "assistant", "content": answer}])
        sequences.append(Scored(ids, [0] * prompt + mask[prompt:]))  # answers earlier in the conversation do not count
    return Pair(*sequences)


def preferences(settings: PreferenceData, seed: int) -> tuple[list[corpora.Preference], list[corpora.Preference]]:
    """Preferences to learn from and preferences held out."""
    if settings.corpus == "files":
        found = examples.from_files(settings.files, examples.preference, settings.examples)
    else:
        found = list(corpora.preferences(settings.examples, seed))
    return examples.split(found, lambda preference: preference.messages, settings.validation, seed)


def texts(recipe: DPORecipe) -> Iterator[str]:
    """What a new tokenizer is trained on."""
    for preference in preferences(recipe.data, recipe.run.seed)[0]:
        yield from (message["content"] for message in preference.messages)
        yield from (preference.chosen, preference.rejected)
