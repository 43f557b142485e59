"""Training steps on a CPU, taken in turn: each candidate in a process of its own, one step each per round.

A CPU is shared with whatever else the machine does, and runs slower when it is warm. So what counts is the processor time of
one thread, which does not run while others have the core, and candidates do not come one after another, when they would meet
different machines. In turn they meet the same one:

    round 1:   ours   plain   transformers
    round 2:   plain   transformers   ours        the order rotates, so that nobody always follows the same one
    …

The others wait for their line of input meanwhile, which costs nothing.

    python -m tilestack.lab.training.train_turns '{"candidate": "tilestack", "config": {…}, …}'      a step for each line of input
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import quantiles
from typing import IO, Any

import torch

from tilestack.lab.bench.timing import median_and_spread
from tilestack.lab.training.train_steps import Step, Work, step_of

MOST_ROUNDS = 300


class Failed(Exception):
    """A candidate that ended, with a line that says why."""


class Candidate:
    """A candidate's process: it says its first loss when it is warm, then takes a step whenever it is asked."""

    def __init__(self, name: str, work: Work, timeout: float):
        self.timeout = timeout
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `end`)
        spec = json.dumps({"candidate": name, **asdict(work)})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tilestack.lab.training.train_turns", spec],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        late = threading.Timer(self.timeout, self.process.kill)
        late.start()
        try:
            line = self.process.stdout.readline()  # type: ignore[union-attr]
        finally:
            in_time = late.is_alive()
            late.cancel()
        if line:
            return json.loads(line)
        code = self.process.wait()
        self.errors.seek(0)
        raise Failed(failure_note(self.errors.read(), code) if in_time else f"not done after {self.timeout:.0f} s")

    def step(self) -> dict[str, Any]:
        try:
            self.process.stdin.write("step\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
        except BrokenPipeError:
            pass  # it has ended; its answer says why
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def failure_note(errors: str, code: int) -> str:
    """What a process that failed said last."""
    said = errors.strip().splitlines() or [f"ended with code {code}"]
    return "out of memory" if "OutOfMemoryError" in errors else said[-1][:200]


def in_turn(names: Sequence[str], work: Work, timeout: float) -> dict[str, dict[str, Any]]:
    """The figures of every candidate, with its `laps`, a step per round; a note for one that failed."""
    found: dict[str, dict[str, Any]] = {}
    running: dict[str, Candidate] = {}

    def asked(name: str, question: str) -> dict[str, Any] | None:
        try:
            return getattr(running[name], question)()
        except Failed as failure:
            found[name] = {"note": str(failure)}
            running.pop(name).end()
            return None

    try:
        for name in names:
            running[name] = Candidate(name, work, timeout)
            if (ready := asked(name, "answer")) is not None:
                found[name] = {"first_loss": ready["loss"], "laps": []}
        number = 0
        while running and not enough(number, sum(sum(found[name]["laps"]) for name in running), work):
            for name in rotated(list(running), number):
                if (step := asked(name, "step")) is not None:
                    found[name]["laps"].append(step["seconds"])
                    found[name]["last_loss"] = step["loss"]
            number += 1
    finally:
        for candidate in running.values():
            candidate.end()
    for name in running:
        seconds, spread = median_and_spread(found[name]["laps"])
        found[name] |= {"seconds": seconds, "spread": spread, "peak_mib": None}
    return {name: found[name] for name in names}


def enough(rounds: int, seconds: float, work: Work) -> bool:
    """Short steps are taken more often: a median of few of them moves with whatever else the machine does."""
    return rounds >= work.steps and (seconds >= work.seconds or rounds >= MOST_ROUNDS)


def rotated(names: list[str], by: int) -> list[str]:
    return [names[(place + by) % len(names)] for place in range(len(names))]


def ratio_quartiles(laps: Sequence[float], peers: Sequence[float]) -> list[float]:
    """How many times faster than the peer's step of the same round: the median, between the ends of the middle half."""
    return quantiles([peer / own for own, peer in zip(laps, peers, strict=True)], n=4, method="inclusive")


def serve(name: str, work: Work) -> None:
    """Take a step for every line of input, and answer its processor time; what libraries print goes to the errors."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)  # of several, processor time counts those that wait for each other too
    step = step_of(name, work)
    losses = [step().item() for _ in range(work.warmup)]
    print(json.dumps({"loss": losses[0]}), file=answers)
    for _ in sys.stdin:
        print(json.dumps(timed_step(step)), file=answers)


def timed_step(step: Step) -> dict[str, float]:
    """The loss of a step and the processor time it took; what it waited while others ran is not in it."""
    began = time.process_time()
    loss = step().item()
    return {"seconds": time.process_time() - began, "loss": loss}


if __name__ == "__main__":
    asked_for = json.loads(sys.argv[1])
    serve(asked_for.pop("candidate"), Work(**asked_for))
