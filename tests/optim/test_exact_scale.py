"""Factors on the device reach half-precision tensors with all their bits.

On CUDA a 0-dim float32 tensor is rounded to bfloat16 before it is multiplied; a CPU does not show it. So the operators that
are called are looked at: none may meet a half-precision tensor with a wider one that has no dimension.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilestack import optim
from tilestack.optim.exact_scale import divide_exactly_, scale_exactly_

HALVES = torch.bfloat16, torch.float16
SCALING = "mul", "div"


class RoundedFactors(TorchDispatchMode):
    """Collects the operators in which CUDA would round a factor."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        halves = any(x.dtype in HALVES and x.ndim for x in tensors)
        scalars = any(x.dtype in (torch.float32, torch.float64) and not x.ndim for x in tensors)
        if halves and scalars and any(word in function.__name__ for word in SCALING):
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize(("scale", "plain"), [(scale_exactly_, torch.mul), (divide_exactly_, torch.div)])
def test_a_factor_keeps_its_bits_and_the_result_is_rounded_once(dtype, scale, plain):
    torch.manual_seed(0)
    factor = torch.tensor(1.0029)  # 1 in bfloat16
    tensors = [torch.randn(shape, dtype=dtype) for shape in ((5, 7), (3,), (), (0,))] + [torch.randn(4, 6).to(dtype).T]
    wide = torch.promote_types(dtype, torch.float32)
    expected = [plain(x.to(wide), factor.to(wide)).to(dtype) for x in tensors]
    with RoundedFactors() as looked:
        scale(tensors, factor)
    assert not looked.found
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("scale", "plain"), [(scale_exactly_, torch.mul), (divide_exactly_, torch.div)])
def test_every_number_of_half_precision_is_rounded_once(dtype, scale, plain):
    """A product with a divisor's reciprocal is rounded before, which some of the numbers show."""
    numbers = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    factor = torch.tensor(0.3)
    expected = plain(numbers.float(), factor).to(dtype)
    scale([numbers], factor)
    assert torch.equal(numbers, expected)


def test_clipping_rounds_no_factor():
    params = [torch.nn.Parameter(torch.zeros(9, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    for param in params:
        param.grad = torch.ones_like(param)
    with RoundedFactors() as looked:
        optim.clip_grad_norm_(params, 1.0)
    assert not looked.found
    assert float(params[1].grad[0]) < 0.3
