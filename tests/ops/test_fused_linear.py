"""Linear layers with what follows them: the same as their parts, and errors for people."""

import pytest
import torch

from tilestack import backend, ops

SEED = torch.tensor(1234567890123)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_dropout_in_the_epilogue_drops_what_the_operator_does(name, p):
    x, weight, residual = drawn(70, 20), drawn(90, 20, seed=1), drawn(70, 90, seed=2)
    with backend(fused_linear=name):
        found = ops.fused_linear(x, weight, None, residual, SEED, "relu", p)
    expected = ops.dropout(torch.relu(x @ weight.T), SEED, p) + residual
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_leading_dimensions_are_those_of_x(name):
    x, weight = drawn(2, 3, 20), drawn(8, 20, seed=1)
    residual = drawn(8, 2, 3, seed=2).permute(1, 2, 0)
    with backend(fused_linear=name, linear_swiglu=name):
        torch.testing.assert_close(ops.fused_linear(x, weight, residual=residual), x @ weight.T + residual)
        assert ops.linear_swiglu(x, weight).shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(activation="swish"),
            "activation must be one of none, relu, squared_relu, silu, gelu, gelu_tanh, not 'swish'",
        ),
        (dict(residual=torch.ones(3, 5)), r"residual must be torch.float32 \(3, 4\), not torch.float32 \(3, 5\)"),
        (dict(p=0.5), r"dropout of p = 0\.5 needs a seed, one int64 number in a tensor"),
        (dict(seed=torch.ones(2)), "seed must be one int64 number"),
        (dict(weight=torch.ones(4, 6)), "x ends in K and weight is"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    with pytest.raises(ValueError, match=message):
        ops.fused_linear(**dict(x=torch.ones(3, 5), weight=torch.ones(4, 5)) | change)


def test_a_gate_needs_two_projections():
    with pytest.raises(ValueError, match="weight must hold two projections, one on the other, but has 3 rows"):
        ops.linear_swiglu(torch.ones(2, 5), torch.ones(3, 5))
