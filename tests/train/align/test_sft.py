"""SFT: only answers count, conversations stay apart, and the order goes on from where it stood."""

import json
from itertools import pairwise

import pytest
import torch
from small import CPU, decoder, log_prob, recipe, through_json, tokenizer

from tilestack.data import DataError
from tilestack.parallel.placement import Placement
from tilestack.train import RecipeError
from tilestack.train.align.sft import SFT, SFTRecipe
from tilestack.train.batch_buffer import difference

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "And 4 more?"},
    {"role": "assistant", "content": "It is 7."},
]


def sft(**sections):
    return SFT(recipe(SFTRecipe, **sections), Placement(decoder()), tokenizer(), CPU)


def test_the_loss_is_that_of_the_answers_of_conversations_read_one_by_one():
    objective, model = sft(data={"sequence": 256}), decoder()
    batch = objective.next_batch()
    loss = objective.loss(model, batch)
    conversations = objective.sequences
    rows = objective.packed()[: objective.recipe.data.batch]
    expected, count = 0.0, 0
    for number in (number for row in rows for number in row):
        ids, labels = conversations[number]
        mask = [0, *(label >= 0 for label in labels[:-1])]
        expected += float(log_prob(model, ids, mask))
        count += sum(mask)
    assert sum(map(len, rows)) > objective.recipe.data.batch  # rows do hold several
    assert loss.total.item() == pytest.approx(-expected, rel=1e-5)
    assert loss.count == count


def test_both_answers_of_a_conversation_are_learned_and_nothing_else(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATION}) + "\n")
    objective = sft(data={"corpus": "files", "files": [str(path)], "validation": 0.0, "examples": 0})
    ((ids, labels),) = objective.sequences
    learned = tokenizer().decode([label for label in labels if label >= 0], special=True)
    assert learned == "3<|im_end|>It is 7.<|im_end|>"
    whole = tokenizer().decode(ids, special=True)
    assert whole.index("Be brief.") < whole.index("And 4 more?")


# A template that shows only the last answer's thoughts, as reasoning models do.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_conversations_whose_history_is_rewritten_are_learned_turn_by_turn(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATION}) + "\n")
    settings = {"corpus": "files", "files": [str(path)], "validation": 0.0, "examples": 0}
    objective = SFT(recipe(SFTRecipe, data=settings), Placement(decoder()), tokenizer().for_chat(FORGETFUL), CPU)
    assert (objective.counts["conversations"], objective.counts["sequences"]) == (1, 2)
    learned = [tokenizer().decode([n for n in labels if n >= 0], special=True) for _, labels in objective.sequences]
    assert learned == ["<think></think>3<|im_end|>", "<think></think>It is 7.<|im_end|>"]
    second = tokenizer().decode(objective.sequences[1][0], special=True)
    assert "assistant\n3<|im_end|>" in second  # history as the model will read it


def test_files_are_mixed_by_their_weights(tmp_path):
    files = []
    for name, count in (("a", 30), ("b", 10)):
        turns = [{"role": "user", "content": f"{name}?"}, {"role": "assistant", "content": f"{name}!"}]
        (tmp_path / name).with_suffix(".jsonl").write_text((json.dumps({"messages": turns}) + "\n") * count)
        files.append(str(tmp_path / f"{name}.jsonl"))
    settings = {"corpus": "files", "files": files, "validation": 0.0, "examples": 0, "weights": [1, 3], "batch": 1}
    objective = sft(data=settings)
    told = [tokenizer().decode(objective.sequences[number][0])[-3] for row in objective.packed() for number in row]
    assert (told.count("a"), told.count("b")) == (10, 30)


def test_what_cannot_be_measured_has_no_figure(tmp_path):
    path = tmp_path / "held.jsonl"
    turns = [{"role": "user", "content": "1" * 400}, {"role": "assistant", "content": "2"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    objective = sft(data={"validation_files": [str(path)]})
    assert objective.counts["held out and too long"] == 1
    with torch.no_grad():
        assert "validation_loss" not in objective.evaluate(decoder())
        assert sft(data={"validation": 0.0}).evaluate(decoder()) == {}


def test_every_conversation_comes_once_a_round_and_rounds_differ():
    objective = sft(data={"batch": 1})
    first, seen = objective.packed(), []
    for _ in first:
        batch = objective.next_batch()
        ends = batch.cu_seqlens.unique().tolist()
        seen += [tuple(batch.ids.flatten()[a:b].tolist()) for a, b in pairwise(ends)]
    texts = sorted(tuple(ids) for ids, _ in objective.sequences)
    assert sorted(text for text in seen if any(text)) == texts
    assert objective.packed() != first


def test_batches_differ_in_nothing_but_contents_over_the_ends_of_rounds():
    objective = sft()
    assert len(objective.rows) % objective.recipe.data.batch  # so that a batch takes rows of two rounds
    first = objective.next_batch()
    while objective.deck.round < 3:
        assert difference(first, objective.next_batch()) == ""


def test_a_saved_place_continues_with_the_same_batches():
    objective, twin = sft(), sft()
    for _ in range(5):
        objective.next_batch()
    twin.load_state_dict(through_json(objective.state_dict()))
    for _ in range(12):
        ours, theirs = objective.next_batch(), twin.next_batch()
        assert torch.equal(ours.ids, theirs.ids)
        assert torch.equal(ours.labels, theirs.labels)
    assert objective.deck.round > 0


def test_evaluation_counts_answers_that_are_right_to_the_letter():
    objective, model = sft(data={"corpus": "arithmetic"}), decoder()
    with torch.no_grad():
        figures = objective.evaluate(model)
    assert figures["exact_answers"] == 0
    assert figures["validation_loss"] > 1
    asked = objective.held[:2]
    assert objective.share_exact(model, asked) == 0
    (line,) = {text.partition(" → ")[0] for text in objective.sample(model)[:1]}
    assert objective.held[0].messages[0]["content"] in line


def test_too_long_for_a_row_is_an_error_that_names_the_setting():
    with pytest.raises(RecipeError, match=r"none of .* conversations fits into data.sequence = 4"):
        sft(data={"sequence": 4})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"most_bytes": 5}, "data.most_bytes is for running text"),
        ({"kinds": ["roots"]}, "data.kinds has no roots; there are sum, difference"),
        ({"corpus": "python"}, "data.corpus must be one of conversations, arithmetic, files, not 'python'"),
        ({"corpus": "files"}, "data.files must name at least one file"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, message):
    with pytest.raises(RecipeError, match=message):
        recipe(SFTRecipe, data=settings)


def test_a_file_without_conversations_is_named(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATION}) + '\n{"text": "no messages"}\n')
    with pytest.raises(DataError, match=r"chats.jsonl:2: expected one of messages, conversations"):
        sft(data={"corpus": "files", "files": [str(path)]})
