"""Texts become ids where it costs least: at once if they are short, else in a thread, so that nobody waits for them."""

import asyncio
import threading

import pytest

from tilestack.server.errors import ApiError
from tilestack.server.prompts import SHORT, text_ids


class Words:
    """A tokenizer that notes the thread it is asked in."""

    def __init__(self):
        self.asked: list[threading.Thread] = []

    def encode(self, text: str) -> list[int]:
        text.encode()
        self.asked.append(threading.current_thread())
        return [len(text)]


@pytest.mark.parametrize(
    ("prompts", "at_once"),
    [
        (["a" * SHORT], True),
        (["a" * (SHORT + 1)], False),
        (["a" * SHORT, "b"], False),  # together they are long
        ([[1] * 5 * SHORT, [2]], True),  # ids are there already
    ],
)
def test_short_texts_are_read_by_the_loop_and_long_ones_by_a_thread(prompts, at_once):
    words = Words()
    found = asyncio.run(text_ids(words, prompts, "prompt"))
    assert found == [[len(prompt)] if isinstance(prompt, str) else prompt for prompt in prompts]
    assert all((thread is threading.main_thread()) is at_once for thread in words.asked)
    assert len(words.asked) == sum(isinstance(prompt, str) for prompt in prompts)


@pytest.mark.parametrize("text", ["\ud800", "a" * SHORT + "\ud800"], ids=["short", "long"])
def test_half_a_character_is_refused_wherever_it_is_read(text):
    with pytest.raises(ApiError, match="prompt holds what is not text"):
        asyncio.run(text_ids(Words(), [text], "prompt"))
