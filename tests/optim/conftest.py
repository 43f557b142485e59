"""What the optimizers' tests share: parameters of awkward shapes, runs of some steps, and the bound on their error."""

import pytest
import torch

from tilestack import backend
from tilestack.contract.backends import usable

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "triton"])
def path(request):
    """The definition, and the kernels in Triton's interpreter."""
    if (reason := usable(request.param, CPU)) is not True:
        pytest.skip(str(reason))
    with backend(request.param):
        yield request.param


def draw(shape, dtype, generator):
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


@pytest.fixture
def awkward():
    """Parameters that are empty, single, odd, longer than a block, transposed, strided, off 16 bytes."""

    def make(dtype, drawn=None):
        g = torch.Generator().manual_seed(0)
        tensors = [
            draw((1100,), drawn or dtype, g).to(dtype),
            draw((0, 3), drawn or dtype, g).to(dtype),
            draw((), drawn or dtype, g).to(dtype),
            draw((7, 13), drawn or dtype, g).to(dtype),
            draw((8, 6), drawn or dtype, g).to(dtype).t(),
            draw((10, 9), drawn or dtype, g).to(dtype)[::2, ::3],
            draw((601,), drawn or dtype, g).to(dtype)[1:],
        ]
        return [torch.nn.Parameter(tensor) for tensor in tensors]

    return make


@pytest.fixture
def run(awkward):
    """Builds an optimizer on awkward parameters (or two small ones, which the interpreter walks in bearable time) and
    takes some steps with fixed gradients; answers both. Values are `drawn` in another dtype where this is the truth for
    it, so that both start from the same numbers."""

    def steps(make, dtype=torch.float32, count=3, small=False, drawn=None):
        params = awkward(dtype, drawn)[2:4] if small else awkward(dtype, drawn)
        optimizer = make(params)
        g = torch.Generator().manual_seed(1)
        for _ in range(count):
            for param in params:
                param.grad = draw(param.shape, torch.float32, g).to(drawn or dtype).to(dtype)
            optimizer.step()
        return params, optimizer

    return steps


@pytest.fixture
def as_good_as():
    """Checks ours against float64 truth: at most twice torch's own error, plus one unit in the last place."""

    def check(ours, theirs, truth):
        for a, b, c in zip(ours, theirs, truth, strict=True):
            a, b, c = (x.detach().double() for x in (a, b, c))
            own = (b - c).abs().max() if b.numel() else torch.tensor(0.0)
            unit = torch.finfo(ours[0].dtype).eps * c.abs()
            assert a.shape == c.shape
            assert bool(((a - c).abs() <= 2 * own + unit).all()), f"off by {(a - c).abs().max()}, torch by {own}"

    return check
