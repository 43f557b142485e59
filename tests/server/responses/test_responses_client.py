"""The Responses API by the real `openai` client, as its documentation shows it."""

import asyncio
import json

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseItemList
from test_openai_client import CALL, TOOL

from tilestack.data.chat import CHATML

FUNCTION = {"type": "function", "strict": False, **TOOL["function"]}
CHAT_TOOL = TOOL | {"function": TOOL["function"] | {"strict": False}}
WEATHER = "Weather in Oslo?"


@pytest.fixture
def ask(serve, fake):
    with openai.OpenAI(base_url=serve(fake) + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def prompts(fake):
    """The prompts that the engine was given, as text."""
    return lambda: [fake.tokenizer.decode(prompt, special=True) for prompt, _, _ in fake.submitted]


def test_a_text_is_answered(ask, fake, prompts):
    fake.says = lambda _: "Hello there."
    beside = dict(
        metadata={"a": "b"},
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        service_tier="auto",
    )
    answer = ask.responses.create(model="fake", input="hello", instructions="be brief", temperature=0.5, **beside)
    assert answer.output_text == "Hello there."
    assert prompts() == [
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ]
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.completed_at >= answer.created_at
    assert (answer.instructions, answer.temperature, answer.top_p) == ("be brief", 0.5, 1.0)
    assert {name: getattr(answer, name) for name in beside} == beside | {"service_tier": "default"}
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(fake.submitted[0][0]), len(fake.tokenizer.encode(answer.output_text, bare=True)))  # fmt: skip
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (1, 0)
    Response.model_validate(answer.to_dict())  # which the client itself does not
    assert fake.submitted[0][2]["id"].startswith(answer.id)


def test_an_answer_that_is_cut_off_is_incomplete(ask):
    answer = ask.responses.create(model="fake", input="hello", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[0].status, answer.completed_at) == ("incomplete", None)
    assert answer.usage.output_tokens == 3


CALLED = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
user, said = ({"role": role, "content": "the cat"} for role in ("user", "assistant"))


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("the cat", [user]),
        ([user, said, user | {"type": "message"}], [user, said, user]),
        ([user, said, said, user], [user, said, said, user]),
        ([{"role": "developer", "content": "x"}, user], [{"role": "developer", "content": "x"}, user]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        (
            [user, {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}, user],
            [user, {"role": "assistant", "content": "a"}, user],
        ),
        (
            [user, said, CALL_ITEM, {"type": "function_call_output", "call_id": "c1", "output": "rain"}],
            [user, said | {"tool_calls": [CALLED]}, {"role": "tool", "tool_call_id": "c1", "content": "rain"}],
        ),
        (
            [user, CALL_ITEM, CALL_ITEM | {"call_id": "c2"}]
            + [
                {"type": "function_call_output", "call_id": id, "output": [{"type": "input_text", "text": "rain"}]}
                for id in ("c1", "c2")
            ],
            [user, {"role": "assistant", "tool_calls": [CALLED, CALLED | {"id": "c2"}]}]
            + [{"role": "tool", "tool_call_id": id, "content": "rain"} for id in ("c1", "c2")],
        ),
        (
            [user, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}, said],
            [user, said | {"reasoning_content": "so"}],
        ),
    ],
)
def test_the_model_is_asked_as_by_a_chat_of_the_same_messages(ask, fake, prompts, monkeypatch, items, messages):
    """So that it answers the same."""
    thoughts = CHATML.replace("message.content", "(message.reasoning_content or '') + message.content")
    monkeypatch.setattr(fake.tokenizer, "template", thoughts if "reasoning" in str(items) else CHATML)
    both = dict(model="fake", temperature=0.3, top_p=0.9, extra_body={"top_k": 7, "seed": 5, "stop": ["x"]})
    answer = ask.responses.create(input=items, max_output_tokens=9, tools=[FUNCTION], **both)
    chat = ask.chat.completions.create(messages=messages, max_completion_tokens=9, tools=[CHAT_TOOL], **both)
    assert answer.output_text == chat.choices[0].message.content
    (prompt, params, _), (prompt_of_chat, params_of_chat, _) = fake.submitted
    assert prompts()[0] == prompts()[1]
    assert (prompt, params) == (prompt_of_chat, params_of_chat)


def test_a_function_is_called_and_its_result_told(ask, fake, prompts):
    fake.says = lambda prompt: "It rains in Oslo." if "tool\nrain" in prompt else CALL
    items = [{"role": "user", "content": WEATHER}]
    answer = ask.responses.create(model="fake", input=items, tools=[FUNCTION])
    message, call = answer.output
    assert message.content[0].text == answer.output_text == "I will look."
    assert (call.type, call.name, json.loads(call.arguments), call.status) == ("function_call", "get_weather", {"city": "Oslo"}, "completed")  # fmt: skip
    assert answer.tools[0].to_dict() == FUNCTION

    items += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    after = ask.responses.create(model="fake", input=items, tools=[FUNCTION])
    assert after.output_text == "It rains in Oslo."
    Response.model_validate(answer.to_dict())
    by_id = ask.responses.create(
        model="fake", input=items[-1:], previous_response_id=answer.id, tools=[FUNCTION], store=False
    )
    assert by_id.output_text == "It rains in Oslo."
    assert prompts()[1] == prompts()[2]
    assert prompts()[1].count("<|im_start|>assistant") == 2  # text and call are one message


def test_text_and_calls_stay_in_their_order_and_become_one_message_again(ask, fake, prompts):
    second = CALL.replace("I will look.\n", "").replace("Oslo", "Bergen")
    fake.says = lambda prompt: "" if "tool\n" in prompt else f"{CALL} And there? {second}"
    answer = ask.responses.create(model="fake", input=WEATHER, tools=[FUNCTION])
    assert [item.type for item in answer.output] == ["message", "function_call", "message", "function_call"]
    assert answer.output_text == "I will look.\n And there?"
    with ask.responses.stream(model="fake", input=WEATHER, tools=[FUNCTION]) as stream:
        streamed = stream.get_final_response()
    assert without_ids(streamed) == without_ids(answer)
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in answer.output[1::2]
    ]
    ask.responses.create(model="fake", input=results, previous_response_id=answer.id, tools=[FUNCTION])
    assert prompts()[-1].count("<|im_start|>assistant") == 2
    assert prompts()[-1].index("Oslo") < prompts()[-1].index("Bergen")
    one = ask.responses.create(model="fake", input=WEATHER, tools=[FUNCTION], parallel_tool_calls=False)
    assert [item.type for item in one.output].count("function_call") == 1
    assert not one.parallel_tool_calls


def without_ids(response):
    """What is the same of two answers to the same question."""

    def bare(value):
        if isinstance(value, list):
            return [bare(each) for each in value]
        changing = {"id", "call_id", "item_id", "created_at", "completed_at", "parsed", "parsed_arguments"}
        return (
            {name: bare(each) for name, each in value.items() if name not in changing}
            if isinstance(value, dict)
            else value
        )

    return bare(response.to_dict())


def test_a_conversation_goes_on_from_an_id(ask, prompts):
    first = ask.responses.create(model="fake", input="one", instructions="be brief", max_output_tokens=1)
    second = ask.responses.create(model="fake", input="two", previous_response_id=first.id, max_output_tokens=1)
    third = ask.responses.create(
        model="fake", input="three", previous_response_id=second.id, max_output_tokens=1, instructions="be kind"
    )
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    said = lambda text, answer: turn.format(text) + answer.output_text + "<|im_end|>\n"
    assert prompts()[1] == said("one", first) + turn.format("two")  # without the instructions of the first
    kind = "<|im_start|>system\nbe kind<|im_end|>\n"
    assert prompts()[2] == kind + said("one", first) + said("two", second) + turn.format("three")
    assert (first.previous_response_id, third.previous_response_id) == (None, second.id)


def test_what_is_stored_is_looked_up_listed_and_deleted(ask, prompts):
    first = ask.responses.create(model="fake", input="one", max_output_tokens=1)
    given = [{"role": "user", "content": "two", "id": "mine"}, {"role": "assistant", "content": "aha"}, user]
    second = ask.responses.create(model="fake", input=given, previous_response_id=first.id, max_output_tokens=1)
    assert ask.responses.retrieve(second.id) == second
    items = list(ask.responses.input_items.list(second.id, order="asc"))
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "one"), ("assistant", first.output_text), ("user", "two"), ("assistant", "aha"), ("user", "the cat"),
    ]  # fmt: skip
    assert items[1] == first.output[0]
    assert items[2].id == "mine"
    page = ask.responses.input_items.list(second.id, limit=2)
    ResponseItemList.model_validate(page.to_dict())
    assert [item.id for item in page.data] == [items[4].id, items[3].id]
    assert (page.has_more, page.object, page.first_id, page.last_id) == (True, "list", items[4].id, items[3].id)
    paged = [item.id for item in ask.responses.input_items.list(second.id, limit=2)]
    assert paged == [item.id for item in reversed(items)]

    ask.responses.delete(first.id)
    for gone in (
        lambda: ask.responses.retrieve(first.id),
        lambda: ask.responses.delete(first.id),
        lambda: ask.responses.input_items.list(first.id),
    ):
        with pytest.raises(openai.NotFoundError, match=first.id):
            gone()
    with pytest.raises(openai.BadRequestError, match="no stored response") as refused:
        ask.responses.create(model="fake", input="x", previous_response_id=first.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
    ask.responses.create(model="fake", input="three", previous_response_id=second.id, max_output_tokens=1)
    assert prompts()[-1].count("one<|im_end|>") == 1  # what continues a deleted response outlives it


def test_items_are_referred_to_by_their_ids(ask, prompts):
    first = ask.responses.create(model="fake", input=[user | {"id": "mine"}], max_output_tokens=2)
    items = [{"type": "item_reference", "id": "mine"}, {"id": first.output[0].id}, {"role": "user", "content": "go"}]
    ask.responses.create(model="fake", input=items, max_output_tokens=1, store=False)
    assert f"the cat<|im_end|>\n<|im_start|>assistant\n{first.output_text}<|im_end|>\n" in prompts()[-1]
    second = ask.responses.create(model="fake", input="on", previous_response_id=first.id, max_output_tokens=1)
    ask.responses.delete(first.id)
    ask.responses.create(model="fake", input=[{"id": second.output[0].id}, items[2]], max_output_tokens=1)
    assert second.output_text in prompts()[-1]
    with pytest.raises(openai.NotFoundError, match="no stored item 'mine'"):  # whose response is deleted
        ask.responses.create(model="fake", input=items)
    everything = [{"id": "mine"}, {"id": second.output[0].id}, {"role": "user", "content": "again"}]
    with pytest.raises(openai.BadRequestError, match=r"the item 'msg_.*' is twice in the conversation"):
        ask.responses.create(model="fake", input=everything[1:], previous_response_id=second.id)
    with pytest.raises(openai.NotFoundError, match="no stored item 'other'"):
        ask.responses.create(model="fake", input=[{"type": "item_reference", "id": "other"}])


def test_an_answer_by_a_model_of_pydantic(ask, fake):
    class City(pydantic.BaseModel):
        name: str

    fake.says = lambda _: '{"name": "Oslo"}'
    answer = ask.responses.parse(model="fake", input="a city", text_format=City)
    assert answer.output_parsed == City(name="Oslo")
    assert answer.text.format.name == "City"
    with ask.responses.stream(model="fake", input="a city", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(name="Oslo")
    structure = fake.submitted[0][1].structure
    assert structure.kind == "json_schema"
    assert json.loads(structure.text)["properties"] == {"name": {"title": "Name", "type": "string"}}


def test_a_function_by_openais_own_helper_keeps_to_its_schema(ask, fake):
    class get_weather(pydantic.BaseModel):
        city: str

    fake.says = lambda _: CALL
    answer = ask.responses.parse(model="fake", input=WEATHER, tools=[openai.pydantic_function_tool(get_weather)])
    assert answer.output[1].parsed_arguments == get_weather(city="Oslo")
    assert fake.submitted[0][1].structure.kind == "grammar"


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "json", ""),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "array"}}}}, "json_schema", '{"type": "array"}'),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "regex", "a+"),
    ],
)  # fmt: skip
def test_forms_of_answers(ask, fake, asked, kind, text):
    answer = ask.responses.create(model="fake", input="x", max_output_tokens=1, **asked)
    structure = fake.submitted[0][1].structure
    assert (structure.kind, structure.text) == (kind, text)
    assert answer.text.format.type == (asked.get("text") or {"format": {"type": "text"}})["format"]["type"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_function_that_must_be_called(ask, fake, choice):
    fake.says = lambda _: '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    answer = ask.responses.create(model="fake", input=WEATHER, tools=[FUNCTION], tool_choice=choice)
    assert [item.type for item in answer.output] == ["function_call"]
    assert json.loads(fake.submitted[0][1].structure.text)["anyOf"][0]["properties"]["name"] == {"const": "get_weather"}
    told = answer.tool_choice
    assert (told if isinstance(told, str) else told.to_dict()) == choice


def test_tools_that_may_not_be_called_are_text(ask, fake, prompts):
    fake.says = lambda _: CALL
    assert ask.responses.create(model="fake", input="x", tools=[FUNCTION], tool_choice="none").output_text == CALL
    assert "get_weather" not in prompts()[0]


def test_log_probabilities(ask):
    asked = dict(model="fake", input="x", max_output_tokens=3, include=["message.output_text.logprobs"], top_logprobs=2)
    answer = ask.responses.create(**asked)
    told = answer.output[0].content[0].logprobs
    assert [entry.logprob for entry in told] == [-0.25] * 3
    assert bytes(byte for entry in told for byte in entry.bytes).decode() == answer.output_text
    assert (told[0].top_logprobs[1].logprob, answer.top_logprobs) == (-9999.0, 2)
    events = list(ask.responses.create(**asked, stream=True))
    pieces = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in pieces for entry in event.logprobs] == [entry.token for entry in told]
    assert [entry.token for entry in events[-1].response.output[0].content[0].logprobs] == [
        entry.token for entry in told
    ]
    again = ask.responses.create(model="fake", input=answer.output, max_output_tokens=1)
    assert again.output[0].content[0].logprobs == []


def test_what_vllm_takes_besides(ask, fake):
    beside = dict(top_k=5, min_p=0.1, repetition_penalty=1.2, min_tokens=2, ignore_eos=True, stop_token_ids=[3])
    extra = beside | dict(
        priority=4, cache_salt="s", include_stop_str_in_output=True, stop="x", chat_template_kwargs={"a": 1}
    )
    ask.responses.create(model="pirate", input="x", max_output_tokens=3, extra_body=extra)
    ((_, params, options),) = fake.submitted
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (5, 0.1, 1.2, 2)
    assert (params.ignore_eos, params.stop_ids, params.keep_stop, params.stop) == (True, (3,), True, ("x",))
    assert (options["priority"], options["salt"], options["adapter"]) == (4, "s", "pirate")


def test_effort_goes_to_the_template(ask, fake, prompts, monkeypatch):
    monkeypatch.setattr(fake.tokenizer, "template", "{{ reasoning_effort }}!")
    answer = ask.responses.create(model="fake", input="x", reasoning={"effort": "low"}, max_output_tokens=1)
    assert (prompts(), answer.reasoning.effort) == (["low!"], "low")


def test_the_models_own_sampling_is_told(serve, fake):
    with openai.OpenAI(base_url=serve(fake, sampling={"temperature": 0.6, "top_p": 0.8}) + "/v1", api_key="x") as ask:
        answer = ask.responses.create(model="fake", input="x", max_output_tokens=1)
    assert (answer.temperature, answer.top_p) == (0.6, 0.8)


def test_the_oldest_items_are_left_out_of_a_conversation_that_is_too_long(ask, fake, prompts):
    fake.context = 120
    items = [{"role": "user", "content": f"{number} cat"} for number in range(12)]
    with pytest.raises(openai.BadRequestError) as refused:
        ask.responses.create(model="fake", input=items, max_output_tokens=30)
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    answer = ask.responses.create(model="fake", input=items, max_output_tokens=30, truncation="auto")
    kept = [line for line in prompts()[0].splitlines() if line.endswith("cat<|im_end|>")]
    assert kept == [f"{number} cat<|im_end|>" for number in range(12 - len(kept), 12)]
    assert 1 < len(kept) < 12
    assert (answer.truncation, answer.usage.output_tokens) == ("auto", 30)
    each = len(fake.tokenizer.encode("<|im_start|>user\n9 cat<|im_end|>\n", bare=True))
    assert 120 - 30 - 2 * each < answer.usage.input_tokens <= 120 - 30  # one more would not have fitted
    with pytest.raises(openai.BadRequestError, match="may have 119"):
        ask.responses.create(model="fake", input="cat " * 200, truncation="auto")


def test_a_conversation_of_any_length_is_read_once_and_what_is_left_of_it_a_few_times(ask, fake, monkeypatch):
    fake.context, read, encode = 120, [], fake.tokenizer.encode
    monkeypatch.setattr(fake.tokenizer, "encode", lambda text, **more: read.append(len(text)) or encode(text, **more))
    items = [{"role": "user", "content": f"{number} cat"} for number in range(500)]
    ask.responses.create(model="fake", input=items, max_output_tokens=30, truncation="auto")
    whole, *tried, _ = read  # the last is what the engine says
    assert max(tried) < whole / 20
    assert 2 < len(tried) < 10


def test_no_result_is_left_of_a_call_that_is_left_out(ask, fake, prompts):
    fake.context = 160
    items = [{"role": "user", "content": "cat " * 30}, CALL_ITEM, CALL_ITEM | {"call_id": "c2"}]
    items += [{"type": "function_call_output", "call_id": id, "output": f"rain {id}"} for id in ("c1", "c2")]
    ask.responses.create(model="fake", input=items, truncation="auto", max_output_tokens=80)
    assert "rain c2" in prompts()[0]
    assert prompts()[0].count("<tool_call>") == prompts()[0].count("<|im_start|>tool\n")
    assert "cat cat" not in prompts()[0]


def test_a_client_that_waits_for_nobody(serve, fake):
    async def talk():
        async with openai.AsyncOpenAI(base_url=serve(fake) + "/v1", api_key="x") as ask:
            first = await ask.responses.create(model="fake", input="one", max_output_tokens=2)
            stream = await ask.responses.create(
                model="fake", input="two", previous_response_id=first.id, stream=True, max_output_tokens=2
            )
            events = [event async for event in stream]
            found = await ask.responses.retrieve(events[-1].response.id)
            await ask.responses.delete(first.id)
            return first, events, found

    first, events, found = asyncio.run(talk())
    assert events[-1].type == "response.incomplete"
    assert found == events[-1].response
    assert found.output_text == first.output_text
