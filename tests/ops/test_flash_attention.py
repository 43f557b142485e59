"""The Triton rung of attention in the interpreter: what its tiles skip, and gradients that are the same in every run."""

import itertools

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tilestack import BackendError, ops
from tilestack.contract import backend
from tilestack.contract.cases import Make
from tilestack.kernels.attention.documents import document_bounds
from tilestack.lab.proof.claims import claims
from tilestack.lab.proof.oracle import root_mean_square
from tilestack.lab.proof.verify import prove


def results(chosen, arguments, options):
    leaves = [arguments[name].detach().requires_grad_() for name in "qkv"]
    with backend(attention=chosen):
        out = ops.attention(*leaves, **options)
    arriving = Make(torch.float32, seed=9).normal(*out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, arriving)]


def drawn(batch, queries, keys, heads, kv_heads, dim):
    make = Make(torch.float32)
    shape = lambda tokens, count: make.normal(batch, tokens, count, dim)
    return dict(q=shape(queries, heads), k=shape(keys, kv_heads), v=shape(keys, kv_heads))


@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [
        (70, 70, dict(window=9)),
        (40, 75, dict(window=20, causal=False)),
        (75, 40, dict(causal=False)),
        (1, 50, dict(softcap=3.0)),
        (60, 60, dict(softcap=1.0, window=33)),
    ],
    ids=str,
)
def test_tiles_that_are_skipped_held_nothing(queries, keys, options):
    arguments = drawn(1, queries, keys, 2, 1, 16)
    for found, expected in zip(*(results(name, arguments, options) for name in ("triton", "torch")), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_documents_across_tiles_are_as_if_alone():
    ends = [0, 3, 40, 41, 80, 80, 100, 160, 160]  # two rows of 80; some documents are empty
    arguments = drawn(2, 80, 80, 2, 1, 16)
    whole = results("triton", arguments, dict(cu_seqlens=torch.tensor(ends, dtype=torch.int32)))
    arriving = Make(torch.float32, seed=9).normal(2, 80, 2, 16).flatten(0, 1)
    for start, end in itertools.pairwise(ends):
        if start == end:
            continue
        leaves = [arguments[name].flatten(0, 1)[None, start:end].requires_grad_() for name in "qkv"]
        out = ops.attention(*leaves)
        alone = [out.detach(), *torch.autograd.grad(out, leaves, arriving[None, start:end])]
        for found, expected in zip(whole, alone, strict=True):
            torch.testing.assert_close(found.flatten(0, 1)[None, start:end], expected, rtol=1e-4, atol=1e-5)


def test_bounds_of_documents_are_counted_from_their_row():
    bounds = document_bounds(torch.tensor([0, 2, 2, 5, 6, 10, 10]), 2, 5)
    assert bounds[..., 0].tolist() == [[0, 0, 2, 2, 2], [0, 1, 1, 1, 1]]
    assert bounds[..., 1].tolist() == [[2, 2, 5, 5, 5], [1, 5, 5, 5, 5]]


def test_bounds_of_documents_of_more_tokens_than_a_program_has():
    ends, token = torch.tensor([0, 3, 129, 130, 150, 257, 300]), torch.arange(300)
    document, row = torch.searchsorted(ends, token, right=True) - 1, token // 150 * 150
    expected = torch.stack([ends[document] - row, ends[document + 1] - row], 1)
    assert torch.equal(document_bounds(ends, 2, 150).flatten(0, 1).long(), expected)


def test_heads_before_tokens_are_read_where_they_lie(monkeypatch):
    """(B, H, S, D) by strides: nothing is copied on the way in."""
    arguments = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in drawn(1, 20, 20, 2, 2, 16).items()}
    expected = results("torch", arguments, {})
    copies = []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self, *_, **__: copies.append(self) or self.clone())
    with torch.no_grad(), backend(attention="triton"):
        found = ops.attention(**arguments)
    assert not copies
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("chosen", "case"),
    [
        *((name, "2x1x13x2x1x16x16xcausal") for name in ("triton", "triton_standard", "triton_blocked")),
        ("aten", "2x70x300x2x1x128x128xcausal"),
    ],
)
def test_scores_in_the_thousands_are_rounded_no_more_than_the_definitions(chosen, case):
    """Two of these rows' scores are close, and near 2,600: one rounding more of each query shows in their difference."""
    cpu, kinds = torch.device("cpu"), ("check", "gpu")
    tried = claims([ops.attention], cpu, only=dict(attention=chosen), dtypes=[torch.float32], kinds=kinds)
    proofs = [prove(c) for c in tried if c.variant == "large" and c.case.name == case]
    assert [proof for proof in proofs if proof.ok is False] == []
    assert any(proof.ok for proof in proofs)


def one_after_the_other(total, a, b):
    """total + a @ b in float32 as cores that are not tensor cores add it up: products in their order, each rounded."""
    for k in range(a.shape[-1]):
        total = (total + a[..., :, k : k + 1].astype(np.float64) * b[..., k : k + 1, :]).astype(np.float32)
    return total


@pytest.mark.parametrize("chosen", ["triton", "triton_standard", "triton_blocked"])
def test_long_sums_of_float32_are_made_in_parts(chosen, monkeypatch):
    """Scores of a head of 128 lose more digits in one sum than cuBLAS' do, which large ones show."""
    given = drawn(1, 40, 40, 1, 1, 128)
    q, k, v = (given[name][0, :, 0].numpy() for name in "qkv")
    truth = ops.attention(**{name: x.double() for name, x in given.items()}, scale=0.3, causal=False)
    scores = one_after_the_other(np.zeros((40, 40), np.float32), q * np.float32(0.3), k.T)
    whole = (torch.from_numpy(scores).double().softmax(-1) @ torch.from_numpy(v).double())[None, :, None]

    def create_dot(self, a, b, total, *_):
        return TensorHandle(one_after_the_other(total.data, a.data, b.data), total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    with torch.no_grad(), backend(attention=chosen):
        found = ops.attention(**given, scale=0.3, causal=False)
    assert root_mean_square(found - truth) < 0.6 * root_mean_square(whole - truth)


@pytest.mark.parametrize("name", ["triton", "triton_blocked", "triton_standard"])
def test_more_heads_than_a_grid_has_room_for_are_left_to_others(name):
    """CUDA's grids are no longer than 65,535 along their second and third sides."""
    one = Make(torch.float32).normal(1, 1, 2, 16)
    q = one.expand(32768, 1, 2, 16)
    with backend(attention=name), pytest.raises(BackendError, match=r"65,535 heads of a batch, not for 32,768 · 2"):
        ops.attention(q, q, q)
    torch.testing.assert_close(ops.attention(q, q, q), q)
