"""Packing: every token once, no row too full, documents apart; whatever the documents are."""

from itertools import pairwise

import numpy as np
import pytest
import tiny_models as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestack.data import NO_LABEL, answer_labels, pack
from tilestack.data.packing import best_fit, most_documents
from tilestack.train.next_token import next_token_loss

LENGTH = 16


def documents_in(batch):
    """The documents of a batch as (ids, labels, positions), padding among them."""
    ends = batch.cu_seqlens.tolist()
    flat = [tensor.flatten() for tensor in (batch.ids, batch.labels, batch.positions)]
    for start, end in pairwise(ends):
        if end > start:
            yield [tensor[start:end].tolist() for tensor in flat]


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, LENGTH), max_size=60), most=st.integers(1, 5))
def test_best_fit_places_everything_once_within_bounds(sizes, most):
    rows = best_fit(sizes, LENGTH, most)
    assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
    assert all(sum(sizes[item] for item in row) <= LENGTH and 1 <= len(row) <= most for row in rows)
    if most > LENGTH // 2:  # then no two rows fit into one
        assert sum(sum(sizes[item] for item in row) <= LENGTH // 2 for row in rows) <= 1


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(2, LENGTH + 5), max_size=30), batch=st.integers(1, 4))
def test_packed_documents_stay_apart(sizes, batch):
    starts = np.cumsum([1000, *sizes])  # every token has its own number
    sequences = [(list(range(a, a + n)), [*range(a + 1, a + n), NO_LABEL]) for a, n in zip(starts, sizes, strict=False)]
    batches = pack(sequences, LENGTH, batch)
    found = []
    for packed in batches:
        assert packed.ids.shape == packed.labels.shape == packed.positions.shape == (batch, LENGTH)
        assert packed.cu_seqlens.shape == batches[0].cu_seqlens.shape
        assert packed.cu_seqlens[-1] == batch * LENGTH
        assert bool((packed.cu_seqlens.diff() >= 0).all())
        assert packed.valid == int((packed.labels != NO_LABEL).sum())
        for ids, labels, positions in documents_in(packed):
            if ids[0] >= 1000:
                assert positions == list(range(len(ids)))
                found.append((ids, labels))
            else:
                assert set(positions) == {0}
                assert set(ids) == {0}
                assert set(labels) == {NO_LABEL}
    assert sorted(found) == sorted((ids[:LENGTH], labels[:LENGTH]) for ids, labels in sequences)


@torch.no_grad()
def test_padding_changes_nothing_in_a_model_that_rotates_by_length():
    model = tiny.ours("phi4_mini").double()  # texts of more than 32 tokens are rotated by other frequencies
    sequences = [([1, 2, 3, 4, 5], [2, 3, 4, 5, NO_LABEL]), ([9, 8, 7], [8, 7, NO_LABEL])]
    loss = lambda length, batch: sum(next_token_loss(model, packed) for packed in pack(sequences, length, batch))
    torch.testing.assert_close(loss(64, 3), loss(8, 1))


def test_a_document_never_spans_rows():
    (batch,) = pack([([1, 2, 3], [2, 3, -100])] * 5, 8, 3)
    boundaries = set(batch.cu_seqlens.tolist())
    assert {0, 8, 16, 24} <= boundaries


def test_rows_come_in_the_order_of_the_sequences():
    batches = pack([([size] * size, [size] * size) for size in (5, 7, 4, 6, 8)], 8, 1)
    assert [batch.ids[0, 0].item() for batch in batches] == [5, 7, 4, 6, 8]


def test_sequences_that_ask_for_nothing_are_left_out():
    assert pack([([1, 2, 3], [NO_LABEL] * 3)], 8, 2) == []
    assert pack([(list(range(10)), [NO_LABEL] * 8 + [9, NO_LABEL])], 8, 2) == []  # what it asks for is cut away


def test_an_answer_is_asked_for_at_the_tokens_before_it():
    """The first token of the answer too, and nothing after its last."""
    assert answer_labels([10, 11, 12, 13, 14], [0, 0, 1, 1, 0]) == [NO_LABEL, 12, 13, NO_LABEL, NO_LABEL]
    assert answer_labels([10, 11, 12], [1, 0, 1]) == [NO_LABEL, 12, NO_LABEL]  # nothing stands before the first token
    assert answer_labels([10], [1]) == [NO_LABEL]


def test_the_documents_of_a_row_are_limited_so_that_shapes_are_fixed():
    batches = pack([([7], [7])] * 40, 32, 1)
    assert most_documents(32) == 8
    assert [batch.valid for batch in batches] == [8] * 5
    assert {tuple(batch.cu_seqlens.shape) for batch in batches} == {(10,)}


def test_a_batch_moves():
    (batch,) = pack([([1, 2], [2, 3])], 4, 1)
    moved = batch.to("meta")
    assert moved.ids.device == moved.cu_seqlens.device == moved.valid.device == torch.device("meta")
    assert (batch.to("cpu").valid, moved.valid.dtype) == (2, torch.int64)


@pytest.mark.parametrize("length", [64, 2048])
def test_little_is_padding(length):
    sizes = np.random.default_rng(0).integers(1, length, 2000)
    rows = best_fit(sizes, length, most_documents(length))
    assert sizes.sum() / (len(rows) * length) > 0.98
