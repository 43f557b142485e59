"""Calls found in text: whole or in pieces of any size, with text around them, malformed, or cut off."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from tilestack.engine.structure import Structures
from tilestack.server.errors import ApiError
from tilestack.server.limits import check_limits
from tilestack.server.sampling import chat_params
from tilestack.server.schemas import ChatRequest
from tilestack.server.settings import Limits
from tilestack.server.tools import CallReader, WholeCall, undecided

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


def read(text, cuts=(), most=None):
    """The text and the calls that are found, when it comes in pieces."""
    reader = CallReader(most)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    found = [reader.feed(text[a:b]) for a, b in itertools.pairwise(edges)] + [reader.end()]
    return "".join(each.text for each in found), [
        (call.name, json.loads(call.arguments)) for each in found for call in each.calls
    ]


@pytest.mark.parametrize(
    ("text", "left", "names"),
    [
        ("just text  ", "just text  ", []),
        (WEATHER, "", ["weather"]),
        (f"Let me see.\n{WEATHER}\n{TIME}\n", "Let me see.", ["weather", "time"]),
        (f"{WEATHER} I  wait. {TIME}\n", "I  wait.", ["weather", "time"]),
        (f"One.\n{TIME} Two  words, {TIME} three ", "One.\n Two  words,  three", ["time", "time"]),
        (WEATHER.removesuffix("</tool_call>"), "", ["weather"]),
        ("a < b and <tool", "a < b and <tool", []),
        ("<tool_call>not json</tool_call> after", "<tool_call>not json</tool_call> after", []),
        ("a <tool_call>{}</tool_call>\n", "a <tool_call>{}</tool_call>\n", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ("<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
        ('<tool_call>{"name": "cut', '<tool_call>{"name": "cut', []),
    ],
)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is not a slow strategy
@given(cuts=some.lists(some.integers(0, 10**6), max_size=12))
def test_calls_are_found_however_the_text_is_cut(text, left, names, cuts):
    said, calls = read(text, cuts)
    assert (said, [name for name, _ in calls]) == (left, names)


def test_at_most_so_many_calls():
    assert [name for name, _ in read(WEATHER + TIME, most=1)[1]] == ["weather"]


def test_arguments_may_be_called_parameters_as_llama_does():
    assert read('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>')[1] == [("f", {"a": 1})]


def test_arguments_may_be_a_text_already():
    assert read('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')[1] == [("f", {"a": 1})]


def test_text_is_not_held_back_longer_than_needed():
    reader = CallReader()
    assert reader.feed("so <").text == "so"
    assert reader.feed("b> it").text == " <b> it"
    assert undecided("x <tool_ca") == len(" <tool_ca")


def test_an_answer_that_is_a_call():
    reader = WholeCall()
    assert not reader.feed('{"name": "f", ').text
    reader.feed('"arguments": {}}')
    assert [call.name for call in reader.end().calls] == ["f"]
    cut = WholeCall()
    cut.feed('{"name')
    assert cut.end().text == '{"name'


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/Point"}},
    "required": ["x"],
}
MOVE = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/Point"}},
    "$defs": {"Point": POINT},
    "required": ["to"],
}


def asked(**changed):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (("stop", None), ("move", MOVE), ("turn", MOVE))
    ]
    body = {"messages": [{"role": "user", "content": "go"}], "tools": tools, "tool_choice": "required"}
    return ChatRequest.model_validate(body | changed)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
def test_parameters_may_refer_to_their_own_definitions(tokenizer, choice):
    """As the schemas of pydantic do, and with them those of OpenAI's client."""
    structure = chat_params(asked(tool_choice=choice), 100, 100).structure
    matcher = Structures(tokenizer, tokenizer.vocabulary).matcher(structure)
    call = '{"name": "move", "arguments": {"to": {"x": 1, "next": {"x": 2}}}}'
    for token in tokenizer.encode(call, bare=True):
        assert matcher.allowed()[token]
        matcher.accept(token)
    wrong = Structures(tokenizer, tokenizer.vocabulary).matcher(structure)
    ids = tokenizer.encode(call.replace("2}}", '"2"}}'), bare=True)
    assert not all(wrong.allowed()[token] and wrong.accept(token) is not None for token in ids)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("it is 3 < 4 <tool", True),
        ('so\n<tool_call>\n{"name": "move", "arguments": {"to": {"x": 1}}}\n</tool_call> and on', True),
        ('<tool_call>{"name": "move", "arguments": {"to": {"x": 1}}}</tool_call>' * 2, True),
        ('<tool_call>{"name": "turn", "arguments": {"any": 1}}</tool_call>', True),
        ('<tool_call>{"name": "move", "arguments": {"to"', False),
        ("<tool_call>hello", None),
        ('<tool_call>{"name": "move", "arguments": {"to": {"x": "1"', None),
        ('<tool_call>{"name": "mo</tool_call>', None),
    ],
)
def test_a_strict_function_is_called_by_its_schema_and_text_is_free(tokenizer, text, ends):
    tools = asked().model_dump(exclude_none=True)["tools"]
    tools[1]["function"]["strict"] = True
    structure = chat_params(asked(tools=tools, tool_choice=None), 100, 100).structure
    matcher = Structures(tokenizer, tokenizer.vocabulary, tokenizer.stops).matcher(structure)
    ids = tokenizer.encode(text, bare=True)
    kept = all(matcher.allowed()[token] and matcher.accept(token) for token in ids)
    assert kept == (ends is not None)
    if kept:
        assert matcher.allowed()[tokenizer.eos] == ends


def test_parameters_have_the_limits_of_a_structure():
    deep = {"type": "object"}
    for _ in range(600):
        deep = {"type": "object", "properties": {"a": deep}}
    large = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(4000)}}
    tool = lambda parameters: [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(ApiError, match="characters of structure"):
        check_limits(asked(tools=tool(large)), Limits())
    check_limits(asked(tools=tool(large), tool_choice="auto"), Limits())
    with pytest.raises(ApiError, match="nested too deeply"):
        chat_params(asked(tools=tool(deep)), 100, 100)
