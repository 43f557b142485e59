"""Texts to calibrate and compare quantised models on: those of files, or Python's own, which need no download.

The built-in texts are Python's sources and its manual, code and English prose. A quarter of the documents, by a hash of
their names, is held out: calibration never reads it, and comparisons read nothing else.
"""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tilestack.data import corpora
from tilestack.data.errors import DataError
from tilestack.data.readers import texts
from tilestack.data.tokenizer import Tokenizer

BUILTIN = "builtin"
SURPLUS = 8  # times as many rows are cut from texts as are drawn
SOURCES = 8 << 20  # bytes of Python's sources
HELD_OUT = 4  # one document of so many
LONGEST = 1 << 11  # characters of a built-in document, so that there are many


def builtin_texts(held_out: bool) -> Iterator[str]:
    """Python's sources and manual, mixed: the part for comparisons, or the rest."""
    documents = [*corpora.python_sources(SOURCES), *corpora.python_manual()]
    place = lambda document: hashlib.blake2b(document.name.encode(), digest_size=8).digest()
    for document in sorted(documents, key=place):
        if (place(document)[-1] % HELD_OUT == 0) == held_out:
            yield document.text[:LONGEST]


def texts_of(sources: Iterable[str], held_out: bool = False) -> Iterator[str]:
    """The texts of files, folders and datasets, or under the name `builtin` of Python."""
    for source in sources:
        yield from builtin_texts(held_out) if source == BUILTIN else texts(source)


def calibration_ids(documents: Iterable[str], tokenizer: Tokenizer, samples: int, length: int, seed: int = 0) -> Tensor:
    """Token ids [samples, length]: documents one after another, cut into rows, of which some are drawn."""
    wanted = SURPLUS * samples * length
    ids: list[int] = []
    for document in documents:
        ids += tokenizer.encode_documents([document])[0]
        if len(ids) >= wanted:
            break
    if (rows := len(ids) // length) < samples:
        raise DataError(
            f"the calibration texts have {len(ids):,} tokens, {rows} rows of {length}; {samples} are asked for; "
            "give more text, fewer samples or a smaller length"
        )
    cut = torch.tensor(ids[: rows * length]).view(rows, length)
    return cut[torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:samples]]
