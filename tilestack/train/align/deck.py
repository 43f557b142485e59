"""Numbers dealt in a new order every round. The order follows from seed and round, so a place in it is two numbers.

Where numbers belong to sources of different weights, a round has as many cards as there are numbers, and each source as
large a share of them as its weight is: what has too few repeats some, what has too many leaves some for other rounds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


class Deck:
    """The numbers below `size`, dealt without end; without weights, every one of them once per round."""

    def __init__(self, size: int, seed: int, sources: Sequence[int] = (), weights: Sequence[float] = ()):
        self.size, self.seed, self.round, self.dealt = size, seed, 0, 0
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
        return {"round": self.round, "dealt": self.dealt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.round = state["round"]
        self.cards = self.order()
        if not 0 <= state["dealt"] < len(self.cards):
            raise ValueError(
                f"the saved place {state['dealt']} is not among {len(self.cards)} items: the data has changed"
            )
        self.dealt = state["dealt"]
