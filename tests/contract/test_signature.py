"""The signature of a call in C++: it tells calls apart just where Python's key does, and leaves to Python what is rare."""

import itertools
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tilestack import ops
from tilestack.contract import call


def key_of(*values):
    """What call.py writes for an operator of these arguments."""
    of = lambda t: None if t is None else (t.__class__, t.shape, t.stride(), t.dtype, t.device)
    tensors = [t for value in values for t in (value if isinstance(value, list | tuple) else [value]) if t is not None]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    parts = [tuple(map(of, value)) if isinstance(value, list | tuple) else of(value) for value in values]
    return torch.are_deterministic_algorithms_enabled(), wanted, *parts


class Derived(torch.Tensor):
    pass


def tensors():
    x = torch.randn(4, 6)
    return [
        x, x.clone(), x.T, x[:, :3], x[::2], x[None], x[:, None], x.reshape(6, 4), x.expand(2, 4, 6), x.double(), x.half(),
        x.int(), x.bool(), x.to(torch.complex64), x.to("meta"), torch.ones(()), torch.ones(0), torch.ones(0, 3),
        torch.ones(3, 0), torch.ones(1, 1), torch.ones(1, 1).as_strided((1, 1), (7, 7)), x.clone().requires_grad_(),
        torch.nn.Parameter(x), torch.nn.Parameter(x, requires_grad=False), x.to(torch.float8_e4m3fn), None,
    ]  # fmt: skip


def test_calls_are_told_apart_where_python_tells_them_apart(node):
    found = tensors()
    given = [(a,) for a in found] + [(a, b) for a in found[:8] + found[-5:] for b in found[::3] + [None]]
    given += [([],), ([found[0]],), ((found[0],),), ([found[0], found[1]],), ([found[0]], found[1]), ([found[21]],)]
    pairs = []
    for deterministic, gradients in itertools.product((False, True), repeat=2):
        torch.use_deterministic_algorithms(deterministic)
        try:
            with torch.set_grad_enabled(gradients):
                pairs += [(key_of(*values), node.signature(*values)) for values in given]
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(isinstance(made, bytes) and made for _, made in pairs)
    assert len({made for _, made in pairs}) == len({key for key, _ in pairs}) == len(set(pairs)) > 100


def test_what_is_rare_is_left_to_python(node):
    x = torch.randn(2, 3)
    seen = []
    torch.func.vmap(lambda row: seen.append(node.signature(row)) or row)(x)
    torch.func.grad(lambda y: seen.append(node.signature(x)) or y.sum())(x)
    with torch.autocast("cpu", torch.bfloat16):
        seen.append(node.signature(x))
    with FakeTensorMode() as fake:
        seen.append(node.signature(fake.from_tensor(x)))
    negated = torch._neg_view(x)
    others = x.to_sparse(), x.as_subclass(Derived), negated, torch.nested.nested_tensor([x]), 3, "x", [x, None], [[x]]
    assert [*seen, *(node.signature(x, other) for other in others)] == [None] * (4 + len(others))
    assert node.signature(x) is not None


def test_it_holds_nothing_of_what_it_was_given(node):
    x, several = torch.randn(2, 3), [torch.randn(2)]
    before = sys.getrefcount(x), sys.getrefcount(several), sys.getrefcount(several[0]), sys.getrefcount(None)
    kept = [node.signature(x, several, None) for _ in range(100)]
    after = sys.getrefcount(x), sys.getrefcount(several), sys.getrefcount(several[0]), sys.getrefcount(None)
    assert before[:3] == after[:3]
    assert abs(before[3] - after[3]) < 50
    assert len(set(kept)) == 1


@pytest.fixture(params=["Python", "C++"])
def each_signature(request, monkeypatch):
    """Operators whose signatures are made in either way, from their first call on."""
    found = request.getfixturevalue("node") if request.param == "C++" else None
    monkeypatch.setattr(call, "native_node", lambda: found)
    for op in (ops.softmax, ops.rms_norm, ops.linear):
        op.plans.clear()
        call.first_signature(op)
    yield request.param
    monkeypatch.undo()
    for op in (ops.softmax, ops.rms_norm, ops.linear):
        op.plans.clear()
        call.first_signature(op)


def test_every_signature_has_a_plan_and_only_one(each_signature):
    x, weight = torch.randn(4, 6), torch.randn(6)
    calls = [
        lambda: ops.rms_norm(x), lambda: ops.rms_norm(x, weight), lambda: ops.rms_norm(x, weight, 1e-3),
        lambda: ops.rms_norm(x[:2], weight), lambda: ops.rms_norm(x.double(), weight.double()),
        lambda: ops.rms_norm(x, weight.clone().requires_grad_()), lambda: ops.rms_norm(x, torch.nn.Parameter(weight)),
    ]  # fmt: skip
    first = [made() for made in calls]
    assert len(ops.rms_norm.plans) == len(calls)
    for _ in range(3):
        assert all(torch.equal(one, made()) for one, made in zip(first, calls, strict=True))
    assert len(ops.rms_norm.plans) == len(calls)
    kinds = {type(key[2]) for key in ops.rms_norm.plans.recent}
    assert kinds == {bytes if each_signature == "C++" else tuple}


@pytest.mark.usefixtures("each_signature")
def test_wrong_arguments_are_refused_in_the_same_words():
    x = torch.randn(4, 6)
    for wrong in (None, 3, [x], "x"):
        with pytest.raises(TypeError, match="x must be a tensor, not"):
            ops.softmax(wrong)
    with pytest.raises(ValueError, match="dim 5"):
        ops.softmax(x, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.linear(x, x).dtype == torch.bfloat16
    assert ops.linear(x, x).dtype == torch.float32
    assert torch.equal(ops.softmax(torch._neg_view(x)), ops.softmax(-x))
