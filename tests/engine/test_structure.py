"""Grammars over a real tokenizer, without a model."""

import pytest

from tilestack.data import Tokenizer
from tilestack.engine import Structure
from tilestack.engine.structure import StructureFailed, Structures


def test_a_text_that_is_complete_may_end_with_any_token_that_ends_texts():
    tokenizer = Tokenizer.load("smollm2")
    end, other = tokenizer.eos, tokenizer.backend.token_to_id("<|endoftext|>")
    assert end != other
    structures = Structures(tokenizer, 49152, {end, other})
    (letter,) = tokenizer.encode("a", bare=True)
    for last in (end, other):
        matcher = structures.matcher(Structure("regex", "a{1,3}"))
        assert not matcher.allowed()[[end, other]].any()
        assert matcher.accept(letter)
        assert matcher.allowed()[[end, other, letter]].all()
        assert not matcher.accept(last)


def test_every_answer_has_a_matcher_of_its_own():
    structures = Structures(tokenizer := Tokenizer.load("smollm2"), 49152)
    first, second = (structures.matcher(Structure("regex", "a{1,3}")) for _ in range(2))
    (letter,) = tokenizer.encode("a", bare=True)
    before = second.allowed()
    assert first.accept(letter)
    assert (first.allowed() != before).any()
    assert (second.allowed() == before).all()


@pytest.mark.parametrize(
    ("kind", "text", "letters"),
    [("regex", "((a{0,100}){0,100}){0,100}", 30), ("json_schema", '{"$ref": "#"}', 0), ("grammar", "start: start", 0)],
)
def test_a_grammar_that_fails_on_the_way_is_no_answer_that_has_ended(kind, text, letters):
    """It allows nothing from there on, and says why; it must not look like a text that is complete."""
    structures = Structures(tokenizer := Tokenizer.load("smollm2"), 49152)
    matcher = structures.matcher(Structure(kind, text))
    (letter,) = tokenizer.encode("aaaa", bare=True)
    failed = None
    while failed is None and letters:
        matcher.allowed()
        try:
            assert matcher.accept(letter)
        except StructureFailed as problem:
            failed = problem
        letters -= 1
    assert not matcher.allowed().any()
    with pytest.raises(StructureFailed, match="too complex"):
        matcher.accept(tokenizer.eos)
