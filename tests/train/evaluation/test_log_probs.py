"""Log-probabilities of answers, in rows of any filling, against a softmax over all logits."""

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
