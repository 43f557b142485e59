"""Anthropic's Messages API over plain HTTP, in the shapes that its client reads."""

import asyncio
import json
from types import SimpleNamespace

import httpx2
import patient
import pytest
from fake_engine import empty_soon
from test_openai_client import CALL, TOOL
from test_refusals import CHAT

from tilestack.engine import Completion, Delta, Usage
from tilestack.server.anthropic.answers import AnthropicAnswers
from tilestack.server.schemas import ChatRequest
from tilestack.server.schemas.chat import Instruction
from tilestack.server.settings import Limits
from tilestack.server.token_text import TokenTexts

ASKED = {"model": "fake", "max_tokens": 500, "messages": [{"role": "user", "content": "hello"}]}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": TOOL["function"]["parameters"],
}
THOUGHT = "<think>\nA city.\n</think>\n\n"


@pytest.fixture
def ask(serve, fake):
    with httpx2.Client(base_url=serve(fake, split_reasoning=True) + "/v1", timeout=patient.LONG) as client:
        yield client


@pytest.fixture
def prompts(fake):
    return lambda: [fake.tokenizer.decode(prompt, special=True) for prompt, _, _ in fake.submitted]


def events_of(ask, **asked):
    text = ask.post("/messages", json=ASKED | {"stream": True} | asked).text
    pairs = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    return events


def test_a_message_is_answered(ask, fake, prompts):
    beside = dict(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"], metadata={"user_id": "u"}, service_tier="auto", thinking={"type": "enabled", "budget_tokens": 5}, cache_control={"type": "ephemeral"})  # fmt: skip
    answer = ask.post("/messages", json=ASKED | {"max_tokens": 5, "system": "be brief"} | beside).json()
    said = answer["content"][0]["text"]
    assert said.startswith("0 1")
    assert answer == {
        "id": answer["id"], "model": "fake", "type": "message", "role": "assistant", "stop_reason": "max_tokens", "stop_sequence": None,
        "content": [{"type": "text", "text": said, "citations": None}],
        "usage": {"input_tokens": len(fake.submitted[0][0]) - 1, "cache_read_input_tokens": 1, "cache_creation_input_tokens": 0, "output_tokens": 5},
    }  # fmt: skip
    assert prompts() == ["<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"]  # fmt: skip
    params = fake.submitted[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.stop, params.max_tokens) == (0.5, 0.9, 7, ("x",), 5)
    fake.says = lambda _: "So."
    assert ask.post("/messages", json=ASKED).json()["stop_reason"] == "end_turn"


def test_a_turn_that_ends_with_a_call_is_not_continued(ask, fake):
    """What a template writes of the call would be cut off, and the model never know of it."""
    use = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}}
    turn = {"role": "assistant", "content": [{"type": "text", "text": "I will look."}, use]}
    refused = ask.post("/messages", json=ASKED | {"messages": [*ASKED["messages"], turn], "tools": [WEATHER]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "messages")
    assert "give their results" in error["message"]
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    talk = [*CHAT["messages"], {"role": "assistant", "content": "I will look.", "tool_calls": [call]}]
    refused = ask.post("/chat/completions", json={"messages": talk, "continue_final_message": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")
    assert not fake.submitted


def test_a_tool_is_used_and_its_result_told(ask, fake, prompts):
    fake.says = lambda prompt: "It rains in Oslo." if "tool\nrain" in prompt else THOUGHT + CALL
    answer = ask.post("/messages", json=ASKED | {"tools": [WEATHER]}).json()
    thought, text, use = answer["content"]
    assert thought == {"type": "thinking", "thinking": "A city.", "signature": ""}
    assert text["text"] == "I will look."
    assert use | {"id": ""} == {"type": "tool_use", "id": "", "name": "get_weather", "input": {"city": "Oslo"}}
    assert answer["stop_reason"] == "tool_use"

    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "rain"}]}
    so = {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}
    talk = [*ASKED["messages"], {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result, so]}]  # fmt: skip
    after = ask.post("/messages", json=ASKED | {"messages": talk, "tools": [WEATHER]}).json()
    assert after["content"][0]["text"] == "It rains in Oslo."
    called = {"id": use["id"], "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    chat = {"tools": [TOOL], "messages": [
        CHAT["messages"][0], {"role": "assistant", "content": "I will look.", "tool_calls": [called], "reasoning_content": "A city."},
        {"role": "tool", "tool_call_id": use["id"], "content": "rain"}, {"role": "user", "content": "So?"},
    ]}  # fmt: skip
    assert ask.post("/chat/completions", json=chat).json()["choices"][0]["message"]["content"] == "It rains in Oslo."
    assert prompts()[1] == prompts()[2]


def test_events_come_in_order_and_to_what_is_given_whole(ask, fake):
    fake.says = lambda _: THOUGHT + CALL
    whole = ask.post("/messages", json=ASKED | {"tools": [WEATHER]}).json()
    start, *between, end, stop = events_of(ask, tools=[WEATHER])
    assert (start["type"], end["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == whole["usage"]
    blocks = []
    for event in between:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            blocks.append(event["content_block"])
            told = ""
        assert event["index"] == len(blocks) - 1
        if kind == "delta":
            (name,) = set(event["delta"]) - {"type"}
            assert event["delta"]["type"] == {"partial_json": "input_json_delta"}.get(name, f"{name}_delta")
            told += event["delta"][name]
        if kind == "stop":
            blocks[-1] |= {"input": json.loads(told)} if name == "partial_json" else {name: told}
    assert [block | {"id": ""} for block in blocks] == [block | {"id": ""} for block in whole["content"]]


def test_arguments_that_are_no_object_become_one_in_events_too(ask, fake):
    fake.says = lambda _: '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'
    whole = ask.post("/messages", json=ASKED | {"tools": [WEATHER]}).json()["content"]
    told = [event["delta"]["partial_json"] for event in events_of(ask, tools=[WEATHER]) if "delta" in event and "partial_json" in event["delta"]]  # fmt: skip
    assert [json.loads(text) for text in told] == [whole[0]["input"]] == [{"arguments": [1]}]


@pytest.mark.parametrize(
    ("choice", "kind"),
    [({"type": "any"}, "json_schema"), ({"type": "tool", "name": "get_weather"}, "json_schema"), ({"type": "auto"}, None), ({"type": "none"}, None)],
)  # fmt: skip
def test_choices_of_tools(ask, fake, choice, kind):
    fake.says = lambda _: '{"name": "get_weather", "arguments": [1]}' if kind else CALL
    answer = ask.post("/messages", json=ASKED | {"tools": [WEATHER], "tool_choice": choice}).json()
    structure = fake.submitted[0][1].structure
    assert (structure and structure.kind) == kind
    used = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
    assert used == ([] if choice["type"] == "none" else [{"arguments": [1]}] if kind else [{"city": "Oslo"}])


def test_one_tool_at_a_time_where_no_more_are_wanted(ask, fake):
    fake.says = lambda _: CALL + CALL
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = ask.post("/messages", json=ASKED | {"tools": [WEATHER], "tool_choice": choice}).json()
    assert [block["type"] for block in answer["content"]].count("tool_use") == 1
    fake.says = lambda _: CALL + " So."
    answer = ask.post("/messages", json=ASKED | {"tools": [WEATHER]}).json()
    assert ([block["type"] for block in answer["content"]][-1], answer["stop_reason"]) == ("text", "tool_use")


def test_what_is_cut_off_after_a_call_says_so(ask, fake):
    fake.says = lambda _: CALL + " and so on" * 9
    most = len(fake.tokenizer.encode(CALL, bare=True)) + 5
    answer = ask.post("/messages", json=ASKED | {"tools": [WEATHER], "max_tokens": most}).json()
    assert "tool_use" in [block["type"] for block in answer["content"]]
    assert answer["stop_reason"] == "max_tokens"


def test_an_assistants_last_turn_is_continued(ask, prompts):
    talk = [*ASKED["messages"], {"role": "assistant", "content": "It is"}]
    ask.post("/messages", json=ASKED | {"messages": talk, "max_tokens": 1})
    assert prompts()[0].endswith("assistant\nIt is")


def test_a_form_of_the_answer(ask, fake):
    form = {"type": "json_schema", "schema": {"type": "array"}}
    ask.post("/messages", json=ASKED | {"output_config": {"format": form}, "max_tokens": 1})
    assert (fake.submitted[0][1].structure.kind, fake.submitted[0][1].structure.text) == ("json_schema", '{"type": "array"}')  # fmt: skip


def test_arguments_of_a_strict_tool_keep_to_its_schema(ask, fake):
    for strict in (True, None):
        ask.post("/messages", json=ASKED | {"tools": [WEATHER | {"strict": strict}], "max_tokens": 1})
    assert [params.structure is not None for _, params, _ in fake.submitted] == [True, False]


@pytest.fixture
def answers(fake):
    chat = ChatRequest(messages=[Instruction(role="user", content="hello")])
    return AnthropicAnswers({"id": "m", "model": "fake"}, chat, TokenTexts(fake.tokenizer), None)


@pytest.mark.parametrize(("by", "told"), [("x", ("stop_sequence", "x")), (7, ("end_turn", None))])
def test_a_stop_sequence_that_ended_an_answer_is_told_and_a_token_is_none(answers, by, told):
    ended = Completion("So", finish="stop", stopped_by=by)
    whole = answers.whole([ended], SimpleNamespace(usage=Usage(3, 1, 2)))
    assert (whole["stop_reason"], whole["stop_sequence"]) == told


def test_a_message_starts_once_whether_its_first_tokens_are_text_or_not(answers):
    async def deltas():
        for delta in (Delta(0, (1,)), Delta(0, (2,)), Delta(0, (3,), "So"), Delta(0, finish="stop")):
            yield delta

    async def read():
        running = SimpleNamespace(usage=Usage(3, 1, 2), deltas=deltas)
        return b"".join([event async for event in answers.events(running)]).decode()

    names = [line.removeprefix("event: ") for line in asyncio.run(read()).splitlines() if line.startswith("event: ")]
    block = [f"content_block_{part}" for part in ("start", "delta", "stop")]
    assert names == ["message_start", *block, "message_delta", "message_stop"]


def test_tokens_are_counted(ask, fake):
    asked = {"messages": ASKED["messages"], "tools": [WEATHER], "system": [{"type": "text", "text": "be brief"}]}
    assert ask.post("/messages/count_tokens", json=asked).json()["input_tokens"] > 100
    ask.post("/messages", json=ASKED | asked | {"max_tokens": 1})
    assert ask.post("/messages/count_tokens", json=asked).json() == {"input_tokens": len(fake.submitted[0][0])}


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"max_tokens": None}, "max_tokens", "null"),
        ({"max_tokens": 5000}, "max_tokens", "at most 4,096"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": "cat " * 3000}]}, "messages", "may have 2,047"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0", "'image' is not supported"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "not text"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences", "17 stop texts"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0", "'web_search_20250305' is not supported"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "has a name"),
        ({"output_config": {"effort": "low"}}, "output_config.effort", "takes no reasoning_effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"enum": ["x" * 70000]}}}}, "output_config.format", "characters"),
        ({"stop_sequences": [""]}, "stop_sequences", "must not be empty"),
        ({"container": "x"}, "container", "container is not supported"),
        ({"temperature": -1}, "temperature", "between 0 and 100"),
    ],
)  # fmt: skip
def test_a_message_is_refused(ask, change, param, said):
    body = json.dumps(ASKED | change).encode()
    answer = ask.post("/messages", content=body, headers={"Content-Type": "application/json"})
    told = answer.json()
    assert (answer.status_code, told["type"]) == (400, "error")
    assert (told["error"]["type"], told["error"]["param"]) == ("invalid_request_error", param)
    assert said in told["error"]["message"]


def test_errors_have_the_shape_of_this_api_whoever_finds_them(serve, fake):
    url = serve(fake, limits=Limits(body_bytes=2000, request_seconds=60)) + "/v1/messages"
    kind = lambda answer: (answer.status_code, answer.json()["type"], answer.json()["error"]["type"])
    for path, asked in (("", ASKED), ("/count_tokens", {"messages": ASKED["messages"]})):
        assert kind(patient.post(url + path, json=asked | {"model": "other"})) == (404, "error", "not_found_error")
    assert kind(patient.post(url, json=ASKED | {"system": "x" * 3000})) == (413, "error", "invalid_request_error")
    assert kind(patient.get(url)) == (405, "error", "invalid_request_error")
    explodes = ASKED | {"messages": [{"role": "user", "content": "explode"}]}
    assert kind(patient.post(url, json=explodes)) == (500, "error", "api_error")
    assert "type" not in patient.post(url.replace("messages", "embeddings"), json={}).json()


def test_the_key_is_given_as_anthropics_client_does(serve, fake):
    url = serve(fake, api_key="secret") + "/v1/messages"
    assert patient.post(url, json=ASKED, headers={"X-Api-Key": "secret"}).status_code == 200
    for headers in ({}, {"X-Api-Key": "wrong"}, {"X-Api-Key": "secret", "Authorization": "Bearer wrong"}):
        refused = patient.post(url, json=ASKED, headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_a_failure_in_a_stream_is_its_last_event(serve, fake):
    fake.pace = 0.05
    with patient.stream("POST", serve(fake) + "/v1/messages", json=ASKED | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        for live in list(fake.live):
            failed = Delta(0, finish="error", error="RuntimeError: the model broke")
            live.task.get_loop().call_soon_threadsafe(live.tell, failed)
        last = [line for line in lines if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "api_error"
    assert empty_soon(fake)
