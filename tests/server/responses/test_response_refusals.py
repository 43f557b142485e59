"""What is refused of a response, and how; whom stored responses belong to; and hostile requests, which cost nobody else."""

import json

import httpx2
import openai
import patient
import pytest
from fake_engine import FakeEngine
from server_thread import served
from test_refusals import refused

from tilestack.server.schemas import ResponsesRequest
from tilestack.server.settings import Limits, ServerSettings

ASKED = {"input": "hello", "max_output_tokens": 2}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
LIMITS = Limits(output_tokens=100, prompt_tokens=300, messages=6, stops=4, tools=3)
NO_CALL = {"type": "function_call_output", "call_id": "c1", "output": "x"}


@pytest.fixture(scope="module")
def here(tokenizer):
    with (
        served(FakeEngine(tokenizer), ServerSettings(port=0, limits=LIMITS)) as url,
        httpx2.Client(base_url=url + "/v1", timeout=patient.LONG) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"input": None}, "input", "not null"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"role": "user", "content": "x"}] * 7}, "input", "7 items; this server gives at most 6"),
        ({"input": "cat " * 400}, "input", "a prompt may have 300"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0", "'web_search_call' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0", "'input_image' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content.0", "'input_file' is not supported"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input.0.role", "wizard"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input.0.encrypted_content", "leave it out"),
        ({"input": [{"role": "user", "content": "x", "id": "same"}] * 2}, "input", "the item 'same' is twice in the conversation"),
        ({"input": [NO_CALL]}, "input", "no call before it has the call_id 'c1'"),
        ({"input": [{"type": "function_call", "call_id": "c1", "name": "f", "arguments": "["}]}, "input", "not a JSON object"),
        *(({"tools": [{"type": kind}]}, "tools.0", f"'{kind}' is not supported") for kind in ("web_search", "file_search", "code_interpreter", "mcp", "custom")),
        ({"tools": [TOOL] * 4}, "tools", "4 tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "web_search"),
        ({"background": True}, "background", "True" and "not true"),
        ({"conversation": "conv_1"}, "conversation", ""),
        ({"prompt": {"id": "x"}}, "prompt", ""),
        ({"n": 2}, "n", "n is not supported"),
        ({"messages": []}, "messages", "messages is not supported"),
        ({"max_tokens": 5}, "max_tokens", "max_tokens is not supported"),
        ({"max_output_tokens": 101}, "max_output_tokens", "at most 100"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"temperature": -1}, "temperature", "between 0 and 100"),
        ({"stop": ["a"] * 5}, "stop", "5 stop texts"),
        ({"top_logprobs": 2}, "top_logprobs", "need include"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "at most 20"),
        ({"include": ["reasoning.encrypted_content"]}, "include.0", "reasoning.encrypted_content"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "takes no reasoning_effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "leave it out"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "'grammar' is not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["x" * 70000]}}}}, "text.format", "characters of structure"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, None, "not several"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream: true"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "at most 512"),
        ({"metadata": {"a" * 65: "x"}}, f"metadata.{'a' * 65}", "at most 64"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"previous_response_id": "resp_none"}, "previous_response_id", "no stored response 'resp_none'"),
        ({"service_tier": "flex"}, "service_tier", "flex"),
    ],
)  # fmt: skip
def test_a_response_is_refused(here, change, param, said):
    error = refused(here.post("/responses", json=ASKED | change))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert said in error["message"]
    assert error["code"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "\ud800"}, "input"),
        ({"input": [{"role": "user", "content": "x", "id": "\ud800"}]}, "input.0.id"),
        ({"instructions": "\udfff"}, "input"),
        ({"tools": [TOOL | {"description": "\ud800"}]}, "input"),
        ({"tools": [TOOL | {"description": "\ud800"}], "tool_choice": "none"}, None),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": "\ud800"}}}}, None),
        ({"metadata": {"\ud800": "x"}}, None),
        ({"metadata": {"a": "\ud800"}}, None),
        ({"user": "\ud800"}, None),
        ({"previous_response_id": "\ud800"}, "previous_response_id"),
        ({"input": [{"type": "\ud800"}]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "\ud800"}]}, "input.0.id"),
        ({"tools": [{"type": "\ud800"}]}, "tools.0"),
        ({"tools": [TOOL | {"parameters": {"const": float("nan")}}], "tool_choice": "none"}, None),
        ({"tools": [TOOL | {"parameters": {"const": float("inf")}}]}, None),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_what_is_no_text_is_no_fault_of_the_server(here, body, param):
    answer = post_json(here, json.dumps(ASKED | body))
    assert answer.status_code in (400, 404) or param is None, answer.text
    assert answer.status_code < 500, answer.text
    if param:
        assert answer.json()["error"]["param"] == param


def post_json(client, text):
    return client.post("/responses", content=text.encode(), headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("change", [{"tools": [TOOL | {"parameters": "SCHEMA"}], "tool_choice": "none"}, {"tools": [TOOL | {"parameters": "SCHEMA"}]}, {"text": {"format": {"type": "json_schema", "name": "x", "schema": "SCHEMA"}}}])  # fmt: skip
def test_what_is_nested_deeply_is_read_or_refused_and_no_fault_of_the_server(here, change, stream):
    """Each level takes some of the stack, at one depth here and at another there."""
    text, statuses = json.dumps(ASKED | change | {"stream": stream}), []
    for depth in (10, 90, 130, *range(420, 490, 3)):
        schema = '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth
        answer = post_json(here, text.replace('"SCHEMA"', schema))
        assert answer.status_code in (200, 400), answer.text[-500:]
        assert not (stream and answer.status_code == 200) or "event: response.incomplete" in answer.text
        statuses.append(answer.status_code)
    assert statuses[-1] == 400
    assert statuses[0] == 200 or "tool_choice" not in change  # elsewhere the prompt is too long


def test_of_a_million_items_the_first_wrong_one_is_told():
    from pydantic import ValidationError

    for change in ({"input": [0] * 9}, {"tools": [0] * 9}, {"include": [0] * 9}, {"input": [{"role": "user", "content": [0] * 9}]}):  # fmt: skip
        with pytest.raises(ValidationError) as wrong:
            ResponsesRequest.model_validate(ASKED | change)
        assert (
            len({error["loc"][-1] if isinstance(error["loc"][-1], int) else 0 for error in wrong.value.errors()}) == 1
        )


@pytest.mark.parametrize(
    ("query", "param", "said"),
    [
        ("limit=0", "limit", "greater than or equal to 1"),
        ("limit=101", "limit", "less than or equal to 100"),
        ("limit=x", "limit", "valid integer"),
        ("order=up", "order", "'asc' or 'desc'"),
        ("after=none", "after", "no item 'none'"),
        ("before=x", "before", "before is not supported"),
    ],
)
def test_a_page_of_items_is_refused(here, query, param, said):
    id = here.post("/responses", json=ASKED).json()["id"]
    error = refused(here.get(f"/responses/{id}/input_items?{query}"))
    assert error["param"] == param
    assert said in error["message"]
    last = here.get(f"/responses/{id}/input_items").json()["last_id"]
    page = here.get(f"/responses/{id}/input_items?after={last}").json()
    assert page == {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}


def test_what_one_key_stores_no_other_finds(serve, fake):
    url = serve(fake) + "/v1"
    with openai.OpenAI(base_url=url, api_key="mine") as mine, openai.OpenAI(base_url=url, api_key="other") as other:
        kept = mine.responses.create(model="fake", input="secret", max_output_tokens=1)
        item = kept.output[0].id
        for look in (
            lambda: other.responses.retrieve(kept.id),
            lambda: other.responses.delete(kept.id),
            lambda: other.responses.input_items.list(kept.id),
            lambda: other.responses.create(model="fake", input=[{"type": "item_reference", "id": item}]),
        ):
            with pytest.raises(openai.NotFoundError) as hidden:
                look()
            assert "secret" not in str(hidden.value)
        with pytest.raises(openai.BadRequestError) as hidden:
            other.responses.create(model="fake", input="x", previous_response_id=kept.id)
        assert hidden.value.code == "previous_response_not_found"
        twin = other.responses.create(model="fake", input=[{"role": "user", "content": "x", "id": item}])
        assert mine.responses.input_items.list(kept.id).data[0].content[0].text == "secret"
        mine.responses.create(model="fake", input=[{"type": "item_reference", "id": item}], max_output_tokens=1)
        assert mine.responses.retrieve(kept.id).output[0].id == item
        assert twin.id != kept.id
    no_key = patient.get(f"{url}/responses/{kept.id}")
    assert refused(no_key, 404)["code"] == "response_not_found"


def test_the_key_of_a_server_is_asked_for(serve, fake):
    url = serve(fake, api_key="secret") + "/v1/responses"
    for ask in (patient.get, patient.post):
        assert ask(url).status_code == 401
    known = {"Authorization": "Bearer secret"}
    id = patient.post(url, json=ASKED, headers=known).json()["id"]
    assert patient.get(f"{url}/{id}").status_code == 401
    assert patient.get(f"{url}/{id}", headers={"Authorization": "bearer  secret"}).json()["id"] == id


def test_only_so_many_are_stored(serve, fake):
    with openai.OpenAI(base_url=serve(fake, limits=Limits(stored=2)) + "/v1", api_key="x") as ask:
        first, second, third = (
            ask.responses.create(model="fake", input=text, max_output_tokens=1) for text in ("one", "two", "three")
        )
        assert ask.responses.retrieve(second.id).id == second.id
        with pytest.raises(openai.NotFoundError):
            ask.responses.retrieve(first.id)
        dropped = ask.responses.create(model="fake", input="x", store=False)
        assert (dropped.to_dict()["store"], third.to_dict()["store"]) == (False, True)
        with pytest.raises(openai.NotFoundError):
            ask.responses.retrieve(dropped.id)
        assert ask.responses.retrieve(second.id).id == second.id  # what is not stored takes no place
    with openai.OpenAI(base_url=serve(fake, limits=Limits(stored=0)) + "/v1", api_key="x") as ask:
        answer = ask.responses.create(model="fake", input="x", max_output_tokens=1)
        assert answer.to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            ask.responses.create(model="fake", input="x", store=True)


def test_a_full_queue_answers_429(serve, fake):
    fake.queue = 0
    answer = patient.post(serve(fake) + "/v1/responses", json=ASKED)
    assert refused(answer, 429)["code"] == "queue_full"


def test_a_page_of_another_site_may_delete_only_where_it_is_told(serve, fake):
    site = {"Origin": "https://site.example"}
    assert patient.options(serve(fake) + "/v1/responses/x", headers=site).status_code == 403
    asked = site | {"Access-Control-Request-Method": "DELETE"}
    url = serve(fake, cors=("https://site.example",))
    assert patient.options(url + "/v1/responses/x", headers=asked).status_code == 200
    with httpx2.Client(base_url=serve(fake), timeout=patient.LONG) as client:
        assert refused(client.delete("/v1/responses/x", headers=site), 403)["code"] == "unknown_origin"
