"""Text while it comes: whatever the pieces, it is the text up to the first stop, and never costs more than it is long."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilestack.engine.text import TextStream


class Pieces(TextStream):
    """A stream whose tokens are numbers of given pieces."""

    def __init__(self, pieces, stops, keep_stop=False):
        super().__init__(object(), stops, keep_stop)
        self.stream = type("Stream", (), {"step": lambda _, tokenizer, token: pieces[token]})()


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
    stream, shown = Pieces(pieces, stops, keep_stop), ""
    for token in range(len(pieces)):
        shown += stream.add(token)
        assert cut_by("".join(pieces), stops, True)[0].startswith(shown)
        if stream.stopped_by:
            break
    assert (shown + stream.rest(), stream.stopped_by) == cut_by("".join(pieces), stops, keep_stop)


@given(
    pieces=st.lists(st.one_of(st.none(), st.text("abé", max_size=4)), max_size=12),
    stop=st.text("abé", min_size=1, max_size=5),
    keep_stop=st.booleans(),
    least=st.integers(0, 3),
)
def test_any_pieces(pieces, stop, keep_stop, least):
    """Nothing before `least` tokens counts, not even as the beginning of a stop."""
    stream, shown = Pieces(pieces, [stop], keep_stop), ""
    for token in range(len(pieces)):
        shown += stream.add(token, token >= least)
        if stream.stopped_by:
            break
    before, after = ("".join(piece or "" for piece in part) for part in (pieces[:least], pieces[least:]))
    expected, found = cut_by(after, [stop], keep_stop)
    assert (shown + stream.rest(), stream.stopped_by) == (before + expected, found)


@pytest.mark.parametrize("stop", ["a" * 50_000 + "b", "ab" * 25_000 + "c", "a" * 50_000])
def test_hostile_stops_cost_what_the_text_is_long(stop):
    pieces = [stop[:5]] * 2_000
    stream = Pieces(pieces, [stop, stop[1:], stop[2:]])
    began = time.process_time()
    shown = "".join(stream.add(token) for token in range(len(pieces)))
    assert time.process_time() - began < 2
    assert shown + stream.rest() == "".join(pieces)
