"""The built-in corpora: determined by their seeds, and right by a check of their own."""

import re
from collections import Counter
from itertools import pairwise

import pytest

from tilestack.data import baselines, corpora
from tilestack.data.baseline import ngram_bits


def test_the_python_sources_are_there_in_order_and_capped():
    documents = list(corpora.python_sources(300_000))
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert not any(set(name.split("/")) & {"test", "tests", "site-packages", "encodings"} for name in names)
    assert 200_000 < sum(len(document.text.encode()) for document in documents) <= 310_000
    assert len({name[0] for name in names}) > 5  # from all over the library
    assert documents == list(corpora.python_sources(300_000))
    compile(documents[0].text, documents[0].name, "exec")


def test_libraries_join_the_sources_under_their_own_names():
    alone, joined = corpora.python_files(), corpora.python_files(libraries=True)
    assert alone.items() <= joined.items()
    assert {name.split("/")[0] for name in joined.keys() - alone.keys()} >= {"torch", "numpy", "sympy"}
    assert not any(set(name.split("/")) & {"tests", "testing"} for name in joined)
    few = [document.name for document in corpora.python_sources(300_000, libraries=True)]
    assert few == sorted(few)
    assert any(name.startswith("torch/") for name in few)


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_arithmetic_is_right(difficulty):
    tasks = list(corpora.arithmetic(300, seed=3, difficulty=difficulty))
    assert {task.kind for task in tasks} == set(corpora.ARITHMETIC)
    for task in tasks:
        numbers = [int(number) for number in re.findall(r"\d+", task.prompt)]
        truth = {
            "sum": lambda a, b: a + b,
            "difference": lambda a, b: a - b,
            "product": lambda a, b: a * b,
            "remainder": lambda a, b: a % b,
            "larger": max,
            "two steps": lambda a, b, c: (a + b) * c,
            "story": lambda a, b, c: a + b - c,
        }[task.kind](*numbers)
        assert int(task.answer) == truth
        assert max(numbers) < 10**difficulty


def test_a_longer_list_begins_with_the_shorter_and_seeds_differ():
    for make in (corpora.arithmetic, corpora.conversations, corpora.preferences):
        assert list(make(30, 1))[:10] == list(make(10, 1))
        assert list(make(10, 1)) != list(make(10, 2))
    with pytest.raises(ValueError, match="difficulty must be"):
        corpora.arithmetic(1, difficulty=4)


def test_kinds_of_tasks_can_be_chosen():
    assert {task.kind for task in corpora.arithmetic(40, kinds=["sum", "larger"])} == {"sum", "larger"}
    with pytest.raises(ValueError, match="no kind of task calculus; there are sum, "):
        corpora.arithmetic(1, kinds=["sum", "calculus"])


@pytest.mark.parametrize(
    ("answer", "text", "worth"),
    [
        ("12", "12", 1),
        ("12", "5 + 7 = 12.", 1),
        ("-3", "It is -3", 1),
        ("1234", "1,234", 1),
        ("12", "12.0", 1),
        ("12", "12 or 13", 0),
        ("12", "-12", 0),
        ("12", "twelve", 0),
        ("12", "", 0),
        ("12", "112", 0),
        ("2", "7-5 = 2", 1),
    ],
)
def test_the_last_number_is_judged(answer, text, worth):
    assert corpora.reward(corpora.Task("", answer, "sum"), text) == worth


def test_conversations_take_turns_and_are_right():
    turns = Counter()
    for messages in corpora.conversations(200):
        roles = [message["role"] for message in messages if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        turns[len(roles) // 2] += 1
        for asked, answered in pairwise(messages):
            if asked["content"].startswith("Sort these words: "):
                words = asked["content"].removeprefix("Sort these words: ").split(", ")
                assert answered["content"] == ", ".join(sorted(words))
    assert set(turns) == {1, 2, 3}


def test_the_chosen_answer_is_right_and_the_rejected_wrong_or_padded():
    kinds = Counter()
    tasks = corpora.arithmetic(100, 0, difficulty=2)
    for task, pair in zip(tasks, corpora.preferences(100), strict=True):
        assert corpora.reward(task, pair.chosen) == 1
        padded = corpora.reward(task, pair.rejected) == 1
        assert not padded or len(pair.rejected) > len(pair.chosen)
        kinds[padded] += 1
    assert min(kinds[True], kinds[False]) > 25


def test_the_ngram_model_is_a_distribution_and_learns():
    text = b"abracadabra " * 50
    assert ngram_bits([], [text]) == 8  # knows nothing
    assert ngram_bits([text], [text]) < 0.5
    # Against every byte that might follow, the probabilities of one context add up to 1.
    total = sum(
        2 ** -(ngram_bits([text], [b"abra" + bytes([c])]) * 5 - ngram_bits([text], [b"abra"]) * 4) for c in range(256)
    )
    assert total == pytest.approx(1)


def test_texts_do_not_lean_on_one_another():
    one = ngram_bits([b"xyz" * 9], [b"ab", b"cd"])
    assert one == pytest.approx((ngram_bits([b"xyz" * 9], [b"ab"]) + ngram_bits([b"xyz" * 9], [b"cd"])) / 2)


def test_baselines_on_sources(sources):
    measured = baselines(sources[1:], sources[:1])
    assert 1 < measured.lzma < 4
    assert 1 < measured.zlib < 4
    assert 1 < measured.five_gram < 4
    with pytest.raises(ValueError, match="no validation text"):
        baselines(sources, [])
