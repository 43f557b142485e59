"""What is said of a changed model: figures by hand, and of a model that has not changed at all."""

import math

import pytest
import tiny_models as tiny
import torch

from tilestack.data import NO_LABEL
from tilestack.train.evaluation.comparison import compare, remember, take_windows
from tilestack.train.evaluation.evaluate import EvaluationError, evaluate_texts

DOCUMENTS = [(list(range(5 + n, 35 + n)), 100 + n) for n in range(6)]


def test_a_model_that_has_not_changed_agrees_with_itself():
    decoder = tiny.ours("llama3")
    found = compare(decoder, remember(decoder, take_windows(DOCUMENTS, 16, 10**6), "cpu"), "cpu")
    assert found.before == found.after
    assert found.kl.value == pytest.approx(0, abs=1e-6)
    assert (found.agreement.value, found.change.value) == (1, 0)
    expected = evaluate_texts(decoder, DOCUMENTS, "cpu", 16)
    assert found.before.documents == expected.documents == 6
    assert (found.before.tokens, found.before.bytes) == (expected.tokens, expected.bytes)
    for name in ("perplexity", "bits_per_byte", "nats_per_token"):
        mine, theirs = getattr(found.before, name), getattr(expected, name)
        assert mine.value == pytest.approx(theirs.value, rel=1e-5)
        assert mine.error == pytest.approx(theirs.error, rel=1e-3)


@torch.no_grad()
def test_logits_of_half_precision_are_not_rounded():
    decoder = tiny.ours("llama3").to(torch.bfloat16)
    decoder.head_weight.mul_(20)  # to where the steps of bfloat16 are coarse
    reference = remember(decoder, take_windows(DOCUMENTS, 16, 10**6), "cpu")
    nats, rounded = [], []
    for _, rows, hidden in reference.batches:
        labels = rows.labels[rows.labels != NO_LABEL]
        for logits, found in (
            (hidden.float() @ decoder.head_weight.float().T, nats),
            (decoder.logits(hidden), rounded),
        ):
            found += torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none").tolist()
    mean = compare(decoder, reference, "cpu").before.nats_per_token.value
    assert mean == pytest.approx(sum(nats) / len(nats), rel=1e-6)
    assert mean != pytest.approx(sum(rounded) / len(rounded), rel=3e-5)


@torch.no_grad()
def test_what_changed_is_measured_token_by_token():
    decoder, softcapped = tiny.ours("gemma2"), tiny.ours("gemma2")
    windows = take_windows(DOCUMENTS, 40, 10**6)
    reference = remember(decoder, windows, "cpu")
    decoder.layers[1].mlp.down.weight.add_(0.1 * torch.randn(64, 80))
    found = compare(decoder, reference, "cpu")
    divergence, same, nats, size = [], [], [], 0
    for ids, count in DOCUMENTS:
        p, q = (torch.log_softmax(model(torch.tensor(ids[:-1])[None])[0], -1) for model in (softcapped, decoder))
        divergence += torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
        nats.append((p - q).gather(1, torch.tensor(ids[1:])[:, None]).sum().item())
        size += count
    assert found.kl.value == pytest.approx(sum(divergence) / len(divergence), rel=1e-4)
    assert found.agreement.value == pytest.approx(sum(same) / len(same))
    assert 0 < found.agreement.value < 1
    assert found.change.value == pytest.approx(sum(nats) / math.log(2) / size, rel=1e-3)
    assert found.change.value == pytest.approx(found.after.bits_per_byte.value - found.before.bits_per_byte.value)
    assert 0 < found.change.error < found.after.bits_per_byte.error


def test_as_many_tokens_are_read_as_asked_for():
    windows = take_windows(DOCUMENTS, 10, 50)
    assert sum(sum(window.scored.mask) for window in windows) == 58  # windows of 10, 10 and 9 tokens of a document
    assert [window.document for window in windows] == [0, 0, 0, 1, 1, 1]
    one = compare(tiny.ours("llama3"), remember(tiny.ours("llama3"), windows[:3], "cpu"), "cpu")
    assert one.before.documents == 1
    assert one.before.perplexity.error > 0  # by windows
    with pytest.raises(EvaluationError, match="there is no text"):
        take_windows([([5], 3), ([], 0)], 10, 50)
