"""flex_attention against what people know its parts by: PyTorch's flex_attention, explicit scores, ops.dropout."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from tilestack import BackendError, ops
from tilestack.contract import backend
from tilestack.contract.cases import Make
from tilestack.ops.block_mask import block_mask_arguments
from tilestack.ops.flex_attention import flex_attention_gradient


@pytest.fixture(params=["torch", "triton"])
def chosen(request):
    with backend(flex_attention=request.param):
        yield request.param


def drawn(queries, keys, heads=2, kv_heads=1, dim=8, batch=1):
    make = Make(torch.float32)
    shape = lambda tokens, count: make.normal(batch, tokens, count, dim).requires_grad_()
    return shape(queries, heads), shape(keys, kv_heads), shape(keys, kv_heads)


def gradients(results, leaves):
    """The results, and the gradients of the leaves for something that arrives at each result."""
    make = Make(torch.float32, seed=3)
    arriving = [make.normal(*result.shape) for result in results]
    return [*results, *torch.autograd.grad(results, leaves, arriving)]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def prefix_or_causal(batch, head, query, key):
    return (key < 20 * head) | (query >= key)


def in_one_document(batch, head, query, key):
    document = torch.tensor([0] * 10 + [1] * 50)
    return document[query] == document[key]


@pytest.mark.parametrize("mask", [prefix_or_causal, in_one_document])
@pytest.mark.filterwarnings("ignore")  # PyTorch's own is slow without a compiler, and says so
def test_a_block_mask_means_what_it_does_in_pytorch(chosen, mask):
    given = [x.detach() for x in drawn(50, 50)]
    blocks = create_block_mask(mask, 1, 2, 50, 50, device="cpu", BLOCK_SIZE=16)
    heads_first = (x.transpose(1, 2) for x in given)
    out, lse = torch_flex_attention(*heads_first, block_mask=blocks, enable_gqa=True, return_lse=True)
    assert_same(ops.flex_attention(*given, **block_mask_arguments(blocks)), (out.transpose(1, 2), lse))


def test_what_lies_beyond_a_block_mask_is_not_seen(chosen):
    """Longer rows may have as many blocks; PyTorch refuses them by the lengths, which blocks and tiles do not have."""
    q, k, v = (x.detach() for x in drawn(30, 30))
    mask = create_block_mask(prefix_or_causal, 1, 2, 20, 20, device="cpu", BLOCK_SIZE=16)
    out, lse = ops.flex_attention(q, k, v, **block_mask_arguments(mask))
    assert not out[:, 20:].any()
    assert (lse[..., 20:] == -torch.inf).all()
    expected = ops.flex_attention(q[:, :20], k[:, :20], v[:, :20], **block_mask_arguments(mask))
    assert_same((out[:, :20], lse[..., :20]), expected)


def test_blocks_that_are_not_seen_are_not_read():
    q, k, v = drawn(32, 48)
    blocks = torch.tensor([[[[0, -1, 1], [-1, -1, 0]]]], dtype=torch.int32)
    tiles = torch.ones(1, 16, 16, dtype=torch.bool)
    poisoned = k.detach().clone()
    poisoned[:, 16:32] = torch.nan
    with torch.no_grad(), backend(flex_attention="triton"):
        out, lse = ops.flex_attention(q, poisoned, v, blocks=blocks, tiles=tiles, causal=False)
    clean, _ = ops.flex_attention(q, k, v, blocks=blocks, tiles=tiles, causal=False)
    torch.testing.assert_close(out, clean.detach())
    assert lse.isfinite().all()


def test_slopes_are_a_bias_that_grows_with_the_distance(chosen):
    leaves = drawn(7, 19)
    slopes = torch.tensor([0.5, 0.03])
    place = torch.arange(19)
    bias = -slopes[:, None, None] * (place - place[-7:, None]).abs()
    found, expected = ops.flex_attention(*leaves, slopes=slopes), ops.flex_attention(*leaves, bias=bias[None])
    assert_same(gradients(found, leaves), gradients(expected, leaves))


def test_a_sink_is_a_key_whose_value_is_zero(chosen):
    q, k, v = leaves = drawn(5, 9, dim=8)
    sinks = torch.tensor([1.5, -0.5], requires_grad=True)
    ours = gradients(ops.flex_attention(*leaves, sinks=sinks, causal=False), (*leaves, sinks))
    scores = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * 8**-0.5
    scores = torch.cat([scores, sinks[None, :, None, None].expand(1, 2, 5, 1)], -1)
    values = torch.cat([v[:, :, 0], torch.zeros(1, 1, 8)], 1)
    out = torch.einsum("bhqk,bkd->bqhd", scores.softmax(-1), values)
    assert_same(ours, gradients((out, scores.logsumexp(-1)), (*leaves, sinks)))


def test_weights_are_dropped_as_a_tensor_of_them_would_be(chosen):
    q, k, _ = drawn(6, 8)
    identity = torch.eye(8)[None, :, None]
    seed = torch.tensor(1234567)
    weights, _ = ops.flex_attention(q, k, identity, causal=False)  # [batch, queries, heads, keys]
    found, _ = ops.flex_attention(q, k, identity, seed=seed, causal=False, dropout=0.5)
    expected = ops.dropout(weights.transpose(1, 2).contiguous(), seed, 0.5).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    assert 0.2 < (found == 0).float().mean() < 0.8


def test_a_bias_of_minus_infinity_hides_and_where_all_is_hidden_there_is_nothing(chosen):
    leaves = drawn(3, 4)
    bias = torch.zeros(1, 1, 3, 4)
    bias[..., 0, :], bias[..., 1, 2:] = -torch.inf, -torch.inf
    out, lse, *found = gradients(ops.flex_attention(*leaves, bias=bias, causal=False), leaves)
    assert not out[:, 0].any()
    assert (lse[..., 0] == -torch.inf).all()
    first, _ = ops.flex_attention(leaves[0][:, 1:2], leaves[1][:, :2], leaves[2][:, :2], causal=False)
    torch.testing.assert_close(out[:, 1:2], first)
    assert all(gradient.isfinite().all() for gradient in found)


@pytest.mark.parametrize("more", [{}, dict(bias=torch.zeros(1, 1, 3, 0))], ids=["plain", "bias"])
def test_without_keys_there_is_nothing_but_the_sink(more):
    q, k, v = leaves = drawn(3, 0)
    out, lse = ops.flex_attention(q, k, v, causal=False, **more)
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == -torch.inf).all()
    sinks = torch.tensor([0.5, -torch.inf], requires_grad=True)
    out, lse, *found = gradients(ops.flex_attention(q, k, v, sinks=sinks, causal=False, **more), (*leaves, sinks))
    assert not out.any()
    assert torch.equal(lse, sinks[None, :, None].expand(1, 2, 3))
    assert all(gradient.isfinite().all() for gradient in found)


def test_the_declared_gradient_of_no_sink_is_zero_where_nothing_is_seen():
    q, k, v = (x.detach() for x in drawn(3, 3))
    sinks, bias = torch.tensor([0.5, -torch.inf]), torch.zeros(1, 1, 3, 3)
    bias[..., 1, :] = -torch.inf
    given = dict(sinks=sinks, slopes=None, bias=bias, blocks=None, tiles=None, cu_seqlens=None)
    rules = dict(causal=False, window=None, scale=None, softcap=None, dropout=0.0)
    out, lse = ops.flex_attention.definition(q, k, v, **given, **rules)
    arriving = torch.ones_like(out), torch.ones_like(lse)
    _, _, _, _, dsinks, *_ = flex_attention_gradient(*arriving, q, k, v, **given, seed=None, **rules, out=out, lse=lse)
    assert dsinks[0] != 0
    assert dsinks[1] == 0


def test_nothing_is_refused_silently():
    q, k, v = drawn(8, 8)
    small = dict(blocks=torch.zeros(1, 1, 1, 1, dtype=torch.int32), tiles=torch.ones(1, 8, 8, dtype=torch.bool))
    with (
        backend(flex_attention="triton"),
        pytest.raises(BackendError, match="its blocks are multiples of 16, not 8 x 8"),
    ):
        ops.flex_attention(q, k, v, **small)
    for arguments, message in [
        (dict(dropout=0.1), "needs a seed"),
        (dict(sinks=torch.zeros(3)), "a number for each of 2 heads"),
        (dict(slopes=torch.zeros(1)), "slopes must be"),
        (dict(bias=torch.zeros(8, 8)), "bias must be"),
        (dict(bias=torch.ones(1, 1, 8, 8, dtype=torch.bool)), "bias is numbers .* not torch.bool"),
        (dict(blocks=small["blocks"]), "blocks and tiles come together"),
        (small | dict(blocks=torch.zeros(1, 1, 2, 1, dtype=torch.int32)), "blocks must be int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.flex_attention(q, k, v, **arguments)


def test_queries_before_the_first_key_get_zeros_and_give_none(chosen):
    """Rows are aligned at their ends: of seven queries and three keys, the first four see nothing."""
    leaves = drawn(7, 3)
    out, lse = ops.flex_attention(*leaves)
    assert not out[:, :4].any()
    assert bool((lse[..., :4] == -torch.inf).all())
    found = gradients([out[:, 4:], lse[..., 4:]], leaves)
    assert not found[2][:, :4].any()
    last = ops.flex_attention(leaves[0][:, 4:], *leaves[1:])
    assert_same(found, gradients(last, leaves))
