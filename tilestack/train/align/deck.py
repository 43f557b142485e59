"""Numbers dealt in a new order every round. The order follows from seed and round, so a place in it is two numbers, and a
digest of what the numbers stand for, without which they mean nothing.

Where numbers belong to sources of different weights, a round has as many cards as there are numbers, and each source as
large a share of them as its weight is: what has too few repeats some, what has too many leaves some for other rounds.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tilestack.data import DataError


def digest_of(*examples: Iterable[Any]) -> str:
    """The same for the same examples in the same order."""
    digest = hashlib.blake2b(digest_size=16)
    for each in examples:
        for example in each:
            digest.update(repr(example).encode())
        digest.update(b"\0")
    return digest.hexdigest()


class Deck:
    """The numbers below `size`, dealt without end; without weights, every one of them once per round. `made_of` is a digest
    of the examples that they number."""

    def __init__(
        self, size: int, seed: int, sources: Sequence[int] = (), weights: Sequence[float] = (), made_of: str = ""
    ):
        self.size, self.seed, self.round, self.dealt, self.made_of = size, seed, 0, 0, made_of
        self.members = [np.flatnonzero(np.asarray(sources) == source) for source in range(len(weights))]
        self.weights = weights
        self.cards = self.order()

    def deal(self, count: int) -> list[int]:
        numbers: list[int] = []
        while len(numbers) < count:
            taken = self.cards[self.dealt : self.dealt + count - len(numbers)]
            numbers += taken
            self.dealt += len(taken)
            if self.dealt == len(self.cards):
                self.next_round()
        return numbers

    def next_round(self) -> None:
        self.round, self.dealt = self.round + 1, 0
        self.cards = self.order()

    def order(self) -> list[int]:
        """The cards of this round."""
        random = np.random.default_rng([self.seed, self.round])
        if not self.weights:
            return random.permutation(self.size).tolist()
        total = sum(weight for weight, members in zip(self.weights, self.members, strict=True) if len(members))
        drawn: list[int] = []
        for weight, members in zip(self.weights, self.members, strict=True):
            if len(members):
                whole, rest = divmod(max(1, round(self.size * weight / total)), len(members))
                drawn += members.tolist() * whole + random.permutation(members)[:rest].tolist()
        return random.permutation(drawn).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "dealt": self.dealt, "made_of": self.made_of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("made_of", self.made_of) != self.made_of:  # of which earlier versions say nothing
            raise DataError(
                "the examples are not those that the run began with: a file of data, the chat template or the tokenizer has "
                "changed; put it back, or start over (--fresh)"
            )
        self.round = state["round"]
        self.cards = self.order()
        if not 0 <= state["dealt"] < len(self.cards):
            raise ValueError(
                f"the saved place {state['dealt']} is not among {len(self.cards)} items: the data has changed"
            )
        self.dealt = state["dealt"]
