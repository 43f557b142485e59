"""Models whose rotation depends on the length of a text (longrope, dynamic): an engine rotates by the longest text it serves."""

import itertools
import weakref

import pytest
import torch
from engines import alone, decoder, greedy, make_engine, serve

from tilestack import models
from tilestack.nn.rotary import RotaryTable

FAMILY, TRAINED, LONGEST = "phi4_mini", 32, 64  # its texts are read with other frequencies above `TRAINED` tokens
PROMPTS = dict(short=[3, 1, 4, 1, 5], long=list(range(1, 30)))


def as_in_a_text_of(length, prompt, count):
    """What greedy decoding gives in a cache that has room for so many tokens."""
    steps = models.generate(decoder(FAMILY), torch.tensor([prompt]), max_new_tokens=length - len(prompt))
    return [int(step[0]) for step in itertools.islice(steps, count)]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("context", [TRAINED, LONGEST])
def test_an_answer_is_that_of_the_longest_text_whatever_the_steps_and_beside_whom(graphs, context):
    asked = [
        greedy("short", PROMPTS["short"], 12),
        # What is not in the tables of a graph is computed operator by operator: the first tokens here, and not the others.
        greedy("in turns", PROMPTS["short"], 12, min_tokens=5),
        greedy("long", PROMPTS["long"], context - len(PROMPTS["long"])),
    ]
    found = serve(make_engine(family=FAMILY, graphs=graphs, context=context, step_tokens=64), asked)
    for request in asked:
        count = request.params.max_tokens
        assert found[request.id] == [as_in_a_text_of(context, request.prompt, count)], request.id


@pytest.mark.parametrize("graphs", [False, True])
def test_a_text_that_ends_within_a_page_is_no_longer_than_it_is(graphs):
    """The model is made for 16 tokens, and two pages have room for 30."""
    prompts = {f"{first}": list(range(first, first + 12)) for first in range(5, 80, 15)}
    engine = make_engine(family="llama_dynamic", page=15, graphs=graphs)
    found = serve(engine, [greedy(name, prompt, 4) for name, prompt in prompts.items()])
    assert found == {name: [alone(prompt, 4, "llama_dynamic")] for name, prompt in prompts.items()}


def test_a_table_that_was_outgrown_stays_for_the_graphs_that_read_it():
    rotary = RotaryTable(8, 10000.0, None, length=4)
    before = weakref.ref(rotary(4)[0])
    grown = rotary(5)[0]
    assert grown.shape[0] > 4
    assert before() is not None
    assert torch.equal(before(), grown[:4])
