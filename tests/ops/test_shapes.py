"""Random shapes, strides and dtypes: every Triton kernel in the interpreter, judged against its definition in float64."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tilestack import ops
from tilestack.contract import backend
from tilestack.lab.proof import oracle

few = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
dtypes = st.sampled_from([torch.float16, torch.float32, torch.float64])
sides = st.integers(0, 9) | st.sampled_from([16, 17, 31, 33, 65])


@st.composite
def laid_out(draw, shape, dtype):
    """A random tensor of a shape, as a permuted, sliced, shifted or expanded view of other memory."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    broadcast = [draw(st.integers(0, 5)) == 0 for _ in shape]
    sizes = [1 if once else size * step for size, step, once in zip(shape, steps, broadcast, strict=True)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    start = draw(st.integers(0, 2))
    memory = torch.randn(math.prod(sizes) + start, generator=generator).to(dtype)[start:]
    stored = memory.view([sizes[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    every = tuple(slice(None, None, 1 if once else step) for step, once in zip(steps, broadcast, strict=True))
    return stored[every].expand(shape)


def one_tensor(draw, dtype):
    return dict(x=draw(laid_out(draw(st.lists(sides, max_size=3)), dtype)))


def two_tensors(draw, dtype):
    shape = draw(st.lists(sides, max_size=3))
    return dict(x=draw(laid_out(shape, dtype)), y=draw(laid_out(shape, dtype)))


def some_rows(draw):
    """Two or more elements in a row: one is its own mean, and its norm's gradient is all cancellation."""
    return [*draw(st.lists(sides, max_size=2)), draw(st.integers(2, 80))]


def rows_and_weight(draw, dtype):
    shape = some_rows(draw)
    return dict(x=draw(laid_out(shape, dtype)), weight=draw(st.none() | laid_out(shape[-1:], dtype)))


def rows_weight_and_bias(draw, dtype):
    arguments = rows_and_weight(draw, dtype)
    bias = st.none() if arguments["weight"] is None else st.none() | laid_out(arguments["weight"].shape, dtype)
    return arguments | dict(bias=draw(bias))


def matrices(draw, dtype):
    shape, columns = some_rows(draw), draw(sides)
    return dict(
        x=draw(laid_out(shape, dtype)),
        weight=draw(laid_out([columns, shape[-1]], dtype)),
        bias=draw(st.none() | laid_out([columns], dtype)),
    )


def rows_and_dim(draw, dtype):
    shape = draw(st.lists(sides, min_size=1, max_size=3))
    return dict(x=draw(laid_out(shape, dtype)), dim=draw(st.integers(-len(shape), len(shape) - 1)))


ARGUMENTS = dict(
    add=two_tensors,
    axpy=lambda draw, dtype: two_tensors(draw, dtype) | dict(alpha=draw(st.floats(-3, 3, width=16))),
    relu=one_tensor,
    silu=one_tensor,
    gelu=lambda draw, dtype: one_tensor(draw, dtype) | dict(approximate=draw(st.sampled_from(["none", "tanh"]))),
    softmax=rows_and_dim,
    rms_norm=rows_and_weight,
    layer_norm=rows_weight_and_bias,
    linear=matrices,
)


def results(function, arguments):
    """Outputs and gradients by name."""
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    out = function(**arguments | leaves)
    arriving = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), arriving)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_triton_is_as_good_as_the_definition_whatever_the_layout(name):
    described = ops.operator_named(name)

    @few
    @given(st.data())
    def check(data):
        arguments = ARGUMENTS[name](data.draw, data.draw(dtypes))
        exact = {key: v.double() if isinstance(v, torch.Tensor) else v for key, v in arguments.items()}
        with backend("triton"):
            found = results(described, arguments)
        for ours, theirs, truth in zip(
            found, results(described.definition, arguments), results(described.definition, exact), strict=True
        ):
            verdict = oracle.judge(ours, theirs, truth, oracle.own_error(theirs, truth))
            assert not verdict.message

    check()
