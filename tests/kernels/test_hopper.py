"""What surrounds the Hopper kernels and runs without their GPU: how tensors must lie, and the small kernels beside them."""

import pytest
import torch
from gluon_emulation import refuse_what_tma_cannot_move

from tilestack import ops
from tilestack.contract.launch import launch
from tilestack.contract.named import call_named
from tilestack.kernels.hopper.attention import CONFIGS, takes
from tilestack.kernels.hopper.attention_backward import prepare_kernel, round_kernel
from tilestack.kernels.hopper.attention_tiles import as_tma_reads, empty_as, tiles_of


def heads(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_single_query_is_not_for_cudnn(tokens):
    """Its backward crashed the process there."""
    q = heads(1, tokens, 2, 64)
    assert CONFIGS["cudnn_backward"].goes_back_by_cudnn(q, q, None) == (tokens > 1)
    assert (CONFIGS["cudnn"].forward(q, q, None) is None) == (tokens > 1)


@pytest.mark.parametrize(
    "lies",
    [
        lambda: heads(2, 6, 4, 128),
        lambda: heads(2, 6, 12, 128)[:, :, 4:8],  # a part of queries, keys and values in one piece
        lambda: heads(2, 9, 4, 128)[:, 2:8],
        lambda: heads(2, 4, 6, 128).transpose(1, 2),
        lambda: heads(6, 2, 4, 128).transpose(0, 1),
        lambda: heads(2, 6, 3, 4, 128)[:, :, 1],
        lambda: heads(2, 6, 4, 136)[..., :128],
        lambda: heads(2, 6, 4, 128)[:1, :, :1].as_strided((1, 6, 1, 128), (3, 512, 5, 1)),
    ],
    ids=[
        "dense",
        "part of the heads",
        "part of the tokens",
        "heads before tokens",
        "tokens before rows",
        "queries, keys and values in turns",
        "padded heads",
        "any stride of what is one",
    ],
)
def test_what_begins_on_16_bytes_is_taken_as_it_lies(lies):
    x = lies()
    assert as_tma_reads(x) is x
    tile = tiles_of(x, 64)
    refuse_what_tma_cannot_move(tile)
    assert torch.equal(x.as_strided(tile.shape, tile.strides), x.transpose(1, 2))


@pytest.mark.parametrize(
    "lies",
    [
        lambda: heads(2 * 6 * 4 * 128 + 1)[1:].view(2, 6, 4, 128),
        lambda: heads(2, 6, 4, 130)[..., :128],
        lambda: heads(2, 6, 4, 256)[..., ::2],
        lambda: heads(1, 6, 4, 128).expand(2, 6, 4, 128),
    ],
    ids=["off 16 bytes", "padded heads off 16 bytes", "strided", "expanded"],
)
def test_what_lies_otherwise_is_copied(lies):
    x = lies()
    copy = as_tma_reads(x)
    assert copy.is_contiguous()
    assert torch.equal(copy, x)


@pytest.mark.parametrize(
    ("lies", "order"),
    [
        (lambda: heads(2, 6, 4, 128), (0, 1, 2, 3)),
        (lambda: heads(2, 4, 6, 128).transpose(1, 2), (0, 2, 1, 3)),
        (lambda: heads(2, 12, 6, 256)[:, :4, :, :128].transpose(1, 2), (0, 2, 1, 3)),
        (lambda: heads(6, 2, 4, 128).transpose(0, 1), (0, 1, 2, 3)),
        (lambda: heads(2, 1, 4, 128), (0, 1, 2, 3)),
    ],
    ids=["dense", "heads before tokens", "some heads before tokens", "tokens before rows", "one token"],
)
def test_results_are_dense_and_have_heads_before_tokens_where_queries_do(lies, order):
    """Either order is promised: the first is contiguous, the second lies as the definition's result."""
    made = empty_as(x := lies(), torch.float32)
    assert (made.shape, made.dtype) == (x.shape, torch.float32)
    assert made.permute(order).is_contiguous()
    if order == (0, 2, 1, 3):
        assert made.stride() == ops.attention.definition(x, x, x).stride()


def test_the_sums_that_a_gradient_needs_are_turned_and_its_total_starts_at_zero():
    batch, length, count, dim = 2, 5, 3, 128
    out, grad = (
        heads(batch, length, count, dim, dtype=torch.float16),
        heads(count, batch, length, dim, dtype=torch.float16).permute(1, 2, 0, 3),
    )
    delta, total = torch.full((batch, count, length), torch.nan), torch.full((batch, length, count, dim), torch.nan)
    rows = batch * length * count
    strides = *out.stride()[:3], *grad.stride()[:3]
    expected = (out.float() * grad.float()).sum(-1).transpose(1, 2)
    for grad_lse in (None, torch.randn(batch, count, length)):
        counts = torch.full((22,), 7, dtype=torch.int32)  # of tiles, and two numbers behind them that nobody may write
        launch(
            prepare_kernel, (4,), out, grad, grad_lse, delta, total, counts, rows, length, count, 20, *strides,
            DIM=dim, ROWS=8,
        )  # fmt: skip
        less = expected if grad_lse is None else expected - grad_lse
        torch.testing.assert_close(delta, less, rtol=1e-5, atol=1e-4)
        assert not total.any()
        assert counts.tolist() == [0] * 20 + [7] * 2


def test_a_total_is_scaled_before_it_is_rounded():
    total, out = torch.randn(100), torch.empty(100, dtype=torch.float16)
    launch(round_kernel, (2,), total, out, 100, 0.125, BLOCK=64)
    assert torch.equal(out, (total * 0.125).half())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(), True),
        (dict(softcap=2.0), "softcap"),
        (dict(window=3), "window"),
        (dict(cu_seqlens=torch.tensor([0, 6])), True),
        (dict(cu_seqlens=torch.tensor([0, 6]), causal=False), "documents"),
        (dict(k=heads(1, 9, 2, 128), v=heads(1, 9, 2, 128)), "splits keys"),
        (dict(q=heads(1, 70, 4, 128), k=heads(1, 90, 2, 128), v=heads(1, 90, 2, 128)), True),
        (dict(q=heads(1, 70, 4, 64), k=heads(1, 9, 2, 64), v=heads(1, 9, 2, 64), causal=False), True),
        (dict(q=heads(1, 6, 4, 64), k=heads(1, 6, 2, 64), v=heads(1, 6, 2, 64)), True),
        (dict(q=heads(1, 6, 4, 96), k=heads(1, 6, 2, 96), v=heads(1, 6, 2, 96)), "64 or 128 dimensions"),
        (dict(v=heads(1, 6, 2, 64)), "those of values as many"),
        (dict(scale=-0.5), "scale is positive"),
        (dict(q=heads(0, 6, 4, 128), k=heads(0, 6, 2, 128), v=heads(0, 6, 2, 128)), "at least one query"),
        (dict(k=heads(1, 0, 2, 128), v=heads(1, 0, 2, 128), causal=False), "one key"),
    ],
    ids=[
        "takes it",
        "softcap",
        "window",
        "documents",
        "documents that are not causal",
        "decoding",
        "more keys",
        "fewer keys",
        "64",
        "other heads",
        "other values",
        "negative scale",
        "nothing",
        "no keys",
    ],
)
def test_it_says_what_it_does_not_take(changed, reason):
    given = dict(q=heads(1, 6, 4, 128), k=heads(1, 6, 2, 128), v=heads(1, 6, 2, 128)) | changed
    answer = call_named(takes, ops.attention.bind(**given))
    assert answer is True if reason is True else reason in answer
