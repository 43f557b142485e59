"""What alignment learns from: rows of files, with errors that name file and line; held-out prompts; dealt orders."""

import json
from collections import Counter

import pytest
from small import recipe

from tilestack.data import Conversation, DataError, corpora, formats
from tilestack.train import RecipeError
from tilestack.train.align import examples
from tilestack.train.align.deck import Deck, digest_of
from tilestack.train.align.sft import SFTRecipe, conversations

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(path, *numbers):
    """A file of conversations that are told apart by a number."""
    turns = lambda n: [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]
    return written(path, *({"messages": turns(n)} for n in numbers))


def found(**data):
    return conversations(recipe(SFTRecipe, data={"corpus": "files", "validation": 0.0, "examples": 0} | data).data, 0)


def asked(some):
    return [each.messages[0]["content"] for each in some]


def test_rows_of_files_become_conversations_with_the_file_they_are_from(tmp_path):
    files = [numbered(tmp_path / "a.jsonl", 1, 2), numbered(tmp_path / "b.jsonl", 3)]
    everything = found(files=files)
    assert (asked(everything.learned), everything.sources, everything.held) == (["1?", "2?", "3?"], [0, 0, 1], [])
    assert asked(found(files=files, examples=1).learned) == ["1?"]


def test_nobody_has_to_ask_for_all_rows_of_a_file(tmp_path):
    path = numbered(tmp_path / "a.jsonl", *range(6000))
    assert len(conversations(examples_of(files=(path,), corpus="files", validation=0.0), 0).learned) == 6000
    assert len(conversations(examples_of(validation=0.0), 0).learned) == examples.MADE


def examples_of(**settings):
    from tilestack.train.align.sft import ConversationData

    return ConversationData(**settings)


def test_files_of_their_own_are_held_out_and_not_learned_from(tmp_path):
    learned, held = numbered(tmp_path / "a.jsonl", 1, 2, 3), numbered(tmp_path / "b.jsonl", 3, 4)
    everything = found(files=[learned], validation_files=[held], validation=0.5)
    assert asked(everything.learned) == ["1?", "2?"]
    assert asked(everything.held) == ["3?", "4?"]


def test_a_row_that_lacks_something_is_named_by_file_and_line(tmp_path):
    path = written(tmp_path / "rows.jsonl", {"messages": MESSAGES}, {"text": "Hi"})
    with pytest.raises(DataError) as caught:
        found(files=[path])
    assert str(caught.value).startswith(f"{path}:2: expected one of messages, conversations")


def test_files_with_nothing_in_them_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"there is nothing in .*empty.jsonl"):
        found(files=[written(tmp_path / "full.jsonl", {"messages": MESSAGES}), written(tmp_path / "empty.jsonl")])


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1.0], "data.weights are 1, and data.files 2"), ([1.0, 0.0], "data.weights must be above 0")],
)
def test_weights_that_make_no_sense_are_named(weights, message):
    with pytest.raises(RecipeError, match=message):
        recipe(SFTRecipe, data={"corpus": "files", "files": ["a", "b"], "weights": weights})


def test_no_prompt_held_out_is_learned_from():
    settings = examples.ArithmeticData(corpus="arithmetic", examples=2000, kinds=("sum",), validation=0.01)
    make = lambda count: examples.arithmetic(settings, 0, count)
    gathered = lambda: examples.gathered(settings, 0, lambda row: [formats.task(row)], make, lambda task: task.prompt)
    tasks = gathered()
    assert len(tasks.held) == 20
    assert tasks.learned
    assert not {task.prompt for task in tasks.learned} & {task.prompt for task in tasks.held}
    assert gathered() == tasks


def test_arithmetic_of_some_kinds():
    settings = examples.ArithmeticData(corpus="arithmetic", kinds=("sum", "larger"), difficulty=2)
    tasks = examples.arithmetic(settings, 0, 50)
    assert {task.kind for task in tasks} == {"sum", "larger"}
    assert len(tasks) == 50
    assert all(corpora.reward(task, examples.solved(task).messages[1]["content"]) == 1 for task in tasks)
    assert isinstance(examples.solved(tasks[0]), Conversation)


def test_weights_say_how_much_of_a_round_each_source_has():
    sources = [0] * 90 + [1] * 10
    deck = Deck(100, seed=3, sources=sources, weights=[1.0, 3.0])
    for _ in range(3):
        dealt = Counter(deck.deal(100))
        assert sum(count for number, count in dealt.items() if sources[number]) == 75
        assert all(count in (7, 8) for number, count in dealt.items() if sources[number])  # 75 cards of 10 numbers
        assert all(count == 1 for number, count in dealt.items() if not sources[number])
    assert deck.round == 3
    assert [len(Deck(size, 3, [0] * 5 + [1] * (size - 5), [2.0, 1.0]).cards) for size in (10, 11, 12)] == [10, 11, 12]
    seen = {number for _ in range(20) for number in deck.deal(100)}
    assert seen == set(range(100))  # what one round leaves out comes in another


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


def test_a_digest_is_of_every_example_in_its_place():
    """One that is held out now was learned from before."""
    some = ([["a", "b"], ["c"]], [["a"], ["b", "c"]], [["b", "a"], ["c"]], [["a", "b"], []], [["a", "d"], ["c"]])
    assert len({digest_of(*each) for each in some}) == len(some)
    assert digest_of(*some[0]) == digest_of(*map(tuple, some[0]))


def test_examples_left_out_for_a_prompt_held_out_are_counted(tmp_path):
    rows = [{"prompt": f"question {number // 8}", "answer": str(number)} for number in range(80)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = examples.ExampleData(corpus="files", files=(str(tmp_path / "tasks.jsonl"),), validation=0.05)
    tasks = examples.gathered(settings, 0, lambda row: [formats.task(row)], lambda _: [], lambda task: task.prompt)
    touched = {task.prompt for task in tasks.held}
    assert tasks.prompt_held_out == 8 * len(touched) - 4
    assert len(tasks.learned) + len(tasks.held) + tasks.prompt_held_out == 80


@pytest.mark.parametrize(("wanted", "told"), [(0, 0), (3, 1), (4, 0), (9, 0)])
def test_rows_that_data_examples_leaves_out_are_told(tmp_path, wanted, told):
    rows = [{"prompt": f"question {number}", "answer": "1"} for number in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = examples.ExampleData(
        corpus="files", files=(str(tmp_path / "tasks.jsonl"),), validation=0, examples=wanted
    )
    tasks = examples.gathered(settings, 0, lambda row: [formats.task(row)], lambda _: [], lambda task: task.prompt)
    assert len(tasks.learned) == min(wanted or 4, 4)
    assert tasks.left_out["or more left out by data.examples"] == told


def test_prompts_that_are_all_held_out_are_told_as_such(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "the same", "answer": "1"}\n' * 30)
    settings = examples.ExampleData(corpus="files", files=(str(tmp_path / "tasks.jsonl"),), validation=0.1)
    with pytest.raises(RecipeError, match=r"prompts of all 27 examples are held out too.*data\.validation = 0"):
        examples.gathered(settings, 0, lambda row: [formats.task(row)], lambda _: [], lambda task: task.prompt)
