"""States of parameters that come back: to where they lay before, from another dtype, from a checkpoint in another order."""

import copy

import pytest
import torch

from tilestack import optim
from tilestack.optim.dynamic_map import decoded_state

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


def test_8bit_moments_follow_a_parameter_to_float64_and_back(path):
    """Which has no moments in 8 bits. Codes taken for values would be up to 255."""
    ours, theirs = (torch.nn.Parameter(drawn(0, 8, 40)) for _ in range(2))
    optimizer = optim.AdamW8bit([ours], lr=0.01, min_8bit_size=64)
    reference = torch.optim.AdamW([theirs], lr=0.01)
    for number, dtype in enumerate((torch.float32, torch.float64, torch.float32)):
        ours.data = ours.data.to(dtype)
        for each, stepping in ((ours, optimizer), (theirs, reference)):
            stepped(stepping, each, number)
        wanted = {"step", "exp_avg", "exp_avg_sq"}
        wanted |= {"exp_avg_scale", "exp_avg_sq_scale"} if dtype == torch.float32 else set()
        assert optimizer.state[ours].keys() == wanted
        off = (ours - theirs).detach().abs().max()  # a step moves a number by 0.01 or so
        assert float(off) < 0.005


def moment_of(optimizer, param):
    state = optimizer.state[param]
    return decoded_state(state["exp_avg"], state["exp_avg_scale"], "exp_avg")


@pytest.mark.parametrize("turned", [True, False], ids=["was turned", "is turned"])
def test_8bit_moments_of_a_checkpoint_in_another_order_of_memory(turned):
    """Blocks are runs of the memory that was saved: their scales belong to other elements of a tensor laid out anew."""
    weight, rising = drawn(0, 24, 40), torch.logspace(-3, 3, 40)
    lay = lambda turned: torch.nn.Parameter(weight.t().contiguous().t() if turned else weight.clone())
    before, after, full = lay(turned), lay(not turned), lay(not turned)
    saved = optim.AdamW8bit([before], min_8bit_size=64)
    before.grad = torch.empty_like(before).copy_(rising * drawn(1, 24, 40))
    saved.step()
    wanted = moment_of(saved, before)
    state = copy.deepcopy(saved.state_dict())
    plain, quantised = optim.AdamW([full]), optim.AdamW8bit([after], min_8bit_size=64)
    plain.load_state_dict(state)
    assert torch.equal(plain.state[full]["exp_avg"], wanted)
    quantised.load_state_dict(state)
    found = moment_of(quantised, after)
    assert found.stride() == after.stride()
    largest = wanted.abs().max()  # of which a part of 64 is the widest gap between two codes
    assert float((found - wanted).abs().max()) <= float(largest) * 0.45 / 64 * 1.01


def test_8bit_moments_of_a_checkpoint_in_the_same_order_are_taken_to_the_code():
    """A dimension of one has a stride too, which means nothing."""
    before, after = (torch.nn.Parameter(drawn(0, 24, 1, 40)) for _ in range(2))
    after.data = after.data.as_strided((24, 1, 40), (40, 7, 1))
    saved = optim.AdamW8bit([before], min_8bit_size=64)
    stepped(saved, before, 1)
    resumed = optim.AdamW8bit([after], min_8bit_size=64)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    for name, value in saved.state[before].items():
        assert torch.equal(resumed.state[after][name], value)
