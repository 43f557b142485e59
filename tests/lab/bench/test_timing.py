"""Timing: the arithmetic behind cold caches and medians, and that candidates cannot fail one another."""

import time
from contextlib import contextmanager

import pytest
import torch

from tilestack.lab.bench import roofs, timing
from tilestack.lab.bench.roofs import Roofs
from tilestack.lab.bench.timing import Candidate, measure

MIB = 2**20
L2 = 60 * MIB


@pytest.mark.parametrize("working_set", [MIB // 2, 16 * MIB, 64 * MIB, 128 * MIB, 256 * MIB])
def test_twice_the_cache_passes_between_two_uses_of_a_copy(working_set):
    copies = timing.copies_needed(working_set, L2)
    assert (copies - 1) * working_set >= 2 * L2
    assert (copies - 2) * working_set < 2 * L2, "one copy less would do"
    assert timing.is_cold(working_set, copies, L2)


def test_a_working_set_far_beyond_the_cache_needs_no_rotation():
    assert timing.copies_needed(8 * L2, L2) == 1
    assert timing.is_cold(8 * L2, 1, L2)


@pytest.mark.parametrize("working_set", [0, 100])
def test_tiny_working_sets_stay_bounded_and_admit_that_they_are_warm(working_set):
    copies = timing.copies_needed(working_set, L2)
    assert copies == timing.MOST_COPIES
    assert not timing.is_cold(working_set, copies, L2)


@pytest.mark.parametrize(
    ("copies", "seconds", "turns"),
    [(1, 1e-5, 10), (2, 1e-5, 5), (3, 1e-5, 4), (500, 1e-6, 1), (1, 5e-3, 4), (1, 1.0, 1)],
)
def test_a_graph_holds_enough_calls_but_not_too_long_ones(copies, seconds, turns):
    assert timing.turns_per_graph(copies, seconds) == turns


def test_the_spread_is_the_interquartile_range_over_the_median_and_ignores_outliers():
    assert timing.median_and_spread([10, 11, 12, 13, 14]) == (12, pytest.approx(2 / 12))
    assert timing.median_and_spread([10, 11, 12, 13, 1400])[0] == 12
    assert timing.median_and_spread([7]) == (7, 0)


def test_one_failing_candidate_leaves_the_others_and_says_why():
    def cannot_prepare(n):
        raise ValueError("no such\nshape")

    def fails_when_called(n):
        return [lambda: 1 / 0] * n

    found = measure(
        {"bad": Candidate(cannot_prepare), "worse": Candidate(fails_when_called), "good": Candidate(busy(1e-4))},
        0,
        "cpu",
        seconds=0.01,
    )
    assert list(found) == ["bad", "worse", "good"]
    assert found["bad"] == timing.Timing(note="ValueError: no such")
    assert found["worse"] == timing.Timing(note="ZeroDivisionError: division by zero")
    assert found["good"].time_us >= 100
    assert found["good"].how == "cpu"


def test_more_work_takes_longer_and_both_take_as_long_as_they_say():
    found = measure({"short": Candidate(busy(1e-3)), "long": Candidate(busy(1e-2))}, 0, "cpu", seconds=0.05)
    assert 1e3 <= found["short"].time_us < found["long"].time_us
    assert found["long"].time_us >= 1e4


def test_candidates_take_turns():
    order = []
    candidate = lambda name: Candidate(lambda n: [lambda: (order.append(name), compute_for(2e-3))] * n)
    measure({"a": candidate("a"), "b": candidate("b")}, 0, "cpu", seconds=0)
    sampled = order[4:]  # two calls each to warm up
    assert sampled == ["a", "b"] * (len(sampled) // 2)
    assert len(sampled) == 2 * timing.CPU_ROUNDS[0]


def test_a_candidate_is_prepared_and_called_inside_its_scope():
    inside = []

    @contextmanager
    def scope():
        inside.append(True)
        yield
        inside.pop()

    seen = []
    prepare = lambda n: (seen.append(bool(inside)), [lambda: seen.append(bool(inside))] * n)[1]
    measure({"scoped": Candidate(prepare, scope)}, 0, "cpu", seconds=0)
    assert len(seen) > 3
    assert all(seen)


def test_the_floor_is_the_slower_of_moving_and_computing():
    roofs = Roofs(copy_tb_per_s=4.0, matmul_tflops={"bfloat16": 800.0, "float32": 50.0}, host_floor_us=5.0)
    assert roofs.floor_us(flops=0, moved=4e9, dtype="bfloat16") == pytest.approx(1000)
    assert roofs.floor_us(flops=1.6e12, moved=4e9, dtype="bfloat16") == pytest.approx(2000)
    assert roofs.floor_us(flops=1.6e12, moved=4e9, dtype="float32") == pytest.approx(32000)
    assert roofs.floor_us(flops=1.6e12, moved=4e9, dtype="float64") == pytest.approx(32000), "no rate of its own"
    assert roofs.floor_us(flops=1.6e12, moved=1e9, dtype="bfloat16", of_codes=True) == pytest.approx(1000)
    assert roofs.floor_us(flops=1.6e12, moved=1e9, dtype="float32", of_codes=True) == pytest.approx(1000)


def test_roofs_are_bytes_and_operations_over_time(monkeypatch):
    timed = []
    monkeypatch.setattr(roofs, "least_us", lambda call: timed.append(call) or 1000.0)
    monkeypatch.setattr(torch, "randn", lambda *shape, device: torch.empty(*shape, device=device))
    found = roofs.measure_roofs.__wrapped__("cpu")
    product, copy, _ = timed
    (M, K), (_, N) = (operand.shape for operand in product.args)
    assert found.matmul_tflops == {"float32": pytest.approx(2 * M * N * K * 1e-9)}
    (source,), target = copy.args, copy.func.__self__
    assert found.copy_tb_per_s == pytest.approx((source.nbytes + target.nbytes) * 1e-9)
    assert found.host_floor_us == 1000.0


def test_out_of_memory_is_told_in_three_words():
    assert timing.in_one_line(torch.cuda.OutOfMemoryError("Tried to allocate 20 GiB …")) == "out of memory"


def compute_for(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def busy(seconds):
    return lambda n: [lambda: compute_for(seconds)] * n


def test_a_cpu_is_timed_on_one_thread_whose_number_is_put_back():
    before, seen = torch.get_num_threads(), []
    call = lambda: seen.append(torch.get_num_threads())
    measure({"call": Candidate(lambda copies: [call])}, 1, "cpu", seconds=0.001)
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_what_a_call_waits_on_a_cpu_is_not_counted():
    timing = measure({"call": Candidate(lambda copies: [lambda: time.sleep(0.01)])}, 1, "cpu", seconds=0.001)["call"]
    assert timing.time_us < 5_000
