"""Token files: a corpus as ids on disk, mapped into memory, with an index of its documents.

    folder/
    ├── tokens.bin      every document's ids one after another, uint16 or uint32
    ├── documents.bin   per document three uint64: where its tokens end, its bytes of text, a hash of its text
    └── meta.json       counts, the fingerprint of the tokenizer, and a digest of both it and the documents

Documents may come in parts, each a source of its own that a mixture can weigh, and the last of which may be held out.

A folder is written under another name and renamed when it is complete, so one that exists is whole.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from tilestack.data.errors import DataError
from tilestack.data.tokenizer import Tokenizer
from tilestack.files import whole_folder

FORMAT = 1
CHARACTERS_AT_ONCE = 1 << 22  # texts handed to the tokenizer's threads together


class TokenFile:
    """A corpus of token ids. `file[i]` is document i, as a view of the mapped file."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.meta = _read_meta(self.folder)
        documents, tokens = self.meta["documents"], self.meta["tokens"]
        self.tokens = _map(self.folder / "tokens.bin", np.dtype(self.meta["dtype"]), tokens)
        self.index = _map(self.folder / "documents.bin", np.dtype("<u8"), 3 * documents).reshape(documents, 3)
        if documents and int(self.index[-1, 0]) != tokens:
            raise DataError(
                f"{self.folder} is damaged: its documents end at {self.index[-1, 0]}, its tokens at {tokens}"
            )
        self.ends, self.bytes, self.hashes = (self.index[:, column] for column in range(3))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, document: int) -> np.ndarray:
        (start,), (end,) = self.spans(np.array([range(len(self))[document]]))
        return self.tokens[start:end]

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the tokens of each of these documents begin and end."""
        before = self.ends[documents - 1].astype(np.int64)
        return np.where(documents > 0, before, 0), self.ends[documents].astype(np.int64)

    def documents(self, split: str = "all", validation: float = 0.0) -> np.ndarray:
        """The documents of a split. Which it belongs to follows from a document's text alone, so copies stay together
        and a corpus that grows moves none of its documents. Parts that are held out take the place of the share."""
        if split not in ("all", "train", "validation"):
            raise ValueError(f"split must be all, train or validation, not {split!r}")
        if not 0 <= validation < 1:
            raise ValueError(f"validation must be a share of at least 0 and below 1, not {validation}")
        if split == "all":
            return np.arange(len(self))
        if first := self.first_held_out:
            copies = np.isin(self.hashes, self.hashes[first:])  # themselves, and what equals one of them
            return np.flatnonzero(~copies) if split == "train" else np.arange(first, len(self))
        held_out = self.hashes < np.uint64(validation * 2**64)
        return np.flatnonzero(held_out if split == "validation" else ~held_out)

    @property
    def first_held_out(self) -> int:
        """The first document of the parts that are held out; 0 where none is."""
        parts, held_out = self.meta.get("parts", ()), self.meta.get("held_out", 0)
        return sum(parts[:-held_out]) if held_out else 0

    def parts_of(self, documents: np.ndarray) -> np.ndarray:
        """The number of the part that each of the documents came in."""
        return np.searchsorted(np.cumsum(self.meta.get("parts", ())), documents, side="right")

    def texts(self, tokenizer: Tokenizer, split: str = "all", validation: float = 0.0) -> Iterator[str]:
        """The documents of a split as text again."""
        self.check(tokenizer)
        return (tokenizer.decode(self[document].tolist()) for document in self.documents(split, validation))

    def check(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer other than the one these tokens were made with."""
        if tokenizer.fingerprint != self.meta["tokenizer"]:
            raise DataError(
                f"the tokens in {self.folder} were made with another tokenizer (fingerprint {self.meta['tokenizer'][:8]}, "
                f"this one has {tokenizer.fingerprint[:8]}); write them again, or use the tokenizer they were made with"
            )


def write_tokens(
    folder: str | Path,
    documents: Iterable[str],
    tokenizer: Tokenizer,
    *,
    source: str = "",
    console: Console | None = None,
) -> TokenFile:
    """Tokenise documents on all cores into a new token file. `source` is kept in meta.json for whoever reads it later;
    `console` shows progress. What a killed run left half-written is swept away by the next."""
    return write_parts(folder, [documents], tokenizer, source=source, console=console)


def write_parts(
    folder: str | Path,
    parts: Iterable[Iterable[str]],
    tokenizer: Tokenizer,
    *,
    held_out: int = 0,
    source: str = "",
    console: Console | None = None,
) -> TokenFile:
    """`write_tokens` of documents from several sources, each a part; the last `held_out` of them are for validation."""
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; remove it or choose another folder")
    with whole_folder(folder) as hidden:
        meta = _write(hidden, parts, tokenizer, console or Console(quiet=True))
        content = json.dumps(meta | {"held_out": held_out, "source": source}, indent=2) + "\n"
        (hidden / "meta.json").write_text(content, encoding="utf-8")
    return TokenFile(folder)


def _write(folder: Path, parts: Iterable[Iterable[str]], tokenizer: Tokenizer, console: Console) -> dict[str, Any]:
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    count, written, text_bytes, empty = 0, 0, 0, 0
    of_parts: list[int] = []
    digest = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=16)
    columns = (TextColumn("tokenising"), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with (
        open(folder / "tokens.bin", "wb") as tokens,
        open(folder / "documents.bin", "wb") as index,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("tokenising", total=None, said="")
        for part, batch in _batches(parts):
            of_parts += [0] * (part + 1 - len(of_parts))
            texts = [text for text in batch if text]
            empty += len(batch) - len(texts)
            if not texts:
                continue
            raw = [text.encode() for text in texts]
            encoded = [np.array(ids, dtype=dtype) for ids in tokenizer.encode_documents(texts)]
            ends = written + np.cumsum([len(ids) for ids in encoded])
            rows = np.array([ends, [len(text) for text in raw], [_hash(text) for text in raw]], dtype="<u8")
            entries = np.ascontiguousarray(rows.T).tobytes()
            tokens.write(np.concatenate(encoded).tobytes())
            index.write(entries)
            digest.update(entries)
            count, written, text_bytes = count + len(texts), int(ends[-1]), text_bytes + sum(map(len, raw))
            of_parts[part] += len(texts)
            progress.update(task, said=f"{count:,} documents, {text_bytes / 1e6:,.1f} MB, {written:,} tokens")
    if not count:
        raise DataError("there is no document to tokenise")
    return {
        "format": FORMAT,
        "dtype": dtype.name,
        "documents": count,
        "parts": of_parts,
        "empty": empty,
        "tokens": written,
        "bytes": text_bytes,
        "vocabulary": tokenizer.vocabulary,
        "tokenizer": tokenizer.fingerprint,
        "digest": digest.hexdigest(),
    }


def _batches(parts: Iterable[Iterable[str]]) -> Iterator[tuple[int, list[str]]]:
    """Texts in lists of some megabytes, each with the number of its part."""
    for part, documents in enumerate(parts):
        texts: list[str] = []
        size = 0
        for text in documents:
            if not isinstance(text, str):
                raise TypeError(f"a document is a str, not a {type(text).__name__}")
            texts.append(text)
            size += len(text) + 1
            if size >= CHARACTERS_AT_ONCE:
                yield part, texts
                texts, size = [], 0
        yield part, texts


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not path.is_file():
        raise FileNotFoundError(f"no token file at {folder}: it has no meta.json")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        known = {"dtype": str, "documents": int, "tokens": int, "bytes": int, "tokenizer": str, "digest": str}
        wrong = [key for key, kind in known.items() if not isinstance(meta[key], kind)]
    except (ValueError, KeyError, TypeError) as problem:
        raise DataError(f"{path} is damaged: {problem}") from problem
    if wrong or meta["dtype"] not in ("uint16", "uint32") or meta.get("format") != FORMAT:
        raise DataError(f"{path} does not describe a token file of format {FORMAT}; write the tokens again")
    return meta


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; write the tokens again")
    size, expected = path.stat().st_size, count * dtype.itemsize
    if size != expected:
        raise DataError(f"{path} has {size:,} bytes where meta.json promises {expected:,}; write the tokens again")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)
