"""The real `openai` client against the server: what a person does who changes nothing but the address."""

import json
import logging

import openai
import pydantic
import pytest
from fake_engine import empty_soon
from test_endings import wait_for_the_log

from tilestack.engine import Delta, QueueFull, TokenLogprob
from tilestack.server.chat_answers import ChatChoice
from tilestack.server.prompts import template_message
from tilestack.server.sampling import call_schema
from tilestack.server.schemas.chat import Function, ToolMessage
from tilestack.server.settings import Limits
from tilestack.server.token_text import TokenTexts

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = 'I will look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
def ask(serve, fake):
    with openai.OpenAI(base_url=serve(fake) + "/v1", api_key="none", max_retries=0) as client:
        yield client


def user(text="hello"):
    return [{"role": "user", "content": text}]


def test_a_chat(ask, fake):
    answer = ask.chat.completions.create(model="fake", messages=user(), max_tokens=5, temperature=0.5, seed=7)
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert (
        fake.tokenizer.encode(choice.message.content, bare=True)
        == fake.tokenizer.encode("0 1 2 3 4 5 6", bare=True)[:5]
    )
    ((prompt, params, options),) = fake.submitted
    assert fake.tokenizer.decode(prompt, special=True) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert (params.temperature, params.seed, params.max_tokens, params.top_p) == (0.5, 7, 5, 1.0)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 5)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert options["id"].startswith(answer.id)


def test_a_chat_streams(ask):
    stream = ask.chat.completions.create(
        model="fake", messages=user(), max_tokens=20, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, finishes, usages = {0: "", 1: ""}, {}, []
    for chunk in stream:
        assert "usage" in chunk.model_fields_set  # null in all events but the last
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    assert texts[0] == texts[1]
    assert texts[0].startswith("0 1 2 3")
    assert finishes == {0: "length", 1: "length"}
    assert [usage.completion_tokens for usage in usages] == [40]


def test_usage_in_every_event(ask):
    options = {"continuous_usage_stats": True}
    stream = ask.chat.completions.create(
        model="fake", messages=user(), max_tokens=9, stream=True, extra_body={"stream_options": options}
    )
    told = [chunk.usage.completion_tokens for chunk in stream]
    assert told == sorted(told)
    assert told[-1] == 9


def test_log_probabilities_of_a_chat(ask):
    answer = ask.chat.completions.create(
        model="fake", messages=user(), max_tokens=3, logprobs=True, top_logprobs=2, extra_body={"prompt_logprobs": 1}
    )
    told = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in told] == [-0.25] * 3
    assert bytes(b for entry in told for b in entry.bytes).decode() == answer.choices[0].message.content
    assert told[0].top_logprobs[1].logprob == -9999.0
    assert answer.prompt_logprobs[0] is None
    assert all(entry["logprob"] == -0.5 for each in answer.prompt_logprobs[1:] for entry in each.values())


def test_log_probabilities_stream(ask):
    stream = ask.chat.completions.create(model="fake", messages=user(), max_tokens=3, logprobs=True, stream=True)
    told = [
        entry for chunk in stream for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content
    ]
    assert [entry.logprob for entry in told] == [-0.25] * 3


def test_a_token_without_text_has_its_log_probability_in_a_stream_too():
    """As the first of those that make a character together."""
    told = {"content": [{"token": "\ufffd", "logprob": -0.25}]}
    (body,) = ChatChoice(0, None).bodies(Delta(0, (7,), ""), told)
    assert body == {"index": 0, "delta": {"content": ""}, "logprobs": told, "finish_reason": None}


def test_a_function_is_called(ask, fake):
    fake.says = lambda prompt: "It rains in Oslo." if "tool\nrain" in prompt else CALL
    answer = ask.chat.completions.create(model="fake", messages=user("Weather in Oslo?"), tools=[TOOL])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I will look.")
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    assert '"name": "get_weather"' in fake.tokenizer.decode(fake.submitted[0][0])

    told = [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    after = ask.chat.completions.create(model="fake", messages=user("Weather in Oslo?") + told, tools=[TOOL])
    assert after.choices[0].message.content == "It rains in Oslo."
    assert '{"city": "Oslo"}' in fake.tokenizer.decode(fake.submitted[1][0])


def test_a_function_is_called_in_a_stream(ask, fake):
    fake.says = lambda _: CALL
    text, calls, finish = "", [], None
    for chunk in ask.chat.completions.create(model="fake", messages=user(), tools=[TOOL], stream=True):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        finish = choice.finish_reason or finish
    assert (text, finish) == ("I will look.", "tool_calls")
    assert [(call.index, call.function.name) for call in calls] == [(0, "get_weather")]
    assert json.loads(calls[0].function.arguments) == {"city": "Oslo"}


def test_of_two_calls_the_first_is_given_where_one_is_asked_for(ask, fake):
    fake.says = lambda _: CALL + CALL.removeprefix("I will look.").replace("Oslo", "Bergen")
    for several, cities in ((True, ["Oslo", "Bergen"]), (False, ["Oslo"])):
        answer = ask.chat.completions.create(model="fake", messages=user(), tools=[TOOL], parallel_tool_calls=several)
        calls = answer.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == cities


def test_what_is_cut_off_after_a_call_says_so(ask, fake):
    fake.says = lambda _: CALL + " and then" * 100
    asked = dict(
        model="fake", messages=user(), tools=[TOOL], max_tokens=len(fake.tokenizer.encode(CALL, bare=True)) + 4
    )
    whole = ask.chat.completions.create(**asked)
    assert whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "length"
    *_, last = ask.chat.completions.create(**asked, stream=True)
    assert last.choices[0].finish_reason == "length"


def test_parts_of_a_message_are_lines_of_one_text(ask, fake):
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    ask.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert "user\nfirst\nsecond<|im_end|>" in fake.tokenizer.decode(fake.submitted[0][0], special=True)


def test_a_developer_is_the_system_to_a_template(ask, fake):
    ask.chat.completions.create(
        model="fake", messages=[{"role": "developer", "content": "be brief"}, *user()], max_tokens=1
    )
    assert "<|im_start|>system\nbe brief<|im_end|>" in fake.tokenizer.decode(fake.submitted[0][0], special=True)


def test_a_function_that_must_be_called_is_asked_for_by_a_schema(ask, fake):
    fake.says = lambda _: '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask.chat.completions.create(model="fake", messages=user(), tools=[TOOL], tool_choice=chosen)
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    structure = fake.submitted[0][1].structure
    assert structure.kind == "json_schema"
    (call,) = json.loads(structure.text)["anyOf"]
    assert call["properties"]["name"] == {"const": "get_weather"}


def test_what_a_schema_refers_to_within_itself_is_found_where_it_is_put():
    inner = {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": {"items": {"$ref": "#"}}}}
    schema = call_schema([Function(name="f"), Function(name="g", parameters=inner)])
    place = "#/anyOf/1/properties/arguments"
    found = {"anyOf": [{"$ref": f"{place}/$defs/A"}, {"type": "null"}], "$defs": {"A": {"items": {"$ref": place}}}}
    assert schema["anyOf"][1]["properties"]["arguments"] == found


def test_a_template_knows_which_call_a_result_is_of():
    made = template_message(ToolMessage(role="tool", content="rain", tool_call_id="c"))
    assert made == {"role": "tool", "content": "rain", "tool_call_id": "c"}


def test_a_function_by_openais_own_helper_keeps_to_its_schema(ask, fake):
    class get_weather(pydantic.BaseModel):
        city: str

    fake.says = lambda _: CALL
    tool = openai.pydantic_function_tool(get_weather)
    assert tool["function"]["strict"]
    answer = ask.chat.completions.parse(model="fake", messages=user(), tools=[tool])
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == get_weather(city="Oslo")
    ask.chat.completions.create(model="fake", messages=user(), tools=[TOOL])
    ask.chat.completions.create(
        model="fake", messages=user(), tools=[tool], max_tokens=1, response_format={"type": "json_object"}
    )
    strict, free, other = [params.structure for _, params, _ in fake.submitted]
    assert (strict.kind, free, other.kind) == ("grammar", None, "json")


def test_tools_that_may_not_be_called_are_text(ask, fake):
    fake.says = lambda _: CALL
    answer = ask.chat.completions.create(model="fake", messages=user(), tools=[TOOL], tool_choice="none")
    assert answer.choices[0].message.content == CALL
    assert "get_weather" not in fake.tokenizer.decode(fake.submitted[0][0])


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}},
            "json_schema",
            '{"type": "array"}',
        ),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "regex", "a+"),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "a"'}}}, "grammar", 'start: "a"'),
        ({"extra_body": {"structured_outputs": {"choice": ["a", "b."]}}}, "regex", "(a)|(b\\.)"),
    ],
)
def test_forms_of_answers(ask, fake, asked, kind, text):
    ask.chat.completions.create(model="fake", messages=user(), max_tokens=1, **asked)
    structure = fake.submitted[0][1].structure
    assert (structure.kind, structure.text) == (kind, text)


def test_what_vllm_takes_besides(ask, fake):
    beside = dict(
        top_k=5, min_p=0.1, repetition_penalty=1.2, min_tokens=2, ignore_eos=True, stop_token_ids=[3], priority=4
    )
    extra = beside | dict(cache_salt="s", include_stop_str_in_output=True)
    ask.chat.completions.create(model="pirate", messages=user(), max_tokens=3, stop="x", extra_body=extra)
    ((_, params, options),) = fake.submitted
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (5, 0.1, 1.2, 2)
    assert (params.ignore_eos, params.stop_ids, params.keep_stop, params.stop) == (True, (3,), True, ("x",))
    assert (options["priority"], options["salt"], options["adapter"]) == (4, "s", "pirate")


@pytest.mark.parametrize("everything", [-1, 0])
def test_no_top_k_is_said_in_two_ways(ask, fake, everything):
    ask.completions.create(model="fake", prompt="x", max_tokens=1, extra_body={"top_k": everything})
    assert fake.submitted[0][1].top_k == 0


def test_completions_of_texts_and_ids(ask, fake):
    one = ask.completions.create(model="fake", prompt="the cat")
    assert one.usage.completion_tokens == 16
    ids = fake.tokenizer.encode("the cat")
    for prompt in (["the cat", "the dog"], [ids, ids]):
        several = ask.completions.create(model="fake", prompt=prompt, max_tokens=2, n=2)
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        assert several.usage.completion_tokens == 8
        assert several.usage.prompt_tokens_details.cached_tokens == 2  # one of each prompt
    assert ask.completions.create(model="fake", prompt=ids, max_tokens=1).usage.prompt_tokens == len(ids)
    best = ask.completions.create(model="fake", prompt=["the cat", "the dog"], max_tokens=2, best_of=3)
    assert [choice.index for choice in best.choices] == [0, 1]
    assert all(choice.text for choice in best.choices)


def test_completions_stream(ask):
    texts = [""] * 4
    for chunk in ask.completions.create(model="fake", prompt=["a", "b"], max_tokens=9, n=2, stream=True, echo=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [text[:6] for text in texts] == ["a0 1 2", "a0 1 2", "b0 1 2", "b0 1 2"]
    whole = ask.completions.create(model="fake", prompt=["a", "b"], max_tokens=9, n=2, echo=True)
    assert [choice.text for choice in whole.choices] == texts


def test_log_probabilities_of_a_completion_are_the_same_in_a_stream(ask, fake):
    fake.pace = 0.01  # so that there are several events
    asked = dict(model="fake", prompt="the cat", max_tokens=6, logprobs=2)
    whole = ask.completions.create(**asked).choices[0]
    events = [chunk.choices[0].logprobs for chunk in ask.completions.create(**asked, stream=True)]
    joined = lambda name: [each for event in events if event for each in getattr(event, name)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert joined(name) == getattr(whole.logprobs, name)
    assert len([event for event in events if event]) > 1
    for place, token in zip(whole.logprobs.text_offset, whole.logprobs.tokens, strict=True):
        assert whole.text[place:].startswith(token)
    assert min(whole.logprobs.top_logprobs[0].values()) == -9999.0  # for minus infinity


def test_of_two_numbers_of_likeliest_tokens_the_larger_is_asked_for(ask, fake):
    for more in (0, 3):
        asked = dict(prompt="the cat", max_tokens=1, echo=True, logprobs=1, extra_body={"prompt_logprobs": more})
        ask.completions.create(model="fake", **asked)
    assert [params.prompt_logprobs for _, params, _ in fake.submitted] == [1, 3]


@pytest.mark.parametrize("bare", [False, True])
def test_echo_with_log_probabilities(ask, fake, bare):
    ids = fake.tokenizer.encode("the cat", bare=bare)
    answer = ask.completions.create(model="fake", prompt=ids, max_tokens=2, echo=True, logprobs=1)
    told = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("the cat0")
    assert told.token_logprobs == [None] + [-0.5] * (len(ids) - 1) + [-0.25] * 2
    assert len(told.tokens) == len(told.text_offset) == len(told.top_logprobs) == len(ids) + 2
    assert "".join(told.tokens) == answer.choices[0].text  # the prompt's first token too, which has no probability
    assert told.text_offset == [len("".join(told.tokens[:place])) for place in range(len(ids) + 2)]


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_are_those_of_the_text_where_special_tokens_are_in_it(ask, fake, as_ids):
    text = "<|im_start|>the<|im_end|> cat"
    prompt = fake.tokenizer.encode("the" + text, bare=True) if as_ids else text
    choice = ask.completions.create(model="fake", prompt=prompt, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert choice.text.endswith("<|im_end|> cat")
    assert "<|im_end|>" in choice.logprobs.tokens
    assert "".join(choice.logprobs.tokens) == choice.text
    for place, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert choice.text[place:].startswith(token)


def test_a_special_token_that_a_prompt_begins_with_is_in_its_text_or_was_put_before_it(fake):
    texts, mark = TokenTexts(fake.tokenizer), fake.tokenizer.backend.token_to_id("<|im_start|>")
    assert [texts.first_text(mark, echoed) for echoed in ("<|im_start|>the", "the")] == ["<|im_start|>", ""]


def test_a_token_that_was_drawn_is_told_beside_the_likeliest(fake):
    texts, told = TokenTexts(fake.tokenizer), TokenLogprob(70, -3.0, ((71, -0.1),))
    completion = texts.completion([None, told])
    assert completion["top_logprobs"] == [None, {texts.text_of(71): -0.1, texts.text_of(70): -3.0}]
    by_id = {token: each["logprob"] for token, each in texts.prompt([None, told])[1].items()}
    assert by_id == {"70": -3.0, "71": -0.1}


def test_a_prompt_alone_is_scored(ask, fake):
    ids = fake.tokenizer.encode("the cat")
    answer = ask.completions.create(model="fake", prompt=["the cat", "a"], max_tokens=0, echo=True, logprobs=1)
    told = answer.choices[0].logprobs
    assert [choice.text for choice in answer.choices] == ["the cat", "a"]
    assert told.token_logprobs == [None] + [-0.5] * (len(ids) - 1)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 0)
    for more in ({}, {"echo": True, "stream": True}):
        with pytest.raises(openai.BadRequestError, match="takes echo: true and no stream"):
            ask.completions.create(model="fake", prompt="a", max_tokens=0, **more)


def test_what_openais_clients_send_and_nothing_is_made_of(ask):
    beside = dict(store=False, metadata={"a": "b"}, prompt_cache_key="k", safety_identifier="s", service_tier="auto", user="u", modalities=["text"], prompt_cache_retention="24h")  # fmt: skip
    assert ask.chat.completions.create(model="fake", messages=user(), max_tokens=1, **beside).choices
    for changed, said in ((dict(store=True), "store"), (dict(service_tier="flex"), "service_tier")):
        with pytest.raises(openai.BadRequestError, match=said):
            ask.chat.completions.create(model="fake", messages=user(), max_tokens=1, **changed)


def test_a_models_own_sampling_is_taken_where_a_request_says_nothing(serve, fake):
    own = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    with openai.OpenAI(base_url=serve(fake, sampling=own) + "/v1", api_key="none") as client:
        client.chat.completions.create(model="fake", messages=user(), max_tokens=1)
        client.completions.create(model="fake", prompt="a", max_tokens=1, temperature=0, extra_body={"top_k": -1})
    taken = [(params.temperature, params.top_k, params.repetition_penalty) for _, params, _ in fake.submitted]
    assert taken == [(0.6, 20, 1.1), (0, 0, 1.1)]


def test_embeddings(ask, fake):
    asked = ask.embeddings.create(model="fake", input=["the cat", "the dog"])  # base64 beneath
    assert [entry.embedding for entry in asked.data] == [pytest.approx([0.6, 0.8])] * 2
    last = ask.embeddings.create(model="fake", input="x", encoding_format="float", extra_body={"pooling": "last"})
    assert last.data[0].embedding == [0.8, 0.6]
    assert last.usage.prompt_tokens == last.usage.total_tokens == len(fake.tokenizer.encode("x"))
    more = {"priority": -3, "cache_salt": "mine"}
    assert ask.embeddings.create(model="pirate", input="x", extra_body=more).model == "pirate"
    _, _, options = fake.submitted[-1]
    assert (options["adapter"], options["priority"], options["salt"]) == ("pirate", -3, "mine")


def test_many_texts_become_vectors_some_at_a_time(serve, fake, caplog):
    """As LangChain and the Vercel AI SDK send them; once begun, a request waits where others have filled the queue."""
    tried, together, submit = [], [], fake.submit

    def fills(prompt, params, **options):
        tried.append(prompt)
        together.append(sum(not stream.cancelled for stream in fake.live))
        if len(tried) == 4:
            raise QueueFull("2 wait")
        return submit(prompt, params, **options)

    fake.submit = fills
    url = serve(fake, limits=Limits(prompts=2, texts=7), retry_after=0)
    caplog.set_level(logging.INFO, "tilestack.server")
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        told = client.embeddings.create(model="fake", input=[[text] for text in range(7)])
        assert [entry.index for entry in told.data] == list(range(7))
        assert told.usage.prompt_tokens == 7
        assert tried == [[0], [1], [2], [3], [2], [3], [4], [5], [6]]
        assert max(together) == 1
        with pytest.raises(openai.BadRequestError, match="at most 7"):
            client.embeddings.create(model="fake", input=["a"] * 8)
    assert empty_soon(fake)
    wait_for_the_log(caplog)
    logged = next(record.fields for record in caplog.records if record.getMessage() == "request")
    assert (logged["prompt_tokens"], logged["cached_tokens"]) == (7, 7), "of all portions together"


def test_models(ask):
    assert [model.id for model in ask.models.list()] == ["fake", "pirate"]
    assert ask.models.retrieve("pirate").max_model_len == 2048
    assert ask.models.retrieve("fake").weights == "int4"
    with pytest.raises(openai.NotFoundError, match="no model 'other' here; there is fake, pirate"):
        ask.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        ask.chat.completions.create(model="other", messages=user())


def test_failures_of_the_model(ask, fake):
    with pytest.raises(openai.InternalServerError, match="the model broke"):
        ask.chat.completions.create(model="fake", messages=user("explode"))
    with pytest.raises(openai.InternalServerError, match="the model broke"):
        ask.chat.completions.create(model="fake", messages=user("explode"), stream=True)
    with pytest.raises(openai.APIError, match="the model broke"):
        list(ask.chat.completions.create(model="fake", messages=user("break later"), stream=True))
    assert ask.chat.completions.create(model="fake", messages=user(), max_tokens=1).choices
    assert not fake.live
