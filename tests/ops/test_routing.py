"""Routing: the first of equals, groups that close, and errors for people."""

import pytest
import torch

from tilestack import backend, ops

either = pytest.mark.parametrize("chosen_backend", ["torch", "triton"])


@either
def test_the_first_of_equals_is_chosen(chosen_backend):
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0], [-torch.inf, 0.0, -torch.inf, -torch.inf]])
    with backend(route=chosen_backend):
        chosen, weights, scores = ops.route(logits, k=3)
    assert chosen.tolist() == [[1, 2, 0], [1, 0, 2]]
    torch.testing.assert_close(scores, logits.softmax(1))
    torch.testing.assert_close(weights.sum(1), torch.ones(2))
    assert weights[1].tolist() == [1, 0, 0]


@either
def test_experts_of_closed_groups_are_left_alone(chosen_backend):
    """By their two best together, the second group is better than the first, which has the best expert."""
    logits = torch.logit(torch.tensor([[0.9, 0.1, 0.7, 0.6, 0.2, 0.2, 0.5, 0.4]]))
    with backend(route=chosen_backend):
        alone = ops.route(logits, k=2, scoring="sigmoid", groups=4, top_groups=1)[0]
        biased = ops.route(logits, torch.tensor([0, 0.5, 0, 0, 0, 0, 0, 0]), 2, "sigmoid", False, 3.0, 4, 1)
    assert alone.tolist() == [[2, 3]]
    assert biased[0].tolist() == [[0, 1]]
    torch.testing.assert_close(biased[1], 3 * torch.tensor([[0.9, 0.1]]))  # the bias has no say in weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k=0), "k must be between 1 and the 8 experts to choose from, not 0"),
        (dict(k=3, groups=4), "k must be between 1 and the 2 experts to choose from, not 3"),
        (dict(groups=3), "groups must divide the 8 experts"),
        (dict(scoring="relu"), "scoring must be softmax or sigmoid, not 'relu'"),
        (dict(bias=torch.ones(3)), r"bias must have shape \(8,\), not \(3,\)"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ops.route(torch.zeros(2, 8), **options)


@either
def test_experts_that_are_masked_in_an_open_group_come_before_those_of_closed_ones(chosen_backend):
    """Closed groups were ranked at -inf as masked experts are, and an expert of one was chosen, with a weight."""
    masked = -torch.inf
    logits = torch.tensor([[0.5, 0.4, 2.0, masked, 1.0, masked, 0.3, 0.2]])
    with backend(route=chosen_backend):
        chosen, weights, _ = ops.route(logits, k=3, groups=4, top_groups=2)
    assert chosen.tolist() == [[2, 4, 3]]
    assert weights[0, 2] == 0
