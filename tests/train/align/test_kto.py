"""KTO: the loss against one written out answer by answer, strangers that are strangers, and the way it moves answers."""

import json
import math

import pytest
import torch
from small import (
    CPU,
    batches_after_a_saved_place,
    decoder,
    evaluated_around_steps,
    log_prob,
    recipe,
    tokenizer,
)

from tilestack.data import DataError
from tilestack.data.formats import Judged, user
from tilestack.parallel.placement import Placement
from tilestack.train import RecipeError
from tilestack.train.align.kto import KTO, KTORecipe, cases_of, strangers
from tilestack.train.loop import Trainer


def kto(model, cache=None, **sections):
    return KTO(recipe(KTORecipe, **sections), Placement(model), tokenizer(), CPU, cache)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(("by", "diverges"), [(0.05, False), (0.01, False), (-0.01, True)])
def test_the_loss_is_that_of_answers_read_one_by_one(by, diverges):
    torch.manual_seed(0)
    reference, model = decoder(), decoder()
    objective = kto(model, kto={"beta": 0.3, "weight_good": 1.3, "weight_bad": 0.7}, data={"batch": 5})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=by)
    cases = [objective.pairs[number] for number in objective.deck.order()[:5]]
    gain = lambda each: float(log_prob(model, each.ids, each.mask) - log_prob(reference, each.ids, each.mask))
    z = max(sum(gain(case.second) for case in cases) / 5, 0)
    assert (z > 0) == diverges
    expected = sum(
        (1.3 if case.good else 0.7) * (1 - sigmoid(0.3 * (1 if case.good else -1) * (gain(case.first) - z)))
        for case in cases
    )
    loss = objective.loss(model, objective.next_batch())
    assert loss.total.item() == pytest.approx(expected, rel=1e-4)
    assert (loss.count, float(loss.metrics["kl"]) / 5) == (5, pytest.approx(z, rel=1e-3, abs=1e-5))
    for kind in ("good", "bad"):
        rewards = [0.3 * gain(case.first) for case in cases if case.good == (kind == "good")]
        assert int(loss.weights[f"reward_{kind}"]) == len(rewards)
        assert float(loss.metrics[f"reward_{kind}"]) == pytest.approx(sum(rewards), rel=1e-3, abs=5e-5 * len(rewards))


def test_rewards_of_a_step_are_means_over_its_good_and_its_bad_answers(tmp_path):
    """Of micro-batches of one answer each, of which none has both."""
    torch.manual_seed(0)
    reference, model = decoder(), decoder()
    objective = kto(model, data={"batch": 1, "accumulate": 5}, run={"steps": 1})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    gain = lambda each: float(log_prob(model, each.ids, each.mask) - log_prob(reference, each.ids, each.mask))
    cases = [objective.pairs[number] for number in objective.deck.order()[:5]]
    rewards = {kind: [0.1 * gain(case.first) for case in cases if case.good == kind] for kind in (True, False)}
    assert len(rewards[True]) != len(rewards[False])
    figures = Trainer(objective.recipe, model, objective, tmp_path).run()
    for name, kind in (("reward_good", True), ("reward_bad", False)):
        assert figures[name] == pytest.approx(sum(rewards[kind]) / len(rewards[kind]), rel=1e-3)


def test_an_evaluation_is_the_mean_over_all_answers_held_out():
    torch.manual_seed(0)
    reference, model = decoder(), decoder()
    objective = kto(model, data={"batch": 5, "validation": 0.4})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.005)
        found = objective.evaluate(model)
    gain = lambda each: float(log_prob(model, each.ids, each.mask) - log_prob(reference, each.ids, each.mask))
    losses, above = [], {1: [], 10: []}  # times the divergence
    for first in range(0, len(objective.held), 5):
        part = objective.held[first : first + 5]
        z = max(sum(gain(case.second) for case in part) / len(part), 0)
        for case in part:
            losses.append(1 - sigmoid(0.1 * (1 if case.good else -1) * (gain(case.first) - z)))
            for times, found_right in above.items():
                found_right.append((gain(case.first) > times * z) == case.good)
    share = {times: sum(found_right) / len(losses) for times, found_right in above.items()}
    assert found["validation_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert found["validation_accuracy"] == pytest.approx(share[1]) != share[10]


def test_a_stranger_answers_another_prompt():
    judged = [Judged([user(prompt)], answer, True) for prompt, answer in (("a", "1"), ("a", "2"), ("b", "3"))]
    assert strangers(judged) == ["3", "3", "1"]
    assert strangers([*judged[1:], judged[0]]) == ["3", "1", "3"]  # the last one asks what the first does
    assert strangers(judged[:2]) == ["1", "1"]  # one prompt alone has none
    case = next(iter(cases_of(tokenizer(), judged)))
    answers = [
        tokenizer().decode([t for t, m in zip(s.ids, s.mask, strict=True) if m]) for s in (case.first, case.second)
    ]
    assert answers == ["1", "3"]


def test_steps_raise_good_answers_and_lower_bad_ones():
    model = decoder()
    objective = kto(model, data={"batch": 8})
    before, after = evaluated_around_steps(objective, model, 25)
    assert after["validation_loss"] < before["validation_loss"] - 0.05
    assert after["validation_accuracy"] > 0.6


def test_a_saved_place_continues_with_the_same_batches(tmp_path):
    model = decoder()
    for ours, theirs in batches_after_a_saved_place(kto(model, tmp_path), kto(model, tmp_path)):
        assert torch.equal(ours.rows.ids, theirs.rows.ids)
        assert torch.equal(ours.good, theirs.good)
    assert len(list(tmp_path.iterdir())) == 1  # the reference was asked once for both


def test_judged_answers_come_from_files_and_bad_ones_are_named(tmp_path):
    path = tmp_path / "judged.jsonl"
    rows = [
        {"prompt": "2 + 2?", "completion": "4", "label": True},
        {"prompt": "2 + 3?", "completion": "4", "label": False},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"corpus": "files", "files": [str(path)], "validation": 0.0, "examples": 0}
    assert [case.good for case in kto(decoder(), data=files).pairs] == [True, False]
    path.write_text(json.dumps({"prompt": "2 + 2?", "completion": "4"}))
    with pytest.raises(DataError, match=r'judged.jsonl:1: expected true or false under "label"'):
        kto(decoder(), data=files)
    with pytest.raises(RecipeError, match=r"none of .* judged answers fits into data.sequence = 4"):
        kto(decoder(), data={"sequence": 4})
