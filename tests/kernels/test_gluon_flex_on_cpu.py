"""flex_attention for Hopper proved on a CPU, by an emulation of Gluon: its log-sum-exp, and the gradient that arrives there."""

import pytest
import torch
from test_gluon_on_cpu import DOCUMENTS, READ_AS_THEY_LIE, SHAPES, emulated, inputs, rows_of_documents, wide

from tilestack import ops
from tilestack.contract.named import call_named
from tilestack.kernels.hopper.flex_attention import backward, flex_attention, takes
from tilestack.lab.proof.oracle import judge, own_error
from tilestack.ops.flex_attention import flex_attention_gradient

assert emulated  # the fixture, for all tests here


def bound(q, k, v, cu_seqlens, causal, window, scale, softcap):
    return ops.flex_attention.bind(q, k, v, cu_seqlens, causal=causal, window=window, scale=scale, softcap=softcap)


def check(arguments, lay=lambda x: x):
    """Hold results and gradients to the definition's, as `verify` does on a GPU."""
    given, exact = bound(*arguments), bound(*wide(arguments))
    assert call_named(takes, given) is True
    results = [
        [*flex_attention(*given.values())],
        *([*ops.flex_attention.definition(**each)] for each in (given, exact)),
    ]
    arriving = lay(torch.randn(results[0][0].shape).half()), torch.randn(results[0][1].shape)
    arriving[1][results[0][1].isinf()] = 3.0  # at a query that sees nothing it changes nothing
    found = dict(grad_out=arriving[0], grad_lse=arriving[1], out=results[0][0], lse=results[0][1])
    results[0] += call_named(backward, given | found)[:3]
    for each, made in ((given, results[1]), (exact, results[2])):
        grads = dict(
            zip(("grad_out", "grad_lse"), (x.to(y.dtype) for x, y in zip(arriving, made, strict=True)), strict=True)
        )
        made += call_named(flex_attention_gradient, each | grads | dict(out=made[0], lse=made[1]))[:3]
    for name, ours, reference, truth in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        error = own_error(reference, truth)
        assert not (message := judge(ours, reference, truth, error).message), f"{name}: {message}"


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_attention(shape):
    check(inputs(*SHAPES[shape]))


@pytest.mark.parametrize("documents", ["short ones", "rows, and empty ones at the end", "128"])
def test_packed_documents(documents):
    check(rows_of_documents(*DOCUMENTS[documents]))


@pytest.mark.parametrize("lie", ["heads before tokens", "beside keys and values"])
def test_what_lies_apart_in_memory(lie):
    lay = READ_AS_THEY_LIE[lie]
    q, k, v, *rest = inputs(2, 70, 70, 4, 2, 64, True, 0.3)
    check((lay(q), lay(k), lay(v), *rest), lay)


def test_large_scores():
    q, k, v, *rest = inputs(1, 100, 100, 2, 1, 128, True)
    check((q * 20, k * 20, v, *rest))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (dict(sinks=torch.zeros(2)), "no sinks, slopes"),
        (dict(slopes=torch.zeros(2)), "no sinks, slopes"),
        (dict(bias=torch.zeros(1, 1, 1, 100)), "no sinks, slopes"),
        (dict(blocks=torch.zeros(1, 1, 1, 1, dtype=torch.int32), tiles=torch.ones(0, 128, 128).bool()), "blocks"),
        (dict(seed=torch.tensor(1), dropout=0.1), "or dropout"),
        (dict(window=3), "no window"),
        (dict(softcap=2.0), "no softcap"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_is_left_to_triton(more, said):
    q, k, v, *_ = inputs(1, 100, 100, 2, 1, 64, True)
    assert said in call_named(takes, ops.flex_attention.bind(q, k, v, **more))
    assert call_named(takes, ops.flex_attention.bind(q, k, v, seed=torch.tensor(1))) is True  # nothing is dropped
