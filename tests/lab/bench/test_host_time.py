"""What a call costs on the host: every operator can be called in the ways that are timed, and what is made of the times."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from tilestack import ops
from tilestack.lab import stale
from tilestack.lab.bench import host_time
from tilestack.lab.compile.explain import elements

ON_TRITON = [op for op in ops.operators() if "triton" in op.implementations]


@pytest.mark.parametrize("op", ON_TRITON, ids=lambda op: op.name)
def test_every_operator_has_ways_to_be_called(op):
    case = host_time.smallest(op)
    assert elements(case) <= host_time.SMALL
    found = host_time.ways_to_call(op, case, "torch", "cpu")
    assert "no_grad" in found
    arguments = case.build(host_time.Make(torch.bfloat16)).values()
    assert any(map(host_time.is_float, arguments)) or list(found) == ["no_grad"]
    assert not op.mutates or list(found) == ["no_grad"]


def test_every_operator_on_triton_is_timed(monkeypatch):
    monkeypatch.setattr(host_time, "of_operator", lambda op, device: [op.name])
    timed = list(itertools.chain.from_iterable(host_time.bench_host("cpu", without={"softmax"})))
    assert timed == [op.name for op in ON_TRITON if op.name != "softmax"]
    assert {"rope_", "kv_write", "qkv_rope_write", "route", "csr_matmul", "quantise_rows_fp8"} <= set(timed)


@pytest.mark.parametrize(("device", "jobs", "ahead"), [("cuda", 3, True), ("cuda", 1, False), ("cpu", 3, False)])
def test_on_a_gpu_what_is_timed_is_compiled_ahead(monkeypatch, device, jobs, ahead):
    asked = []
    monkeypatch.setattr(host_time, "of_operator", lambda op, device: asked.append(op.name) or [])
    monkeypatch.setattr(host_time, "run_ahead", lambda *given, files: asked.append((*given, files)))
    without = {op.name for op in ON_TRITON} - {"add", "relu"}
    list(host_time.bench_host(device, without, jobs, ("mine.py",)))
    named = [(name, device) for name in ("add", "relu")]
    assert asked == [(host_time.call_all_ways, named, 3, ("mine.py",))] * ahead + ["add", "relu"]


def test_ahead_every_way_is_called_on_both_backends(monkeypatch):
    called = []
    monkeypatch.setattr(host_time, "ways_to_call", lambda op, case, name, device: called.append((op.name, name)) or {})
    host_time.call_all_ways("silu_mul", "cpu")
    host_time.call_all_ways("softmax", "cpu")
    assert called == [("silu_mul", "triton"), ("silu_mul", "torch"), ("softmax", "triton"), ("softmax", "aten")]


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in calls, of which the floor's takes three microseconds; and the backends that were chosen."""
    clock = SimpleNamespace(now=0.0, chosen=[])

    def taking(*seconds):
        """A call that takes these in batch after batch, and the last of them from there on."""
        left = itertools.chain.from_iterable(itertools.repeat(each, host_time.CALLS) for each in seconds)

        def call():
            clock.now += next(left, seconds[-1])

        return call

    clock.taking = taking
    floor = taking(3e-6)
    monkeypatch.setattr(host_time, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(host_time, "configure_backend", clock.chosen.append)
    monkeypatch.setattr(host_time.torch, "ones", lambda *_, **__: SimpleNamespace(add_=lambda one: floor()))
    return clock


def test_the_fastest_batch_counts_after_those_that_warm_up(clock):
    warm = [1e-6] * host_time.WARM  # which would be the fastest, were they to count
    calls = {("no_grad", "triton"): clock.taking(*warm, 9e-6, 7e-6, 8e-6), ("both", "aten"): clock.taking(2e-6)}
    found = host_time.measure_all(calls, "cpu")
    assert found == {("no_grad", "triton"): (7.0, 3.0), ("both", "aten"): (2.0, 3.0)}
    assert clock.chosen == ["triton", "aten", ""]


def test_a_slow_call_is_not_waited_for(clock):
    """A definition may take milliseconds: few batches of it suffice, and the floor beside it has as many."""
    slow = clock.taking(0.05)
    assert host_time.measure_all({("no_grad", "torch"): slow}, "cpu") == {("no_grad", "torch"): (5e4, 3.0)}
    batches = clock.now / (0.05 + 3e-6) / host_time.CALLS
    assert batches == pytest.approx(host_time.WARM + host_time.FEWEST)


def test_medians_are_of_what_is_added_to_the_floor_and_of_the_backward():
    row = lambda op, way, backend, us: dict(op=op, direction=way, backend=backend, host_us=us, floor_us=7.0)
    three = lambda op, backend, *times: [row(op, *at) for at in zip(("no_grad", "grad", "both"), [backend] * 3, times, strict=True)]  # fmt: skip
    rows = [*three("a", "triton", 8, 10, 50), *three("a", "aten", 8, 9, 40), *three("b", "triton", 9, 13, 93), *three("b", "torch", 20, 30, 40), row("c", "no_grad", "triton", 17)]  # fmt: skip
    assert host_time.summary_of_host_times(rows) == (
        "median over 3 operators: no_grad +2.00 µs, grad +4.50 µs over the floor; "
        "backward 40.00 µs, PyTorch's own 31.00 µs, over the 1 operators that it has"
    )
    assert host_time.summary_of_host_times(rows[-1:]) == "median over 1 operators: no_grad +10.00 µs over the floor"
    assert "over 1 operators, gradients through C++: no" in host_time.summary_of_host_times(
        [rows[-1] | {"node": "C++"}]
    )


def test_a_row_follows_the_contract_as_well_as_the_kernel(monkeypatch):
    rows = [dict(op="relu", backend="triton", case=host_time.smallest(ops.relu).name, source=host_time.host_source("relu", "triton"))]  # fmt: skip
    assert host_time.current_operators(rows) == {"relu"}
    assert host_time.current_operators([rows[0] | {"source": stale.present_source("relu", "triton")}]) == set()
    monkeypatch.setattr(host_time, "hash_of_parts", lambda parts: f"changed {parts}")
    assert host_time.current_operators(rows) == set()
    assert host_time.host_source("relu", "aten") == "", "PyTorch's own function is no source of ours"
