"""Rows of the formats that people share, as conversations, preferences, judged answers and tasks; what is wrong is named."""

import pytest

from tilestack.data import Conversation, DataError, corpora, formats
from tilestack.data.formats import Judged

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
PREFERENCE = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
ASKED = [{"role": "user", "content": "2 + 2?"}]
said = lambda text: [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"messages": [USER, ASSISTANT], "system": "Be brief."}, [SYSTEM, USER, ASSISTANT]),
        ({"messages": [SYSTEM, USER, ASSISTANT], "system": "Be long."}, [SYSTEM, USER, ASSISTANT]),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, [USER, ASSISTANT]),
        ({"conversations": [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello"}]}, [SYSTEM, USER, ASSISTANT]),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hey", "weight": 0}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 1}]}, [USER, {**ASSISTANT, "content": "Hey", "weight": 0}, USER, {**ASSISTANT, "weight": 1}]),
        ({"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "function_call", "value": "add"}, {"from": "observation", "value": "4"}, {"from": "gpt", "value": "4"}]}, [*ASKED, *said("add"), {"role": "tool", "content": "4"}, *said("4")]),
        ({"conversations": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, [USER, ASSISTANT]),
        ({"instruction": "Add", "input": "2, 2", "output": "4"}, [{"role": "user", "content": "Add\n\n2, 2"}, *said("4")]),
        ({"instruction": "2 + 2?", "output": "4", "history": [["Hi", "Hello"], ["Hi", "Hello"]], "system": "Be brief."}, [SYSTEM, *2 * [USER, ASSISTANT], *ASKED, *said("4")]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, {**ASSISTANT, "name": None}]}, [USER, ASSISTANT]),
    ],
)  # fmt: skip
def test_conversations_of_every_format(row, messages):
    assert formats.conversation(row) == Conversation(messages)


@pytest.mark.parametrize(
    ("row", "messages", "given"),
    [
        ({"prompt": "Hi", "completion": "Hello"}, [USER, ASSISTANT], 1),
        ({"prompt": [USER], "completion": [ASSISTANT]}, [USER, ASSISTANT], 1),
        ({"prompt": [USER, ASSISTANT, *ASKED], "completion": said("4")}, [USER, ASSISTANT, *ASKED, *said("4")], 3),
        ({"prompt": "Hi", "completion": "Hello", "system": "Be brief."}, [SYSTEM, USER, ASSISTANT], 2),
    ],
)
def test_of_a_prompt_and_its_completion_the_completion_is_learned(row, messages, given):
    assert formats.conversation(row) == Conversation(messages, given=given)


def test_calls_of_tools_are_kept_with_their_arguments_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "4", "tool_call_id": "1"}, ASSISTANT], "tools": tools}  # fmt: skip
    found = formats.conversation(row)
    assert found.tools == tools
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 2}}}]}  # fmt: skip
    assert found.messages[2]["tool_call_id"] == "1"
    assert formats.conversation({**row, "tools": '[{"name": "add"}]'}).tools == [{"name": "add"}]
    plain = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}]}
    assert formats.conversation({"messages": [USER, plain]}).messages[1]["tool_calls"] == plain["tool_calls"]


@pytest.mark.parametrize(
    "row",
    [
        PREFERENCE,
        {"prompt": ASKED, "chosen": "4", "rejected": "5"},
        {"prompt": ASKED, "chosen": said("4"), "rejected": said("5")},  # TRL, with a prompt
        {"chosen": [*ASKED, *said("4")], "rejected": [*ASKED, *said("5")]},  # TRL, without
        {"prompt": "2 + 2?", "chosen": [*ASKED, *said("4")], "rejected": [*ASKED, *said("5")]},  # UltraFeedback
    ],
)
def test_preferences_of_every_format(row):
    assert formats.preference(row) == corpora.Preference(ASKED, "4", "5")
    assert formats.judged(row) == [Judged(ASKED, "4", True), Judged(ASKED, "5", False)]


ASKED_LATER = [USER, ASSISTANT, *ASKED]


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("Hi", ASKED_LATER),  # the prompt is what a longer conversation begins with
        ("2 + 2?", ASKED_LATER),  # or its last question
        ("Hi", ASKED_LATER[1:]),  # the answers go on from the prompt
        (ASKED_LATER, []),
        (ASKED_LATER, ASKED),
        (ASKED_LATER, ASKED_LATER),
        ("Hi\n", [USER | {"content": " Hi"}, *ASKED_LATER[1:]]),
    ],
)
def test_an_answer_in_messages_answers_all_that_stands_before_it(prompt, before):
    row = {"prompt": prompt, "chosen": [*before, *said("4")], "rejected": [*before, *said("5")]}
    found = formats.preference(row)
    assert (found.chosen, found.rejected) == ("4", "5")
    assert formats.spoken(found.messages) == formats.spoken(ASKED_LATER)
    (judged,) = formats.judged({"prompt": prompt, "completion": [*before, *said("5")], "label": False})
    assert (formats.spoken(judged.messages), judged.answer) == (formats.spoken(ASKED_LATER), "5")


@pytest.mark.parametrize(
    "row",
    [
        PREFERENCE,
        {"prompt": "2 + 2?", "chosen": [*ASKED, *said("4")], "rejected": [*ASKED, *said("5")]},
        {"chosen": [*ASKED, *said("4")], "rejected": [*ASKED, *said("5")]},
    ],
)
def test_a_system_prompt_beside_preferences_and_judged_answers_is_part_of_what_is_asked(row):
    row = {**row, "system": "Be brief."}
    assert formats.preference(row) == corpora.Preference([SYSTEM, *ASKED], "4", "5")
    assert formats.judged(row)[1] == Judged([SYSTEM, *ASKED], "5", False)
    row = {"prompt": "2 + 2?", "completion": "4", "label": True, "system": "Be brief."}
    assert formats.judged(row) == [Judged([SYSTEM, *ASKED], "4", True)]


@pytest.mark.parametrize("made", [
    lambda row: [formats.conversation({**row, "messages": [USER, ASSISTANT]})],
    lambda row: [formats.preference({**row, **PREFERENCE})],
    lambda row: formats.judged({**row, **PREFERENCE}),
    lambda row: formats.judged({**row, "prompt": "2 + 2?", "completion": "4", "label": True}),
], ids=["conversation", "preference", "both of a preference", "judged"])  # fmt: skip
def test_tools_come_along_in_every_format(made):
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert all(each.tools == tools for each in made({"tools": tools}))


def test_judged_answers_and_tasks():
    assert formats.judged({"prompt": "2 + 2?", "completion": said("5"), "label": False}) == [Judged(ASKED, "5", False)]
    row = {"prompt": "2 + 2?", "answer": "4", "system": "Be brief.", "level": 3}
    for answered in (True, False):
        found = formats.task(row, answered)
        assert (found.prompt, found.answer, found.messages, found.row["level"]) == ("2 + 2?", "4", (SYSTEM, *ASKED), 3)
    assert formats.task({"prompt": [SYSTEM, *ASKED], "tests": ["x"]}, answered=False).messages == (SYSTEM, *ASKED)


KEYS = ("messages", "conversations", "instruction", "input", "output", "history", "system", "tools", "prompt", "completion",
        "chosen", "rejected", "label", "answer")  # fmt: skip


@pytest.mark.parametrize(
    ("read", "row"),
    [
        (formats.conversation, {"messages": [USER, ASSISTANT]}),
        (formats.conversation, {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hey"}]}),
        (formats.conversation, {"instruction": "Hi", "output": "Hello"}),
        (formats.conversation, {"prompt": "2 + 2?", "completion": "4"}),
        (formats.preference, PREFERENCE),
        (formats.preference, {"chosen": [*ASKED, *said("4")], "rejected": [*ASKED, *said("5")]}),
        (formats.judged, {"prompt": "2 + 2?", "completion": "4", "label": False}),
        (formats.judged, PREFERENCE),
        (lambda row: formats.task(row).messages, {"prompt": "2 + 2?", "answer": "4"}),
        (lambda row: formats.task(row, answered=False).answer, {"prompt": "2 + 2?"}),
    ],
)
def test_a_key_of_null_is_as_good_as_none(read, row):
    """Parquet writes every key in every row."""
    assert read(dict.fromkeys(KEYS) | row) == read(row)


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (formats.preference, {"prompt": "?", "chosen": "4"}, 'expected a text or messages under "rejected"; this row has prompt, chosen'),
        (formats.preference, {"chosen": "4", "rejected": "5"}, 'a text or messages under "prompt"; this row has chosen, rej'),
        (formats.preference, {**PREFERENCE, "prompt": [USER, ASSISTANT]}, '"prompt" must end before the answer'),
        (formats.preference, {**PREFERENCE, "chosen": ""}, 'expected a text under "chosen"'),
        (formats.preference, {**PREFERENCE, "chosen": [USER]}, 'the last message under "chosen" must be a text of the assistant'),
        (formats.preference, {**PREFERENCE, "chosen": [ASSISTANT | {"tool_calls": [{"function": {"name": "f"}}]}]}, 'the last message under "chosen" must be a text of the assistant'),
        (formats.preference, {"chosen": [USER, ASSISTANT], "rejected": [*ASKED, ASSISTANT]}, "must differ in their last message alone"),
        (formats.preference, {**PREFERENCE, "chosen": [USER, *said("4")]}, 'what stands before the answer under "chosen" is not what stands under "prompt"'),
        (formats.preference, {**PREFERENCE, "chosen": [*said("Hm."), *ASKED, *said("4")]}, '"chosen" and "rejected" must answer the same conversation'),
        (formats.preference, {**PREFERENCE, "chosen": [*said("Hm."), *said("4")]}, 'under "chosen" two messages of the assistant follow each other'),
        (formats.judged, {"prompt": "?", "completion": [USER, ASSISTANT], "label": True}, 'what stands before the answer under "completion"'),
        (formats.conversation, {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hey", "weight": 2}]}, 'message 1 under "conversations" has the "weight" 2'),
        (formats.conversation, {"text": "Hi"}, "expected one of messages, conversations, instruction, completion; this row has text"),
        (formats.conversation, {"messages": []}, 'expected a list of messages under "messages"'),
        (formats.conversation, {"messages": [USER]}, "needs an answer: a message of the assistant"),
        (formats.conversation, {"messages": [{"role": "user"}]}, 'message 0 under "messages" needs texts under'),
        (formats.conversation, {"messages": [USER, {"role": "assistant", "content": [{"type": "image"}]}]}, "message 1 under \"messages\" has a part that is no text, but 'image'"),
        (formats.conversation, {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "calls f with arguments that are not JSON"),
        (formats.conversation, {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "without the name of a function"),
        (formats.conversation, {"messages": [USER, ASSISTANT], "tools": {"a": 1}}, 'expected a list of objects under "tools"'),
        (formats.conversation, {"conversations": [{"from": "alien", "value": "Hi"}]}, 'one of human, user, gpt'),
        (formats.conversation, {"conversations": "Hi"}, 'expected a list of messages under "conversations"'),
        (formats.conversation, {"instruction": "Hi", "output": 3}, 'expected a text under "output"'),
        (formats.conversation, {"instruction": "Hi", "output": "Hello", "history": ["Hi"]}, 'turn 0 under "history"'),
        (formats.conversation, {"messages": [USER, ASSISTANT | {"weight": 0}]}, "needs an answer: a message of the assistant"),
        (formats.conversation, {"messages": [USER, ASSISTANT | {"weight": 0.5}]}, 'message 1 under "messages" has the "weight" 0.5'),
        (formats.conversation, {"prompt": [USER], "completion": [USER]}, "needs an answer: a message of the assistant"),
        (formats.judged, {"prompt": "?", "completion": "4", "label": 1}, 'expected true or false under "label", not 1'),
        (formats.task, {"prompt": "2 + 2?", "answer": 4}, 'expected a text under "answer", not 4'),
        (formats.task, {"prompt": "2 + 2?"}, 'expected a text under "answer"; this row has prompt'),
        (formats.task, {"prompt": "2 + 2?", "answer": "4", "tools": "add"}, '"tools" is a text that is not JSON'),
        (formats.conversation, {"prompt": [USER, ASSISTANT, USER], "completion": [USER]}, "needs an answer: a message of the assistant"),
    ],
)  # fmt: skip
def test_what_a_row_lacks_is_said(read, row, message):
    with pytest.raises(DataError) as caught:
        read(row)
    assert message in str(caught.value)
