"""States of parameters that come back to where they lay before."""

import pytest
import torch

from tilestack import optim

MAKERS = {
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: optim.AdamW(params, lr=0.1),
}


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(optimizer, param, seed):
    param.grad = torch.empty_like(param).copy_(drawn(seed, *param.shape))
    optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
def test_a_parameter_that_was_cast_is_known_where_it_lay_before(path, name):
    """Its address is that of the last float32 step; the states beside it are not."""
    ends = []
    for comes_back in (True, False):
        param = torch.nn.Parameter(drawn(0, 8, 40))
        optimizer, home = MAKERS[name]([param]), param.data
        stepped(optimizer, param, 1)
        param.data = param.data.bfloat16()
        stepped(optimizer, param, 2)
        param.data = home.copy_(param.data) if comes_back else param.data.float()
        stepped(optimizer, param, 3)
        ends.append(param.detach())
        kept = [value for key, value in optimizer.state[param].items() if key != "step"]
        assert path == "torch" or {value.dtype for value in kept} == {torch.float32}
    assert torch.equal(*ends)
