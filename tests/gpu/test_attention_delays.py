"""Hopper's attention with delays at its barriers, over and over: every run has the bits of the first, dq but for its order.

Racecheck does not follow barriers and TMA; `delayed_kernels.py` makes the orders in which a missing wait would show.
"""

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from delayed_kernels import delayed
from test_attention_repeats import ENDS, TOGETHER, differences

from tilestack.contract.cases import Make
from tilestack.kernels.attention.documents import document_bounds
from tilestack.kernels.hopper import attention_backward, attention_codes, attention_forward
from tilestack.kernels.hopper.attention_forward import Forward

RUNS, SECONDS = 2000, 1.5  # of each test; whichever comes first ends it
BATCH, TOKENS, HEADS, KV_HEADS = 3, 1000, 6, 2


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Gluon's kernels are for Hopper, which this GPU is not")


@pytest.fixture
def drawn():
    make = Make(torch.bfloat16, "cuda")
    return lambda dim: [make.normal(BATCH, TOKENS, heads, dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def bounds_of(documents: bool):
    ends = torch.tensor(ENDS, dtype=torch.int32, device="cuda") if documents else None
    return document_bounds(ends, BATCH, TOKENS)


def check_repeats(run: Callable, shipped: Callable, unlike: Callable) -> None:
    """Runs with delays have the bits of the first of them, which is what the kernel gives without."""
    first, until = run(), time.monotonic() + SECONDS
    for found, expected in zip(first, shipped(), strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=2**-10)
    differing = torch.zeros(len(first), dtype=torch.int64, device="cuda")
    for number in range(1, RUNS + 1):
        differing += unlike(run(), first)
        if number % TOGETHER == 0:
            assert not differing.any(), f"runs that differ of {number}: {differing.tolist()}"
            if time.monotonic() > until:
                break


def in_any_bit(found, first):
    return torch.stack([(one != other).any() for one, other in zip(found, first, strict=True)])


@pytest.mark.parametrize(
    ("dim", "config", "documents"),
    [
        (64, Forward(slots=3, ping_pong=True), False),
        (64, Forward(), True),
        (128, Forward(), False),
    ],
    ids=str,
)
def test_forward(dim, config, documents, drawn, tmp_path):
    q, k, v, _ = drawn(dim)
    given = q, k, v, True, dim**-0.5, config, bounds_of(documents)
    made = delayed(attention_forward, tmp_path)
    check_repeats(
        lambda: made.attention_and_lse(*given), lambda: attention_forward.attention_and_lse(*given), in_any_bit
    )


@pytest.mark.parametrize(("dim", "documents"), [(64, False), (128, True)])
def test_backward(dim, documents, drawn, tmp_path):
    q, k, v, grad = drawn(dim)
    bounds = bounds_of(documents)
    out, lse = attention_forward.attention_and_lse(q, k, v, True, dim**-0.5, Forward(), bounds)
    given = grad, q, k, v, out, lse, True, dim**-0.5, bounds
    made = delayed(attention_backward, tmp_path)
    check_repeats(
        lambda: (out, *made.gradients(*given)),
        lambda: (out, *attention_backward.gradients(*given)),
        partial(differences, in_one_order=False),
    )


@pytest.mark.parametrize(("codes", "values"), [(torch.int8, "same"), (torch.float8_e4m3fn, "fp8")])
def test_codes(codes, values, drawn, tmp_path):
    q, k, v, _ = drawn(128)
    given = q, k, v, None, True, None, codes, values, attention_codes.Config(ping_pong=True)
    made = delayed(attention_codes, tmp_path)
    check_repeats(
        lambda: (made.attention_of_codes(*given),), lambda: (attention_codes.attention_of_codes(*given),), in_any_bit
    )
