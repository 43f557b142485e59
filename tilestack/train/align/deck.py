"""Numbers dealt in a new order every round. The order follows from seed and round, so a place in it is two numbers."""

from typing import Any

import numpy as np


class Deck:
    """The numbers below `size`, dealt without end; every one of them once per round."""

    def __init__(self, size: int, seed: int):
        self.size, self.seed, self.round, self.dealt = size, seed, 0, 0

    def deal(self, count: int) -> list[int]:
        numbers: list[int] = []
        while len(numbers) < count:
            taken = self.order()[self.dealt : self.dealt + count - len(numbers)]
            numbers += taken
            self.dealt += len(taken)
            if self.dealt == self.size:
                self.round, self.dealt = self.round + 1, 0
        return numbers

    def order(self) -> list[int]:
        return np.random.default_rng([self.seed, self.round]).permutation(self.size).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "dealt": self.dealt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not 0 <= state["dealt"] < self.size:
            raise ValueError(f"the saved place {state['dealt']} is not among {self.size} items: the data has changed")
        self.round, self.dealt = state["round"], state["dealt"]
