"""The stream: every token of an epoch once, another order each time, and a cursor that continues bit for bit."""

import json
from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestack.data import NO_LABEL, DataError, Packed, write_tokens
from tilestack.data.tokens import write_parts

LENGTH = 24
OPTIONS = dict(length=LENGTH, batch=3, seed=5, window=7)


@pytest.fixture(scope="module")
def file(tokenizer, tmp_path_factory):
    """Forty documents of many lengths, some longer than a row, no two alike."""
    texts = [" ".join(f"w{number}x{word}" for word in range(number % 13 + 1)) for number in range(40)]
    return write_tokens(tmp_path_factory.mktemp("stream") / "tokens", texts, tokenizer)


def same(a, b):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("ids", "labels", "positions", "cu_seqlens"))


def pairs(batches):
    """All (token, the one to predict) of batches, sorted."""
    found = []
    for batch in batches:
        wanted = batch.labels != NO_LABEL
        found += zip(batch.ids[wanted].tolist(), batch.labels[wanted].tolist(), strict=True)
    return sorted(found)


def test_an_epoch_asks_for_every_token_of_every_document_once(file, tokenizer):
    batches = list(Packed(file, **OPTIONS, epochs=1))
    expected = [pair for i in range(len(file)) for pair in zip(file[i].tolist(), file[i][1:].tolist(), strict=False)]
    assert pairs(batches) == sorted(expected)
    asked = [label for batch in batches for label in batch.labels.flatten().tolist() if label != NO_LABEL]
    assert sum(tokenizer.token_bytes[label] for label in asked) == file.meta["bytes"]
    assert len({batch.cu_seqlens.shape for batch in batches}) == 1


@pytest.mark.parametrize("length", [1, 5, LENGTH, 10_000])
def test_documents_are_cut_where_rows_end(file, length):
    documents = torch.randperm(len(file), generator=torch.Generator().manual_seed(1)).numpy()
    expected, starts = [], [0, *file.ends.tolist()]
    for document in documents.tolist():
        start, end = starts[document], starts[document + 1]
        expected += [[first, min(first + length, end), first + length >= end] for first in range(start, end, length)]
    assert Packed(file, length, 3)._cut(documents).tolist() == expected


def test_labels_do_not_cross_documents(file, tokenizer):
    for batch in Packed(file, **OPTIONS, epochs=1):
        ends = batch.cu_seqlens.tolist()
        ids, labels = batch.ids.flatten(), batch.labels.flatten()
        for start, end in pairwise(ends):
            inside = labels[start : max(end - 1, start)]
            assert bool(((inside == ids[start + 1 : end]) | (inside == NO_LABEL)).all())
            if end > start and ids[end - 1] == tokenizer.eos:
                assert labels[end - 1] == NO_LABEL


def test_epochs_and_seeds_differ_and_repeat(file):
    stream = Packed(file, **OPTIONS)
    first = list(islice(stream, 8))
    again = list(islice(Packed(file, **OPTIONS), 8))
    other = list(islice(Packed(file, **OPTIONS | {"seed": 6}), 8))
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not any(same(a, b) for a, b in zip(first, other, strict=True))
    while stream.epoch < 1:
        next(stream)
    later = list(islice(stream, 8))
    assert not any(same(a, b) for a in first for b in later)


def test_the_rows_of_every_window_are_dealt_in_an_order_of_their_own(file):
    """A row for each document: packing puts the longest first, and the order in which they come is that of the dealing."""
    options = dict(length=512, batch=1, seed=5, most=1, epochs=1)
    documents = lambda window: [
        tuple(batch.ids[0, : batch.cu_seqlens[1]].tolist()) for batch in Packed(file, **options, window=window)
    ]
    order, dealt = documents(window=1), documents(window=8)
    orders = set()
    for start in range(0, len(order), 8):
        packed = sorted(order[start : start + 8], key=len, reverse=True)
        orders.add(tuple(packed.index(document) for document in dealt[start : start + 8]))
    assert len(orders) == 5


@settings(max_examples=25, deadline=None)
@given(taken=st.integers(0, 60), more=st.integers(1, 30))
def test_a_cursor_continues_bit_for_bit(file, taken, more):
    whole = Packed(file, **OPTIONS)
    for _ in range(taken):
        next(whole)
    cursor = json.loads(json.dumps(whole.state_dict()))
    resumed = Packed(file, **OPTIONS)
    next(resumed)  # wherever it stood before
    resumed.load_state_dict(cursor)
    for _ in range(more):
        assert same(next(whole), next(resumed))
    assert whole.state_dict() == resumed.state_dict()


def test_ranks_share_out_one_stream(file):
    alone = Packed(file, **OPTIONS | {"batch": 4})
    ranks = [Packed(file, **OPTIONS | {"batch": 2}, rank=rank, world=2) for rank in range(2)]
    for _ in range(30):
        shares = [next(rank) for rank in ranks]
        assert torch.equal(next(alone).ids, torch.cat([share.ids for share in shares]))
    assert ranks[0].state_dict() == ranks[1].state_dict() == alone.state_dict()


def test_validation_is_another_part_of_the_documents(file):
    options = OPTIONS | {"validation": 0.3, "epochs": 1}
    held_out, rest = (Packed(file, **options, split=split) for split in ("validation", "train"))
    assert held_out.bytes + rest.bytes == file.meta["bytes"]
    assert sorted(pairs(held_out) + pairs(rest)) == pairs(Packed(file, **OPTIONS, epochs=1))


def test_a_cursor_of_another_stream_is_refused(file):
    cursor = Packed(file, **OPTIONS).state_dict()
    with pytest.raises(DataError, match=r"another stream's: length was 24, is 32; seed was 5, is 6"):
        Packed(file, length=32, batch=3, seed=6, window=7, most=8).load_state_dict(cursor)
    Packed(file, **OPTIONS | {"batch": 1}).load_state_dict(cursor)  # the batch may change
    with pytest.raises(DataError, match="another stream's"):
        Packed(file, **OPTIONS).load_state_dict({})


def test_a_cursor_of_another_corpus_is_refused(file, tokenizer, tmp_path):
    texts = list(file.texts(tokenizer))
    swapped = write_tokens(tmp_path / "swapped", [texts[1], texts[0], *texts[2:]], tokenizer)
    with pytest.raises(DataError, match=r"another stream's: file was \w+, is \w+$"):
        Packed(swapped, **OPTIONS).load_state_dict(Packed(file, **OPTIONS).state_dict())


def test_what_makes_no_sense_is_refused(file):
    for name, value in (("length", 0), ("batch", 0), ("window", 0), ("seed", -1), ("rank", 1)):
        with pytest.raises(ValueError, match=f"{name} must"):
            Packed(file, **OPTIONS | {name: value})
    with pytest.raises(DataError, match="no document in its validation split"):
        Packed(file, **OPTIONS, split="validation")


@pytest.fixture(scope="module")
def mixture(tokenizer, tmp_path_factory):
    """Two parts, the second a sixth as long as the first; the words of each begin with a letter of its own."""
    texts = lambda letter, count: [" ".join(f"{letter}{n}" for _ in range(n % 7 + 3)) for n in range(count)]
    folder = tmp_path_factory.mktemp("mixture") / "tokens"
    return write_parts(folder, [texts("a", 120), texts("b", 20)], tokenizer)


def shares(stream, tokenizer, epochs):
    """Of the tokens of some epochs, how many are of each part, by the letters of their documents."""
    found = {"a": 0, "b": 0}
    for batch in stream:
        if stream.epoch >= epochs:
            return found
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            ids = batch.ids.flatten()[start:end]
            letters = [letter for letter in "ab" if letter in tokenizer.decode(ids.tolist())]
            if len(letters) == 1:
                found[letters[0]] += end - start
    return found


@pytest.mark.parametrize(("weights", "share"), [((1.0, 1.0), 0.5), ((1.0, 9.0), 0.9), ((99.0, 1.0), 0.01)])
def test_weights_say_how_many_tokens_are_of_each_part(mixture, tokenizer, weights, share):
    found = shares(Packed(mixture, 64, 2, 5, weights=weights), tokenizer, epochs=3)
    assert found["b"] / sum(found.values()) == pytest.approx(share, abs=0.01)
    whole = int(mixture.ends[-1])
    assert sum(found.values()) == pytest.approx(3 * whole, rel=0.02)  # an epoch is as long as without weights


def test_a_mixture_differs_from_epoch_to_epoch_and_goes_on_where_it_was(mixture):
    make = lambda: Packed(mixture, 64, 2, 5, window=16, weights=(1.0, 3.0))
    stream = make()
    batches = list(islice(stream, 90))
    assert stream.epoch > 2
    assert not same(batches[0], batches[30])
    for place in (0, 11, 47):
        other = make()
        for _ in range(place):
            next(other)
        again = make()
        again.load_state_dict(json.loads(json.dumps(other.state_dict())))
        assert all(same(a, b) for a, b in zip(islice(again, 20), batches[place:], strict=False))
    with pytest.raises(DataError, match=r"weights was \[1.0, 3.0\], is \[1.0, 1.0\]"):
        Packed(mixture, 64, 2, 5, window=16, weights=(1.0, 1.0)).load_state_dict(stream.state_dict())


def test_weights_for_what_is_not_there_are_refused(mixture, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"3 weights are given, and .* has 2 parts"):
        Packed(mixture, 64, 2, weights=(1.0, 1.0, 1.0))
    empty = write_parts(tmp_path / "tokens", [["some text"], [""], ["held out"]], tokenizer, held_out=1)
    with pytest.raises(DataError, match="part 2 of the mixture has no document in the train split"):
        Packed(empty, 64, 2, split="train", weights=(1.0, 1.0))
    assert next(Packed(empty, 64, 2, split="validation")).valid > 0
