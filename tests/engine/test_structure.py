"""Grammars over a real tokenizer, without a model."""

from tilestack.data import Tokenizer
from tilestack.engine import Structure
from tilestack.engine.structure import Structures


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
