"""Thoughts told from answers: whole or in pieces of any size, begun by the model or by the template, cut off, or absent."""

import itertools

import openai
import patient
import pytest
from hypothesis import given
from hypothesis import strategies as some
from test_openai_client import CALL, TOOL

from tilestack.data.chat import CHATML
from tilestack.server.reasoning import ThoughtReader

ASKED = [{"role": "user", "content": "hello"}]


def read(text, cuts=(), begun=False):
    reader = ThoughtReader(begun)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    found = [reader.feed(text[a:b]) for a, b in itertools.pairwise(edges)] + [reader.end()]
    return tuple(map("".join, zip(*found, strict=True)))


@given(cuts=some.lists(some.integers(0, 99), max_size=6))
@pytest.mark.parametrize(
    ("text", "begun", "thoughts", "answer"),
    [
        ("<think>\nWell, a < b.\n</think>\n\nYes.\n", False, "Well, a < b.", "Yes.\n"),
        ("\nWell.\n\nSo</think>\n\nYes.", True, "Well.\n\nSo", "Yes."),
        ("\n\n<think></think> Yes.", False, "", "Yes."),
        ("<think>\nstill on ", False, "still on", ""),
        ("<thin ice", False, "", "<thin ice"),
        ("<thi", False, "", "<thi"),
        ("Yes, <think>not this</think>.", False, "", "Yes, <think>not this</think>."),
        ("a </thin b", True, "a </thin b", ""),
        ("", True, "", ""),
    ],
)
def test_thoughts_and_answer(text, begun, thoughts, answer, cuts):
    assert read(text, cuts, begun) == (thoughts, answer)


def test_thoughts_are_not_held_back_longer_than_needed():
    reader = ThoughtReader(begun=True)
    assert reader.feed("\nso <") == ("so", "")
    assert reader.feed("b> it") == (" <b> it", "")
    assert reader.feed(" </think>\n") == ("", "")
    assert reader.feed("\nYes ") == ("", "Yes ")


THINKS = "<think>\nA city.\n</think>\n\n"


@pytest.mark.parametrize("opened", [False, True])
def test_the_server_tells_them_apart(serve, fake, tokenizer, opened, monkeypatch):
    """In streams too, where tokens cut the marks, and before calls."""
    monkeypatch.setattr(
        tokenizer, "template", CHATML.replace("assistant\\n'", "assistant\\n<think>\\n'") if opened else CHATML
    )
    fake.says = lambda _: (THINKS.removeprefix("<think>\n") if opened else THINKS) + CALL
    asked = dict(model="fake", messages=ASKED, tools=[TOOL])
    with openai.OpenAI(base_url=serve(fake, split_reasoning=True) + "/v1", api_key="none") as client:
        message = client.chat.completions.create(**asked).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert (message.reasoning_content, message.content) == ("A city.", "I will look.")
    assert message.tool_calls[0].function.name == "get_weather"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "A city."
    assert "".join(delta.content or "" for delta in deltas) == "I will look."


def test_they_stay_text_unless_asked_for_and_in_answers_of_a_form(serve, fake):
    fake.says = lambda _: THINKS + "Oslo"
    plain, split = serve(fake), serve(fake, split_reasoning=True)
    form = {"response_format": {"type": "json_object"}}
    strict = {"tools": [TOOL | {"function": TOOL["function"] | {"strict": True}}]}
    choice = {"structured_outputs": {"choice": ["Oslo"]}}
    for url, more in ((plain, {}), (split, form), (split, form | strict), (split, choice | strict)):
        message = patient.post(url + "/v1/chat/completions", json={"messages": ASKED} | more).json()["choices"][0][
            "message"
        ]
        assert message["content"] == THINKS + "Oslo"
        assert "reasoning_content" not in message


@pytest.mark.parametrize(
    ("begun", "thoughts", "content"),
    [
        ("<think>\nA", "city", "Oslo"),
        ("<think>A</think>\n", None, " city</think>Oslo"),
        ("A", None, " city</think>Oslo"),
    ],
)
def test_an_answer_that_is_continued_goes_on_within_its_thoughts_or_behind_them(serve, fake, begun, thoughts, content):
    fake.says = lambda _: " city</think>Oslo"
    url = serve(fake, split_reasoning=True)
    asked = {"messages": [*ASKED, {"role": "assistant", "content": begun}], "continue_final_message": True}
    message = patient.post(url + "/v1/chat/completions", json=asked).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (thoughts, content)
