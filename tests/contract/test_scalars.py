"""Numbers that are no tensors: each call gets the value it was given, whatever calls came before and whatever its type."""

import numpy as np
import pytest
import torch

from tilestack import contract, ops
from tilestack.contract import backend, implements, operator
from tilestack.contract.cases import cases

X = torch.randn(6, 8)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_every_kind_of_number_is_the_float_it_stands_for(name):
    x, y = torch.randn(5), torch.randn(5)
    with backend(name):
        for alpha in (2, 2, 5, True, np.float64(0.5), np.float32(0.25), np.int64(3), 7.5, False):
            torch.testing.assert_close(ops.axpy(x, y, alpha), float(alpha) * x + y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.axpy(X, X, torch.tensor(2.0)), "axpy: alpha must be a number, not Tensor"),
        (lambda: ops.axpy(X, X, "2"), "axpy: alpha must be a number, not str"),
        (lambda: ops.softmax(X, 1.0), "softmax: dim must be a whole number, not float"),
        (lambda: ops.strided_copy(X, "2"), "strided_copy: step must be a whole number, not str"),
    ],
)
def test_what_is_no_number_is_refused_by_name(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_a_check_is_asked_about_every_float():
    ops.softcap(X, 30.0)
    with pytest.raises(ValueError, match="softcap"):
        ops.softcap(X, -1.0)
    labels = torch.tensor([0, 1, 2, 3, 4, 5])
    ops.cross_entropy(X, labels)
    with pytest.raises(ValueError, match="label_smoothing"):
        ops.cross_entropy(X, labels, label_smoothing=7.0)


def test_a_when_is_asked_about_every_float():
    weight, labels = torch.randn(20, 8), torch.randint(0, 20, (6,))
    with backend("aten"):
        ops.linear_cross_entropy(X, weight, labels)
        with pytest.raises(contract.BackendError, match="it has no label smoothing"):
            ops.linear_cross_entropy(X, weight, labels, label_smoothing=0.3)
    smoothed = ops.linear_cross_entropy(X, weight, labels, label_smoothing=0.3)
    torch.testing.assert_close(smoothed, ops.linear_cross_entropy.definition(X, weight, labels, label_smoothing=0.3))


def test_two_values_of_an_option_are_two_signatures():
    seed = torch.tensor(3)
    ops.dropout.plans.clear()
    for p in (0, 0.1, 0.0):
        ops.dropout(torch.ones(4), seed, p)
    assert len(ops.dropout.plans) == 2


@pytest.mark.usefixtures("outside")
def test_optional_numbers_and_lists_are_part_of_a_signature():
    asked = []

    @operator(cases=cases(lambda make, n: dict(x=make.normal(n), dims=[0]), check=[(3,)]))
    def scaled_sum(x: torch.Tensor, dims: list[int], scale: float | None = None) -> torch.Tensor:
        return x.sum(dims) * (1 if scale is None else scale)

    implements(scaled_sum, backend="mine", when=lambda dims, scale: asked.append((tuple(dims), scale)) or True)(
        scaled_sum.definition
    )
    with backend("mine"):
        for dims, scale in (([0], None), ([1], None), ([1], 2), ([1], 2.0), ([0, 1], True)):
            assert torch.equal(scaled_sum(X, dims, scale), scaled_sum.definition(X, dims, scale))
    assert asked == [((0,), None), ((1,), None), ((1,), 2.0), ((0, 1), 1.0)]


def test_autocast_is_part_of_a_signature():
    x, weight = torch.randn(4, 8), torch.randn(5, 8)
    for name in ("torch", "aten", "triton"):
        with backend(name):
            found = [ops.linear(x, weight).dtype]
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast("cpu", dtype=dtype):
                    found.append(ops.linear(x, weight).dtype)
            found.append(ops.linear(x, weight).dtype)
        assert found == [torch.float32, torch.bfloat16, torch.float16, torch.float32]
