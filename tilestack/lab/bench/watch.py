"""Keeping to a budget of seconds, and telling how long the rest of a run will take."""

import time

from rich.console import Console


class Watch:
    """How far a run has come, how long the rest will take, and whether that is longer than there is."""

    def __init__(self, total: int, budget: float | None, console: Console | None):
        self.total, self.budget, self.console = total, budget, console or Console(quiet=True)
        self.done, self.began, self.ahead = 0, time.monotonic(), 0.0
        self.console.print(f"{total} cases to measure" + (f" in {max(budget, 0):.0f} s" if budget is not None else ""))

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def each(self) -> float:
        return (self.elapsed() - self.ahead) / max(self.done, 1)

    def is_over(self) -> bool:
        """Whether the next case, if it takes as long as they did on average, would end too late."""
        over = self.budget is not None and self.elapsed() + (self.each() if self.done else 0.0) > self.budget
        if over:
            left = self.total - self.done
            self.console.print(f"stopped after {self.elapsed():.0f} s: {left} of {self.total} cases are left")
        return over

    def say(self, what: str) -> None:
        """Tell of something that went before the first case, which is no measure of how long one takes."""
        self.console.print(f"{what} after {self.elapsed():.0f} s")
        self.ahead = self.elapsed()

    def tell(self, name: str) -> None:
        left = (self.total - self.done) * self.each()
        self.console.print(
            f"{name}: {self.done} of {self.total} cases after {self.elapsed():.0f} s, {left:.0f} s to go"
        )
