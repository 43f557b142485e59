"""The bound bites: what is wrong by a little everywhere is refused, and what says nothing is not counted."""

import pytest
import torch

from tilestack import ops
from tilestack.lab.proof.oracle import judge, own_error, silent

HALVES = [torch.float16, torch.bfloat16]
SAMPLES = {
    "rms_norm": dict(x=3.0, weight=1.0),
    "layer_norm": dict(x=3.0, weight=1.0, bias=1.0),
    "gelu": dict(x=1.0),
    "silu": dict(x=1.0),
    "softmax": dict(x=4.0),
    "log_softmax": dict(x=4.0),
}
WRONG = {
    "one percent too large": lambda truth: truth * 1.01,
    "one percent too small": lambda truth: truth * 0.99,
    "an offset of five percent": lambda truth: truth + 0.05 * truth.abs().mean(),
}


def standards(name, dtype):
    torch.manual_seed(0)
    shape = lambda argument: (64, 1000) if argument == "x" else (1000,)
    operator = ops.operator_named(name)
    given = operator.bind(**{a: (torch.randn(shape(a)) * scale).to(dtype) for a, scale in SAMPLES[name].items()})
    exact = {a: v.double() if isinstance(v, torch.Tensor) else v for a, v in given.items()}
    reference, truth = operator.definition(**given), operator.definition(**exact)
    return reference, truth, own_error(reference, truth)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_little_wrong_everywhere_is_refused_in_half_precision(name, dtype):
    reference, truth, own = standards(name, dtype)
    assert not judge(truth.to(dtype), reference, truth, own).message
    for what, change in WRONG.items():
        assert judge(change(truth).to(dtype), reference, truth, own).message, what


@pytest.mark.parametrize("dtype", HALVES)
def test_fair_rounding_is_accepted_however_often(dtype):
    for seed in range(200):
        truth = torch.randn(4096, generator=torch.Generator().manual_seed(seed)).double()
        rounded = truth.to(dtype)
        another = (truth * (1 + torch.finfo(torch.float32).eps)).to(dtype)
        assert not judge(another, rounded, truth, own_error(rounded, truth)).message


def test_rows_of_small_probabilities_are_held_to_their_own_size():
    truth = torch.full((4, 1000), 1e-3, dtype=torch.float64)
    truth[:, 0] = 0.5
    reference = truth.half()
    off = truth.clone()
    off[:, 1:] *= 1.3
    assert judge(off.half(), reference, truth, own_error(reference, truth)).message


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([0.0, 0.0], "all of it is zero"),
        ([torch.nan, -torch.inf], "nothing in it is finite"),
        ([0.0, torch.nan], "all of it is zero"),
        ([0.0, 1.0], ""),
        ([], ""),
    ],
)
def test_what_says_nothing(values, reason):
    assert silent(torch.tensor(values), torch.tensor(values, dtype=torch.float64)) == reason
    whole = torch.tensor([int(v) for v in values if v == v and abs(v) < 9])
    assert bool(silent(whole, whole)) == (whole.numel() > 0 and not whole.any())


def test_infinity_is_open_only_where_the_truth_is_as_large_as_the_largest_number():
    largest = torch.finfo(torch.float16).max
    truth = torch.tensor([1.0, largest * 1.0001, -largest * 1.0001]).double()
    finite, infinite = truth.clamp(-largest, largest).half(), torch.tensor([1.0, torch.inf, -torch.inf]).half()
    for reference, result in ((finite, infinite), (infinite, finite), (infinite, infinite)):
        assert not judge(result, reference, truth, own_error(reference, truth)).message
    for wrong in (torch.tensor([torch.inf, largest, -largest]), torch.tensor([1.0, -torch.inf, -largest])):
        assert "inf in one" in judge(wrong.half(), finite, truth, own_error(finite, truth)).message
    truth = torch.tensor([1.0, torch.inf]).double()
    assert judge(torch.tensor([1.0, largest]).half(), truth.half(), truth, (0.0,) * 4).message


def test_a_nan_that_a_library_spreads_need_not_be_spread():
    truth = torch.tensor([1.0, float("nan"), 3.0], dtype=torch.float64)
    spread = torch.tensor([1.0, float("nan"), float("nan")])
    own = own_error(spread, truth)
    assert not judge(truth.float(), spread, truth, own).message
    assert not judge(spread, spread, truth, own).message
    for wrong in ([1.0, 2.0, 3.0], [float("nan"), float("nan"), 3.0]):
        assert "NaN" in judge(torch.tensor(wrong), spread, truth, own).message
    assert judge(torch.tensor([1.0, float("nan"), 7.0]), spread, truth, own).message, (
        "what it is not is held to the truth"
    )
