"""Direct preference optimisation: raise answers people chose above those they rejected, without a reward model.

The policy is compared with a frozen reference, the model as the run found it; see `pairs`. SimPO, which compares the
policy's two answers alone, has none.
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
from tilestack.train.align.losses import PREFERENCE_LOSSES, Preferences, preference_losses, simpo_losses
from tilestack.train.align.pairs import Pair, PairObjective, PreferenceData, spoken_pairs
from tilestack.train.evaluation.log_probs import Rows, log_probs
from tilestack.train.objective import Loss
from tilestack.train.settings import RecipeError, setting


@dataclass(frozen=True)
class DPOSettings:
    loss: str = setting("sigmoid", "how a pair is judged", choices=PREFERENCE_LOSSES)
    beta: float = setting(0.1, "how dear it is to leave the reference; for simpo, of the order of 2", above=0)
    label_smoothing: float = setting(0.0, "the share of pairs taken to be the wrong way round", low=0, high=0.5)
    gamma: float = setting(0.5, "the margin that simpo asks for", low=0)

    def __post_init__(self) -> None:
        if self.loss != "sigmoid" and self.label_smoothing:
            raise RecipeError(f'dpo.label_smoothing has no meaning where dpo.loss is "{self.loss}"')
        if self.loss != "simpo" and self.gamma != DPOSettings.gamma:
            raise RecipeError(f'dpo.gamma has no meaning where dpo.loss is "{self.loss}"; it is the margin of "simpo"')


@dataclass(frozen=True)
class DPORecipe(examples.AlignmentRecipe):
    data: PreferenceData = field(default_factory=PreferenceData)
    dpo: DPOSettings = field(default_factory=DPOSettings)


@dataclass(frozen=True)
class PairBatch:
    """Pairs as rows, the chosen answers above the rejected ones, with what the reference says of each row."""

    rows: Rows  # 2 · pairs
    reference: Tensor  # [2 · pairs]


class DPO(PairObjective[Pair]):
    """Preferences as an objective; see `tilestack.train.objective`."""

    def __init__(
        self,
        recipe: DPORecipe,
        placement: Placement,
        tokenizer: Tokenizer,
        device: torch.device,
        cache: Path | None = None,
    ):
        self.settings = recipe.dpo
        found = preferences(recipe.data, recipe.run.seed)
        pairs = lambda some: pairs_of(tokenizer, some)
        asks = recipe.dpo.loss != "simpo"
        super().__init__(recipe, placement, tokenizer, device, cache, found, pairs, "pairs of answers", asks)
        self.counts["with two equal answers, which teach nothing"] = sum(p.chosen == p.rejected for p in found.learned)

    def next_batch(self) -> PairBatch:
        return PairBatch(*self.in_rows(*self.dealt()))

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
        sums: dict[str, float] = {}
        for part in self.held_parts():
            loss = self.loss(model, PairBatch(*self.in_rows(*part)))
            for name, value in {"loss": loss.total, **loss.metrics}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return {f"validation_{name}": value / len(self.held) for name, value in sums.items()}


def pairs_of(tokenizer: Tokenizer, found: Sequence[corpora.Preference]) -> Iterator[Pair]:
    """The chosen answer and the rejected one of each preference."""
    return spoken_pairs(tokenizer, found, lambda each: (each.chosen, each.rejected))


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
