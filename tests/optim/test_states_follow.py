"""States when parameters, groups and checkpoints change under them: they follow, or the change is refused."""

import copy

import pytest
import torch

from tilestack import backend, optim

MAKERS = {
    "SGD": lambda home, params: home.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda home, params: home.AdamW(params, lr=0.1, amsgrad=True),
}


def parameter(*shape, dtype=torch.float32, seed=0):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def give_gradient(param, seed):
    grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    param.grad = torch.empty_like(param).copy_(grad)


def stepped(make, *shape, steps=2, **kwargs):
    """A parameter and its optimizer after some steps."""
    param = parameter(*shape, **kwargs)
    optimizer = make([param])
    for step in range(steps):
        give_gradient(param, step)
        optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("name", MAKERS)
def test_states_follow_a_parameter_that_is_laid_out_anew(path, name):
    """As `model.to(memory_format=torch.channels_last)` does: the same numbers in another order in memory."""
    ours, theirs = (stepped(lambda p, home=home: MAKERS[name](home, p), 8, 40) for home in (optim, torch.optim))
    for param, optimizer in (ours, theirs):
        param.data = param.data.t().contiguous().t()
        for step in (2, 3):
            give_gradient(param, step)
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)


def test_8bit_moments_follow_a_parameter_that_is_laid_out_anew(path):
    """They are quantised a second time, in other blocks: they err at most twice as much as those that stay."""
    ends = []
    for make, anew in ((torch.optim.AdamW, False), (optim.AdamW8bit, False), (optim.AdamW8bit, True)):
        options = {} if make is torch.optim.AdamW else dict(min_8bit_size=64)
        param, optimizer = stepped(lambda p, make=make, options=options: make(p, lr=0.1, **options), 8, 40)
        if anew:
            param.data = param.data.t().contiguous().t()
        give_gradient(param, 2)
        optimizer.step()
        ends.append(param.detach())
    full, stayed, laid_anew = ends
    assert (laid_anew - full).abs().mean() <= 2 * (stayed - full).abs().mean()


@pytest.mark.parametrize("name", MAKERS)
def test_states_follow_a_parameter_that_is_cast(path, name):
    """Kernels read all tensors of a launch as of one dtype: one that is new beside one that was cast is not misread."""
    old, new, alone = parameter(300), parameter(300, seed=1), parameter(300, dtype=torch.float16, seed=1)
    optimizer = MAKERS[name](optim, [old, new])
    give_gradient(old, 0)
    optimizer.step()
    for param in (old, new):
        param.data, param.grad = param.data.half(), None
        give_gradient(param, 2)
    optimizer.step()
    give_gradient(alone, 2)
    with backend("torch"):
        MAKERS[name](optim, [alone]).step()
    torch.testing.assert_close(new, alone, rtol=2e-3, atol=0)
    assert not torch.equal(new, parameter(300, dtype=torch.float16, seed=1))


def test_amsgrad_is_switched_off_beside_a_master_copy(path):
    """The kernel's table holds what the group asks for, not all that an earlier setting has left."""
    make = lambda amsgrad: lambda p: optim.AdamW(p, lr=0.1, master_weights=True, amsgrad=amsgrad)
    (ours, optimizer), (theirs, plain) = (
        stepped(make(amsgrad), 300, steps=1, dtype=torch.float16) for amsgrad in (True, False)
    )
    optimizer.param_groups[0]["amsgrad"] = False
    for param, stepping in ((ours, optimizer), (theirs, plain)):
        give_gradient(param, 1)
        stepping.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("decoupled", [True, False])
def test_8bit_weight_decay_is_decoupled_or_not_as_the_group_says(path, decoupled):
    """After one step from zero the moments are exact, so that only rounding parts ours from torch's."""
    group = lambda params: [{"params": params, "decoupled_weight_decay": decoupled}]
    ours, _ = stepped(lambda p: optim.AdamW8bit(group(p), weight_decay=0.5, min_8bit_size=64), 300, steps=1)
    theirs, _ = stepped(lambda p: torch.optim.AdamW(group(p), weight_decay=0.5), 300, steps=1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [optim.AdamW, optim.AdamW8bit])
def test_moments_in_8_bits_are_decoded_by_who_keeps_them_in_full(path, make):
    """By AdamW, and by AdamW8bit where a parameter is too small for it. Codes taken for values would be up to 255."""
    param, quantised = stepped(lambda p: optim.AdamW8bit(p, min_8bit_size=64), 8, 40, steps=1)
    twin = parameter(8, 40)
    resumed = make([twin])
    resumed.load_state_dict(copy.deepcopy(quantised.state_dict()))
    assert resumed.state[twin].keys() == {"step", "exp_avg", "exp_avg_sq"}
    for name, moment in (("exp_avg", 0.1 * param.grad), ("exp_avg_sq", 0.001 * param.grad**2)):
        off = (resumed.state[twin][name] - moment).abs().max()
        assert off <= moment.abs().max() * 0.45 / 64 * 1.01
    give_gradient(twin, 1)
    resumed.step()
    assert resumed.state[twin]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("make", [
    lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    optim.AdamW,
    lambda params: optim.AdamW8bit(params, min_8bit_size=64),
    optim.Muon,
], ids=["SGD", "AdamW", "AdamW8bit", "Muon"])  # fmt: skip
def test_a_checkpoint_that_was_loaded_stays_as_it_was(path, make):
    """Whoever loads it again, or goes on with what it was taken from, finds what was saved."""
    _, first = stepped(make, 8, 40)
    saved = first.state_dict()
    kept = copy.deepcopy(saved["state"][0])
    param = parameter(8, 40)
    second = make([param])
    second.load_state_dict(saved)
    give_gradient(param, 2)
    second.step()
    assert all(torch.equal(saved["state"][0][name], value) for name, value in kept.items())
    assert not all(torch.equal(second.state[param][name], value) for name, value in kept.items())


@pytest.mark.parametrize("make", [optim.AdamW, optim.Muon])
def test_a_master_copy_in_a_checkpoint_does_not_overrule_who_keeps_none(path, make):
    _, saved = stepped(lambda p: make(p, master_weights=True), 8, 40, dtype=torch.float16)
    param = torch.nn.Parameter(torch.zeros(8, 40, dtype=torch.float16))
    resumed = make([param], lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    give_gradient(param, 2)
    resumed.step()
    assert "master_param" not in resumed.state[param]
    assert float(param.detach().abs().max()) < 0.1


def test_a_step_count_that_is_no_tensor_comes_to_the_device():
    """As in checkpoints of old, and where kernels read it: PyTorch makes it a tensor on the host."""
    _, saved = stepped(torch.optim.AdamW, 5)
    old = copy.deepcopy(saved.state_dict())
    old["state"][0]["step"] = 2
    param = torch.nn.Parameter(torch.empty(5, device="meta"))
    resumed = optim.AdamW([param])
    resumed.load_state_dict(old)
    assert resumed.state[param]["step"].device == param.device


def test_changes_that_no_state_can_follow_are_refused():
    weight = parameter(300)
    with pytest.raises(ValueError, match="no amsgrad"):
        optim.AdamW8bit([weight], amsgrad=True)
    with pytest.raises(ValueError, match="no amsgrad"):
        optim.AdamW8bit([{"params": [weight], "amsgrad": True}])
    _, running_maximum = stepped(lambda p: torch.optim.AdamW(p, amsgrad=True), 300)
    with pytest.raises(ValueError, match="no amsgrad"):
        optim.AdamW8bit([weight]).load_state_dict(running_maximum.state_dict())
    with (
        pytest.raises(ValueError, match="a parameter is twice in a group"),
        pytest.warns(UserWarning, match="duplicate"),
    ):
        optim.SGD([weight, weight], lr=0.1)
    for make in (torch.optim.AdamW, lambda p: optim.AdamW8bit(p, min_8bit_size=64)):
        _, other = stepped(make, 2, 300)
        with pytest.raises(ValueError, match=r"exp_avg of the shape \(2, 300\) for a parameter of \(300,\)"):
            optim.AdamW([weight]).load_state_dict(other.state_dict())
