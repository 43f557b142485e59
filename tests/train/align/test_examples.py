"""What alignment learns from: rows of files, with errors that name file and line; held-out prompts; dealt orders."""

import json
from collections import Counter

import pytest

from tilestack.data import DataError, corpora
from tilestack.train.align import examples
from tilestack.train.align.deck import Deck

PREFERENCE = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def test_rows_of_files_become_conversations_preferences_and_tasks(tmp_path):
    files = written(tmp_path / "a.jsonl", {"messages": MESSAGES}, {"messages": MESSAGES[:1] + MESSAGES})
    assert examples.from_files(files, examples.conversation, 0) == [MESSAGES, MESSAGES[:1] + MESSAGES]
    assert examples.from_files(files, examples.conversation, 1) == [MESSAGES]
    files = written(tmp_path / "b.jsonl", PREFERENCE, {**PREFERENCE, "prompt": MESSAGES[:1]})
    text, messages = examples.from_files(files, examples.preference, 0)
    assert text == corpora.Preference([{"role": "user", "content": "2 + 2?"}], "4", "5")
    assert messages.messages == MESSAGES[:1]
    files = written(tmp_path / "c.jsonl", {"prompt": "2 + 2?", "answer": "4"})
    (task,) = examples.from_files(files, examples.task, 0)
    assert (task.prompt, task.answer) == ("2 + 2?", "4")


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (examples.preference, {"prompt": "?", "chosen": "4"}, 'expected a text under "rejected"; this row has prompt, chosen'),
        (examples.preference, {"chosen": "4", "rejected": "5"}, 'list of messages under "prompt"; this row has chosen, rej'),
        (examples.preference, {**PREFERENCE, "prompt": MESSAGES}, '"prompt" must end before the answer'),
        (examples.preference, {**PREFERENCE, "chosen": ""}, 'expected a text under "chosen"'),
        (examples.conversation, {"text": "Hi"}, 'expected a list of messages under "messages"; this row has text'),
        (examples.conversation, {"messages": MESSAGES[:1]}, "needs an answer: a message of the assistant"),
        (examples.conversation, {"messages": [{"role": "user"}]}, 'message 0 under "messages" needs texts under'),
        (examples.task, {"prompt": "2 + 2?", "answer": 4}, 'expected a text under "answer"'),
    ],
)  # fmt: skip
def test_a_row_that_lacks_something_is_named_by_file_and_line(tmp_path, read, row, message):
    good = {**PREFERENCE, "messages": MESSAGES, "answer": "4"}
    files = written(tmp_path / "rows.jsonl", good, row)
    with pytest.raises(DataError) as caught:
        examples.from_files(files, read, 0)
    assert str(caught.value).startswith(f"{tmp_path}/rows.jsonl:2: ")
    assert message in str(caught.value)


def test_files_with_nothing_in_them_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"there is nothing in .*empty.jsonl"):
        examples.from_files(written(tmp_path / "empty.jsonl"), examples.task, 0)


def test_no_prompt_held_out_is_learned_from():
    tasks = examples.arithmetic(examples.ArithmeticData(corpus="arithmetic", examples=2000, kinds=("sum",)), 0)
    learned, held = examples.split(tasks, lambda task: task.prompt, 0.01, 0)
    assert len(held) == 20
    assert learned
    assert not {task.prompt for task in learned} & {task.prompt for task in held}
    assert examples.split(tasks, lambda task: task.prompt, 0.01, 0) == (learned, held)


def test_arithmetic_of_some_kinds():
    settings = examples.ArithmeticData(corpus="arithmetic", examples=50, kinds=("sum", "larger"), difficulty=2)
    tasks = examples.arithmetic(settings, 0)
    assert {task.kind for task in tasks} == {"sum", "larger"}
    assert len(tasks) == 50
    assert all(corpora.reward(task, examples.solved(task)[1]["content"]) == 1 for task in tasks)


def test_a_deck_deals_everything_once_a_round_and_goes_on_from_its_place():
    deck, twin = Deck(7, seed=3), Deck(7, seed=3)
    dealt = deck.deal(3) + deck.deal(2) + deck.deal(9)
    assert Counter(dealt) == dict.fromkeys(range(7), 2)
    assert dealt[:7] != dealt[7:]
    assert twin.deal(5) == dealt[:5]
    resumed = Deck(7, seed=3)
    resumed.load_state_dict(json.loads(json.dumps(twin.state_dict())))
    assert resumed.deal(9) == dealt[5:]
    with pytest.raises(ValueError, match="the data has changed"):
        Deck(3, seed=3).load_state_dict({"round": 0, "dealt": 5})
