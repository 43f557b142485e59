"""What says `repeat=straight_line` does nothing else in the calls that `bench host` times: it allocates, views and launches.

Such a call is repeated from the third on. One that also adds up with PyTorch's own kernel, or whose addresses cannot be told
apart, is not: all its Python runs every time. Here calls are noted as they are on a GPU, by launches that launch nothing.
"""

import sys
import threading

import pytest
import torch

from tilestack import backend, ops
from tilestack.contract import launch as launcher
from tilestack.contract import registry
from tilestack.contract.repeat import Notes
from tilestack.lab.bench import host_time

REPEATED = [op for op in ops.operators() if (found := op.implementations.get("triton")) and found.repeat]

# What PyTorch is known to do in between: sorts, and sums of integers or of a bias's gradient.
BESIDE = {
    ("conv2d", "backward"): "aten.sum.dim_IntList",
    ("expert_places", "forward"): "aten.zeros.default",
    ("gather_rows", "backward"): "aten.sort.stable",
    ("linear_swiglu", "backward"): "aten.sum.dim_IntList",
    ("scatter_rows", "forward"): "aten.sort.stable",
}


class FirstBeside(Notes):
    """Notes that know what it was that cannot be repeated."""

    beside = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.straight_line and not self.beside:
            self.beside = str(func)
        return out


@pytest.fixture
def noted(monkeypatch):
    """What became of each forward and backward: the function that repeats it, or why there is none."""
    found = []
    events_of = lambda: launcher.notes.get(threading.get_ident(), [])

    def launch(kernel, grid, *arguments, **constants):
        if 0 not in grid:
            events_of().append(launcher.Launched(lambda *values: None, grid, -1, arguments))

    def noting(function, keep, strides_known=True, **_):
        def run(*values):
            record = FirstBeside(values)
            with monkeypatch.context() as here, record:
                here.setitem(launcher.notes, threading.get_ident(), record.events)
                result = function(*values)
            written = record.written(function, result, strides_known)
            launched = any(isinstance(event, launcher.Launched) for event in record.events)
            direction = "forward" if strides_known else "backward"
            if launched:  # else it returns views, and there is nothing to repeat
                found.append((direction, written, record.beside or "an address that cannot be told"))
            return result

        return run

    for name, module in list(sys.modules.items()):
        if name.startswith("tilestack.kernels") and getattr(module, "launch", None) is launcher.launch:
            monkeypatch.setattr(module, "launch", launch)
    for op in REPEATED:
        monkeypatch.setattr(op.implementations["triton"], "repeat", noting)
        monkeypatch.setattr(op.implementations["triton"], "when", None)  # in the interpreter some would refuse fp8
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: -1, raising=False)
    registry.forget_plans()
    yield found
    registry.forget_plans()


@pytest.mark.parametrize("op", REPEATED, ids=lambda op: op.name)
def test_what_is_timed_on_the_host_is_repeated(op, noted):
    with backend("triton"):
        for call in host_time.ways_to_call(op, host_time.smallest(op), "triton", "cpu").values():
            call()
    assert noted
    why = {direction: beside for direction, written, beside in noted if written is None}
    assert why == {direction: beside for (name, direction), beside in BESIDE.items() if name == op.name}
