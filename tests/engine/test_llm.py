"""The offline interface on a real model, SmolLM2-135M: text, stops, structure, chat, and a tokenizer's odd pieces."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

import tilestack
from tilestack import models
from tilestack.data import Tokenizer
from tilestack.engine import EngineSettings, RequestError, SamplingParams, Structure
from tilestack.engine.text import TextStream

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm():
    return tilestack.LLM("smollm2", max_sequences=8, context=512)


def test_chat_answers(llm):
    output = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert "Paris" in output.text
    assert output.completions[0].finish == "stop"
    assert output.usage.completion == len(output.completions[0].ids)


def test_text_goes_on_as_plain_decoding_does(llm):
    prompts = ["The three primary colours are", "def fibonacci(n):"]
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), progress=False)
    for prompt, output in zip(prompts, found, strict=True):
        ids = torch.tensor([llm.tokenizer.encode(prompt)])
        steps = models.generate(llm.engine.decoder, ids, max_new_tokens=12)
        assert output.completions[0].ids == [int(step[0]) for step in steps]
        assert output.text == llm.tokenizer.decode(output.completions[0].ids)


def test_stop_texts_end_an_answer_before_them_or_with_them(llm):
    whole = llm.generate("One, two, three, four,", SamplingParams(temperature=0, max_tokens=16)).text
    stop = whole[6:9]
    asked = lambda **more: llm.generate(
        "One, two, three, four,", SamplingParams(temperature=0, max_tokens=16, stop=("@@", stop), **more)
    )
    assert asked().text == whole[: whole.index(stop)]
    assert asked().completions[0].stopped_by == stop
    assert asked(keep_stop=True).text == whole[: whole.index(stop) + 3]
    never = llm.generate("One, two, three, four,", SamplingParams(temperature=0, max_tokens=16, stop=("zzzz",)))
    assert never.text == whole


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["name", "age"], "additionalProperties": False}  # fmt: skip


def test_structures_are_kept(llm):
    ask = lambda structure, **more: llm.generate(
        "A person:", SamplingParams(seed=1, max_tokens=60, structure=structure, **more)
    )
    found = json.loads(ask(Structure("json_schema", json.dumps(SCHEMA)), temperature=0.8).text)
    assert set(found) == {"name", "age"}
    assert 0 <= found["age"] <= 99
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", ask(Structure("regex", "[0-9]{3}-[a-c]{2}")).text)
    assert ask(Structure("grammar", 'start: "yes" | "no"')).text in ("yes", "no")
    with pytest.raises(RequestError, match="regex cannot be read"):
        ask(Structure("regex", "(["))
    with pytest.raises(RequestError, match="json_schema cannot be read"):
        ask(Structure("json_schema", "{"))


def test_structured_beside_plain_requests(llm):
    params = [
        SamplingParams(temperature=0, max_tokens=8),
        SamplingParams(temperature=0, max_tokens=8, structure=Structure("regex", "[ab]{5}")),
    ]
    together = llm.generate(["Hello", "Hello"], params, progress=False)
    assert re.fullmatch("[ab]{5}", together[1].text)
    assert together[0].text == llm.generate("Hello", params[0]).text


def test_token_prompts_lists_and_mistakes(llm):
    ids = llm.tokenizer.encode("Hello")
    assert llm.generate(ids, GREEDY).text == llm.generate(["Hello"], [GREEDY], progress=False)[0].text
    assert llm.generate([], GREEDY) == []
    with pytest.raises(ValueError, match="2 prompts and 1 parameters"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="2048 tokens; at most 511"):
        llm.generate([[5], [5] * 2048], GREEDY)
    for wrong in (None, b"abc", {"prompt": "abc"}, [b"abc"], ["abc", 5]):
        with pytest.raises(RequestError, match="a prompt is a text or token ids, not"):
            llm.generate(wrong, GREEDY)
    with pytest.raises(UnicodeEncodeError, match="position 3: surrogates not allowed"):
        llm.generate("abc\ud83d", GREEDY)
    with pytest.raises(TypeError, match="params must be SamplingParams"):
        llm.generate("abc", {"temperature": 0})
    for wrong in (None, "Hello"):
        with pytest.raises(RequestError, match="a conversation is a list of messages"):
            llm.chat(wrong, GREEDY)
    assert not llm.engine.busy


def test_ids_may_be_arrays_and_prompts_any_iterable(llm):
    ids = llm.tokenizer.encode("One, two, three,")
    text = llm.generate(ids, GREEDY).text
    for given in (torch.tensor(ids), numpy.array(ids), list(numpy.array(ids)), list(torch.tensor(ids)), tuple(ids)):
        assert llm.generate(given, GREEDY).text == text
    for given in (torch.tensor([ids]), [numpy.array(ids)], (each for each in [ids])):
        assert [output.text for output in llm.generate(given, GREEDY, progress=False)] == [text]


def test_devices_and_dtypes_of_torch_are_settings_too():
    given = EngineSettings(device=torch.device("cpu"), dtype=torch.float32)
    assert given == EngineSettings(device="cpu", dtype="float32")
    with pytest.raises(ValueError, match="no dtype int8; choose from float32, bfloat16, float16"):
        tilestack.LLM("smollm2", dtype=torch.int8)


def test_threads_that_ask_one_model_get_their_own_answers(llm):
    prompts = [f"Some facts about the number {number}:" for number in range(4)]
    ask = lambda prompt: llm.generate(prompt, GREEDY).text
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(ask, prompts))
    assert together == [ask(prompt) for prompt in prompts]


def test_tools_that_the_template_does_not_read_are_refused(llm):
    assert "tools" not in llm.tokenizer.template
    tool = {"type": "function", "function": {"name": "look"}}
    with pytest.raises(RequestError, match="the chat template of this model takes no tools"):
        llm.chat([{"role": "user", "content": "Look!"}], GREEDY, tools=[tool])


def test_characters_that_span_tokens_come_whole():
    tokenizer = Tokenizer.load("smollm2")
    text = "naïve 漢字 🙂 end"
    stream = TextStream(tokenizer.backend)
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.rest() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_what_may_become_a_stop_is_held_back():
    tokenizer = Tokenizer.load("smollm2")
    stream = TextStream(tokenizer.backend, ["END OF"])
    shown = "".join(stream.add(token) for token in tokenizer.encode("the END"))
    assert shown == "the "
    assert stream.rest() == "END"
    stream = TextStream(tokenizer.backend, ["aab", "ab"])
    assert "".join(stream.add(token) for token in tokenizer.encode("x aab")) == "x "
    assert stream.stopped_by == "aab"
