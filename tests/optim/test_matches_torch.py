"""Each optimizer against torch.optim's: the same numbers, options, checkpoints and habits."""

import copy
import functools
import itertools

import pytest
import torch

from tilestack import backend, optim

EPS = torch.finfo(torch.float64).eps
SGD_OPTIONS = [
    dict(lr=0.1),
    dict(lr=0.1, weight_decay=0.1, maximize=True),
    dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    dict(lr=0.1, momentum=0.9, dampening=0.5),
    dict(lr=torch.tensor(0.1, dtype=torch.float64), momentum=0.5, maximize=True),
]
ADAM_OPTIONS = [
    dict(amsgrad=amsgrad, maximize=maximize, weight_decay=decay, lr=lr)
    for amsgrad, maximize, decay, lr in itertools.product(
        (False, True), (False, True), (0.0, 0.1), (1e-3, torch.tensor(1e-2, dtype=torch.float64))
    )
]
ALL = [("SGD", options) for options in SGD_OPTIONS] + [
    (name, options) for name in ("Adam", "AdamW") for options in ADAM_OPTIONS
]
FEW = [("SGD", SGD_OPTIONS[2]), ("Adam", ADAM_OPTIONS[2]), ("AdamW", ADAM_OPTIONS[-1])]


def makers(name, options):
    """How to build our optimizer and torch's of the same name."""
    return tuple(functools.partial(getattr(home, name), **options) for home in (optim, torch.optim))


def last_bits(steps, params, options):
    """How far two float64 runs of the same mathematics may part, per parameter element.

    A step rounds the parameter a few times, each by at most eps/2 of it. It moves the parameter by at most lr times a
    factor of 10 (the normalised Adam update and the momentum sum are below that here), and what it moves by is known to
    torch within eps / (2 (1 - β2)): the cancellation in 1 - β2 to the power of the step, whose root halves it. A dozen
    more roundings lie in the update. Steps add up.
    """
    relative = 0.25 / (1 - 0.999) + 0.5 / (1 - 0.9) + 12
    return [steps * EPS * (2 * param.detach().abs() + 10 * float(options["lr"]) * relative + 1e-9) for param in params]


@pytest.mark.parametrize(("name", "options"), FEW)
def test_float64_agrees_to_the_last_bits_over_100_steps(path, run, name, options):
    ours, theirs = (run(make, torch.float64, 100, small=path == "triton")[0] for make in makers(name, options))
    for a, b, bound in zip(ours, theirs, last_bits(100, theirs, options), strict=True):
        assert bool(((a - b).abs() <= bound).all())


@pytest.mark.parametrize(("name", "options"), ALL)
def test_every_option_in_float64(path, run, name, options):
    ours, theirs = (run(make, torch.float64, 3, small=path == "triton")[0] for make in makers(name, options))
    for a, b, bound in zip(ours, theirs, last_bits(3, theirs, options), strict=True):
        assert bool(((a - b).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), FEW)
def test_other_dtypes_err_no_more_than_torch(path, run, as_good_as, name, options, dtype):
    if path == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates what it casts to bfloat16")
    if name != "SGD" and dtype == torch.float16:
        options = options | dict(eps=1e-3)  # torch's own 1e-8 is zero in float16, and its step NaN
    mine, theirs = makers(name, options)
    as_good_as(run(mine, dtype)[0], run(theirs, dtype)[0], run(theirs, torch.float64, drawn=dtype)[0])


def test_float32_keeps_its_bound_over_100_steps(path, run, as_good_as):
    mine, theirs = makers("AdamW", dict(lr=1e-2))
    dtypes = torch.float32, torch.float32, torch.float64
    runs = zip((mine, theirs, theirs), dtypes, strict=True)
    as_good_as(*(run(make, dtype, 100, path == "triton", drawn=torch.float32)[0] for make, dtype in runs))


def test_mixed_dtypes_groups_and_missing_gradients(path):
    torch.manual_seed(0)
    tensors = [torch.randn(40, dtype=d) for d in (torch.float32, torch.float64, torch.float32, torch.float32)]
    results = []
    for home in (optim, torch.optim):
        params = [torch.nn.Parameter(t.clone()) for t in tensors]
        optimizer = home.AdamW([{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "weight_decay": 0.3}])
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            g = torch.Generator().manual_seed(step)
            for number, param in enumerate(params):
                grad = torch.randn(40, generator=g)
                param.grad = None if (number, step) in ((2, 0), (3, 1)) else grad.to(param.dtype)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert all(param.grad is None for param in params)
        results.append((params, [int(optimizer.state[param]["step"]) for param in params]))
    (ours, our_steps), (theirs, their_steps) = results
    assert our_steps == their_steps == [3, 3, 2, 2]
    for a, b in zip(ours, theirs, strict=True):
        assert bool(((a - b).abs() <= 3 * torch.finfo(a.dtype).eps * (a.abs() + 1)).all())


@pytest.mark.parametrize(("name", "options"), FEW)
@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_pass_to_torch_and_back(path, run, name, options, ours_first):
    first, second = makers(name, options)[:: 1 if ours_first else -1]
    params, saved = run(first, torch.float64, 2, small=path == "triton")
    clones = [torch.nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in params]
    resumed = second(clones)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert saved.state_dict()["param_groups"] == resumed.state_dict()["param_groups"]
    for _ in range(2):
        for param, clone in zip(params, clones, strict=True):
            param.grad = torch.ones_like(param)
            clone.grad = torch.ones_like(clone)
        saved.step()
        resumed.step()
    for a, b, bound in zip(params, clones, last_bits(2, clones, options), strict=True):
        assert bool(((a - b).abs() <= bound).all())
    names = [{key: type(value) for key, value in state.items()} for state in saved.state_dict()["state"].values()]
    assert names == [{k: type(v) for k, v in state.items()} for state in resumed.state_dict()["state"].values()]


def test_a_copy_keeps_the_options_and_goes_on_alone(path, run):
    params, optimizer = run(lambda p: optim.AdamW(p, clip_norm=0.5, seed=7), torch.float64, 2, small=path == "triton")
    twins, twin = copy.deepcopy((params, optimizer))
    assert (twin.clip_norm, twin.seed) == (0.5, 7)
    for pair in zip(params, twins, strict=True):
        for param in pair:
            param.grad = torch.ones_like(param)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(params, twins, strict=True) if a.numel())
    twin.step()
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_a_closure_is_evaluated_with_gradients_and_answered(path):
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = optim.SGD([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 9
    assert weight.item() == pytest.approx(2.4)


def test_gradients_of_another_memory_order(path):
    results = []
    for home in (optim, torch.optim):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(6, 8, dtype=torch.float64))
        optimizer = home.AdamW([param])
        for _ in range(2):
            param.grad = torch.randn(8, 6, dtype=torch.float64).t()
            optimizer.step()
        results.append(param.detach())
    torch.testing.assert_close(*results, rtol=1e-14, atol=1e-14)


def test_refusals_name_the_remedy():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradients only.*SparseAdam"):
        optim.AdamW(embedding.parameters()).step()
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="differentiated"):
        optim.Adam([weight], differentiable=True)
    with pytest.raises(ValueError, match="exclude each other"):
        optim.AdamW([weight], stochastic_rounding=True, master_weights=True)
    with pytest.raises(ValueError, match="learning rate"):
        optim.AdamW([weight], lr=-1)
    weight.grad = torch.ones(3)
    with backend(adamw="gluon"), pytest.raises(RuntimeError, match="adamw has no gluon backend; it has torch, triton"):
        optim.AdamW([weight]).step()
