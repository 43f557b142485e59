"""The quicker interpreter replaces what Triton's own does, for as long as a launch lasts, and computes the same."""

import importlib

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from tilestack.kernels import interpreter_speed

TYPES = [t for t in vars(tl).values() if isinstance(t, tl.dtype) and t.name not in ("void", "str", "uint1")]


def language():
    """Every member of the language and of its tensors, but what functions inside kernels replace for good in `tl.core`."""
    return {(owner.__name__, name): member for owner in (tl, tl.tensor) for name, member in vars(owner).items()}


@triton.jit
def twice(x):
    return tl.sum(tl.reshape(x, (2, 2)), axis=0) * 2


@triton.jit
def sums_kernel(x_ptr, out_ptr, FAILS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    tl.static_assert(not FAILS)
    tl.store(out_ptr + tl.arange(0, 2), twice(x))


@triton.jit
def successors_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr) + 1)


def test_a_launch_leaves_the_language_as_it_was():
    x, out = torch.arange(4.0), torch.zeros(2)
    sums_kernel[(1,)](
        x, out, FAILS=False
    )  # the first gives tensors a few members of their own that they had of `object`
    before = language()
    for _ in range(2):
        sums_kernel[(1,)](x, out.zero_(), FAILS=False)
        assert out.tolist() == [4.0, 8.0]
        assert language() == before


def test_a_launch_that_fails_does_so_too():
    x, out = torch.arange(4.0), torch.zeros(2)
    sums_kernel[(1,)](x, out, FAILS=False)
    before = language()
    for _ in range(2):
        with pytest.raises(InterpreterError):
            sums_kernel[(1,)](x, out, FAILS=True)
        assert language() == before
    sums_kernel[(1,)](x, out.zero_(), FAILS=False)
    assert out.tolist() == [4.0, 8.0]


def test_the_language_is_listed_once(monkeypatch):
    sums_kernel[(1,)](torch.arange(4.0), torch.zeros(2), FAILS=False)
    monkeypatch.setattr(interpreter_speed, "patch_language", lambda function: pytest.fail("it is listed again"))
    sums_kernel[(2,)](torch.arange(4.0), torch.zeros(2), FAILS=False)


def test_integers_wrap_around_as_ever():
    out = torch.zeros(1, dtype=torch.int32)
    successors_kernel[(1,)](torch.tensor([2**31 - 1], dtype=torch.int32), out)
    assert out.item() == -(2**31)


def test_executed_again_it_replaces_no_more_than_before():
    originals = interpreter_speed.patch_language, interpreter_speed.find_numpy_type, interpreter_speed.make_type
    again = importlib.reload(interpreter_speed)
    assert (again.patch_language, again.find_numpy_type, again.make_type) == originals
    out = torch.zeros(2)
    sums_kernel[(1,)](torch.arange(4.0), out, FAILS=False)
    assert out.tolist() == [4.0, 8.0]


@pytest.mark.parametrize("type", TYPES, ids=str)
def test_numpy_calls_types_as_ever(type):
    for kind in (type, tl.pointer_type(type), tl.block_type(type, [4]), tl.block_type(tl.pointer_type(type), [4])):
        assert interpreter._get_np_dtype(kind) == interpreter_speed.find_numpy_type(kind)
