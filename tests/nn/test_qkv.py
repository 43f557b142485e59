"""Queries, keys and values split and turned: what the operators give, with a gradient in one piece."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilestack import contract, ops
from tilestack.nn.qkv import split_and_turn
from tilestack.ops.rope import frequencies, tables

BATCH, TOKENS, SIZES, HEAD_DIM = 2, 5, (4, 2, 2), 16
COS, SIN = tables(frequencies(12)[0], 9)  # of twelve elements; the other four pass through


class Calls(TorchDispatchMode):
    """The names of the PyTorch operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def plain(heads, sizes, cos, sin, positions, norms):
    q, k, v = heads.split(sizes, 2)
    if norms is None:
        return *ops.rope(q, k, cos, sin, positions), v
    return *ops.qk_norm_rope(q, k, *norms, cos, sin, positions), v


def inputs(norm, leaf=True):
    torch.manual_seed(0)
    heads = torch.randn(BATCH, TOKENS, sum(SIZES), HEAD_DIM, requires_grad=leaf)
    norms = tuple(torch.randn(HEAD_DIM, requires_grad=True) for _ in range(2)) if norm else None
    return heads, norms


def weighted(*results):
    """A scalar in which every element of the results counts differently."""
    make = torch.Generator().manual_seed(2)
    return sum((result * torch.randn(result.shape, generator=make)).sum() for result in results)


def gradients(function, norm, positions, use):
    heads, norms = inputs(norm)
    with contract.backend("triton"):
        results = function(heads, SIZES, COS, SIN, positions, norms)
        use(*results)
    zeros = torch.zeros(HEAD_DIM)  # instead of None, where nobody asks for turned heads
    return [*results, heads.grad, *(zeros if weight.grad is None else weight.grad for weight in norms or ())]


def transposed(q, k, v):
    weighted(*(x.transpose(1, 3) for x in (q, k, v))).backward()


def twice(q, k, v):
    loss = weighted(q, k, v)
    loss.backward(retain_graph=True)
    loss.backward()


def hooked(q, k, v):
    for scale, result in enumerate((q, k, v), 2):
        result.register_hook(lambda grad, scale=scale: grad * scale)
    weighted(q, k, v).backward()


USES = {
    "all three": lambda q, k, v: weighted(q, k, v).backward(),
    "values not": lambda q, k, v: weighted(q, k).backward(),
    "values alone": lambda q, k, v: v.square().sum().backward(),
    "queries by two": lambda q, k, v: (weighted(q, k, v) + q.square().sum()).backward(),
    "gradients that lie across": transposed,
    "gradients without memory": lambda q, k, v: (q.sum() + k.sum() + v.sum()).backward(),
    "the graph kept": twice,
    "hooks": hooked,
}
POSITIONS = {"none": None, "shared": torch.tensor([3, 0, 8, 1, 1]), "own": torch.arange(10).view(2, 5) % 9}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("norm", [False, True])
def test_gradients_are_those_of_a_split(norm, use):
    found, expected = (gradients(function, norm, POSITIONS["own"], USES[use]) for function in (split_and_turn, plain))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("norm", [False, True])
def test_positions_are_those_of_the_operators(norm, positions):
    both = [gradients(function, norm, POSITIONS[positions], USES["all three"]) for function in (split_and_turn, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("norm", [False, True])
def test_no_gradient_is_concatenated(norm):
    heads, norms = inputs(norm)
    with contract.backend("triton"):
        results = split_and_turn(heads, SIZES, COS, SIN, None, norms)
        arriving = [torch.randn_like(result) for result in results]
        with Calls() as calls:
            (gradient, *_) = torch.autograd.grad(results, (heads, *(norms or ())), arriving)
    assert "cat" not in calls.names
    assert gradient.is_contiguous()


def test_the_definition_concatenates():
    """So that the test above has something to see."""
    heads, _ = inputs(False)
    results = split_and_turn(heads, SIZES, COS, SIN, None)
    with Calls() as calls:
        torch.autograd.grad(results, heads, [torch.randn_like(result) for result in results])
    assert "cat" in calls.names


def test_heads_need_not_be_dense():
    def of_every_second(function):
        wide = torch.randn(BATCH, TOKENS, sum(SIZES), 2 * HEAD_DIM, generator=torch.Generator().manual_seed(3))
        wide.requires_grad_()
        with contract.backend("triton"):
            weighted(*function(wide[..., ::2], SIZES, COS, SIN, None, inputs(True)[1])).backward()
        return wide.grad

    assert torch.equal(of_every_second(split_and_turn), of_every_second(plain))


def test_weights_of_norms_learn_over_a_frozen_projection():
    heads, norms = inputs(True, leaf=False)
    with contract.backend("triton"):
        weighted(*split_and_turn(heads, SIZES, COS, SIN, None, norms)).backward()
    found = [weight.grad for weight in norms]
    _, norms = inputs(True)
    weighted(*plain(heads, SIZES, COS, SIN, None, norms)).backward()
    for a, b in zip(found, norms, strict=True):
        torch.testing.assert_close(a, b.grad)


@pytest.mark.parametrize("norm", [False, True])
def test_there_is_no_second_derivative(norm):
    heads, norms = inputs(norm)
    with contract.backend("triton"):
        results = split_and_turn(heads, SIZES, COS, SIN, None, norms)
        (gradient,) = torch.autograd.grad(weighted(*results), heads, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("norm", [False, True])
def test_compilers_see_operators(norm):
    heads, norms = inputs(norm)
    torch.compiler.reset()
    compiled = torch.compile(split_and_turn, fullgraph=True, backend="aot_eager")
    with contract.backend("triton"):
        results = compiled(heads, SIZES, COS, SIN, POSITIONS["own"], norms)
        weighted(*results).backward()
    expected = gradients(plain, norm, POSITIONS["own"], USES["all three"])
    for a, b in zip([*results, heads.grad], expected, strict=False):
        torch.testing.assert_close(a, b)
