"""The events of a streamed response: their order, their numbers, and how they end; and that they come to what is given whole."""

import asyncio
import itertools
import json
import logging

import httpx2
import openai
import patient
import pydantic
import pytest
from fake_engine import empty_soon
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from openai.types.responses import Response, ResponseStreamEvent
from test_openai_client import CALL
from test_responses_client import FUNCTION, without_ids

from tilestack.engine import Delta, TokenLogprob
from tilestack.server.answer_reader import AnswerReader
from tilestack.server.reasoning import ThoughtReader, thought_tokens
from tilestack.server.responses.output import Output
from tilestack.server.settings import Limits
from tilestack.server.token_text import TokenTexts
from tilestack.server.tools import CallReader

EVENT = pydantic.TypeAdapter(ResponseStreamEvent)
THOUGHT = "<think>\nA city.\n</think>\n\n"


@pytest.fixture
def url(serve, fake):
    return serve(fake, split_reasoning=True)


@pytest.fixture
def ask(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(url, **asked):
    """The events of a stream, as they are sent."""
    text = patient.post(url + "/v1/responses", json={"input": "hello", "stream": True} | asked).text
    pairs = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)  # which the client itself does not
    return events


def short(event):
    return event["type"].removeprefix("response.")


def test_events_come_in_order(url, fake):
    fake.says = lambda _: THOUGHT + CALL
    events = events_of(url, tools=[FUNCTION])
    assert [kind for kind, _ in itertools.groupby(map(short, events))] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    created, in_progress, *between, completed = events
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    added = [event["item"] for event in between if short(event) == "output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert [item.get("content", item.get("arguments")) for item in added] == [[], [], ""]
    done = [event["item"] for event in between if short(event) == "output_item.done"]
    assert done == completed["response"]["output"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    for event in between:
        item = done[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
    said = lambda kind: "".join(event["delta"] for event in between if short(event) == kind)
    assert said("reasoning_text.delta") == done[0]["content"][0]["text"] == "A city."
    assert said("output_text.delta") == done[1]["content"][0]["text"] == "I will look."
    assert json.loads(said("function_call_arguments.delta")) == {"city": "Oslo"}
    assert completed["response"]["usage"]["output_tokens"] > 0


def test_a_stream_comes_to_what_is_given_whole(url, ask, fake):
    fake.says = lambda _: THOUGHT + CALL
    whole = ask.responses.create(model="fake", input="hello", tools=[FUNCTION])
    with ask.responses.stream(model="fake", input="hello", tools=[FUNCTION]) as stream:
        streamed = stream.get_final_response()
    assert without_ids(streamed) == without_ids(whole)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[0].content[0].text == "A city."
    thought = fake.tokenizer.encode("<think>\nA city.\n</think>", bare=True)
    assert whole.usage.output_tokens_details.reasoning_tokens == pytest.approx(len(thought), abs=1)
    stored = ask.responses.retrieve(streamed.id)
    assert without_ids(stored) == without_ids(streamed)
    assert [item.id for item in stored.output] == [item.id for item in streamed.output]
    again = ask.responses.create(
        model="fake",
        input=[{"role": "user", "content": "hello"}, *whole.output[:2], {"role": "user", "content": "go"}],
        tools=[FUNCTION],
    )
    assert again.status == "completed"


def test_an_answer_that_ends_within_its_thoughts(ask, fake):
    fake.says = lambda _: "<think>\nA city that is far away"
    count = len(fake.tokenizer.encode("<think>\nA city that", bare=True))
    answer = ask.responses.create(model="fake", input="hello", max_output_tokens=count)
    assert [(item.type, item.status) for item in answer.output] == [("reasoning", "incomplete")]
    assert answer.usage.output_tokens_details.reasoning_tokens == answer.usage.output_tokens == count
    assert ask.responses.create(model="fake", input="x", previous_response_id=answer.id).output_text == ""


def test_an_answer_of_nothing_is_an_empty_message(ask, fake):
    fake.says = lambda _: ""
    answer = ask.responses.create(model="fake", input="hello")
    assert [(item.type, item.content[0].text) for item in answer.output] == [("message", "")]


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=some.lists(some.integers(0, 300), max_size=20))
@pytest.mark.parametrize("text", [THOUGHT + CALL + " And there? " + CALL, CALL, "just text", "<think>so", ""])
def test_an_answer_is_the_same_however_it_is_cut(tokenizer, text, cuts):
    def items(pieces):
        output = Output(AnswerReader(ThoughtReader(begun=False), CallReader()), TokenTexts(tokenizer), False)
        events = [event for piece in pieces for event in output.add(Delta(0, text=piece))]
        events += output.add(Delta(0, finish="stop"))
        deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert deltas == "".join(
            part["text"] for item in output.items if item["type"] == "message" for part in item["content"]
        )
        return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output.items]

    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    assert items([text[a:b] for a, b in itertools.pairwise(edges)]) == items([text])


@pytest.mark.parametrize(
    ("pieces", "begun", "count"),
    [
        (["<thi", "nk>", "so", "</think>", "\n", "Yes"], False, 4),
        (["\n", "<think>so</thi", "nk>\nYes", "!"], False, 3),
        (["so ", "</think>"], True, 2),
        (["so", " on"], True, 2),
        (["<think>", "so"], False, 2),
        (["Yes <think>", "so</think>"], False, 0),
        (["<thin", " ice"], False, 0),
        (["é".encode()[:1], "é".encode()[1:], "</think>"], True, 3),
        ([], True, 0),
    ],
)
def test_tokens_of_thoughts_are_counted(pieces, begun, count):
    assert thought_tokens([piece if isinstance(piece, bytes) else piece.encode() for piece in pieces], begun) == count


def test_log_probabilities_of_thoughts_are_not_those_of_the_message(tokenizer):
    output = Output(AnswerReader(ThoughtReader(begun=False), None), TokenTexts(tokenizer), False)
    ids = tokenizer.encode("<think>so</think>the cat", bare=True)
    for place, token in enumerate(ids):
        last = "stop" if place == len(ids) - 1 else None
        list(output.add(Delta(0, (token,), tokenizer.decode([token]), (TokenLogprob(token, -0.5),), last)))
    (part,) = output.items[1]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "the cat"


def test_the_log_probability_of_every_token_is_told_once(tokenizer):
    """That of a token, too, behind which no text comes: it belonged to a stop text."""
    texts = TokenTexts(tokenizer)
    output = Output(AnswerReader(None, CallReader()), texts, None)
    ids = tokenizer.encode('the cat<tool_call>{"name": "f"}</tool_call>the dog', bare=True)
    for token in ids:
        list(output.add(Delta(0, (token,), tokenizer.decode([token]), (TokenLogprob(token, -0.5),))))
    list(output.add(Delta(0, (ids[0],), "", (TokenLogprob(ids[0], -0.5),), "stop")))
    messages = [item["content"][0] for item in output.items if item["type"] == "message"]
    assert [message["text"] for message in messages] == ["the cat", "the dog"]
    told = [entry["token"] for message in messages for entry in message["logprobs"]]
    assert told == [texts.text_of(token) for token in (*ids, ids[0])]


def test_a_stream_that_is_left_ends_its_request_and_nothing_is_stored(url, fake):
    fake.pace = 0.05
    with patient.stream("POST", url + "/v1/responses", json={"input": "hello", "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: response.created"
        id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
        assert fake.live
        assert patient.get(f"{url}/v1/responses/{id}").status_code == 404  # not before it has ended
    assert empty_soon(fake)
    assert patient.get(f"{url}/v1/responses/{id}").status_code == 404


def test_a_client_that_does_not_wait_for_the_answer_takes_its_request_along(url, fake):
    fake.pace = 0.05

    async def leave():
        async with httpx2.AsyncClient(base_url=url, timeout=patient.LONG) as client:
            asked = asyncio.create_task(client.post("/v1/responses", json={"input": "hello"}))
            while not fake.totals.completion_tokens:
                await asyncio.sleep(0.01)
            asked.cancel()

    asyncio.run(leave())
    assert empty_soon(fake)


def breaks(stream):
    stream.tell(Delta(0, finish="error", error="RuntimeError: the model broke"))


def cannot_go_on(stream):
    stream.tell(Delta(0, finish="refused", error="the grammar is too complex"))


@pytest.mark.parametrize(
    ("happens", "code", "kind", "said"),
    [
        (breaks, "model_error", "server_error", "the model broke"),
        (cannot_go_on, "structure_failed", "invalid_prompt", "too complex"),
        (lambda stream: stream.cancel(), "ending", "server_error", "ending"),  # once the time to drain is up
    ],
    ids=["the model", "a grammar", "a drain"],
)
def test_a_failure_in_a_stream_is_told_by_its_last_events(url, ask, fake, happens, code, kind, said):
    fake.pace = 0.05
    events = []
    for event in ask.responses.create(model="fake", input="hello", stream=True):
        for live in list(fake.live) if not events else ():
            live.task.get_loop().call_soon_threadsafe(happens, live)
        events.append(event)
    error, failed = events[-2:]
    assert (error.type, error.code, error.param) == ("error", code, None)
    assert said in error.message
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert (failed.response.error.code, failed.response.error.message) == (kind, error.message)
    assert [item.status for item in failed.response.output] == ["incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    Response.model_validate(failed.response.to_dict())
    assert patient.get(f"{url}/v1/responses/{failed.response.id}").status_code == 404
    assert empty_soon(fake)


def test_a_failure_before_the_first_event_has_a_status(url, ask):
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="the model broke"):
            ask.responses.create(model="fake", input="explode", stream=stream)


def test_time_that_is_up(serve, fake, caplog):
    fake.pace = 0.02
    url = serve(fake, limits=Limits(request_seconds=1.5))
    with caplog.at_level(logging.INFO, "tilestack.server"):
        *_, error, failed = events_of(url)
    assert (error["code"], failed["response"]["status"]) == ("timeout", "failed")
    assert empty_soon(fake)
    fake.pace = 60
    late = patient.post(url + "/v1/responses", json={"input": "hello"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")


def test_two_streams_continue_one_response_and_a_third_outlives_it(url, ask, fake):
    first = ask.responses.create(model="fake", input="one", max_output_tokens=2)
    fake.pace = 0.02
    streams = [
        ask.responses.create(model="fake", input=text, previous_response_id=first.id, max_output_tokens=8, stream=True)
        for text in ("two", "three")
    ]
    begun = [next(stream) for stream in streams]
    ask.responses.delete(first.id)
    last = [list(stream)[-1].response for stream in streams]
    assert [response.id for response in last] == [event.response.id for event in begun]
    for response, text in zip(last, ("two", "three"), strict=True):
        items = ask.responses.input_items.list(response.id, order="asc").data
        assert [item.content[0].text for item in items] == ["one", first.output_text, text]
