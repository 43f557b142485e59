"""What `models.save` writes of a decoder of codes, `models.load` reads: the same codes, bit for bit."""

import pytest
import tiny_models as tiny
import torch
from code_models import ALL, KINDS, code_layers, quantised, same

from tilestack import models

FAMILIES = ["smollm2", "llama_biased", "qwen3", "phi3", "glm4", "gemma3"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_codes_come_back_bit_for_bit(name, family, tmp_path):
    decoder = quantised(family, ALL[name])
    models.save(decoder, tmp_path / "model", shard_size=20_000)
    again = models.load(tmp_path / "model")
    here, there = code_layers(decoder), code_layers(again)
    assert list(here) == list(there)
    assert len(here) == 4 * decoder.config.layers
    for path, layer in here.items():
        for one, other in zip(layer.kept, there[path].kept, strict=True):
            assert same(one, other), path
        assert all(getattr(there[path].scheme, each) == getattr(ALL[name], each) for each in KINDS)
    ids = tiny.ids()
    assert again(ids).equal(decoder(ids))
