"""PyTorch's BlockMask given to nn.attend, nn.Attention and transformers hides what the same mask as a tensor hides."""

import gc

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import and_masks, create_block_mask

from tilestack import BackendError, nn
from tilestack.contract import backend
from tilestack.nn.attention import transformers_attention
from tilestack.ops import block_mask


def prefix_or_causal(batch, head, query, key):
    return (key < 5 * (head + 1)) | (key <= query)


def near(batch, head, query, key):
    return (query - key).abs() < 20


def both_masks(mask_mod, batch, heads, queries, keys, block=16):
    """(the mask by blocks, the same as a tensor)."""
    places = [torch.arange(size) for size in (batch or 1, heads or 1, queries, keys)]
    dense = mask_mod(*torch.meshgrid(*places, indexing="ij"))
    return create_block_mask(mask_mod, batch, heads, queries, keys, device="cpu", BLOCK_SIZE=block), dense


def drawn(queries=40, keys=50):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, queries, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def with_gradients(out, leaves):
    return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


@pytest.mark.parametrize(("chosen", "heads"), [("torch", None), ("torch", 4), ("triton", 4)])
@pytest.mark.parametrize("rules", [{}, dict(causal=True, sinks=torch.ones(4), window=9)], ids=["alone", "and more"])
def test_attend_hides_what_the_mask_as_a_tensor_hides(chosen, heads, rules):
    leaves = drawn()
    blocks, dense = both_masks(prefix_or_causal, None, heads, 40, 50)
    with backend(flex_attention=chosen):
        found, expected = (with_gradients(nn.attend(*leaves, mask, **rules), leaves) for mask in (blocks, dense))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_layer_takes_it_on_top_of_its_own_rules():
    torch.manual_seed(0)
    layer, x = nn.Attention(32, 4, 2), torch.randn(2, 40, 32)
    blocks, dense = both_masks(near, None, None, 40, 40)
    torch.testing.assert_close(layer(x, blocks), layer(x, dense), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(layer(x, blocks), layer(x))


def test_transformers_hands_it_on():
    nn.register_attention()
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=50)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, attn_implementation="tilestack")
    model, ids = transformers.LlamaForCausalLM(config), torch.arange(40)[None]
    causal = lambda batch, head, query, key: key <= query
    blocks, dense = both_masks(and_masks(near, causal), None, None, 40, 40)
    torch.testing.assert_close(
        model(ids, attention_mask=blocks).logits, model(ids, attention_mask=dense).logits, rtol=1e-4, atol=1e-5
    )


def test_a_mask_is_read_once_and_forgotten_with_it(monkeypatch):
    read = []
    made = block_mask.block_mask_arguments
    monkeypatch.setattr(block_mask, "block_mask_arguments", lambda mask: read.append(mask.mask_mod) or made(mask))
    leaves = drawn()
    mask, _ = both_masks(near, None, None, 40, 50)
    with torch.inference_mode():
        nn.attend(*leaves, mask)
    with_gradients(nn.attend(*leaves, mask), leaves)  # what was read in inference mode can be kept for a gradient
    assert read == [near]
    mask.mask_mod = prefix_or_causal
    nn.attend(*leaves, mask)
    assert read == [near, prefix_or_causal]
    before = len(block_mask.KEPT)
    del mask
    gc.collect()
    assert len(block_mask.KEPT) == before - 1


def test_it_compiles_with_a_break_in_the_graph():
    leaves = drawn()
    mask, _ = both_masks(near, None, None, 40, 50)
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v: nn.attend(q, k, v, mask), backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), nn.attend(*leaves, mask))


def test_what_is_refused_is_said():
    leaves = drawn()
    shorter, _ = both_masks(near, None, None, 40, 40)
    more_rows, _ = both_masks(near, 3, None, 40, 50)
    small, dense = both_masks(near, None, None, 40, 50, block=8)
    with pytest.raises(ValueError, match=r"is \(1, 1, 40, 40\), but must be .*, 40, 50\): .*KV_LEN=50"):
        nn.attend(*leaves, shorter)
    with pytest.raises(ValueError, match=r"is \(3, 1, 40, 50\), but must be \(2 or 1"):
        nn.attend(*leaves, more_rows)
    with pytest.raises(TypeError, match="a tensor or a BlockMask, not str"):
        nn.attend(*leaves, "causal")
    with backend(flex_attention="triton"), pytest.raises(BackendError, match="multiples of 16, not 8 x 8"):
        nn.attend(*leaves, small)
    torch.testing.assert_close(nn.attend(*leaves, small), nn.attend(*leaves, dense))  # the definition takes any
    heads_first = [x.transpose(1, 2) for x in leaves]
    with pytest.raises(ValueError, match="not with a BlockMask"):
        transformers_attention(torch.nn.Module(), *heads_first, small, position_bias=torch.zeros(1, 4, 40, 50))
