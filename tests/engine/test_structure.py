"""Grammars over a real tokenizer, without a model."""

import pytest

from tilestack.data import Tokenizer
from tilestack.engine import RequestError, Structure
from tilestack.engine.structure import StructureFailed, Structures


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load("smollm2")


@pytest.fixture(scope="module")
def structures(tokenizer):
    return Structures(tokenizer, 49152)


def test_a_text_that_is_complete_may_end_with_any_token_that_ends_texts(tokenizer):
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


@pytest.mark.parametrize("more", [1, 7, 1000])
def test_a_vocabulary_padded_beyond_the_tokenizer_allows_none_of_the_padding(tokenizer, structures, more):
    """Models have heads of round sizes; a token that is no text fits no form."""
    allowed = Structures(tokenizer, 49152 + more).matcher(Structure("regex", ".*")).allowed()
    assert (len(allowed), allowed[49152:].any()) == (49152 + more, False)
    assert (allowed[:49152] == structures.matcher(Structure("regex", ".*")).allowed()).all()


def test_every_answer_has_a_matcher_of_its_own(tokenizer, structures):
    first, second = (structures.matcher(Structure("regex", "a{1,3}")) for _ in range(2))
    (letter,) = tokenizer.encode("a", bare=True)
    before = second.allowed()
    assert first.accept(letter)
    assert (first.allowed() != before).any()
    assert (second.allowed() == before).all()


def test_a_grammar_that_fails_on_the_way_is_no_answer_that_has_ended(tokenizer, structures):
    """It allows nothing from there on, and says why; it must not look like a text that is complete."""
    matcher = structures.matcher(Structure("regex", "((a{0,100}){0,100}){0,100}"))
    (letter,) = tokenizer.encode("aaaa", bare=True)
    failed, letters = None, 0
    while failed is None and letters < 30:
        letters += 1
        matcher.allowed()
        try:
            assert matcher.accept(letter)
        except StructureFailed as problem:
            failed = problem
    assert letters > 1
    assert not matcher.allowed().any()
    with pytest.raises(StructureFailed, match="too complex"):
        matcher.accept(tokenizer.eos)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", '{"$ref": "#"}', "allows no text"),
        ("grammar", "start: start", "allows no text"),
        ("grammar", "start: " + " | ".join(f'"w{number}"' for number in range(3000)), "cannot be used: .* too complex"),
    ],
)
def test_what_fails_at_its_first_token_is_refused_before(structures, kind, text, said, capfd):
    with pytest.raises(RequestError, match=f"the {kind} {said}") as problem:
        structures.matcher(Structure(kind, text))
    assert problem.value.param == "structure"
    assert not capfd.readouterr().err  # llguidance's own warnings
