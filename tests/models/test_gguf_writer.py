"""GGUF files that are written: every architecture comes back, transformers reads it too, and what cannot be said is refused."""

import dataclasses
import errno
import os

import numpy as np
import pytest
import tiny_models as tiny
import torch

from tilestack import models
from tilestack.models import gguf_writer
from tilestack.models.gguf import GGUF
from tilestack.models.gguf_metadata import turning
from tilestack.models.gguf_writer import shown_name
from tilestack.models.quantise import quantise
from tilestack.models.weights import unfused
from tilestack.ops.rope import frequencies
from tilestack.quant import SCHEMES

# Where llama.cpp has in its code what a configuration says, and no key for it; see test_gguf_families.
AS_RELEASED = {
    "gemma2": dict(query_pre_attn_scalar=24),
    "gemma3": dict(query_pre_attn_scalar=24),
    "gemma3_whole": dict(query_pre_attn_scalar=24),
    "gemma3_scaled": dict(query_pre_attn_scalar=24, attention_bias=False, layer_types=["sliding_attention"] * 2),
    "olmo2": dict(attention_bias=False),
    "phi3": dict(),
    "qwen2": dict(),
    "qwen3_yarn": dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    "qwen3_moe": dict(mlp_only_layers=[]),
    "mixtral": dict(sliding_window=None),
    "mistral": dict(sliding_window=64),
}
WRITTEN = [
    "llama2", "llama3", "smollm2", "llama_biased", "llama_linear", "mistral", "mistral_whole", "qwen2", "qwen3", "qwen3_yarn",
    "gemma2", "gemma3", "gemma3_whole", "gemma3_scaled", "phi3", "phi4_mini", "phi4_mini_long", "olmo2", "granite", "glm4",
    "qwen3_moe", "mixtral",
]  # fmt: skip


def model_of(family, **changes):
    decoder = tiny.ours(family, **AS_RELEASED.get(family, {}) | changes)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return decoder


@torch.no_grad()
@pytest.mark.parametrize("family", WRITTEN)
def test_a_model_comes_back_with_its_weights_and_its_logits(family, tmp_path):
    decoder, ids = model_of(family), tiny.ids()
    saved = models.save_gguf(decoder, tmp_path / "my model.gguf", type="f32")
    assert saved.bytes == (tmp_path / "my model.gguf").stat().st_size
    assert os.listdir(tmp_path) == ["my model.gguf"]
    found = models.load(tmp_path / "my model.gguf")
    written, read = dict(unfused(decoder)), dict(unfused(found))
    for name, tensor in written.items():
        # Gemma's norms are kept with a 1 added to them, which costs digits behind it.
        assert torch.allclose(tensor, read[name], rtol=0, atol=2.0**-23 if "norm" in name else 0), name
    expected = decoder(ids)
    assert (found(ids) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", ["smollm2", "gemma2", "phi3", "mixtral"])
@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_numbers_that_a_type_has_are_kept_to_the_bit(family, type, tmp_path):
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[type]
    decoder = model_of(family).to(dtype)
    models.save_gguf(decoder, tmp_path / "model.gguf", type=type)
    read = dict(unfused(models.load(tmp_path / "model.gguf")))
    assert all(torch.equal(tensor.float(), read[name]) for name, tensor in unfused(decoder))
    types = {name: tensor.tensor_type.name for name, tensor in GGUF(tmp_path / "model.gguf").stored.items()}
    plain = {name for name, kind in types.items() if kind == "F32"}
    assert plain == {name for name in types if "norm" in name or "ffn_gate_inp" in name}
    assert {types[name] for name in types.keys() - plain} == {type.upper()}


@pytest.mark.parametrize(("type", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_numbers_that_a_type_has_not_go_to_the_nearest(type, dtype, tmp_path):
    decoder, told = model_of("llama2"), []
    models.save_gguf(decoder, tmp_path / "model.gguf", type=type, progress=lambda *at: told.append(at))
    read = dict(unfused(models.load(tmp_path / "model.gguf")))
    for name, tensor in unfused(decoder):
        assert torch.equal(read[name], tensor if tensor.ndim == 1 else tensor.to(dtype).float()), name
    assert told == [(number, 21) for number in range(1, 22)]


@pytest.mark.parametrize(("type", "levels"), [("q8_0", 127), ("q4_0", 8)])
def test_codes_are_within_a_step_of_their_block(type, levels, tmp_path):
    decoder = model_of("llama2", intermediate_size=96)
    saved = models.save_gguf(decoder, tmp_path / "model.gguf", type=type)
    assert saved.tensors == ({"q8_0": 16, "f32": 5} if type == "q8_0" else {"q8_0": 2, "q4_0": 14, "f32": 5})
    read = dict(unfused(models.load(tmp_path / "model.gguf")))
    for name, tensor in unfused(decoder):
        if tensor.ndim == 1:
            assert torch.equal(tensor, read[name])
            continue
        blocks, found = tensor.reshape(-1, 32), read[name].reshape(-1, 32)
        of = 127 if name in ("model.embed_tokens.weight", "lm_head.weight") else levels
        step = blocks.abs().amax(1, keepdim=True) / of
        # A step is kept in float16, of whose rounding a block's largest codes have the most; and 4 bits have one level less on
        # one side, so that a number there may be off by a whole step.
        worst = (blocks - found).abs() / step
        assert worst.max() <= (0.5 + 127 * 2.0**-11 if of == 127 else 1 + 8 * 2.0**-11)
        assert worst.mean() <= 0.3


FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}  # llama.cpp's numbers


@pytest.mark.parametrize("type", FILE_TYPES)
def test_a_file_says_what_it_is(type, tmp_path):
    """What only llama.cpp and who shows the file read of it, in the types that they expect."""
    decoder = model_of("qwen3", intermediate_size=96)  # whose heads together are wider than the hidden state
    config = decoder.config = dataclasses.replace(decoder.config, bos=5, eos=(6, 7), pad=0)
    tables = {"tokenizer.ggml.tokens": list(map(str, range(97))), "tokenizer.ggml.token_type": [1] * 97}
    more = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.scores": [0.5] * 97}
    models.save_gguf(decoder, tmp_path / "model.gguf", type=type, tokenizer=tables | more)
    file = GGUF(tmp_path / "model.gguf")
    said = file.metadata
    assert said["general.file_type"] == FILE_TYPES[type]
    assert said.get("general.quantization_version") == (2 if type.startswith("q") else None)
    assert (said["qwen3.attention.key_length"], said["qwen3.attention.value_length"]) == (
        config.head_dim,
        config.head_dim,
    )
    assert config.head_dim != config.hidden // config.heads
    assert said["qwen3.vocab_size"] == 97
    assert [said[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")] == [5, 6, 0]
    types = {name: [kind.name for kind in field.types] for name, field in file.reader.fields.items()}
    assert types["tokenizer.ggml.token_type"] == ["ARRAY", "INT32"]
    assert types["tokenizer.ggml.tokens"] == ["ARRAY", "STRING"]
    assert types["tokenizer.ggml.scores"] == ["ARRAY", "FLOAT32"]
    assert types["tokenizer.ggml.add_bos_token"] == ["BOOL"]
    assert types["qwen3.block_count"] == ["UINT32"]
    assert types["qwen3.rope.freq_base"] == ["FLOAT32"]


@pytest.mark.parametrize("ends", [(), (6,), (6, 7), (7, 6, 0)])
def test_every_token_that_ends_a_text_comes_back(ends, tmp_path):
    decoder = model_of("llama3")
    decoder.config = dataclasses.replace(decoder.config, eos=ends)
    models.save_gguf(decoder, tmp_path / "model.gguf")
    assert models.load(tmp_path / "model.gguf").config.eos == ends


def test_more_ends_than_there_are_places_for_are_refused_unless_the_tokenizer_says_them(tmp_path):
    decoder = model_of("llama3")
    decoder.config = dataclasses.replace(decoder.config, eos=(6, 7, 8, 9))
    with pytest.raises(
        models.ConfigError, match=r"places for 3 tokens that end a text .* ends at 4: 6, 7, 8, 9\. Give"
    ):
        models.save_gguf(decoder, tmp_path / "model.gguf")
    assert not os.listdir(tmp_path)
    models.save_gguf(decoder, tmp_path / "model.gguf", tokenizer={"tokenizer.ggml.eos_token_id": 8})
    assert models.load(tmp_path / "model.gguf").config.eos == (8,)


@pytest.mark.parametrize(
    ("name", "architecture", "has", "shown"),
    [
        ("Phi-3-mini", "phi3", True, "Phi-3-mini"),
        ("mine", "phi3", True, "mine (Phi-3)"),
        ("mine", "llama", True, "mine"),
        ("my phi3 and PHI-3", "llama", False, "my phi 3 and PHI 3"),
        ("mine", "phi3", False, "mine"),
    ],
)
def test_the_name_of_a_phi_3_is_on_what_has_its_tokens(name, architecture, has, shown):
    """Of whose likes llama.cpp looks for these tokens, which spaces do not follow."""
    tokens = ["a", "<s>", "</s>", "<unk>", "<|endoftext|>"] if has else ["a", "<s>", "</s>"]
    assert shown_name(name, {"tokenizer.ggml.tokens": tokens, "general.architecture": architecture}) == shown


@torch.no_grad()
def test_a_tied_head_is_written_where_llama_cpp_wants_one(tmp_path):
    decoder = model_of("olmo2", tie_word_embeddings=True)
    models.save_gguf(decoder, tmp_path / "model.gguf", type="f32")
    tensors = GGUF(tmp_path / "model.gguf").tensors
    assert torch.equal(tensors["output.weight"], decoder.embedding.weight)
    assert torch.equal(models.load(tmp_path / "model.gguf")(tiny.ids()), decoder(tiny.ids()))
    tied = model_of("llama2", tie_word_embeddings=True)
    models.save_gguf(tied, tmp_path / "tied.gguf", type="f32")
    assert "output.weight" not in GGUF(tmp_path / "tied.gguf").tensors


def test_rows_that_are_no_whole_blocks_stay_float16(tmp_path):
    decoder = model_of("llama2")  # whose feed-forward is 80 wide
    assert models.save_gguf(decoder, tmp_path / "model.gguf", type="q8_0").tensors == {"q8_0": 14, "f16": 2, "f32": 5}


# transformers takes its defaults for some of what a file says.
THEIR_DEFAULTS = {
    "llama2": {},
    "smollm2": {},
    "qwen2": {},
    "qwen3": dict(head_dim=128),
    "gemma2": dict(head_dim=256, query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "gemma3": dict(head_dim=256, query_pre_attn_scalar=256, sliding_window_pattern=6, num_hidden_layers=7),
    "phi3": dict(vocab_size=32064, sliding_window=None),
}


@torch.no_grad()
@pytest.mark.parametrize("family", THEIR_DEFAULTS)
def test_transformers_reads_the_file(family, tmp_path):
    from transformers import AutoModelForCausalLM

    decoder, ids = model_of(family, **THEIR_DEFAULTS[family]), tiny.ids()
    models.save_gguf(decoder, tmp_path / "model.gguf", type="f32")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    expected = decoder(ids)
    assert (theirs(ids).logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_layers_of_codes_are_written_as_their_numbers(tmp_path):
    decoder = model_of("llama2")
    quantise(decoder, SCHEMES["w8a16"])
    models.save_gguf(decoder, tmp_path / "model.gguf", type="f32")
    codes = decoder.layers[1].mlp.down.kept.numbers()
    assert torch.equal(models.load(tmp_path / "model.gguf").layers[1].mlp.down.weight, codes)
    assert not torch.equal(codes, model_of("llama2").layers[1].mlp.down.weight)


def test_a_table_of_frequencies_is_read_whether_llama3_made_it_or_not(tmp_path):
    models.save_gguf(model_of("llama3"), tmp_path / "model.gguf")
    file = GGUF(tmp_path / "model.gguf")
    assert file.config.rope_scaling == tiny.LLAMA3
    table = np.linspace(1, 3, 8, dtype=np.float32)
    file.stored["rope_freqs.weight"] = file.stored["rope_freqs.weight"]._replace(data=table)
    del file.config
    plain, stretched = frequencies(16, 500000.0)[0], turning(file.config, long=True)
    assert torch.allclose(stretched[0], plain / torch.from_numpy(table))
    assert stretched[1] == 1.0


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("deepseek_v2", {}, "are written of llama, .*, not of deepseek_v2"),
        ("glm", {}, "not of glm"),
        ("llama_dynamic", {}, "rope scaling of the type dynamic"),
        ("mistral", dict(sliding_window=5), "of a mistral model .architecture llama.: windows"),
        ("qwen2_window", {}, ": windows"),
        ("qwen3_yarn", dict(rope_scaling=tiny.YARN), ": rope_scaling"),
        ("qwen3", dict(rope_scaling=tiny.LLAMA3), ": rope_scaling"),
        ("qwen3_moe", dict(norm_topk_prob=False), ": normalise"),
        ("qwen3_moe", dict(mlp_only_layers=[0]), ": dense_layers"),
        ("gemma2", dict(query_pre_attn_scalar=20), ": attention_scale"),
        ("gemma2", dict(tie_word_embeddings=False), ": tied"),
        ("gemma2", dict(attn_logit_softcapping=None), ": attention_softcap"),
        ("gemma3", dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"]), "follow no period"),
        ("gemma3_scaled", dict(attention_bias=True), ": output_bias"),
        ("olmo2", dict(attention_bias=True), ": output_bias"),
        *((family, dict(head_dim=24), ": head_dim") for family in ("qwen2", "phi3", "olmo2")),
        *((family, dict(attention_bias=True), ": output_bias") for family in ("qwen3", "qwen3_moe")),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_named_and_nothing_is_written(family, changes, said, tmp_path):
    decoder = model_of(family, **changes)
    with pytest.raises(models.ConfigError, match=said):
        models.save_gguf(decoder, tmp_path / "model.gguf")
    assert os.listdir(tmp_path) == []


def test_numbers_that_cannot_be_kept_are_named_and_what_was_there_stays(tmp_path):
    (tmp_path / "model.gguf").write_text("before")
    decoder = model_of("llama2")
    with torch.no_grad():
        decoder.layers[1].mlp.down.weight[0, 0] = 1e5
    with pytest.raises(models.CheckpointError, match=r"blk\.1\.ffn_down\.weight holds numbers that float16 has not"):
        models.save_gguf(decoder, tmp_path / "model.gguf", type="f16")
    with torch.no_grad():
        decoder.layers[1].mlp.down.weight[0, 0] = 0
        decoder.layers[1].mlp.down.weight[-1, -1] = float("nan")
    with pytest.raises(models.CheckpointError, match="not finite"):
        models.save_gguf(decoder, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_text() == "before"
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_a_full_disk_is_seen_before_the_first_byte_and_while_writing(tmp_path, monkeypatch):
    decoder = model_of("llama2")
    usage = gguf_writer.shutil.disk_usage
    monkeypatch.setattr(gguf_writer.shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
    with pytest.raises(models.CheckpointError, match=r"0\.0 MB left, and the file takes more than 0\.2 MB"):
        models.save_gguf(decoder, tmp_path / "model.gguf")
    monkeypatch.undo()

    def full(file, part):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gguf_writer, "write_data", full)
    with pytest.raises(OSError, match=r"model\.gguf"):
        models.save_gguf(decoder, tmp_path / "model.gguf")
    assert os.listdir(tmp_path) == []


def test_the_tokenizer_must_name_as_many_tokens_as_the_model_knows(tmp_path):
    with pytest.raises(models.CheckpointError, match="names 2 tokens, the model knows 97"):
        models.save_gguf(model_of("llama2"), tmp_path / "model.gguf", tokenizer={"tokenizer.ggml.tokens": ["a", "b"]})
    with pytest.raises(ValueError, match="f32, f16, bf16, q8_0, q4_0, not in 'q4_K'"):
        models.save_gguf(model_of("llama2"), tmp_path / "model.gguf", type="q4_K")


def test_a_tensor_is_rounded_some_rows_at_a_time(tmp_path, monkeypatch):
    decoder = model_of("mixtral", intermediate_size=96)
    models.save_gguf(decoder, tmp_path / "whole.gguf", type="q8_0")
    monkeypatch.setattr(gguf_writer, "CHUNK", 7 * 64)
    models.save_gguf(decoder, tmp_path / "rows.gguf", type="q8_0", name="whole")
    assert (tmp_path / "rows.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
