"""Rows of calibration text: pieces of the documents, drawn by a seed, or an error that says what there is."""

import pytest
import torch

from tilestack.data import DataError, Tokenizer
from tilestack.data.calibration import SURPLUS, calibration_ids

TEXTS = [f"{number} times the cat sat on the mat. " * 3 for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, 300)


def test_rows_are_pieces_of_the_documents_one_after_another(tokenizer):
    ids = [token for text in TEXTS for token in [*tokenizer.encode(text), tokenizer.eos]]
    everything = len(ids) // 16
    found = calibration_ids(TEXTS, tokenizer, everything, 16)
    assert sorted(found.tolist()) == sorted(ids[begin : begin + 16] for begin in range(0, everything * 16, 16))


def test_the_seed_draws_the_rows(tokenizer):
    rows = [calibration_ids(TEXTS, tokenizer, 4, 8, seed) for seed in (0, 0, 1)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def test_no_more_is_read_than_rows_are_drawn_from(tokenizer):
    read = []
    calibration_ids((read.append(text) or text for text in TEXTS), tokenizer, 1, 4)
    assert 0 < len(read) <= SURPLUS * 4 < len(TEXTS)


def test_too_little_text_is_said(tokenizer):
    with pytest.raises(DataError, match=r"have \d+ tokens, \d rows of 16; 100 are asked for"):
        calibration_ids(TEXTS[:2], tokenizer, 100, 16)
    with pytest.raises(DataError, match="have 0 tokens"):
        calibration_ids([], tokenizer, 1, 16)
