"""What DPO and KTO share: pairs of sequences, what a frozen reference says of both, and an order to deal them in.

The reference is the model as the run found it. What it says of a sequence does not change, so it is asked once, before the
first step, and only the policy runs after that. No second model is held. Processes with other texts deal the same cards, and
each takes its share of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tilestack.data import Conversation, Tokenizer
from tilestack.data.corpora import Preference
from tilestack.data.formats import Judged
from tilestack.parallel.placement import Placement
from tilestack.train import execution
from tilestack.train.align import examples
from tilestack.train.align.deck import Deck, digest_of
from tilestack.train.align.reference import reference_log_probs
from tilestack.train.evaluation.answers import prompt_ids, shown_answers
from tilestack.train.evaluation.log_probs import Rows, Scored, in_rows
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError, setting


@dataclass(frozen=True)
class PreferenceData(examples.ExampleData):
    """Pairs of answers or judged answers: built-in ones, or rows of files in the formats of `data.formats`."""

    corpus: str = setting("preferences", "what to learn from", choices=("preferences", "files"))


@dataclass(frozen=True)
class Pair:
    """Two sequences of which the answers are scored."""

    first: Scored
    second: Scored


P = TypeVar("P", bound=Pair)
E = TypeVar("E", bound=Preference | Judged)


def spoken_pairs(tokenizer: Tokenizer, found: Sequence[E], answers: Callable[[E], tuple[str, str]]) -> Iterator[Pair]:
    """Each prompt with two answers to it, as sequences; answers earlier in a conversation do not count."""
    for part in examples.in_parts(found):
        both = [
            Conversation([*each.messages, {"role": "assistant", "content": answer}], each.tools)
            for each in part
            for answer in answers(each)
        ]
        sequences = [Scored(ids, mask) for ((ids, mask),) in tokenizer.chat_ids(both, last_only=True)]
        yield from (Pair(*pair) for pair in zip(sequences[::2], sequences[1::2], strict=True))


class PairObjective(Generic[P]):
    """The parts of an objective that do not depend on what is made of a pair."""

    def __init__(
        self,
        recipe: Recipe,
        placement: Placement,
        tokenizer: Tokenizer,
        device: torch.device,
        cache: Path | None,
        found: examples.Examples[Any],
        pairs: Callable[[Sequence[Any]], Iterator[P]],
        noun: str,
        with_reference: bool = True,
    ):
        self.recipe, self.tokenizer, self.device, self.has_reference = recipe, tokenizer, device, with_reference
        self.placement, self.mesh = placement, placement.mesh
        self.prompts = [prompt_ids(tokenizer, each.messages, each.tools) for each in found.held[:2]]
        with self.mesh.first_alone():  # the others find what it has tokenised
            self.pairs, sources = self.fitting(pairs(found.learned), found.sources)
            self.held, _ = self.fitting(pairs(found.held), [0] * len(found.held))
        self.counts = {
            noun: len(found.learned), "too long for data.sequence": len(found.learned) - len(self.pairs),
            **found.left_out,
            "held out": len(found.held), "held out and too long": len(found.held) - len(self.held),
        }  # fmt: skip
        if not self.pairs:
            raise RecipeError(f"none of {len(found.learned)} {noun} fits into data.sequence = {recipe.data.sequence}")
        asked = torch.zeros(len(self.pairs) + len(self.held), 2)
        if with_reference:
            sequences = [sequence for pair in self.pairs + self.held for sequence in (pair.first, pair.second)]
            with execution.autocast(recipe.precision, device):  # as the policy will be asked
                asked = reference_log_probs(placement, sequences, device, cache).view(-1, 2)
        self.reference, self.held_reference = asked[: len(self.pairs)], asked[len(self.pairs) :]
        made_of = digest_of(self.pairs, self.held)
        self.deck = Deck(len(self.pairs), recipe.run.seed, sources, found.weights, made_of)

    def fitting(self, pairs: Iterator[P], sources: Sequence[int]) -> tuple[list[P], list[int]]:
        """The pairs of which both sequences fit into a row, and the sources of each."""
        longest = self.recipe.data.sequence
        fits = lambda pair: max(len(pair.first.ids), len(pair.second.ids)) <= longest
        fitting = [(pair, source) for pair, source in zip(pairs, sources, strict=True) if fits(pair)]
        return [pair for pair, _ in fitting], [source for _, source in fitting]

    def dealt(self) -> tuple[list[P], Tensor]:
        """The next pairs, and what the reference says of them, [pairs, 2]."""
        numbers = self.mesh.share(self.deck.deal(self.recipe.data.batch * self.mesh.size("data")), "data")
        return [self.pairs[number] for number in numbers], self.reference[list(numbers)]

    def in_rows(self, pairs: Sequence[P], reference: Tensor) -> tuple[Rows, Tensor]:
        """Pairs as rows, the first of each above the second, and what the reference says of each row, [2 · pairs]."""
        rows = in_rows([pair.first for pair in pairs] + [pair.second for pair in pairs])
        return rows.to(self.device), reference.T.reshape(-1).float().to(self.device)

    def held_parts(self) -> Iterator[tuple[list[P], Tensor]]:
        """The pairs held out, a batch at a time."""
        size = self.recipe.data.batch
        for first in range(0, len(self.held), size):
            yield self.held[first : first + size], self.held_reference[first : first + size]

    def sample(self, model: Any) -> list[str]:
        return shown_answers(self.placement.whole_copy(model), self.tokenizer, self.prompts, self.recipe.evaluation)

    def state_dict(self) -> dict[str, Any]:
        return self.deck.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.deck.load_state_dict(state)
