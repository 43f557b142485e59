"""Kernels that begin early, in the interpreter as if on Hopper: every program waits before it reads or writes memory, and
what it has fetched before is the weight, all of it and nothing beyond."""

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import GridExecutor

from tilestack import ops
from tilestack.contract.cases import Make
from tilestack.kernels import early
from tilestack.kernels.attention import paged
from tilestack.lab.proof.interpreted import interpreter_with

TOUCHES = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
WAITING = {  # operator and backend, whose kernels all wait; and how many of its cases are tried
    ("rms_norm", "triton"): 3,
    ("add_rms_norm", "triton"): 3,
    ("layer_norm", "triton"): 3,
    ("qkv_rope_write", "triton"): 3,
    ("paged_attention", "triton"): 8,
    ("argmax", "triton"): 5,
    ("sample", "triton"): 7,
}
FETCHING = [
    ("linear", "triton_gemv"),
    ("linear", "triton_slices"),
    ("linear", "triton_split_k"),
    ("linear_swiglu", "triton_split_k"),
]


class Programs(list):
    """What each program did, in order: "fetch", "wait", "let" and "touch"; and all the addresses that were fetched, of 16
    bytes each."""

    def __init__(self):
        super().__init__()
        self.fetched = set()

    def note(self, what):
        self[-1].append(what)

    def fetch(self, asm, constraints, given, **named):
        self.note("fetch")
        for first, size in zip(*(each.handle.data.ravel().tolist() for each in given), strict=True):
            assert first % early.PIECE == size % early.PIECE == 0
            self.fetched.update(range(first, first + size, early.PIECE))

    def check(self):
        assert self
        for done in self:
            assert "wait" in done, "it may end before the kernel in front"
            assert set(done[: done.index("wait")]) <= {"fetch"}
            assert done.count("wait") == done.count("let") == 1


@pytest.fixture
def programs(monkeypatch):
    noted = Programs()
    call = GridExecutor.__call__

    def launched(executor, *given, **named):
        assert "EARLY" in executor.arg_names, "a kernel that does not wait"
        return call(executor, *given, **named)

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    monkeypatch.setattr(early, "begins_early", lambda device: True)
    monkeypatch.setattr(early, "gdc_wait", lambda: noted.note("wait"))
    monkeypatch.setattr(early, "gdc_launch_dependents", lambda: noted.note("let"))
    monkeypatch.setattr(tl, "inline_asm_elementwise", noted.fetch)
    begins = lambda place: lambda *at: (noted.append([]), place(*at))[1]
    touches = lambda create: lambda *given, **named: (noted.note("touch"), create(*given, **named))[1]
    with interpreter_with(set_grid_idx=begins, **dict.fromkeys(TOUCHES, touches)):
        yield noted


@pytest.mark.parametrize(("name", "backend"), WAITING)
def test_every_program_waits_before_it_touches_memory(programs, name, backend, monkeypatch):
    monkeypatch.setattr(paged, "LEAST_SPAN", 16)  # so that texts are split
    monkeypatch.setattr(paged, "PROGRAMS", 8)
    operator = ops.operator_named(name)
    checks = [case for case in operator.cases if case.kind == "check"]
    for case in checks[: WAITING[name, backend]]:
        arguments = operator.bind(**case.build(Make(torch.float32)))
        operator.implementations[backend].forward(*arguments.values())
    programs.check()


@pytest.mark.parametrize(("name", "backend"), FETCHING)
def test_all_of_a_weight_is_fetched_and_nothing_beyond(programs, name, backend):
    implementation = ops.operator_named(name).implementations[backend]
    for config in implementation.configs.values():
        x, weight = torch.randn(3, 512), torch.randn(80, 512)  # no whole tiles of rows
        implementation.forward(x, weight, None, config=config)
        begin = weight.data_ptr()
        assert programs.fetched == set(range(begin, begin + weight.nbytes, early.PIECE)), config
        programs.check()
        programs.fetched.clear()
