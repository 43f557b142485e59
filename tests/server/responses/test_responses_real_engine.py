"""Responses by the real engine, on a tiny random model: the text of a chat, kept forms, and prefixes that are remembered."""

import json

import openai
import pytest
from server_thread import served

from tilestack.engine import AsyncEngine, EngineSettings

SMALL = EngineSettings(device="cpu", dtype="float32", max_sequences=16, kv_memory=1 << 20, step_tokens=256)
SEEDED = dict(model="tiny", temperature=0.8)


@pytest.fixture
def ask(folder):
    with (
        served(AsyncEngine.load(folder, SMALL)) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none") as client,
    ):
        yield client


def test_the_text_is_that_of_a_chat_streamed_or_not(ask):
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat sat"}]
    more = {"extra_body": {"seed": 11}}
    chat = ask.chat.completions.create(messages=talk, max_tokens=24, **SEEDED, **more)
    text = chat.choices[0].message.content
    whole = ask.responses.create(input=talk, max_output_tokens=24, **SEEDED, **more)
    assert whole.output_text == text
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)  # fmt: skip
    instructed = ask.responses.create(
        instructions="be brief", input="the cat sat", max_output_tokens=24, **SEEDED, **more
    )
    assert instructed.output_text == text
    events = list(ask.responses.create(input=talk, max_output_tokens=24, stream=True, **SEEDED, **more))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text

    talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "the dog"}]
    second = ask.chat.completions.create(messages=talk, max_tokens=24, **SEEDED, **more)
    continued = ask.responses.create(
        input="the dog", previous_response_id=whole.id, max_output_tokens=24, **SEEDED, **more
    )
    assert continued.output_text == second.choices[0].message.content
    assert continued.usage.input_tokens_details.cached_tokens > 0


def test_forms_are_kept_to(ask):
    form = {"type": "json_schema", "name": "x", "schema": {"enum": ["the cat", "the dog"]}}
    answer = ask.responses.create(model="tiny", input="hello", text={"format": form}, max_output_tokens=30)
    assert json.loads(answer.output_text) in ("the cat", "the dog")
    tool = {"type": "function", "name": "look", "strict": True, "parameters": {"type": "object", "properties": {"at": {"enum": [1, 2]}}, "required": ["at"], "additionalProperties": False}}  # fmt: skip
    called = ask.responses.create(model="tiny", input="hello", tools=[tool], tool_choice="required")
    assert json.loads(called.output[0].arguments)["at"] in (1, 2)
    form |= {"schema": {"type": "nonsense"}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask.responses.create(model="tiny", input="hello", text={"format": form})
    assert refused.value.param == "text.format"
