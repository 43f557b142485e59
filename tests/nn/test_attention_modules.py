"""PyTorch's MultiheadAttention and transformers' models on our attention are as good as on their own."""

import pytest
import torch
import transformers

from tilestack.nn import MultiheadAttention, attend, register_attention

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0)
FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": dict(sliding_window=5, query_pre_attn_scalar=8),
    "GptOss": dict(sliding_window=4, num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager"),
}


def build(family, implementation, dtype=torch.float32):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family], attn_implementation=implementation)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model.to(dtype)


@pytest.fixture(autouse=True)
def registered():
    register_attention()


def logits_and_gradients(model, ids, mask):
    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    loss = torch.nn.functional.cross_entropy(logits, ids[mask.bool()])
    weights = [parameter for name, parameter in model.named_parameters() if "_proj" in name or "sinks" in name]
    return [logits, *torch.autograd.grad(loss, weights, allow_unused=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_transformers_models_are_as_good_by_our_attention(family, padded, as_good_as):
    ids, mask = torch.randint(1, 64, (2, 11)), torch.ones(2, 11, dtype=torch.int64)
    mask[1, : 4 if padded else 0] = 0
    kinds = ("tilestack", torch.float32), ("eager", torch.float32), ("eager", torch.float64)
    results = [logits_and_gradients(build(family, *kind), ids, mask) for kind in kinds]
    assert len(results[0]) > 8
    as_good_as(*(found[0] for found in results))
    for ours, theirs in zip(*(found[1:] for found in results[:2]), strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_transformers_generates_the_same_text():
    ids = torch.randint(1, 64, (2, 5))
    options = dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
    ours, theirs = (build("Qwen3", name).generate(ids, **options) for name in ("tilestack", "eager"))
    assert torch.equal(ours, theirs)


def test_a_static_cache_longer_than_the_prompt_is_not_seen_past_its_end():
    """Its mask is left out in prefill, though there are more keys than queries: rows begin together there."""
    ids = torch.randint(1, 64, (2, 5))
    options = dict(
        max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids), cache_implementation="static"
    )
    options |= dict(return_dict_in_generate=True, output_logits=True)
    ours, theirs = (build("Qwen3", name).eval().generate(ids, **options) for name in ("tilestack", "eager"))
    assert len(ours.logits) == 6
    for found, expected in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_transformers_models_train_under_autocast_as_by_pytorchs_attention(family):
    """Rotation leaves queries and keys in float32 there and values in bfloat16: attention is what brings them together."""
    ids, model = torch.randint(1, 64, (2, 11)), build(family, "tilestack")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    expected = build(family, "eager")(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    assert all(p.grad.isfinite().all() for name, p in model.named_parameters() if "_proj" in name)


def test_attention_under_autocast_has_the_dtype_of_pytorchs():
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        for mask in (None, torch.ones(1, 1, 1, 4, dtype=torch.bool)):
            found = attend(q, k, v, mask)
            assert found.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(found, expected.transpose(1, 2), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_mask_of_whole_numbers_is_refused(dtype):
    """Added to the scores, ones and zeros would hide nothing."""
    q, seen = torch.randn(1, 4, 2, 8), torch.ones(1, 1, 1, 4, dtype=dtype)
    with pytest.raises(TypeError, match=f"a mask is bool, or numbers .* not {dtype}; make it bool"):
        attend(q, q, q, seen)
    module, x = MultiheadAttention(8, 2), torch.randn(4, 8)
    for masks in (dict(key_padding_mask=seen[0, 0, 0]), dict(attn_mask=seen[0, 0].expand(4, 4))):
        with pytest.raises(TypeError, match=f"not {dtype}"):
            module(x, x, x, need_weights=False, **masks)


def test_what_our_attention_cannot_do_for_transformers_is_said():
    with pytest.raises(ValueError, match="no attention weights"):
        build("Llama", "tilestack")(torch.randint(1, 64, (1, 4)), output_attentions=True)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("given", ["nothing", "causal", "padding", "both", "numbers", "by head", "other sizes"])
def test_multihead_attention_is_pytorchs(given, batch_first):
    torch.manual_seed(0)
    sizes = dict(kdim=6, vdim=10) if given == "other sizes" else {}
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=batch_first, **sizes)
    ours = MultiheadAttention(8, 2, batch_first=batch_first, **sizes)
    ours.load_state_dict(theirs.state_dict())
    shape = lambda tokens, size: torch.randn((3, tokens, size) if batch_first else (tokens, 3, size))
    x, causal = shape(5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.arange(5).expand(3, 5) >= torch.tensor([[5], [3], [4]])
    arguments = {
        "nothing": {},
        "causal": dict(attn_mask=causal, is_causal=True),
        "padding": dict(key_padding_mask=padding),
        "both": dict(attn_mask=causal, key_padding_mask=padding, is_causal=True),
        "numbers": dict(attn_mask=torch.randn(5, 5)),
        "by head": dict(attn_mask=torch.randn(6, 5, 5)),
        "other sizes": dict(key=shape(7, 6), value=shape(7, 10)),
    }[given]
    arguments = dict(key=x, value=x) | arguments
    found, expected = (module(x, need_weights=False, **arguments)[0] for module in (ours, theirs))
    torch.testing.assert_close(found, expected)
    parameters = [list(module.parameters()) for module in (ours, theirs)]
    for ours_, theirs_ in zip(
        *(torch.autograd.grad(out.square().sum(), of) for out, of in zip((found, expected), parameters, strict=True)),
        strict=True,
    ):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-4, atol=1e-5)


def test_multihead_attention_alone_and_with_weights_is_pytorchs():
    torch.manual_seed(0)
    module, x = MultiheadAttention(8, 2), torch.randn(5, 8)
    expected, weights = module(x, x, x)
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], expected)
    assert weights.shape == (5, 5)


@pytest.mark.parametrize("sizes", [(2, 5), (5, 2)])
def test_multihead_attention_hides_what_its_mask_says_where_rows_differ_in_length(sizes):
    """is_causal is a hint about the mask; PyTorch's rows begin together, those of ops.attention end together."""
    torch.manual_seed(0)
    theirs, ours = torch.nn.MultiheadAttention(8, 2), MultiheadAttention(8, 2)
    ours.load_state_dict(theirs.state_dict())
    query, key = (torch.randn(tokens, 3, 8) for tokens in sizes)
    hidden = torch.ones(sizes, dtype=torch.bool).triu(1)
    found, expected = (
        module(query, key, key, attn_mask=hidden, is_causal=True, need_weights=False)[0] for module in (ours, theirs)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("masks", [(), ("attn_mask",), ("key_padding_mask",), ("attn_mask", "key_padding_mask")])
@pytest.mark.parametrize("batched", [True, False])
def test_multihead_attention_of_no_keys_is_what_is_added_to_nothing(masks, batched):
    module = MultiheadAttention(8, 2)
    torch.nn.init.normal_(module.out_proj.bias)
    query, key = (torch.randn(tokens, 1, 8) if batched else torch.randn(tokens, 8) for tokens in (3, 0))
    shapes = dict(attn_mask=(3, 0), key_padding_mask=(1, 0) if batched else (0,))
    given = {name: torch.zeros(shapes[name], dtype=torch.bool) for name in masks}
    found, _ = module(query, key, key, need_weights=False, **given)
    assert torch.equal(found, module.out_proj.bias.expand(query.shape))


def test_multihead_attention_drops_while_it_trains():
    torch.manual_seed(0)
    module, x = MultiheadAttention(8, 2, dropout=0.5), torch.randn(5, 8)
    one, other = (module(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(one, other)
    one, other = (module.eval()(x, x, x, need_weights=False)[0] for _ in range(2))
    assert torch.equal(one, other)
