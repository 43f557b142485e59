"""The store of responses: bounded by number and bytes, each client's its own, with what conversations share held once."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tilestack.server.responses.store import ResponseStore, StoredResponse

ME, OTHER = b"me", b"other"


def response(name, context=(), size=100):
    """A response to one new item."""
    items = [json.dumps([{"id": f"{name}-{part}", "text": "x" * size}]).encode() for part in ("in", "out")]
    head = json.dumps({"id": name}).encode()
    return StoredResponse(head, (*context, items[0]), items[1], (f"{name}-in", f"{name}-out"))


def continued(before, name):
    return response(name, (*before.context, before.output))


def held(store):
    """The bytes that are held, counted anew: each part once."""
    parts = {id(part): len(part) for each in store.responses.values() for part in each.parts}
    return sum(parts.values())


def test_a_response_is_found_by_its_owner_with_its_items():
    store = ResponseStore(9, 10**6)
    store.add((ME, "a"), response("a"))
    assert json.loads(store.responses[ME, "a"].body) == {"id": "a", "output": [{"id": "a-out", "text": "x" * 100}]}
    assert [item["id"] for item in store.responses[ME, "a"].input_items()] == ["a-in"]
    assert store.with_item == {(ME, "a-in"): (ME, "a"), (ME, "a-out"): (ME, "a")}
    assert {id: item["id"] for id, item in store.responses[ME, "a"].own_items().items()} == {
        "a-in": "a-in",
        "a-out": "a-out",
    }
    assert not store.remove((OTHER, "a"))
    assert store.remove((ME, "a"))
    assert not store.remove((ME, "a"))
    assert (store.bytes, store.with_item, store.uses) == (0, {}, {})


def test_the_oldest_goes_first_where_there_are_too_many():
    store = ResponseStore(2, 10**6)
    for name in "abc":
        store.add((ME, name), response(name))
    assert list(store.responses) == [(ME, "b"), (ME, "c")]
    assert (ME, "a-in") not in store.with_item
    assert store.bytes == held(store)


def test_or_too_many_bytes():
    one = sum(map(len, response("a").parts))
    store = ResponseStore(99, 3 * one)
    for name in "abcd":
        store.add((ME, name), response(name))
    assert list(store.responses) == [(ME, name) for name in "bcd"]
    store.add((ME, "large"), response("large", size=2 * one))
    assert list(store.responses) == [(ME, name) for name in "bcd"]  # which it cannot take the place of
    store.add((ME, "e"), response("e", size=150))
    assert list(store.responses) == [(ME, name) for name in "de"]


def test_a_long_conversation_is_held_once():
    store, last = ResponseStore(1000, 10**6), response("0")
    store.add((ME, "0"), last)
    for number in range(1, 100):
        last = continued(last, str(number))
        store.add((ME, str(number)), last)
    assert store.bytes == held(store) < 100 * 2 * (len(last.output) + len(last.head))
    for number in range(99):
        store.remove((ME, str(number)))
    assert [item["id"] for item in last.input_items()][:2] == ["0-in", "0-out"]
    assert store.bytes == held(store) == sum(map(len, last.parts))


def test_an_item_that_comes_again_is_found_while_its_latest_response_is_stored():
    store = ResponseStore(2, 10**6)
    for name in "ab":
        store.add((ME, name), response("same"))
    store.add((ME, "c"), response("c"))
    assert store.with_item[ME, "same-in"] == (ME, "b")
    store.add((ME, "d"), response("d"))
    assert (ME, "same-in") not in store.with_item


@given(
    steps=some.lists(
        some.tuples(some.sampled_from(["new", "continue", "remove"]), some.integers(0, 20), some.integers(0, 400)),
        max_size=40,
    ),
    most=some.integers(0, 8),
    most_bytes=some.integers(0, 6000),
)
def test_bounds_and_counts_hold_whatever_happens(steps, most, most_bytes):
    store = ResponseStore(most, most_bytes)
    for number, (kind, which, size) in enumerate(steps):
        known = list(store.responses)
        key = known[which % len(known)] if known else None
        if kind == "remove":
            store.remove(key or (ME, "none"))
        elif kind == "continue" and key:
            store.add((key[0], str(number)), continued(store.responses[key], str(number)))
        else:
            store.add((ME if which % 2 else OTHER, str(number)), response(str(number), size=size))
        assert len(store.responses) <= most
        assert store.bytes == held(store) <= most_bytes
        assert set(store.with_item.values()) <= set(store.responses)


@pytest.mark.parametrize("bounds", [(0, 10**6), (9, 0)])
def test_a_store_without_room_keeps_nothing(bounds):
    store = ResponseStore(*bounds)
    store.add((ME, "a"), response("a"))
    assert not store.responses
    assert (store.bytes, store.uses, store.with_item) == (0, {}, {})
