"""An endless, shuffled, resumable stream of packed batches from a token file.

Nothing random is stored. The order of documents follows from the seed and the epoch, a window of documents is packed at a
time, and the rows of a window are dealt in an order that follows from seed, epoch and window. So the cursor is three
numbers (epoch, window, row), and a stream that is given one continues bit for bit: it packs that one window again.

With weights, an epoch is as many tokens as there are, and each part of the file as large a share of them as its weight is:
one that has too few repeats documents, one that has too many leaves some for other epochs.

The cursor counts rows of all ranks together. Each rank packs the same windows and takes its share of the rows, so a run
may continue on another number of ranks, or with another batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tilestack.data.errors import DataError
from tilestack.data.packing import NO_LABEL, Batch, best_fit, collate, most_documents
from tilestack.data.tokens import TokenFile

WINDOW = 8192
Piece = Sequence[int]  # first token, the one after the last, whether the document ends there


class Packed:
    """Batches of `batch` rows of `length` tokens, best-fit packed; documents longer than a row continue in another."""

    def __init__(
        self,
        file: TokenFile,
        length: int,
        batch: int,
        seed: int = 0,
        *,
        split: str = "all",
        validation: float = 0.0,
        weights: Sequence[float] = (),
        epochs: int | None = None,
        rank: int = 0,
        world: int = 1,
        window: int = WINDOW,
        most: int | None = None,
        padding: int = 0,
    ):
        """`split` is all, train or validation, where `validation` is the share of documents held out. `weights` are those
        of the file's parts, as many as are not held out. `epochs` ends the
        stream; its last batch then may have empty rows. `window` is how many documents are packed together, `most` how
        many a row may hold."""
        for name, value in (("length", length), ("batch", batch), ("world", world), ("window", window)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, but is {seed}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be from 0 to {world - 1}, not {rank}")
        self.file, self.length, self.batch = file, length, batch
        self.epochs, self.rank, self.world, self.padding = epochs, rank, world, padding
        self.most = most or most_documents(length)
        self._documents = file.documents(split, validation)
        if not len(self._documents):
            raise DataError(f"{file.folder} has no document in its {split} split (validation share {validation})")
        self._made_with = {
            "file": file.meta["digest"],
            "length": length,
            "seed": seed,
            "split": split,
            "validation": validation,
            "window": window,
            "most": self.most,
        }
        self._weights = tuple(weights)
        if weights:
            self._made_with["weights"] = list(weights)
            self._refuse_empty_parts(split)
        self._go_to(0, 0, 0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = [row for _ in range(self.batch * self.world) if (row := self._next_row()) is not None]
        if not rows:
            raise StopIteration
        rows += [[]] * (self.batch * self.world - len(rows))
        mine = rows[self.rank * self.batch : (self.rank + 1) * self.batch]
        return collate([[self._read(piece) for piece in row] for row in mine], self.length, self.most, self.padding)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, and what that position means nothing without; JSON can hold it."""
        return {"epoch": self._epoch, "window": self._window, "row": self._row, "made_with": dict(self._made_with)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another stream of the same file, length and seed stood."""
        theirs = state.get("made_with", {})
        differing = [name for name, value in self._made_with.items() if theirs.get(name) != value]
        if differing:
            told = "; ".join(f"{name} was {theirs.get(name)}, is {self._made_with[name]}" for name in differing)
            raise DataError(f"the saved place in the data is another stream's: {told}")
        self._go_to(state["epoch"], state["window"], state["row"])

    def _refuse_empty_parts(self, split: str) -> None:
        """A weight for nothing would silently be another mixture."""
        parts = len(self.file.meta.get("parts", ())) - self.file.meta.get("held_out", 0)
        if len(self._weights) != parts:
            raise ValueError(
                f"{len(self._weights)} weights are given, and {self.file.folder} has {parts} parts to weigh"
            )
        counts = np.bincount(self.file.parts_of(self._documents), minlength=parts)
        if empty := [number + 1 for number in range(parts) if not counts[number]]:
            raise DataError(f"part {empty[0]} of the mixture has no document in the {split} split; leave it out")

    @property
    def documents(self) -> int:
        """How many documents the stream reads."""
        return len(self._documents)

    @property
    def epoch(self) -> int:
        """Passes over the documents that are complete."""
        return self._epoch

    @property
    def bytes(self) -> int:
        """Bytes of text in one epoch, for bits per byte."""
        return int(self.file.bytes[self._documents].sum())

    def _go_to(self, epoch: int, window: int, row: int) -> None:
        self._epoch, self._window, self._row = epoch, window, row
        self._order: np.ndarray | None = None  # of this epoch's documents
        self._rows: list[list[int]] | None = None  # of this window, as numbers of its pieces

    def _next_row(self) -> list[Piece] | None:
        while self.epochs is None or self._epoch < self.epochs:
            if self._rows is None:
                self._pieces, self._rows = self._pack()
            if self._row < len(self._rows):
                self._row += 1
                return self._pieces[self._rows[self._row - 1]].tolist()
            self._rows, self._row, self._window = None, 0, self._window + 1
            if self._order is not None and self._window * self._made_with["window"] >= len(self._order):
                self._order, self._window, self._epoch = None, 0, self._epoch + 1
        return None

    def _drawn(self) -> np.ndarray:
        """The documents of this epoch, in their order."""
        random = self._random(self._epoch)
        if not self._weights:
            return self._documents[random.permutation(len(self._documents))]
        parts, ends = self.file.parts_of(self._documents), self.file.ends.astype(np.int64)
        sizes = np.diff(ends, prepend=0)[self._documents]
        members = [np.flatnonzero(parts == part) for part in range(len(self._weights))]
        total = sum(weight for weight, mine in zip(self._weights, members, strict=True) if len(mine))
        drawn = []
        for weight, mine in zip(self._weights, members, strict=True):
            if len(mine):
                whole, rest = divmod(round(int(sizes.sum()) * weight / total), int(sizes[mine].sum()))
                some = random.permutation(mine)
                few = np.searchsorted(np.cumsum(sizes[some]) - sizes[some] / 2, rest)
                drawn += [mine] * whole + [some[:few]]
        return self._documents[random.permutation(np.concatenate(drawn))]

    def _pack(self) -> tuple[np.ndarray, list[list[int]]]:
        """The pieces of this window, each a `Piece`, and its rows in the order in which they are dealt."""
        if self._order is None:
            self._order = self._drawn()
        window = self._made_with["window"]
        pieces = self._cut(self._order[self._window * window : (self._window + 1) * window])
        rows = best_fit(pieces[:, 1] - pieces[:, 0], self.length, self.most)
        dealt = self._random(self._epoch, self._window).permutation(len(rows)).tolist()
        return pieces, [rows[row] for row in dealt]

    def _cut(self, documents: np.ndarray) -> np.ndarray:
        """Pieces [n, 3] no longer than a row, one document after another."""
        starts, ends = self.file.spans(documents)
        counts = -(-(ends - starts) // self.length)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # in its document
        first, end = np.repeat(starts, counts) + number * self.length, np.repeat(ends, counts)
        last = np.minimum(first + self.length, end)
        return np.stack([first, last, last == end], axis=1)

    def _random(self, *counter: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self._made_with["seed"], spawn_key=counter)))

    def _read(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        start, end, ends_document = piece
        ids = self.file.tokens[start:end].astype(np.int64)
        following = NO_LABEL if ends_document else int(self.file.tokens[end])
        return ids, np.append(ids[1:], following)
