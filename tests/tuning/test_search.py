"""The search for the fastest configuration, with a model, proofs and a clock that are made up."""

import json
import subprocess
import sys

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract.cases import Make
from tilestack.kernels.matmul import persistent, split_k
from tilestack.tuning import preferences
from tilestack.tuning.model import LAUNCH_US, Gpu, product_us
from tilestack.tuning.search import search

PREDICTED = {"aten": None, "triton:tall": 3.0, "triton:wide": 2.0, "triton:low": 9.0, "gluon:one": 99.0}
TRUE_TIMES = {"aten": 4.0, "triton:tall": 2.5, "triton:wide": 5.0, "triton:low": 1.0, "gluon:one": 3.0}


class Clock:
    """Times what it is asked to, and remembers what that was."""

    def __init__(self, times=TRUE_TIMES):
        self.times, self.asked = times, []

    def __call__(self, names):
        self.asked += names
        return {name: self.times[name] for name in names}


def test_a_model_prunes_within_each_backend_and_the_clock_ranks():
    clock = Clock()
    trials = search(PREDICTED, PREDICTED.get, lambda name: "", clock, kept=2)
    assert clock.asked == ["aten", "triton:tall", "triton:wide", "gluon:one"], "together, so that they take turns"
    assert [trial.name for trial in trials] == ["triton:tall", "gluon:one", "aten", "triton:wide", "triton:low"]
    assert trials[-1].time_us is None
    assert "model" in trials[-1].note
    assert (trials[0].backend, trials[0].config) == ("triton", "tall")


def test_nothing_wrong_is_ever_timed():
    clock = Clock()
    verify = lambda name: "forward: too far" if name == "triton:tall" else ""
    trials = search(PREDICTED, PREDICTED.get, verify, clock)
    assert "triton:tall" not in clock.asked
    assert next(trial for trial in trials if trial.name == "triton:tall").note == "wrong: forward: too far"


def test_what_cannot_be_timed_says_why():
    trials = search(
        ["aten", "triton"], lambda name: None, lambda name: "", lambda names: dict(aten=1.0, triton="no backward")
    )
    assert [(trial.name, trial.time_us, trial.note) for trial in trials] == [
        ("aten", 1.0, ""),
        ("triton", None, "no backward"),
    ]


def test_a_budget_ends_verification_and_times_what_was_proved():
    clock, left = Clock(), iter([False, True, True, True, True])
    trials = search(PREDICTED, PREDICTED.get, lambda name: "", clock, over=lambda: next(left))
    assert clock.asked == ["aten"]
    assert {trial.note for trial in trials[1:]} == {"there was no time left"}


def test_nothing_is_timed_where_nothing_is_right():
    trials = search(["aten"], lambda name: None, lambda name: "broken", lambda names: pytest.fail("timed"))
    assert [trial.time_us for trial in trials] == [None]


def test_the_model_knows_what_turns_and_shares_are():
    gpu = Gpu(multiprocessors=100)
    large = lambda m, n: product_us(8192, 8192, 8192, m, n, gpu)
    assert large(128, 256) < large(64, 64), "small tiles are fetched more often"
    few = lambda splits: product_us(16, 4096, 14336, 16, 128, gpu, splits)
    assert few(4) < few(1), "32 tiles leave most multiprocessors without work"
    one_turn = product_us(1280, 1280, 4096, 128, 128, gpu)
    assert product_us(1280, 1408, 4096, 128, 128, gpu) > 1.9 * one_turn - 2, "one tile too many takes a turn more"


def test_what_is_shared_out_is_written_and_read_once_more_for_each_share():
    """In float32, where memory is the limit."""
    gpu = Gpu(multiprocessors=10_000, flops_per_us=1e30, cache_bytes_per_us=1e30, memory_bytes_per_us=1e6)
    one, three = (product_us(256, 512, 1024, 64, 64, gpu, splits) for splits in (1, 3))
    once = LAUNCH_US + 2 * (256 * 1024 + 512 * 1024 + 256 * 512) / 1e6
    assert (one, three) == (pytest.approx(once), pytest.approx(once + 2 * (4 + 4) * 256 * 512 / 1e6))


def test_configurations_have_their_predictions():
    of_persistent = {name: config.model_us(512, 4096, 4096, Gpu()) for name, config in persistent.CONFIGS.items()}
    assert of_persistent["128x128"] < of_persistent["128x256"], "64 tiles are too few"
    of_split = {name: config.model_us(16, 4096, 14336, Gpu()) for name, config in split_k.CONFIGS.items()}
    assert min(of_split, key=of_split.__getitem__) != "64x64x1"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    preferences.forget_tables()
    yield preferences.user_table_path("h200")
    monkeypatch.undo()
    preferences.forget_tables()


def row(backend, time_us, config=None):
    about = dict(op="linear", case="16x4096x4096xplain", dtype="bfloat16", direction="forward")
    return about | dict(backend=backend, config=config, time_us=time_us)


def asked(*sizes):
    M, N, K = sizes
    make = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return preferences.look_up(
        preferences.known_of("h200"), ops.linear, dict(x=make(M, K), weight=make(N, K), bias=None)
    )


def test_what_a_user_tuned_is_asked_before_what_is_shipped(cache):
    shipped = asked(8192, 8192, 8192)
    preferences.add_to_table(cache, [row("aten", 9.0), row("triton_split_k", 8.0, "64x64x4")])
    assert asked(16, 4096, 4096) == ["triton_split_k:64x64x4", "aten"]
    assert asked(8192, 8192, 8192) == shipped
    preferences.add_to_table(cache, [row("aten", 7.0), row("triton_split_k", 8.0, "64x64x4")])
    assert asked(16, 4096, 4096)[0] == "aten", "a bucket measured anew replaces the old one"
    assert list(json.loads(cache.read_text())) == ["linear"]


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "nonsense",
        '{"linear": {}}',
        '{"linear": {"default": ["aten"], "bfloat16": 3}}',
        '{"linear": {"default": ["aten"], "bfloat16": {"4 by 12": ["aten"], "large": ["aten"]}}}',
        None,  # a folder
    ],
)
def test_a_cache_that_is_none_of_ours_counts_for_nothing(cache, text):
    shipped = asked(16, 4096, 4096)
    cache.parent.mkdir(parents=True)
    cache.mkdir() if text is None else cache.write_text(text)
    preferences.forget_tables()
    with pytest.warns(UserWarning, match="delete it"):
        assert asked(16, 4096, 4096) == shipped
    with pytest.raises(ValueError, match=r"h200.json is no table of `tilestack tune` \(.*\); delete it"):
        preferences.add_to_table(cache, [row("aten", 9.0)])


ADDS = """
import sys
from pathlib import Path
from tilestack import ops
from tilestack.tuning import preferences
cases = [case.name for case in ops.linear.cases if case.kind == "bench"][int(sys.argv[2]) :: 2]
about = dict(op="linear", dtype="bfloat16", direction="forward", backend="aten", config=None, time_us=1.0)
for case in cases:
    preferences.add_to_table(Path(sys.argv[1]), [about | dict(case=case)])
"""


def test_two_processes_lose_nothing_of_each_other(cache):
    both = [subprocess.Popen([sys.executable, "-c", ADDS, str(cache), str(number)]) for number in range(2)]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    cases = [case for case in ops.linear.cases if case.kind == "bench"]
    bound = [ops.linear.bind(**case.build(Make(torch.bfloat16, "meta"))) for case in cases]
    buckets = {preferences.bucket_of(ops.linear, arguments)[1] for arguments in bound}
    assert set(json.loads(cache.read_text())["linear"]["bfloat16"]) == buckets


def test_no_call_of_a_user_tunes_anything(cache, monkeypatch):
    monkeypatch.setattr("tilestack.tuning.search.search", lambda *_, **__: pytest.fail("searched"))
    with contract.backend(linear="triton_split_k"):
        ops.linear(torch.randn(3, 8), torch.randn(4, 8))
    assert not cache.exists()


def test_a_benchmark_keeps_the_configurations_it_was_measured_in(cache, tmp_path):
    preferences.add_to_table(cache, [row("aten", 9.0), row("triton_split_k", 8.0, "64x64x4")])
    results = dict(machine=dict(slug="h200"), rows=[row("aten", 7.0), row("triton_split_k", 8.0), row("triton", 9.0)])
    table = json.loads(preferences.write_table(results, tmp_path / "tables").read_text())
    assert table["linear"]["bfloat16"]["4x12x12"] == ["aten", "triton_split_k:64x64x4", "triton"]
