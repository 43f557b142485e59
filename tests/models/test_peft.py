"""PEFT itself: what we save it computes, what it saves we compute, on dense models and on mixtures of experts."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ids, ours

from tilestack import models
from tilestack.models.adapters import CONFIG, WEIGHTS, load_adapters, save_adapters
from tilestack.nn.lora import ExpertLoRA, add_lora, lora_layers, lora_parameters, merge_lora

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")


def hugging_face(decoder, folder):
    models.save(decoder, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


OURS = [
    ("llama2", ["layers.*"]),
    ("llama2", ["*"]),  # the head too
    ("smollm2", ["layers.0.*"]),
    ("qwen3_moe", ["layers.*"]),  # a dense layer and experts
    ("qwen3_moe", ["*.attention.*"]),
    ("qwen3_moe", ["layers.1.mlp.down"]),
    ("qwen3_moe", ["layers.1.mlp.gate_up", "layers.0.mlp.down"]),
    ("deepseek_v2", ["layers.*"]),  # shared experts as well
    ("deepseek_v2", ["*.shared.*"]),
    ("mixtral", ["layers.*"]),
]


@torch.no_grad()
@pytest.mark.parametrize(("family", "targets"), OURS, ids=[f"{family} {' '.join(targets)}" for family, targets in OURS])
def test_what_we_save_peft_computes_and_we_read_again(tmp_path, family, targets):
    decoder = ours(family)
    theirs = hugging_face(decoder, tmp_path / "base")
    plain = decoder(ids())
    add_lora(decoder, targets, rank=4, alpha=10, dropout=0.1)
    for number, (_, parameter) in enumerate(lora_parameters(decoder)):
        parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
    expected = decoder.eval()(ids())
    assert (expected - plain).abs().max() > 0.1 * plain.abs().max()
    save_adapters(decoder, tmp_path / "adapter", "base")
    close(peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()(ids()).logits, expected)
    again = ours(family)
    load_adapters(again, tmp_path / "adapter")
    close(again(ids()), expected)
    merge_lora(again)
    close(again(ids()), expected)


MLP = ["gate_proj", "up_proj", "down_proj"]
THEIRS = {
    "plain": ("llama2", dict(target_modules=["q_proj", "v_proj"])),
    "head": ("llama2", dict(target_modules=["q_proj", "lm_head"])),
    "alpha pattern": ("llama2", dict(target_modules=["q_proj", "v_proj"], alpha_pattern={"v_proj": 32})),
    "rank pattern": ("llama2", dict(target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 2})),
    "both": ("llama2", dict(target_modules=["q_proj", "k_proj", "up_proj"], rank_pattern={r"0.*\.k_proj": 2, "q_proj": 8}, alpha_pattern={"layers.1.self_attn.q_proj": 1})),
    "rank-stabilised": ("llama2", dict(target_modules=["o_proj", "v_proj"], use_rslora=True, rank_pattern={"v_proj": 2})),
    "some layers": ("llama2", dict(target_modules=["q_proj"], layers_to_transform=[1])),
    "all": ("smollm2", dict(target_modules="all-linear")),
    "experts": ("qwen3_moe", dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])),
    "experts with a pattern": ("qwen3_moe", dict(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], target_modules=[], alpha_pattern={r".*\.down_proj": 20})),
    "experts' down alone": ("deepseek_v2", dict(target_modules=[], target_parameters=["mlp.experts.down_proj"])),
    "experts' gate_up alone": ("mixtral", dict(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])),
    "experts by their old names": ("qwen3_moe", dict(target_modules=MLP)),
    "mixtral by its old names": ("mixtral", dict(target_modules=["w1", "w2", "w3", "v_proj"])),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("case", THEIRS)
def test_what_peft_saves_we_compute(tmp_path, case):
    family, settings = THEIRS[case]
    theirs = hugging_face(ours(family), tmp_path / "base")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, r=4, lora_alpha=8, **settings)
    adapted = peft.get_peft_model(copy.deepcopy(theirs), settings).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    decoder = ours(family)
    load_adapters(decoder, tmp_path / "adapter")
    expected = adapted(ids()).logits
    assert (expected - theirs(ids()).logits).abs().max() > 0.01
    close(decoder(ids()), expected)


@torch.no_grad()
def test_adapters_of_each_expert_apart_are_read_as_peft_reads_them(tmp_path):
    """As PEFT wrote them when transformers had a linear layer for each expert."""
    decoder = ours("qwen3_moe")
    theirs = hugging_face(decoder, tmp_path / "base")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for expert in range(8):
        for name, out, width in (("gate_proj", 24, 64), ("up_proj", 24, 64), ("down_proj", 64, 24)):
            key = f"base_model.model.model.layers.1.mlp.experts.{expert}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(3, width, generator=generator) * 0.3
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, 3, generator=generator) * 0.3
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, "target_modules": MLP}
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config))
    load_adapters(decoder, tmp_path / "adapter")
    assert any(isinstance(layer, ExpertLoRA) for layer in lora_layers(decoder).values())
    close(decoder(ids()), peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()(ids()).logits)


def test_only_what_is_adapted_is_named(tmp_path):
    decoder = ours("qwen3_moe")
    add_lora(decoder, ["*.qkv", "layers.1.*.output", "layers.*.mlp.*"], rank=2)
    save_adapters(decoder, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["target_modules"] == ["k_proj", "model.layers.1.self_attn.o_proj", "q_proj", "v_proj"]
    assert config["target_parameters"] == [
        "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj",
    ]  # fmt: skip
    assert all(re.search(r"layers\.[01]\.", name) for name in load_file(tmp_path / WEIGHTS))
