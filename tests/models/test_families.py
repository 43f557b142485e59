"""Every family against transformers on random weights: the same logits from its folder, and again from ours."""

import dataclasses
import json

import pytest
import tiny_models as tiny
import torch

from tilestack import models
from tilestack.data import NO_LABEL, Batch
from tilestack.models.weights import unfused
from tilestack.train.evaluation.log_probs import Rows, log_probs
from tilestack.train.next_token import next_token_loss

each_family = pytest.mark.parametrize("family", tiny.FAMILIES)


def close(found, expected):
    """Logits to 1e-4 of their scale, in float32."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@torch.no_grad()
@each_family
def test_a_folder_of_transformers_gives_its_logits_and_comes_back_the_same(family, tmp_path):
    from transformers import AutoModelForCausalLM

    theirs, ids = tiny.theirs(family), tiny.ids()
    theirs.save_pretrained(tmp_path / "theirs")
    expected = theirs(ids).logits
    ours = models.load(tmp_path / "theirs")
    close(ours(ids), expected)
    written = models.ModelConfig.from_hf(tiny.config_of(family))
    named = {name: getattr(written, name) for name in ("bos", "eos", "pad")}  # transformers has some of its own
    assert dataclasses.replace(ours.config, **named) == written

    models.save(ours, tmp_path / "ours", shard_size=40_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    close(again(ids).logits, expected)
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), again.parameters(), strict=True))


@each_family
def test_a_configuration_survives_the_way_out_and_in(family):
    config = models.ModelConfig.from_hf(tiny.config_of(family))
    assert models.ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 4, 5, 14, 30])
def test_longrope_goes_by_the_positions_of_a_text(first, tmp_path):
    """Trained on 16 positions: below them, up to the last, one further, across them, and beyond."""
    theirs, ids, positions = tiny.theirs("phi4_mini_long"), tiny.ids(2, 12), torch.arange(first, first + 12)
    theirs.save_pretrained(tmp_path)
    close(models.load(tmp_path)(ids, positions), theirs(ids, position_ids=positions[None]).logits)


@torch.no_grad()
def test_short_documents_in_a_long_row_are_short():
    decoder, ids = tiny.ours("phi4_mini_long"), tiny.ids(1, 24)
    positions = torch.arange(12).repeat(2)
    packed = decoder(ids, positions, torch.tensor([0, 12, 24]))[0]
    torch.testing.assert_close(packed[12:], decoder(ids[:, 12:])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "phi4_mini", "olmo2", "granite", "glm4", "deepseek_v2"])
def test_gradients_are_those_of_transformers(family, tmp_path):
    theirs, ids = tiny.theirs(family), tiny.ids()
    theirs.save_pretrained(tmp_path)
    ours = models.load(tmp_path)
    for model, logits in ((theirs, lambda: theirs(ids).logits), (ours, lambda: ours(ids))):
        model.zero_grad()
        torch.nn.functional.cross_entropy(logits()[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter.grad)
    found = {name: grad for name, grad in unfused(ours) if name in expected}
    assert len(found) > 10
    for name, grad in found.items():
        close(grad, expected[name])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_losses_on_hidden_states_know_of_bounded_and_divided_logits(temperature):
    """Gemma 2 bounds its logits and Granite divides them; what trains on hidden states and the head's weight does too."""
    ids = tiny.ids()
    labels = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], NO_LABEL)), 1)
    for family in ("gemma2", "granite"):
        decoder = tiny.ours(family)
        expected = (decoder(ids) / temperature).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(log_probs(decoder, Rows(ids, labels), temperature)[:, :-1], expected)
        if temperature == 1:
            batch = Batch(ids, labels, torch.arange(ids.shape[1]).expand_as(ids), torch.tensor([0, 24, 48]), 46)
            torch.testing.assert_close(next_token_loss(decoder, batch), -expected.sum())
