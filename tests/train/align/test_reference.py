"""The reference is asked once: its words are kept under a fingerprint of model and data."""

import dataclasses

import pytest
import tiny_models as tiny
import torch
from bigrams import Bigrams
from safetensors.torch import load_file, save_file
from small import decoder

from tilestack import models
from tilestack.nn.lora import add_lora
from tilestack.parallel.placement import Placement
from tilestack.train import fp8
from tilestack.train.align import reference
from tilestack.train.align.reference import FrozenWeights, reference_log_probs
from tilestack.train.evaluation.log_probs import Scored, in_rows, log_probs

SEQUENCES = [Scored.answer([1, 2, 3], [4, 5]), Scored.answer([7], [8, 9, 10])]


def log_probs_of(model, *asked):
    return reference_log_probs(Placement(model), *asked)


def test_it_is_what_the_model_says_and_is_kept(tmp_path, monkeypatch):
    model = Bigrams()
    found = log_probs_of(model, SEQUENCES, "cpu", tmp_path / "cache")
    expected = [model.log_prob([3, 4, 5]), model.log_prob([7, 8, 9, 10])]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(reference, "shared_log_probs", lambda *_: pytest.fail("the reference was asked again"))
    assert torch.equal(log_probs_of(model, SEQUENCES, "cpu", tmp_path / "cache"), found)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_another_model_or_other_data_is_asked_itself(tmp_path):
    model = Bigrams()
    first = log_probs_of(model, SEQUENCES, "cpu", tmp_path)
    assert not torch.equal(log_probs_of(Bigrams(seed=1), SEQUENCES, "cpu", tmp_path), first)
    assert torch.equal(log_probs_of(model, SEQUENCES[::-1], "cpu", tmp_path), first.flip(0))
    with torch.no_grad():
        model.embedding[0, 0] += 1e-6
    log_probs_of(model, SEQUENCES, "cpu", tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_other_tokens_of_the_same_texts_are_asked_themselves(tmp_path):
    model = Bigrams()
    for mask in ([0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]):
        (found,) = log_probs_of(model, [Scored([5, 6, 7, 8], mask)], "cpu", tmp_path)
        assert float(found) == pytest.approx(model.log_prob([5, 6, 7, 8][-sum(mask) - 1 :]), rel=1e-5)


def test_other_texts_of_the_same_lengths_are_asked_themselves(tmp_path):
    model = Bigrams()
    for ids in ([5, 6, 7, 8], [5, 6, 8, 7], [9, 6, 7, 8]):
        (found,) = log_probs_of(model, [Scored(ids, [0, 1, 1, 1])], "cpu", tmp_path)
        assert float(found) == pytest.approx(model.log_prob(ids), rel=1e-5)
    assert len(list(tmp_path.iterdir())) == 3


def test_tokens_of_long_answers_are_added_up_in_float64():
    model, long = decoder(), Scored([1, *range(2, 102)], [0] + [1] * 100)
    with torch.no_grad():
        each = log_probs(model, in_rows([long]))[0].double()
    (found,) = log_probs_of(model, [long], "cpu", None)
    assert found == each.sum() != each.float().sum()


def test_a_model_in_another_precision_is_asked_itself(tmp_path):
    model = decoder()
    in_full = log_probs_of(model, SEQUENCES, "cpu", tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        in_halves = log_probs_of(model, SEQUENCES, "cpu", tmp_path)
        assert torch.equal(in_halves, log_probs_of(model, SEQUENCES, "cpu", None))
    assert not torch.equal(in_halves, in_full)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_same_weights_in_another_model_are_asked_themselves(tmp_path):
    """Turned otherwise by RoPE; what ends an answer is not asked about."""
    model, turned = decoder(), models.Decoder(dataclasses.replace(decoder().config, rope_base=100.0))
    turned.load_state_dict(model.state_dict())
    first = log_probs_of(model, SEQUENCES, "cpu", tmp_path)
    assert torch.equal(log_probs_of(turned, SEQUENCES, "cpu", tmp_path), log_probs_of(turned, SEQUENCES, "cpu", None))
    assert not torch.equal(log_probs_of(turned, SEQUENCES, "cpu", tmp_path), first)
    model.config = dataclasses.replace(model.config, eos=(3, 4))
    assert torch.equal(log_probs_of(model, SEQUENCES, "cpu", tmp_path), first)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_model_in_fp8_is_asked_itself(tmp_path):
    model = decoder()
    in_full = log_probs_of(model, SEQUENCES, "cpu", tmp_path)
    fp8.compute_in_fp8(model)
    in_fp8 = log_probs_of(model, SEQUENCES, "cpu", tmp_path)
    assert not torch.equal(in_fp8, in_full)
    assert torch.equal(log_probs_of(model, SEQUENCES, "cpu", tmp_path), in_fp8)
    assert torch.equal(log_probs_of(decoder(), SEQUENCES, "cpu", tmp_path), in_full)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_file_is_made_again(tmp_path):
    model = Bigrams()
    first = log_probs_of(model, SEQUENCES, "cpu", tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:20])
    assert torch.equal(log_probs_of(model, SEQUENCES, "cpu", tmp_path), first)
    save_file({"another": first}, path)
    assert torch.equal(log_probs_of(model, SEQUENCES, "cpu", tmp_path), first)
    assert load_file(path)["log_probs"].equal(first)
    assert torch.equal(log_probs_of(model, SEQUENCES, "cpu", tmp_path), first)


def test_a_write_that_breaks_off_leaves_nothing_under_the_name(tmp_path, monkeypatch):
    def broken(tensors, path):
        path.write_bytes(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(reference, "save_file", broken)
    with pytest.raises(OSError, match="no space left"):
        log_probs_of(Bigrams(), SEQUENCES, "cpu", tmp_path)
    assert not list(tmp_path.glob("reference-*"))


@torch.no_grad()
def test_frozen_weights_are_all_that_a_run_changes():
    """Biases of routers too, which are no parameters."""
    model = tiny.ours("qwen3_moe")
    model.layers[1].mlp.router.bias = torch.arange(8.0)
    frozen, found = FrozenWeights(Placement(model)), model.state_dict()
    before = {name: x.clone() for name, x in found.items()}
    for x in found.values():
        x.add_(1)
    with frozen.applied():
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(torch.equal(x, before[name] + 1) for name, x in model.state_dict().items())
    with pytest.raises(KeyboardInterrupt), frozen.applied():
        raise KeyboardInterrupt
    assert all(torch.equal(x, before[name] + 1) for name, x in model.state_dict().items())


def test_nothing_is_dropped_at_random():
    model = decoder()
    for adapter in add_lora(model, ["layers.*"], 2, dropout=0.5).values():
        torch.nn.init.normal_(adapter.lora_B)
    expected = log_probs_of(model.eval(), SEQUENCES, "cpu", None)
    assert torch.equal(log_probs_of(model.train(), SEQUENCES, "cpu", None), expected)


def test_the_model_is_left_in_the_mode_it_was_in(tmp_path):
    model = Bigrams().train()
    log_probs_of(model, SEQUENCES, "cpu", None)
    assert model.training
