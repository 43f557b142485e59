"""Log-probabilities of answers, in rows of any filling, against a softmax over all logits."""

import pytest
import tiny_models as tiny
import torch

from tilestack.data import NO_LABEL
from tilestack.train.evaluation.log_probs import Scored, in_rows, log_probs


class Bigram:
    """A model of which each token's logits depend on the token before: no attention, so nothing to hide."""

    logit_softcap = 0.0

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(11, 4, generator=generator)
        self.head_weight = torch.randn(11, 4, generator=generator)

    def hidden(self, ids):
        return self.embedding[ids]


def test_labels_are_what_follows_where_it_is_scored():
    rows = in_rows([Scored.answer([1, 2, 3], [4, 5]), Scored([6, 7, 8], [1, 0, 1])], multiple=4)
    assert rows.ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 0, 0, 0, 0, 0]]
    x = NO_LABEL
    assert rows.labels.tolist() == [[x, x, 4, 5, x, x, x, x], [x, 8, x, x, x, x, x, x]]
    assert rows.tokens.tolist() == [2, 1]


def test_log_probs_are_those_of_the_softmax_at_any_temperature():
    model = Bigram()
    rows = in_rows([Scored.answer([1, 2, 3], [4, 5]), Scored.answer([9], [10, 0, 2])])
    for temperature in (1.0, 0.7):
        logits = model.hidden(rows.ids) @ model.head_weight.T / temperature
        expected = logits.log_softmax(-1).gather(-1, rows.labels.clamp_min(0)[..., None])[..., 0]
        expected = expected.masked_fill(rows.labels == NO_LABEL, 0)
        torch.testing.assert_close(log_probs(model, rows, temperature), expected)


@pytest.mark.parametrize("family", ["phi4_mini", "llama_dynamic"])
def test_rows_of_models_that_rotate_by_length_are_as_long_as_their_texts(family):
    """A policy reads rows side by side and its reference read them one by one: with the same weights both say the same."""
    model = tiny.ours(family).double()
    most = min(model.rotary.most, model.config.positions - 8)
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 90, (size,), generator=draw).tolist() for size in (most + 8, most - 3, 5)]
    rows = in_rows([Scored.answer(ids[:2], ids[2:]) for ids in texts], multiple=7)
    found = log_probs(model, rows)
    assert found.shape == rows.labels.shape
    for ids, row in zip(texts, found, strict=True):
        expected = model(torch.tensor([ids[:-1]])).log_softmax(-1)[0, 1:]
        torch.testing.assert_close(row[1 : len(ids) - 1], expected[range(len(ids) - 2), ids[2:]])
        assert not row[len(ids) - 1 :].any()
    (gradient,) = torch.autograd.grad(found.sum(), model.embedding.weight)
    assert gradient.any()
