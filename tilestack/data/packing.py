"""Packing: documents laid side by side in rows of one length, so that little of a batch is padding.

    row 0   │ a a a a a a a a a a │ b b b b b b │
    row 1   │ c c c c c c c │ d d d d d │ e e │ ▒ ▒ │      ▒ padding: no label, a document of its own

Best fit, longest first: each document goes into the fullest row that still has room. Documents stay apart: attention is
held to `cu_seqlens`, positions restart, and the last token of a document has nothing to predict.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

NO_LABEL = -100


@dataclass(frozen=True)
class Batch:
    """What a decoder is trained on: `labels[b, t]` is the token that follows `ids[b, t]`, NO_LABEL where none is to be
    predicted. Document i of the flattened batch is tokens cu_seqlens[i] to cu_seqlens[i + 1]; the last offset repeats
    to a fixed length, so that shapes never change."""

    ids: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64, from 0 in each document; 0 in padding, where it must not count as a long text
    cu_seqlens: Tensor  # [documents + 1] int32
    valid: Tensor  # labels that count, a number

    def to(self, device: torch.device | str) -> "Batch":
        """On another device; a copy to a GPU is not waited for."""
        move = lambda tensor: tensor.pin_memory().to(device, non_blocking=True)
        if torch.device(device).type != "cuda":
            move = lambda tensor: tensor.to(device)
        return Batch(*(move(getattr(self, field.name)) for field in fields(self)))


Sequences = Sequence[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]]  # ids and labels of each


def most_documents(length: int) -> int:
    """How many documents a row may hold where nobody says: enough that real text never meets the limit."""
    return max(8, length // 32)


def best_fit(sizes: Sequence[int] | np.ndarray, length: int, most: int) -> list[list[int]]:
    """Rows of indices into `sizes` (each at most `length`), at most `most` of them in a row."""
    sizes = np.asarray(sizes, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row) of rows that can take more, ascending
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(room, (size, -1))
        if at == len(room):
            free, row = length, len(rows)
            rows.append([])
        else:
            free, row = room.pop(at)
        rows[row].append(item)
        if free > size and len(rows[row]) < most:
            insort(room, (free - size, row))
    return rows


def collate(rows: Sequence[Sequences], length: int, most: int, padding: int = 0) -> Batch:
    """A batch of these rows, each a list of (ids, labels) that fit into `length` together."""
    ids = np.full((len(rows), length), padding, dtype=np.int64)
    labels = np.full((len(rows), length), NO_LABEL, dtype=np.int64)
    positions = np.zeros((len(rows), length), dtype=np.int64)
    counting = np.arange(length)
    ends = np.full(len(rows) * (most + 1) + 1, len(rows) * length, dtype=np.int32)
    ends[0] = 0
    documents = 0
    for number, row in enumerate(rows):
        start = 0
        for row_ids, row_labels in row:
            end = start + len(row_ids)
            ids[number, start:end], labels[number, start:end] = row_ids, row_labels
            positions[number, start:end] = counting[: end - start]
            documents += 1
            ends[documents] = number * length + end
            start = end
        if start < length:
            documents += 1
            ends[documents] = (number + 1) * length
    valid = np.asarray((labels != NO_LABEL).sum())
    return Batch(*map(torch.from_numpy, (ids, labels, positions, ends, valid)))


def pack(sequences: Sequences, length: int, batch: int, *, padding: int = 0, most: int | None = None) -> list[Batch]:
    """Batches of all sequences, best fit, in the order of the first sequence in each row. A sequence is ids and labels in
    the convention of `Batch` (`answer_labels` makes them); one longer than `length` is cut, and one without a label is
    left out. The last batch may have empty rows."""
    most = most or most_documents(length)
    kept = [(ids[:length], labels[:length]) for ids, labels in sequences]
    kept = [(ids, labels) for ids, labels in kept if any(label != NO_LABEL for label in labels)]
    placed = sorted(best_fit([len(ids) for ids, _ in kept], length, most), key=min)
    rows = [[kept[item] for item in row] for row in placed]
    rows += [[]] * (-len(rows) % batch)
    return [collate(rows[start : start + batch], length, most, padding) for start in range(0, len(rows), batch)]


def answer_labels(ids: Sequence[int], mask: Sequence[int]) -> list[int]:
    """Labels that ask only for the tokens under the mask: each stands at the token before it."""
    return [following if wanted else NO_LABEL for following, wanted in zip(ids[1:], mask[1:], strict=True)] + [NO_LABEL]
