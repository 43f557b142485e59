"""DPO: the loss against one written out pair by pair, the way it moves answers, and its reference."""

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
from tilestack.nn.lora import add_lora, without_lora
from tilestack.parallel.placement import Placement
from tilestack.train import RecipeError, execution
from tilestack.train.align.dpo import DPO, DPORecipe, pairs_of, preferences


def dpo(model, cache=None, **sections):
    return DPO(recipe(DPORecipe, **sections), Placement(model), tokenizer(), CPU, cache)


def nudged(model, by=0.05):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=by)


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0), ("simpo", 0.0)])
def test_the_loss_is_that_of_pairs_read_one_by_one(kind, smoothing):
    torch.manual_seed(0)
    reference, model = decoder(), decoder()
    margin = {"gamma": 0.7} if kind == "simpo" else {}
    objective = dpo(model, dpo={"loss": kind, "beta": 0.3, "label_smoothing": smoothing, **margin})
    nudged(model)
    pairs = [objective.pairs[number] for number in objective.deck.order()[:3]]
    expected, margins = 0.0, []
    for pair in pairs:
        h = 0.0
        for sign, sequence in ((1, pair.first), (-1, pair.second)):
            ratio = log_prob(model, sequence.ids, sequence.mask)
            if kind != "simpo":
                ratio = ratio - log_prob(reference, sequence.ids, sequence.mask)
            h += sign * float(ratio) / (1 if kind == "sigmoid" else sum(sequence.mask))
        margins.append(0.3 * h)
        sigmoid = lambda x: 1 / (1 + math.exp(-x))
        if kind == "ipo":
            expected += (h - 1 / 0.6) ** 2
        elif kind == "simpo":
            expected -= math.log(sigmoid(0.3 * h - 0.7))
        else:
            expected -= (1 - smoothing) * math.log(sigmoid(0.3 * h)) + smoothing * math.log(sigmoid(-0.3 * h))
    loss = objective.loss(model, objective.next_batch())
    assert loss.total.item() == pytest.approx(expected, rel=1e-4)
    assert loss.count == 3
    assert float(loss.metrics["margin"]) == pytest.approx(sum(margins), rel=1e-3, abs=1e-5)
    assert int(loss.metrics["accuracy"]) == sum(margin > 0 for margin in margins)
    difference = loss.metrics["reward_chosen"] - loss.metrics["reward_rejected"]
    assert float(difference) == pytest.approx(sum(margins), rel=1e-3, abs=1e-5)


def test_a_run_begins_where_policy_and_reference_agree():
    model = decoder()
    loss = dpo(model).loss(model, dpo(model).next_batch())
    assert loss.total.item() / loss.count == pytest.approx(math.log(2), rel=1e-4)
    assert abs(float(loss.metrics["margin"])) < 1e-3


def test_the_reference_computes_in_the_precision_of_the_policy():
    model = decoder()
    objective = dpo(model, precision={"compute": "bfloat16"})
    batch = objective.next_batch()
    margin = lambda: abs(float(objective.loss(model, batch).metrics["margin"]))
    with execution.autocast(objective.recipe.precision, CPU):
        agreeing = margin()
    assert agreeing < 0.01 * margin()  # of a policy in float32


def test_without_a_reference_none_is_asked(tmp_path):
    objective = dpo(decoder(), tmp_path, dpo={"loss": "simpo"})
    assert list(tmp_path.iterdir()) == []
    assert objective.next_batch().reference.abs().sum() == 0


def test_steps_raise_the_chosen_over_the_rejected():
    model = decoder()
    objective = dpo(model, data={"batch": 8})
    before, after = evaluated_around_steps(objective, model, 12)
    assert after["validation_margin"] > before["validation_margin"] + 0.5
    assert after["validation_loss"] < before["validation_loss"]
    assert after["validation_accuracy"] > 0.5


def test_an_evaluation_is_the_mean_over_all_pairs_held_out():
    torch.manual_seed(0)
    reference, model = decoder(), decoder()
    objective = dpo(model, dpo={"beta": 0.3}, data={"batch": 2})
    nudged(model)
    gain = lambda each: float(log_prob(model, each.ids, each.mask) - log_prob(reference, each.ids, each.mask))
    margins = [0.3 * (gain(pair.first) - gain(pair.second)) for pair in objective.held]
    assert len(margins) > objective.recipe.data.batch
    with torch.no_grad():
        found = objective.evaluate(model)
    assert found["validation_margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-3, abs=1e-5)
    assert found["validation_accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / len(margins))


def test_pairs_that_fit_to_the_token_are_taken():
    longest = lambda pair: max(len(pair.first.ids), len(pair.second.ids))
    lengths = sorted(map(longest, dpo(decoder()).pairs))
    room = lengths[len(lengths) // 2]
    found = sorted(map(longest, dpo(decoder(), data={"sequence": room}).pairs))
    assert found == [length for length in lengths if length <= room] != lengths
    for objective in (dpo(decoder()), dpo(decoder(), data={"sequence": room})):
        counts = objective.counts
        assert counts["pairs of answers"] == 36 == len(objective.pairs) + counts["too long for data.sequence"]
        assert counts["held out"] == 4 == len(objective.held) + counts["held out and too long"]


def test_pairs_of_equal_answers_are_counted_aloud(tmp_path):
    file = tmp_path / "pairs.jsonl"
    answers = [("4", "5"), ("4", "4"), ("7", "7")]
    file.write_text("".join(json.dumps({"prompt": f"{n}?", "chosen": a, "rejected": b}) + "\n" for n, (a, b) in enumerate(answers)))  # fmt: skip
    counts = dpo(decoder(), data={"corpus": "files", "files": [str(file)], "validation": 0}).counts
    assert counts["pairs of answers"] == 3
    assert counts["with two equal answers, which teach nothing"] == 2


def test_pairs_that_do_not_fit_leave_the_others_to_their_files(tmp_path):
    row = lambda prompt: json.dumps({"prompt": prompt, "chosen": "4", "rejected": "5"}) + "\n"
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text(row("2 + 2? " * 40) + row("a?") + row("aa?"))
    files[1].write_text(row("b?") + row("bb?"))
    data = dict(corpus="files", files=list(map(str, files)), weights=[1.0, 3.0], validation=0.0, examples=0)
    objective = dpo(decoder(), data=data)
    prompts = [tokenizer().decode(pair.first.ids) for pair in objective.pairs]
    assert ["b?" in prompt for prompt in prompts] == [False, False, True, True]
    assert [members.tolist() for members in objective.deck.members] == [[0, 1], [2, 3]]


def test_only_the_last_answer_is_scored():
    preference = preferences(recipe(DPORecipe).data, 0).learned[0]
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (pair,) = pairs_of(tokenizer(), [type(preference)([*earlier, *preference.messages], "4", "five")])
    for sequence, answer in ((pair.first, "4"), (pair.second, "five")):
        scored = [token for token, marked in zip(sequence.ids, sequence.mask, strict=True) if marked]
        assert tokenizer().decode(scored, special=True) == f"{answer}<|im_end|>"


def test_with_adapters_the_reference_is_the_model_without_them():
    torch.manual_seed(0)
    plain, model = decoder(), decoder()
    add_lora(model, ["layers.*"], rank=2)
    objective = dpo(model)
    assert torch.equal(objective.reference, dpo(plain).reference)
    nudged(model)
    with without_lora(model):
        assert float(objective.loss(model, objective.next_batch()).metrics["margin"]) == pytest.approx(0, abs=1e-3)
    assert float(objective.loss(model, objective.next_batch()).metrics["margin"]) != pytest.approx(0, abs=1e-3)


def test_a_saved_place_continues_with_the_same_batches(tmp_path):
    model = decoder()
    for ours, theirs in batches_after_a_saved_place(dpo(model, tmp_path), dpo(model, tmp_path)):
        assert torch.equal(ours.rows.ids, theirs.rows.ids)
        assert torch.equal(ours.reference, theirs.reference)
    assert len(list(tmp_path.iterdir())) == 1  # the reference was asked once for both


def test_a_place_is_refused_where_other_pairs_are_held_out(tmp_path):
    row = lambda prompt: json.dumps({"prompt": prompt, "chosen": "4", "rejected": "5"}) + "\n"
    learned, held = tmp_path / "learned.jsonl", tmp_path / "held.jsonl"
    learned.write_text(row("2 + 2?") + row("1 + 3?"))
    data = dict(corpus="files", files=[str(learned)], validation_files=[str(held)], examples=0)
    held.write_text(row("3 + 1?"))
    place = dpo(decoder(), data=data).state_dict()
    dpo(decoder(), data=data).load_state_dict(place)
    held.write_text(row("4 + 0?"))
    with pytest.raises(DataError, match="the examples are not those that the run began with"):
        dpo(decoder(), data=data).load_state_dict(place)


def test_bad_input_is_named(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}\n{"prompt": "2 + 2?", "chosen": "4"}\n')
    with pytest.raises(
        DataError, match=r'pairs.jsonl:2: expected a text or messages under "rejected"; this row has prompt, chosen'
    ):
        dpo(decoder(), data={"corpus": "files", "files": [str(path)]})
    with pytest.raises(RecipeError, match=r"none of .* pairs of answers fits into data.sequence = 4"):
        dpo(decoder(), data={"sequence": 4})
    with pytest.raises(RecipeError, match=r'dpo.label_smoothing has no meaning where dpo.loss is "ipo"'):
        recipe(DPORecipe, dpo={"loss": "ipo", "label_smoothing": 0.1})
    with pytest.raises(RecipeError, match=r'dpo.gamma has no meaning where dpo.loss is "sigmoid"; it is the margin'):
        recipe(DPORecipe, dpo={"gamma": 0.7})
    with pytest.raises(RecipeError, match=r"dpo.loss must be one of sigmoid, ipo, simpo, not 'ippo'; did you mean ipo"):
        recipe(DPORecipe, dpo={"loss": "ippo"})
