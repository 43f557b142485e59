"""What is refused, and how: in OpenAI's shape, with the field and the limit named, and never with a 5xx."""

import gzip
import json
import socket
import time
from contextlib import suppress

import httpx2
import patient
import pytest
from fake_engine import FakeEngine
from pydantic import ValidationError
from server_thread import served

from tilestack.server.schemas import ChatRequest, DetokenizeRequest, TokenizeRequest
from tilestack.server.settings import Limits, ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
TEXT = {"prompt": "hello", "max_tokens": 2}
LIMITS = Limits(
    body_bytes=20000, output_tokens=100, prompt_tokens=300, stops=4, stop_characters=20, choices=4, prompts=4
)


@pytest.fixture(scope="module")
def here(tokenizer):
    with (
        served(FakeEngine(tokenizer), ServerSettings(port=0, limits=LIMITS)) as url,
        httpx2.Client(base_url=url, timeout=patient.LONG) as client,
    ):
        yield client


def refused(response, status=400):
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"functions": []}, "functions", "functions is not supported"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0", "'wizard'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, None, ""),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0", "content or tool_calls"),
        ({"messages": [{"role": "wizard", "content": "x"}], "functions": []}, "functions", "is not supported"),
        ({"temperature": "hot"}, "temperature", 'not "hot"'),
        ({"temperature": "h" * 200}, "temperature", f'not "{"h" * 76}…'),
        ({"temperature": -1}, "temperature", "temperature must lie between 0 and 100"),
        ({"temperature": True}, "temperature", ""),
        ({"top_p": 3}, "top_p", "top_p must lie between 0 and 1"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 5}, "n", "at most 4"),
        ({"max_tokens": 101}, "max_tokens", "at most 100"),
        ({"max_tokens": None, "max_completion_tokens": 101}, "max_completion_tokens", "at most 100"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
        ({"min_tokens": 3}, "min_tokens", "min_tokens is 3"),
        ({"stop": ["a"] * 5}, "stop", "5 stop texts"),
        ({"stop": "a" * 21}, "stop", "21 characters"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": {"a": 1}}, None, ""),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", ""),
        ({"logit_bias": {"1": 5000}}, "logit_bias", "logit_bias of token 1"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs", "at most 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "cannot be streamed"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "holds 2"),
        *(
            ({"chat_template_kwargs": {name: []}}, "chat_template_kwargs", name)
            for name in ("messages", "tools", "add_generation_prompt")
        ),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
        ({"seed": 2**70}, "seed", "seed must lie between"),
        *(({name: 10**310}, name, "not a number of 1030 bits") for name in ("seed", "top_k", "min_tokens")),
        *(({name: 10**310}, name, "") for name in ("temperature", "n", "max_tokens", "priority")),
    ],
)
def test_a_chat_is_refused(here, change, param, said):
    error = refused(here.post("/v1/chat/completions", json=CHAT | change))
    assert error["param"] == param or param is None
    assert said in error["message"]
    assert '"messages"' not in error["message"]  # the field, and not the whole body
    assert error["type"] == "invalid_request_error"
    assert error["code"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": []}, "at least 1"),
        ({"prompt": [[]]}, "at least 1"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "greater than or equal to 0"),
        ({"prompt": ["a"] * 5}, "5 prompts in a request; this server gives at most 4"),
        ({"prompt": "a " * 400}, "a prompt may have 300; this one has 801"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "stream": True}, "cannot be streamed"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 5}, "5 answers drawn; this server gives at most 4"),
        ({"logprobs": 21}, "at most 20"),
    ],
)
def test_a_completion_is_refused(here, change, said):
    error = refused(here.post("/v1/completions", json=TEXT | change))
    assert said in error["message"]
    assert error["param"] is not None
    assert '"prompt"' not in error["message"]  # the field, and not the whole body


SMALL = Limits(
    prompts=2, choices=3, stops=4, stop_characters=5, biases=6, logprobs=7, output_tokens=8, messages=9, tools=10,
    structure_characters=200,
)  # fmt: skip
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
LONG_FUNCTION = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"enum": ["x" * 200]}}}


@pytest.fixture(scope="module")
def small(tokenizer):
    with (
        served(FakeEngine(tokenizer), ServerSettings(port=0, limits=SMALL)) as url,
        httpx2.Client(base_url=url + "/v1", timeout=patient.LONG) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("limit", "param", "asked"),
    [
        ("prompts", "prompt", lambda most: {"prompt": ["a"] * most}),
        ("choices", "n", lambda most: {"n": most}),
        ("choices", "best_of", lambda most: {"prompt": "a", "best_of": most}),
        ("stops", "stop", lambda most: {"stop": ["a"] * most}),
        ("stop_characters", "stop", lambda most: {"stop": "a" * most}),
        ("biases", "logit_bias", lambda most: {"logit_bias": {str(token): 1 for token in range(most)}}),
        ("logprobs", "prompt_logprobs", lambda most: {"prompt_logprobs": most}),
        ("logprobs", "top_logprobs", lambda most: {"logprobs": True, "top_logprobs": most}),
        ("logprobs", "logprobs", lambda most: {"prompt": "a", "logprobs": most}),
        ("output_tokens", "max_tokens", lambda most: {"max_tokens": most}),
        ("output_tokens", "max_completion_tokens", lambda most: {"max_tokens": None, "max_completion_tokens": most}),
        ("messages", "messages", lambda most: {"messages": CHAT["messages"] * most}),
        ("tools", "tools", lambda most: {"tools": [FUNCTION] * most}),
    ],
)
def test_as_much_as_a_limit_is_taken_and_one_more_refused(small, limit, param, asked):
    most = getattr(SMALL, limit)
    path, usual = ("/completions", TEXT) if "prompt" in asked(most) else ("/chat/completions", CHAT)
    assert small.post(path, json=usual | asked(most)).status_code == 200
    error = refused(small.post(path, json=usual | asked(most + 1)))
    assert (error["param"], error["code"]) == (param, "over_limit")
    assert f"at most {most}" in error["message"]


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("tools", {"tools": [LONG_FUNCTION]}),
        ("tools", {"tools": [LONG_FUNCTION], "tool_choice": "required"}),
        ("structured_outputs", {"structured_outputs": {"regex": "x" * 200}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 200, "schema": {}}}}),
    ],
)  # fmt: skip
def test_a_long_form_of_the_answer_is_refused(small, param, asked):
    error = refused(small.post("/chat/completions", json=CHAT | asked))
    assert (error["param"], error["code"]) == (param, "over_limit")
    short = json.loads(json.dumps(asked).replace("x" * 200, "x"))
    assert small.post("/chat/completions", json=CHAT | short).status_code == 200


def test_what_is_not_done_at_all_is_told_from_a_wrong_value(here):
    for path, body in (
        ("/v1/embeddings", {"input": "a", "dimensions": 64}),
        ("/v1/completions", TEXT | {"suffix": "x"}),
        ("/v1/chat/completions", CHAT | {"modalities": ["text", "audio"]}),
    ):
        error = refused(here.post(path, json=body))
        assert error["param"] in body or error["param"] == "modalities.1"
        assert "None" not in error["message"]
    error = refused(here.post("/v1/embeddings", json={"input": "a", "dimensions": 64}))
    assert (error["message"], error["code"]) == ("dimensions is not supported; leave it out", "unsupported_parameter")


def test_a_prompt_leaves_room_for_an_answer_and_an_answer_ends_with_the_context(serve, fake):
    fake.context = 60
    with httpx2.Client(base_url=serve(fake), timeout=patient.LONG) as client:
        for path, field, longest in (("/v1/completions", "prompt", 59), ("/v1/embeddings", "input", 60)):
            assert client.post(path, json={field: [1] * longest}).status_code == 200
            error = refused(client.post(path, json={field: [1] * (longest + 1)}))
            assert (error["code"], error["param"]) == ("context_length_exceeded", field)
            assert (
                "this model's maximum context length is 60 tokens" in error["message"]
            )  # LiteLLM looks for these words
        assert client.post("/v1/completions", json={"prompt": [1] * 13, "max_tokens": 4000}).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 4000}).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT | {"max_tokens": None}).status_code == 200
    for prompt, params, _ in fake.submitted[-3:]:
        assert len(prompt) + params.max_tokens == 60


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"hello"', b"\xff\xfe", b'{"messages": ' + b"[" * 9000, b"{" * 9000, b"1" * 9000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": "\\udc00"}}}]}',
    ],
)  # fmt: skip
def test_malformed_bodies(here, body):
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        refused(here.post(path, content=body, headers={"Content-Type": "application/json"}))


@pytest.mark.parametrize(
    ("request_type", "body"),
    [
        (ChatRequest, {"messages": [0] * 9}),
        (ChatRequest, CHAT | {"tools": [0] * 9}),
        (ChatRequest, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [0] * 9}]}),
        (ChatRequest, CHAT | {"stop_token_ids": ["a"] * 9}),
        (ChatRequest, CHAT | {"structured_outputs": {"choice": [0] * 9}}),
        (DetokenizeRequest, {"tokens": ["a"] * 9}),
        (TokenizeRequest, {"messages": [0] * 9}),
    ],
    ids=str,
)
def test_of_a_list_only_the_first_wrong_entry_is_told(request_type, body):
    """A body holds a million entries, and of each pydantic would tell at length while nobody else is served."""
    with pytest.raises(ValidationError) as wrong:
        request_type.model_validate(body)
    assert wrong.value.error_count() == 1


def test_a_body_that_is_not_text_is_told_from_one_that_is_compressed(here):
    json_type = {"Content-Type": "application/json"}
    latin = json.dumps(CHAT, ensure_ascii=False).replace("hello", "caf\xe9").encode("latin-1")
    error = refused(here.post("/v1/chat/completions", content=latin, headers=json_type))
    assert (error["code"], "utf-8" in error["message"]) == ("invalid_json", True)
    packed = gzip.compress(json.dumps(CHAT).encode())
    answer = here.post("/v1/chat/completions", content=packed, headers=json_type | {"Content-Encoding": "gzip"})
    assert "Content-Encoding: gzip" in refused(answer, 415)["message"]
    assert answer.headers["accept-encoding"] == "identity"
    assert answer.headers["connection"] == "close"  # or its body would be read as the next request
    plain = json_type | {"Content-Encoding": "identity"}
    assert here.post("/v1/chat/completions", json=CHAT, headers=plain).status_code == 200


def test_other_content_types_are_not_read(here):
    """A form of another site can send text/plain without being asked; JSON it cannot."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        said = refused(here.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"Content-Type": kind}))
        assert "Content-Type: application/json" in said["message"]


def test_large_bodies_are_ended_while_they_arrive(here):
    big = json.dumps(CHAT | {"user": "x" * 30000}).encode()
    assert refused(here.post("/v1/chat/completions", content=big), 413)["code"] == "body_too_large"

    sent = 0

    def forever():
        nonlocal sent
        while sent < 100 << 20:
            sent += 1000
            yield b" " * 1000

    with suppress(httpx2.TransportError):  # where the server had closed the connection before all was sent
        refused(here.post("/v1/completions", content=forever(), headers={"Content-Type": "application/json"}), 413)
    assert sent < 50 << 20
    assert here.post("/v1/completions", json=TEXT).status_code == 200


@pytest.mark.parametrize("told", [True, False])
def test_who_sends_all_of_a_large_body_before_reading_hears_why_it_is_refused(told, serve, fake):
    """As asynchronous clients do. A connection that was closed meanwhile would be reset, and the answer lost."""
    url = httpx2.URL(serve(fake, limits=Limits(body_bytes=20000)))
    length, size = "Content-Length: 8000000" if told else "Transfer-Encoding: chunked", 8_000_000
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    body = b" " * size if told else f"{size:x}\r\n".encode() + b" " * size + b"\r\n0\r\n\r\n"
    with socket.create_connection((url.host, url.port), timeout=patient.LONG) as client:
        client.sendall(head.encode())
        for place in range(0, len(body), 1 << 20):
            client.sendall(body[place : place + (1 << 20)])
            time.sleep(0.02)
        assert b"413" in client.recv(4096).split(b"\r\n")[0]
        while client.recv(4096):  # until the server closes it
            pass


def test_slow_bodies_are_ended(serve, fake):
    url = httpx2.URL(serve(fake, limits=Limits(upload_seconds=0.2)))
    with socket.create_connection((url.host, url.port), timeout=patient.LONG) as slow:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        slow.sendall(head)
        assert b"408" in slow.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_take_longer_than_its_question_to_arrive(serve, fake, stream):
    fake.pace = 0.75
    url = serve(fake, limits=Limits(upload_seconds=2))
    answer = patient.post(url + "/v1/completions", json=TEXT | {"max_tokens": 4, "stream": stream})
    assert answer.status_code == 200
    assert fake.submitted
    assert "upload_timeout" not in answer.text


def test_unknown_paths_and_methods(here):
    assert "/v1/other" in refused(here.get("/v1/other"), 404)["message"]
    assert "GET" in refused(here.get("/v1/completions"), 405)["message"]
    refused(here.post("/health"), 405)
    refused(here.get("/v1/models/nobody"), 404)
    for path in ("/chat/completions", "/v1/v1/chat/completions"):  # of a client that was given no /v1, or two
        said = refused(here.post(path, json=CHAT), 404)["message"]
        assert (
            said
            == f"there is no {path}, but /v1/chat/completions; the address that clients are given ends in /v1, once"
        )
    assert "/v1" not in refused(here.get("/favicon.ico"), 404)["message"]


def test_a_hostile_template_ends_and_others_are_served(serve, tokenizer, monkeypatch):
    from tilestack.data import chat_process

    monkeypatch.setattr(chat_process, "SECONDS", 0.5)
    hostile = {
        "memory": "{{ '%1000000000d' % 1 }}",
        "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "python": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "refuses": "{{ raise_exception('roles must alternate') }}",
        "malformed": "{% for %}",
    }
    before = tokenizer.template
    url = serve(FakeEngine(tokenizer))
    try:
        for template in hostile.values():
            tokenizer.template = template
            refused(patient.post(url + "/v1/chat/completions", json=CHAT))
            assert patient.post(url + "/v1/completions", json=TEXT).status_code == 200
    finally:
        tokenizer.template = before
    assert patient.post(url + "/v1/chat/completions", json=CHAT).status_code == 200


def test_tools_are_refused_where_the_template_takes_none(serve, tokenizer):
    before, tool = tokenizer.template, {"type": "function", "function": {"name": "f"}}
    tokenizer.template = "{{ messages[0].content }}"
    try:
        error = refused(
            patient.post(serve(FakeEngine(tokenizer)) + "/v1/chat/completions", json=CHAT | {"tools": [tool]})
        )
    finally:
        tokenizer.template = before
    assert error["param"] == "tools"
