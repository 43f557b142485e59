"""Attention: what each query sees, against one query at a time; packed documents against separate ones; compiled."""

import itertools

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract import backend
from tilestack.contract.cases import Make
from tilestack.kernels.attention import aten as attention_aten
from tilestack.ops.attention import pairs_seen

each_backend = pytest.mark.parametrize("chosen", ["torch", "aten"])


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_at_a_time(q, k, v, sees, scale):
    """Each query of each head by itself, over the keys that sees(row, query, key) shows it."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    group = q.shape[2] // k.shape[2]
    for row, query, head in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        keys = [key for key in range(k.shape[1]) if sees(row, query, key)]
        weights = torch.softmax(k[row, keys, head // group] @ q[row, query, head] * scale, 0)
        out[row, query, head] = weights @ v[row, keys, head // group]
    return out


@each_backend
@pytest.mark.parametrize(
    ("queries", "keys", "options", "sees"),
    [
        (5, 5, {}, lambda row, i, j: j <= i),
        (3, 7, {}, lambda row, i, j: j <= i + 4),
        (1, 7, dict(window=3), lambda row, i, j: j >= 4),
        (6, 6, dict(window=2), lambda row, i, j: i - 2 < j <= i),
        (6, 6, dict(window=2, causal=False), lambda row, i, j: abs(i - j) < 2),
        (4, 9, dict(causal=False), lambda row, i, j: True),
        (7, 3, {}, lambda row, i, j: j <= i - 4),  # the first four see nothing
        (9, 3, dict(window=2), lambda row, i, j: i - 8 < j <= i - 6),
    ],
)
def test_a_query_sees_what_the_rules_show_it(queries, keys, options, sees, chosen):
    q, k, v = draw(2, queries, 4, 8), draw(2, keys, 2, 8, seed=1), draw(2, keys, 2, 6, seed=2)
    with backend(chosen):
        found = ops.attention(q, k, v, scale=0.5, **options)
    torch.testing.assert_close(found, one_at_a_time(q, k, v, sees, 0.5))


@each_backend
@pytest.mark.parametrize("options", [{}, dict(window=3), dict(causal=False)])
def test_packed_documents_are_as_if_alone(options, chosen):
    ends = [0, 2, 9, 10, 10, 16, 20, 20, 20]  # two rows of ten; empty documents within and at the end
    q, k, v = draw(2, 10, 4, 8), draw(2, 10, 2, 8, seed=1), draw(2, 10, 2, 8, seed=2)
    with backend(chosen):
        packed = ops.attention(q, k, v, torch.tensor(ends, dtype=torch.int32), **options).flatten(0, 1)
        for start, end in itertools.pairwise(ends):
            alone = ops.attention(*(x.flatten(0, 1)[None, start:end] for x in (q, k, v)), **options)
            torch.testing.assert_close(packed[None, start:end], alone)


def test_softcap_bounds_the_scores():
    q, k, v = draw(1, 3, 1, 4) * 100, draw(1, 3, 1, 4, seed=1), draw(1, 3, 1, 4, seed=2)
    scores = 5 * torch.tanh((q[0, :, 0] @ k[0, :, 0].T) / 2 / 5)
    expected = torch.softmax(scores.masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf), -1) @ v[0, :, 0]
    torch.testing.assert_close(ops.attention(q, k, v, softcap=5.0)[0, :, 0], expected)
    with backend("aten"), pytest.raises(contract.BackendError, match="no softcap"):
        ops.attention(q, k, v, softcap=5.0)


@each_backend
def test_it_compiles_whole_with_documents_and_gradients(chosen):
    ends = torch.tensor([0, 3, 8, 13, 16, 16], dtype=torch.int32)
    leaves = [draw(2, 8, heads, 8, seed=heads).float().requires_grad_() for heads in (4, 2, 2)]
    call = lambda q, k, v, ends: ops.attention(q, k, v, ends, window=4)
    torch.compiler.reset()
    results = []
    with backend(chosen):
        for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            out = function(*leaves, ends)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    with backend(chosen):
        torch.library.opcheck(torch.ops.tilestack.attention.default, (*leaves, ends))


def varying_lengths(q, k, v, of_q, of_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
    """What PyTorch's flash attention over sequences of varying length computes, which runs on CUDA alone."""
    assert enable_gqa
    assert {of_q.dtype, of_k.dtype} == {torch.int32}
    left, right = window_size
    rules = dict(causal=right == 0, window=None if left < 0 else left + 1, scale=scale)
    out = torch.full((*q.shape[:2], v.shape[2]), torch.nan, dtype=q.dtype)
    for (first, last), (start, end) in zip(*map(itertools.pairwise, (of_q.tolist(), of_k.tolist())), strict=True):
        assert last - first <= longest_q
        assert end - start <= longest_k
        out[first:last] = ops.attention(q[None, first:last], k[None, start:end], v[None, start:end], **rules)[0]
    return out


@pytest.mark.parametrize(
    "case", [c for c in ops.attention.cases if c.kind == "check" and "capped" not in c.name], ids=lambda c: c.name
)
def test_flash_attention_is_asked_for_the_same(case, monkeypatch):
    monkeypatch.setattr(attention_aten, "varying_lengths", lambda: (varying_lengths, dict(enable_gqa=True)))
    arguments = ops.attention.bind(**case.build(Make(torch.float32)))
    del arguments["softcap"]
    torch.testing.assert_close(attention_aten.flash(**arguments), ops.attention(**arguments))


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((1, 2, 3, 8), (1, 2, 2, 8), (1, 2, 2, 8)), {}, "multiple"),
        (((1, 2, 2, 8), (1, 2, 2, 4), (1, 2, 2, 8)), {}, "agree in batch and dim"),
        (((1, 2, 2, 8), (1, 2, 2, 8), (1, 3, 2, 8)), {}, "k and v"),
        (((1, 2, 2, 8), (1, 2, 2, 8), (1, 2, 2, 8)), dict(window=0), "1 or more"),
        (((1, 2, 2, 8), (1, 3, 2, 8), (1, 3, 2, 8)), dict(cu_seqlens=torch.tensor([0, 2])), "as many keys"),
        (((1, 2, 2, 8), (1, 2, 2, 8), (1, 2, 2, 8)), dict(cu_seqlens=torch.tensor([0.0, 2.0])), "int32 or int64"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(shapes, options, message):
    with pytest.raises(ValueError, match=f"attention: .*{message}"):
        ops.attention(*(torch.zeros(shape) for shape in shapes), **options)


@pytest.mark.parametrize(
    ("queries", "window", "flashes"), [(12, 5, False), (12, 4, False), (12, 3, True), (3, 5, True)]
)
def test_a_window_wider_than_the_keys_is_kept_where_queries_come_long_before_them(
    monkeypatch, queries, window, flashes
):
    """FlashAttention takes such a window for none, and lets queries that see nothing see everything."""
    arguments = dict(
        q=torch.randn(1, queries, 1, 8),
        k=torch.randn(1, 3, 1, 8),
        v=torch.randn(1, 3, 1, 8),
        causal=False,
        window=window,
    )
    expected = ops.attention(**arguments)
    asked = []
    monkeypatch.setattr(attention_aten, "has_flash", lambda q, v: True)
    monkeypatch.setattr(attention_aten, "varying_lengths", lambda: (attention_aten.flash, {}))
    monkeypatch.setattr(attention_aten, "flash", lambda *given: asked.append(given) or expected)
    with backend(attention="aten"):
        torch.testing.assert_close(ops.attention(**arguments), expected)
    assert bool(asked) is flashes


@pytest.mark.parametrize("length", [attention_aten.BLOCK, attention_aten.BLOCK + 1, 3 * attention_aten.BLOCK - 5])
def test_blocks_of_queries_on_the_cpu_are_the_whole(length):
    make = Make(torch.float64)
    q, k, v, grad = (make.normal(2, length, heads, 8).requires_grad_() for heads in (4, 2, 2, 4))
    with backend(attention="aten"):
        out = ops.attention(q, k, v, scale=0.3)
    expected = ops.attention.definition(q, k, v, scale=0.3)
    torch.testing.assert_close(out, expected)
    found, gradients = (torch.autograd.grad(result, (q, k, v), grad) for result in (out, expected))
    torch.testing.assert_close(found, gradients)


def test_the_cost_counts_the_pairs_that_are_seen():
    q = torch.empty(2, 10, 1, 4)
    count = lambda **rules: pairs_seen(q, q, **dict(cu_seqlens=None, causal=True, window=None) | rules)
    assert count() == 2 * 55
    assert count(causal=False) == 200
    assert count(window=3) == 2 * (1 + 2 + 3 * 8)
    assert count(cu_seqlens=torch.tensor([0, 4, 10, 20, 20])) == 10 + 21 + 55
    assert pairs_seen(q[:, :2], q, None, True, None) == 2 * 19


class Recorder(torch.autograd.Function):
    """Stands for PyTorch's fused kernel: notes, in both directions, whether PyTorch is strict about determinism."""

    seen: list[tuple[bool, bool]] = []

    @staticmethod
    def note():
        mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        Recorder.seen.append(mode)

    @staticmethod
    def forward(ctx, q, k, v):
        Recorder.note()
        return q + k + v

    @staticmethod
    def backward(ctx, grad):
        Recorder.note()
        return grad, grad, grad


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("asked", "while_it_runs"),
    [((True, True), (True, False)), ((True, False), (True, False)), ((False, False), (False, False))],
    ids=["warns", "strict", "free"],
)
def test_fused_kernels_are_strict_where_pytorch_would_only_warn(monkeypatch, documents, asked, while_it_runs):
    """Their backward has one order if PyTorch is strict, and another in every run if it may warn and go on."""
    fused = lambda q, k, v, *_, **__: Recorder.apply(q, k, v)
    monkeypatch.setattr(attention_aten, "has_flash", lambda q, v: True)
    monkeypatch.setattr(attention_aten, "varying_lengths", lambda: (fused, {}))
    monkeypatch.setattr(attention_aten.F, "scaled_dot_product_attention", fused)
    monkeypatch.setattr(attention_aten, "BLOCK", 8)
    Recorder.seen.clear()
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32) if documents else None
    leaves = [draw(1, 8, 2, 16, seed=seed).half().requires_grad_() for seed in range(3)]
    torch.use_deterministic_algorithms(asked[0], warn_only=asked[1])
    try:
        with backend(attention="aten"):
            ops.attention(*leaves, offsets).sum().backward()
        Recorder.note()
    finally:
        torch.use_deterministic_algorithms(False)
    assert Recorder.seen == [while_it_runs, while_it_runs, asked]
    assert all(torch.equal(leaf.grad, torch.ones_like(leaf)) for leaf in leaves)


@pytest.mark.parametrize(("width", "of_values"), [(24, 16), (16, 24)])
def test_heads_of_two_widths_go_to_the_fused_kernel_as_one_width_where_bits_must_repeat(monkeypatch, width, of_values):
    """PyTorch's other fused kernels add up gradients in another order in every run, and FlashAttention takes one width."""
    heads = ((width, 0), (width, 1), (of_values, 2))
    leaves = [draw(2, 8, 4, size, seed=seed).bfloat16().requires_grad_() for size, seed in heads]
    widths, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def noting(q, k, v, **options):
        widths.append((q.shape[3], k.shape[3], v.shape[3]))
        return sdpa(q, k, v, **options)

    monkeypatch.setattr(attention_aten.F, "scaled_dot_product_attention", noting)
    results = []
    for repeats in (False, True):
        torch.use_deterministic_algorithms(repeats, warn_only=True)
        try:
            with backend(attention="aten"):
                out = ops.attention(*leaves)
            results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
        finally:
            torch.use_deterministic_algorithms(False)
    assert widths == [(width, width, of_values), (24, 24, 24)]
    assert results[1][0].is_contiguous() or results[1][0].stride() == results[0][0].stride()
    for usual, padded in zip(*results, strict=True):
        torch.testing.assert_close(usual, padded)
