"""Texts as tokens and back, and how much of a conversation the model is given."""

import json

import httpx2
import patient
import pytest
from fake_engine import FakeEngine
from server_thread import served

from tilestack.server.settings import Limits, ServerSettings

TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on "}]
TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def limited(tokenizer):
    with served(FakeEngine(tokenizer), ServerSettings(port=0, limits=Limits(body_bytes=2000, messages=2))) as url:
        yield url


def test_texts_as_tokens_and_back(client, tokenizer):
    asked = {"model": "fake", "prompt": "the cat sat"}
    told = client.post("/tokenize", json=asked).json()
    assert told == {"count": len(told["tokens"]), "max_model_len": 2048, "tokens": tokenizer.encode("the cat sat"), "token_strs": None}  # fmt: skip
    bare = client.post("/tokenize", json=asked | {"add_special_tokens": False, "return_token_strs": True}).json()
    assert bare["tokens"] == tokenizer.encode("the cat sat", bare=True) != told["tokens"]
    assert bare["token_strs"] == [tokenizer.backend.id_to_token(token) for token in bare["tokens"]]
    assert client.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "<|endoftext|>the cat sat"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    statuses = [client.post("/detokenize", json={"tokens": [tokenizer.vocabulary - n]}).status_code for n in (1, 0)]
    assert statuses == [200, 400]


def test_the_tokenizer_tells_of_itself(client, tokenizer):
    told = client.get("/tokenizer_info").json()
    assert told["eos_token"] == "<|endoftext|>"
    assert told["chat_template"] == tokenizer.template
    assert told["model_max_length"] == 2048
    eos = client.post("/tokenize", json={"prompt": told["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert eos == [tokenizer.eos]


def text_of(client, path="/tokenize", **asked):
    tokens = client.post(path, json={"messages": TALK} | asked).json()["tokens"]
    return client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_conversations_as_the_model_reads_them(client, fake, tokenizer):
    begun = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat on "
    assert text_of(client) == begun + "<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(client, add_generation_prompt=False) == begun + "<|im_end|>\n"
    assert text_of(client, continue_final_message=True) == begun
    assert text_of(client, add_special_tokens=True).startswith("<|endoftext|><|im_start|>")
    assert '"name": "look"' in text_of(client, tools=[TOOL])
    answered = client.post(
        "/v1/chat/completions", json={"messages": TALK, "continue_final_message": True, "max_tokens": 1}
    )
    assert answered.status_code == 200
    assert tokenizer.decode(fake.submitted[0][0], special=True) == begun


def test_what_a_template_does_not_read_is_refused(client, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "template", "{{ messages[0].content }}")
    for change, param in (({"tools": [TOOL]}, "tools"), ({"reasoning_effort": "low"}, "reasoning_effort"), ({"continue_final_message": True}, "continue_final_message")):  # fmt: skip
        for path in ("/tokenize", "/v1/chat/completions"):
            refused = client.post(path, json={"messages": TALK} | change)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = [*TALK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x", "tool_call_id": "c"}]
    refused = client.post("/v1/chat/completions", json={"messages": called})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert "writes no calls of tools" in refused.json()["error"]["message"]
    monkeypatch.setattr(tokenizer, "template", "{{ reasoning_effort }}")
    assert text_of(client, reasoning_effort="low") == "low"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": TALK}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": TALK * 2}, "messages"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": TALK, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "x" * 3000}, None),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [10**310]}, "tokens.0"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)  # fmt: skip
def test_tokens_have_limits_too(limited, path, body, param):
    refused = patient.post(limited + path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert refused.status_code == (400 if param else 413)
    assert refused.json()["error"]["param"] == param


def test_tokens_are_for_those_who_have_the_key(serve, fake):
    with httpx2.Client(base_url=serve(fake, api_key="secret"), timeout=patient.LONG) as client:
        for path in ("/tokenize", "/detokenize"):
            assert client.post(path, json={"prompt": "a"}).status_code == 401
        assert client.get("/tokenizer_info").status_code == 401
        assert (
            client.post("/tokenize", json={"prompt": "a"}, headers={"Authorization": "Bearer secret"}).status_code
            == 200
        )
