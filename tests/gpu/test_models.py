"""Decoders on a GPU: in bfloat16 near what the CPU computes in float32, packed, compiled, and without waiting."""

import copy
import itertools

import pytest
import torch

from tilestack import models

SIZES = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
FAMILIES = {
    "llama": dict(num_key_value_heads=2),
    "mistral": dict(num_key_value_heads=2, sliding_window=40),
    "qwen3": dict(num_key_value_heads=2, head_dim=128),
    "mixtral": dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": dict(
        q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=128, n_shared_experts=1, first_k_dense_replace=1,
    ),
}  # fmt: skip
each_family = pytest.mark.parametrize("family", FAMILIES)
ENDS = [0, 30, 128, 129, 200, 256, 256, 256]


def decoder_of(family):
    torch.manual_seed(0)
    decoder = models.Decoder(models.ModelConfig.from_hf(SIZES | FAMILIES[family] | {"model_type": family}))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return decoder


def packed():
    ids = torch.randint(512, (2, 128), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor(ENDS, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in ends.diff()]).view(2, 128)
    return ids, positions, ends


def near(found, expected):
    """To what bfloat16 leaves, in the middle: rounding may send a token to another expert."""
    assert (found.float().cpu() - expected).abs().median() < 0.02 * expected.std()


@torch.no_grad()
@each_family
def test_bfloat16_on_the_gpu_is_near_float32_on_the_cpu(family):
    decoder, given = decoder_of(family), packed()
    on_gpu = copy.deepcopy(decoder).to("cuda", torch.bfloat16)
    near(on_gpu(*(x.cuda() for x in given)), decoder(*given))
    near(on_gpu(given[0].cuda()), decoder(given[0]))
    cache = models.KVCache(decoder.config, 2, 128, torch.bfloat16, "cuda")
    pieces = [on_gpu(piece.cuda(), context=cache) for piece in given[0].split([100, 1, 27], dim=1)]
    near(torch.cat(pieces, 1), decoder(given[0]))


@torch.no_grad()
@each_family
def test_packed_documents_are_as_if_read_alone(family):
    decoder = decoder_of(family).to("cuda", torch.bfloat16)
    ids, positions, ends = (x.cuda() for x in packed())
    found = decoder(ids, positions, ends).flatten(0, 1)
    for start, end in itertools.pairwise(ENDS[:6]):
        near(found[start:end], decoder(ids.flatten()[None, start:end])[0].float().cpu())


@each_family
def test_a_step_never_waits_for_the_gpu(family):
    decoder, given = decoder_of(family).to("cuda", torch.bfloat16), [x.cuda() for x in packed()]
    step = lambda: decoder.hidden(*given).float().square().mean().backward()
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2"])
def test_it_compiles_whole(family):
    decoder, given = decoder_of(family).to("cuda", torch.bfloat16), [x.cuda() for x in packed()]
    torch.compiler.reset()
    compiled = torch.compile(decoder.hidden, fullgraph=True, dynamic=False)
    near(compiled(*given).detach(), decoder.hidden(*given).detach().float().cpu())


def test_generation_on_the_gpu_gives_the_tokens_of_the_cpu():
    decoder, ids = decoder_of("qwen3"), packed()[0][:, :8]
    tokens = lambda model, prompt: torch.stack(list(models.generate(model, prompt, max_new_tokens=16)), 1).cpu()
    expected = tokens(decoder, ids)
    assert torch.equal(tokens(decoder.cuda(), ids.cuda()), expected)
