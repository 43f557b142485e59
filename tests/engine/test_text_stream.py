"""Text while it comes: whatever the pieces, it is the text up to the first stop, and never costs more than it is long."""

import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tilestack.engine.text import PATIENCE, TextStream


class Given(TextStream):
    """A stream whose tokens are numbers of given pieces."""

    def __init__(self, pieces, stops, keep_stop=False):
        super().__init__(None, stops, keep_stop)
        self.pieces = SimpleNamespace(step=lambda token: pieces[token] or "", left=str)


def cut_by(whole, stops, keep_stop):
    """The text up to the stop that begins first among those that are there first, character by character."""
    for end in range(len(whole) + 1):
        if ended := [(end - len(stop), stop) for stop in stops if whole[:end].endswith(stop)]:
            place, stop = min(ended)
            return whole[: place + (len(stop) if keep_stop else 0)], stop
    return whole, None


@given(
    pieces=st.lists(st.sampled_from(["a", "b", "c"]), max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3, unique=True),
    keep_stop=st.booleans(),
)
def test_one_character_at_a_time(pieces, stops, keep_stop):
    stream, shown = Given(pieces, stops, keep_stop), ""
    for token in range(len(pieces)):
        shown += stream.add(token)
        assert cut_by("".join(pieces), stops, True)[0].startswith(shown)
        if stream.stopped_by:
            break
    assert (shown + stream.rest(), stream.stopped_by) == cut_by("".join(pieces), stops, keep_stop)


def test_a_stop_of_equal_letters_is_not_found_across_another():
    stream = Given("aaacab", ["aaab"])
    assert "".join(map(stream.add, range(6))) + stream.rest() == "aaacab"
    assert stream.stopped_by is None


@given(
    pieces=st.lists(st.one_of(st.none(), st.text("abé", max_size=4)), max_size=12),
    stops=st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=3, unique=True),
    keep_stop=st.booleans(),
    least=st.integers(0, 3),
)
@example(pieces=["abé"], stops=["abé", "b"], keep_stop=False, least=0)  # as in three pieces: with b it has ended
def test_any_pieces(pieces, stops, keep_stop, least):
    """Nothing before `least` tokens counts, not even as the beginning of a stop."""
    stream, shown = Given(pieces, stops, keep_stop), ""
    for token in range(len(pieces)):
        shown += stream.add(token, token >= least)
        if stream.stopped_by:
            break
    before, after = ("".join(piece or "" for piece in part) for part in (pieces[:least], pieces[least:]))
    expected, found = cut_by(after, stops, keep_stop)
    assert (shown + stream.rest(), stream.stopped_by) == (before + expected, found)


@pytest.mark.parametrize("stop", ["a" * 50_000 + "b", "ab" * 25_000 + "c", "a" * 50_000])
def test_hostile_stops_cost_what_the_text_is_long(stop):
    pieces = [stop[:5]] * 2_000
    stream = Given(pieces, [stop, stop[1:], stop[2:]])
    began = time.process_time()
    shown = "".join(stream.add(token) for token in range(len(pieces)))
    assert time.process_time() - began < 2
    assert shown + stream.rest() == "".join(pieces)


def tokens_of_bytes(kind):
    """A tokenizer with a token for each byte, and " a", "é" and one that is skipped; as Llama or as GPT-2 write bytes."""
    from tilestack.server.token_text import alphabet

    llama = kind == "llama"
    letters = {byte: letter for letter, byte in alphabet().items()}
    words = [f"<0x{byte:02X}>" if llama else letters[byte] for byte in range(256)]
    words += ["▁a", "é"] if llama else [letters[32] + "a", letters[0xC3] + letters[0xA9]]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], byte_fallback=llama))
    written = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(written) if llama else decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


KINDS = {kind: tokens_of_bytes(kind) for kind in ("llama", "gpt2")}
A, E_ACUTE, END = 256, 257, 258


def streamed(kind, ids, before=()):
    stream = TextStream(KINDS[kind], before=before)
    return "".join(map(stream.add, ids)) + stream.rest()


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text("aé中🙂\n ", max_size=12), ended=st.integers(0, 2))
def test_text_in_single_bytes_is_that_text(kind, text, ended):
    ids = [*text.encode(), *[END] * ended]
    assert streamed(kind, ids, before=[ord("x")]) == text


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.one_of(st.sampled_from([0xE4, 0xB8, 0xAD, 0xF0, 0xC3, A, E_ACUTE, END]), st.integers(0, 258)), max_size=60))  # fmt: skip
def test_any_tokens_have_some_text_and_what_follows_them_is_not_lost(kind, ids):
    assert streamed(kind, [*ids, A, A, E_ACUTE]).endswith("a aé")


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_no_text_are_not_kept_for_ever(kind):
    stream = TextStream(KINDS[kind])
    shown = "".join(stream.add(0xAD) for _ in range(200))
    assert len(stream.pieces.undecided) <= PATIENCE
    assert 200 - PATIENCE - 1 <= len(shown) == shown.count("\ufffd")


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_that_is_cut_off_is_not_shown_and_what_stands_before_it_is(kind):
    assert streamed(kind, [A, *"🙂".encode()[:3]], before=[A]) == " a"
    assert streamed(kind, [A, 0x20, *"é".encode()[:1]], before=[A]) == " a "


@pytest.mark.parametrize(("keep_stop", "shown"), [(False, "b"), (True, "b ")])
def test_a_stop_before_a_character_that_is_cut_off_ends_the_text(keep_stop, shown):
    made = Tokenizer(models.BPE({"b": 0, "Ġð": 1}, []))  # a space and an emoji's first byte, as GPT-2 has
    made.decoder = decoders.ByteLevel()
    stream = TextStream(made, [" "], keep_stop)
    assert stream.add(0) + stream.add(1) + stream.rest() == shown
    assert stream.stopped_by == " "


def test_an_answer_goes_on_from_the_prompt_with_a_space():
    assert streamed("llama", [A, A], before=[A]) == " a a"
    assert streamed("llama", [A, A], before=[END]) == "a a"
