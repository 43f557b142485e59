"""Training steps in turn: the candidates meet the same machine, and the ratio has a spread."""

import io
import signal
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tiny_work import WORK

from tilestack.lab.rows import verdict_of_rounds
from tilestack.lab.training import bench_train, train_turns
from tilestack.lab.training.train_steps import write_weights
from tilestack.lab.training.train_turns import (
    Failed,
    enough,
    failure_note,
    in_turn,
    ratio_quartiles,
    rotated,
    timed_step,
)


class Pretended:
    """A candidate whose steps take what the machine takes at the moment: slower and slower, for whoever has the turn."""

    clock = 0.0
    order: list[str] = []
    needs = {"tilestack": 1.0, "plain": 0.8}

    def __init__(self, name, work, timeout):
        self.name = name

    def answer(self):
        return {"loss": 4.0}

    def step(self):
        type(self).clock += 1
        self.order.append(self.name)
        if self.name not in self.needs:
            raise Failed("ValueError: no such thing")
        return {"seconds": self.needs[self.name] * (1 + self.clock / 100), "loss": 3.0}

    def end(self):
        pass


def test_a_machine_that_slows_down_does_not_change_the_ratio(monkeypatch):
    monkeypatch.setattr(train_turns, "Candidate", Pretended)
    monkeypatch.setattr(Pretended, "order", [])
    work = replace(WORK, steps=20)
    rows = {row["backend"]: row for row in bench_train.bench_train(work, ["tilestack", "plain", "transformers"])}
    assert Pretended.order[:6] == ["tilestack", "plain", "transformers", "plain", "tilestack", "tilestack"]
    ours = rows["tilestack"]
    assert ours["ratio_to_best_peer"] == pytest.approx(0.8, rel=0.02)  # one after another it would be 0.94
    low, high = ours["ratio_quartiles"]
    assert 0.78 < low < 0.8 < high < 0.82
    assert ours["verdict"] == "slower"
    assert ours["how"] == "processor time of whole steps on one thread, taken in turn, at least 20 each"
    assert rows["transformers"]["note"] == "ValueError: no such thing"
    page = io.StringIO()
    Console(file=page, width=80).print(bench_train.render_training_steps([ours, rows["plain"]]))
    assert all(shown in page.getvalue() for shown in ("tilestack", "0.80× slower", f"{low:.2f}–{high:.2f}"))
    assert "…" not in page.getvalue()


def test_short_steps_are_taken_more_often():
    work = replace(WORK, steps=30, seconds=60)
    assert [enough(29, 100, work), enough(30, 59, work), enough(30, 60, work), enough(300, 1, work)] == [
        False, False, True, True,
    ]  # fmt: skip


def test_the_order_rotates():
    assert [rotated(["a", "b", "c"], number) for number in range(3)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
    ]


def test_quartiles_are_of_the_rounds():
    assert ratio_quartiles([1.0, 1.0, 1.0, 1.0, 1.0], [0.8, 0.9, 1.0, 1.1, 1.2]) == pytest.approx([0.9, 1.0, 1.1])


def test_the_verdict_is_that_of_half_of_the_rounds():
    verdicts = [
        verdict_of_rounds(*ends) for ends in ((1.02, 1.3), (0.7, 0.97), (0.97, 1.04), (0.999, 1.001), (0.7, 1.1))
    ]
    assert verdicts == ["faster", "slower", "equal", "equal", "unclear"]


def test_rounds_that_differ_too_much_are_said_to_be_unclear(monkeypatch):
    class Disturbed(Pretended):
        def step(self):
            found = super().step()
            return found | {"seconds": found["seconds"] * (1.5 if self.clock % 3 == 0 else 0.9)}

    monkeypatch.setattr(train_turns, "Candidate", Disturbed)
    rows = bench_train.bench_train(replace(WORK, steps=20), ["tilestack", "plain"])
    assert rows[0]["verdict"] == "unclear"
    page = io.StringIO()
    Console(file=page, width=80).print(bench_train.render_training_steps(rows))
    assert "try again when less is running" in page.getvalue()


def test_time_that_a_step_waits_is_not_counted():
    def step():
        time.sleep(0.3)
        return torch.tensor(2.0)

    found = timed_step(step)
    assert found["loss"] == 2.0
    assert found["seconds"] < 0.2


def test_a_process_takes_a_step_whenever_it_is_asked(tmp_path):
    found = in_turn(["plain"], replace(write_weights(WORK, tmp_path), steps=3), 100)["plain"]
    assert len(found["laps"]) == 3
    assert found["seconds"] == sorted(found["laps"])[1]
    assert found["last_loss"] < found["first_loss"]


def test_a_process_that_ended_is_quoted():
    assert failure_note("Traceback\nValueError: no weights\n", 1) == "ValueError: no weights"
    assert failure_note("torch.OutOfMemoryError: tried to\nsee the docs", 1) == "out of memory"
    assert failure_note("", -9) == "ended with code -9"


def test_a_candidate_that_takes_too_long_is_ended(tmp_path):
    work = replace(WORK, weights=str(tmp_path))
    assert in_turn(["plain"], work, 0.05) == {"plain": {"note": "not done after 0 s"}}
    late = train_turns.Candidate("plain", work, 0.05)
    with pytest.raises(Failed, match="not done after 0 s"):
        late.answer()
    assert late.process.returncode == -signal.SIGKILL
    late.end()
