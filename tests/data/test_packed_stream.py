"""The stream: every token of an epoch once, another order each time, and a cursor that continues bit for bit."""

import json
from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestack.data import NO_LABEL, DataError, Packed, write_tokens

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
