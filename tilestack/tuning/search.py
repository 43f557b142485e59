"""The search for the fastest way to run a call: a model leaves out what cannot win, proofs what is wrong, the clock decides.

    every backend and configuration ──predict──▶ the most promising ──verify──▶ the right ones ──time──▶ ranked

Nothing is timed that was not proved on the very call it is timed on. What predicting, verifying and timing are is for
the caller to say; the laboratory's are in `lab/bench/tune.py`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

KEPT = 8  # configurations of a backend that are worth timing


@dataclass(frozen=True)
class Trial:
    """What became of one candidate: `triton` or `triton:tall`. Without a time, the note says why."""

    name: str
    predicted_us: float | None = None
    time_us: float | None = None
    note: str = ""

    @property
    def backend(self) -> str:
        return self.name.partition(":")[0]

    @property
    def config(self) -> str:
        return self.name.partition(":")[2]


def search(
    candidates: Iterable[str],
    predict: Callable[[str], float | None],
    verify: Callable[[str], str],
    time: Callable[[Sequence[str]], Mapping[str, float | str]],
    kept: int = KEPT,
    over: Callable[[], bool] = lambda: False,
) -> list[Trial]:
    """Every candidate with what became of it, the fastest first, then those without a time.

    `predict` answers µs, or None for what there is no model of, which is always kept. `verify` answers what is wrong, empty
    when nothing is. `time` takes names together, so that they can take turns, and answers µs or a reason for each. When
    `over` says so, nothing more is verified, and only what already was is timed.
    """
    predicted = {name: predict(name) for name in candidates}
    promising = most_promising(predicted, kept)
    notes = {name: "the model expects others to be faster" for name in predicted if name not in promising}
    proved = []
    for name in promising:
        if over():
            notes[name] = "there was no time left"
        elif reason := verify(name):
            notes[name] = f"wrong: {reason}"
        else:
            proved.append(name)
    found = time(proved) if proved else {}
    times = {name: value for name, value in found.items() if not isinstance(value, str)}
    notes |= {name: value for name, value in found.items() if isinstance(value, str)}
    trials = [Trial(name, guess, times.get(name), notes.get(name, "")) for name, guess in predicted.items()]
    return sorted(trials, key=lambda trial: math.inf if trial.time_us is None else trial.time_us)


def most_promising(predicted: Mapping[str, float | None], kept: int) -> list[str]:
    """Of each backend the configurations with the lowest predictions, and all that there is no prediction of, in order."""
    backend_of = lambda name: name.partition(":")[0]
    chosen = {name for name, guess in predicted.items() if guess is None}
    for backend in {backend_of(name) for name in predicted}:
        guesses = {n: g for n, g in predicted.items() if g is not None and backend_of(n) == backend}
        chosen |= set(sorted(guesses, key=guesses.__getitem__)[:kept])
    return [name for name in predicted if name in chosen]
