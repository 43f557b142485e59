"""Readers: records from text, JSONL and parquet files, folders of them, and Hugging Face datasets, one at a time.

    .txt .md .py        a document per file; a long one comes in parts of about a megabyte, cut at line ends
    .jsonl              an object per line
    .parquet            a row each
    .gz .zst            any of the text formats, compressed
    folder              all of these in it, in order of name
    hf:name             a dataset of the hub, streamed; hf:name:configuration@split says which part

No file is ever read whole, and an error names the file and the line.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tilestack.data.errors import DataError, needs

PART = 1 << 20  # bytes of a text document that come together
LONGEST_LINE = 1 << 26
TEXT = (".txt", ".text", ".md", ".py")
COMPRESSED = (".gz", ".zst")

Located = tuple[str, dict[str, Any]]  # where a record stands, such as "data.jsonl:3", and the record


def read(source: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a file, folder or dataset; a text document is {"text": …}."""
    return (record for _, record in located(source))


def texts(source: str | Path, field: str = "text") -> Iterator[str]:
    """One field of every record, which must be a string."""
    for where, record in located(source):
        text = record.get(field)
        if not isinstance(text, str):
            raise DataError(f"{where}: expected a string under {field!r}; this record has {_described(record)}")
        yield text


def located(source: str | Path) -> Iterator[Located]:
    """Records with the places they come from, for whoever finds something wrong in them."""
    if str(source).startswith("hf:"):
        return _read_hub(str(source))
    return (record for file in files_behind(source) for record in _read_file(file))


def files_behind(source: str | Path) -> list[Path]:
    """The files that a source is read from, in order; none for a dataset of the hub."""
    path = Path(source)
    if str(source).startswith("hf:"):
        return []
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _reader(file) and not _hidden(file.relative_to(path)))
        if not files:
            raise DataError(f"{path} holds no file that can be read; known are {_known()}")
        return files
    if not path.is_file():
        raise FileNotFoundError(f"no data at {path}")
    return [path]


def _read_file(path: Path) -> Iterator[Located]:
    reader = _reader(path)
    if reader is None:
        raise DataError(f"{path} has no suffix that can be read; known are {_known()}")
    try:
        yield from reader(path)
    except (EOFError, OSError, zlib.error) as problem:
        raise DataError(f"{path} cannot be read: {problem}") from problem


def _reader(path: Path) -> Callable[[Path], Iterator[Located]] | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes = suffixes[:-1]
    elif suffixes and suffixes[-1] == ".parquet":
        return _read_parquet
    suffix = suffixes[-1] if suffixes else ""
    return _read_jsonl if suffix == ".jsonl" else _read_text if suffix in TEXT else None


def _read_text(path: Path) -> Iterator[Located]:
    with _open(path) as file:
        line = 1
        while lines := file.readlines(PART):
            yield f"{path}:{line}", {"text": _decode(b"".join(lines), path, line)}
            line += len(lines)


def _read_jsonl(path: Path) -> Iterator[Located]:
    with _open(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise DataError(f"{path}:{number}: a line of more than {LONGEST_LINE >> 20} MiB")
            if not line.strip():
                continue
            try:
                record = json.loads(_decode(line.rstrip(b"\r\n"), path, number))
            except json.JSONDecodeError as problem:
                raise DataError(f"{path}:{number}: not JSON: {problem.msg} at column {problem.colno}") from problem
            except RecursionError as problem:
                raise DataError(f"{path}:{number}: nested too deeply") from problem
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: expected an object, found a {type(record).__name__}")
            yield f"{path}:{number}", record


def _read_parquet(path: Path) -> Iterator[Located]:
    parquet = needs("pyarrow.parquet", "a parquet file")
    arrow = needs("pyarrow", "a parquet file")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", record
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError) as problem:
        raise DataError(f"{path} cannot be read after row {number}: {problem}") from problem


def _read_hub(source: str) -> Iterator[Located]:
    datasets = needs("datasets", f"reading {source}")
    name, _, split = source.removeprefix("hf:").partition("@")
    name, _, configuration = name.partition(":")
    records = datasets.load_dataset(name, configuration or None, split=split or "train", streaming=True)
    for number, record in enumerate(records):
        yield f"{source}, record {number}", record


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path)  # type: ignore[return-value]
    if path.suffix == ".zst":
        stream = needs("pyarrow", "a .zst file").input_stream(str(path), compression="zstd")
        return io.BufferedReader(stream)
    return open(path, "rb")


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        line += raw.count(b"\n", 0, problem.start)
        raise DataError(f"{path}:{line}: not UTF-8: byte 0x{raw[problem.start]:02x}") from problem


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _described(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in list(record.items())[:8]) or "nothing"


def _known() -> str:
    return ", ".join([*TEXT, ".jsonl", ".parquet", *(f"(text){suffix}" for suffix in COMPRESSED)])
