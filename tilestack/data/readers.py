"""Readers: records from text, JSONL and parquet files, folders of them, and Hugging Face datasets, one at a time.

    .txt .md .py        a document per file; a long one comes in parts of about a megabyte, cut at line ends
    .jsonl              an object per line
    .json               a list of objects, or an object per line; in a folder it is passed over, being mostly settings
    .parquet            a row each
    .gz .zst            any of the text formats, compressed
    folder              all of these in it and in folders that it links to, in order of name
    hf:name             a dataset of the hub, streamed; hf:name:configuration@split says which part

No file is ever read whole, and an error names the file and the line.
"""

import gzip
import io
import json
import os
import re
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tilestack.data.errors import DataError, needs
from tilestack.files import expand_home

PART = 1 << 20  # bytes of a text document that come together
LONGEST_LINE = 1 << 26
TEXT = (".txt", ".text", ".md", ".py")
COMPRESSED = (".gz", ".zst")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escape of JSON that stands for half of a character

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
    if str(source).startswith("hf:"):
        return []
    path = expand_home(source)
    if path.is_dir():
        files = sorted(file for file in _files_in(path) if _reader(file) not in (None, _read_json))
        if odd := next((file for file in files if file.exists() and not file.is_file()), None):
            raise DataError(f"{odd} is a pipe, socket or device, which a folder of texts cannot hold; leave it out")
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
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes = suffixes[:-1]
    elif suffixes and suffixes[-1] == ".parquet":
        return _read_parquet
    suffix = suffixes[-1] if suffixes else ""
    readers = {".jsonl": _read_jsonl, ".json": _read_json} | dict.fromkeys(TEXT, _read_text)
    return readers.get(suffix)


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
            written = _decode(line.rstrip(b"\r\n"), path, number)
            try:
                record = json.loads(written)
            except json.JSONDecodeError as problem:
                raise DataError(f"{path}:{number}: not JSON: {problem.msg} at column {problem.colno}") from problem
            except RecursionError as problem:
                raise DataError(f"{path}:{number}: nested too deeply") from problem
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: expected an object, found a {type(record).__name__}")
            _refuse_half_pairs(written, record, f"{path}:{number}")
            yield f"{path}:{number}", record


def _read_json(path: Path) -> Iterator[Located]:
    """A list of objects, one at a time; what does not begin as a list has an object per line."""
    with _open(path) as file:
        begins = next(
            (character for line in iter(lambda: file.readline(PART), b"") if (character := line.strip()[:1])), b""
        )
    return _read_list(path) if begins == b"[" else _read_jsonl(path)


def _read_list(path: Path) -> Iterator[Located]:
    """The objects of a JSON list. Of the text there is never more than a part and the object that it breaks off in."""
    decoder, text, number, at = json.JSONDecoder(), "", 0, "["
    with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8") as lines:
        try:
            while piece := lines.read(PART):
                text += piece
                while text := text.lstrip():
                    if at in "[,":  # what has to come next
                        if text[0] != at and not (at == "," and text[0] == "]"):
                            raise DataError(f"{path}: expected {at!r} after item {number}, found {text[0]!r}")
                        at, text = ("end" if text[0] == "]" else "item"), text[1:]
                        continue
                    if at == "end":
                        raise DataError(f"{path}: there is more after the list")
                    if text[0] == "]" and not number:
                        at, text = "end", text[1:]
                        continue
                    if text[0] != "{":
                        raise DataError(f"{path}, item {number + 1}: expected an object, found {text[:20]!r}")
                    try:
                        record, end = decoder.raw_decode(text)
                    except json.JSONDecodeError as problem:
                        if len(text) > LONGEST_LINE:
                            raise DataError(
                                f"{path}, item {number + 1}: longer than {LONGEST_LINE >> 20} MiB, or not JSON: {problem.msg}"
                            ) from problem
                        break  # it may go on in the next part
                    _refuse_half_pairs(text[:end], record, f"{path}, item {number + 1}")
                    number, at, text = number + 1, ",", text[end:]
                    yield f"{path}, item {number}", record
        except UnicodeDecodeError as problem:
            raise DataError(f"{path}, item {number + 1}: not UTF-8") from problem
        except RecursionError as problem:
            raise DataError(f"{path}, item {number + 1}: nested too deeply") from problem
    if at != "end":
        raise DataError(f"{path}, item {number + 1}: the list breaks off or is not JSON: {text[:40]!r}")


def _refuse_half_pairs(written: str, record: Any, where: str) -> None:
    """Refuse half of a surrogate pair, which JSON can write and no text can hold; tokenizers would say so without a place."""
    if SURROGATE.search(written):
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as problem:
            half = ascii(problem.object[problem.start]).strip("'")
            raise DataError(f"{where}: {half} is half of a character; there must be two such escapes") from problem


def _read_parquet(path: Path) -> Iterator[Located]:
    parquet = needs("pyarrow.parquet", "a parquet file")
    arrow = needs("pyarrow", "a parquet file")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", _as_written(record)
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError) as problem:
        raise DataError(f"{path} cannot be read after row {number}: {problem}") from problem


def _read_hub(source: str) -> Iterator[Located]:
    datasets = needs("datasets", f"reading {source}")
    name, _, split = source.removeprefix("hf:").partition("@")
    name, _, configuration = name.partition(":")
    records = datasets.load_dataset(name, configuration or None, split=split or "train", streaming=True)
    for number, record in enumerate(records):
        yield f"{source}, record {number}", _as_written(record)


def _as_written(record: dict[str, Any]) -> dict[str, Any]:
    """A row of a table as it was before it became one: objects inside a column have all keys that any of them has, and those
    of others as null. A tool would be described with the parameters of all tools, and called with them."""
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _open(path: Path) -> BinaryIO:
    """A file's bytes, uncompressed, behind the byte order mark with which editors on Windows begin a text."""
    file = _open_whole(path)
    try:
        if file.peek(len(BOM_UTF8))[: len(BOM_UTF8)] == BOM_UTF8:  # type: ignore[attr-defined]
            file.read(len(BOM_UTF8))
    except BaseException:
        file.close()
        raise
    return file


def _open_whole(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path)  # type: ignore[return-value]
    if path.suffix.lower() == ".zst":
        stream = needs("pyarrow", "a .zst file").input_stream(str(path), compression="zstd")
        return io.BufferedReader(stream)
    return open(path, "rb")


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        marked = line == 1 and raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
        way_out = "; it begins as UTF-16 does, so convert it: iconv -f UTF-16 -t UTF-8" if marked else ""
        line += raw.count(b"\n", 0, problem.start)
        raise DataError(f"{path}:{line}: not UTF-8: byte 0x{raw[problem.start]:02x}{way_out}") from problem


def _files_in(folder: Path) -> Iterator[Path]:
    """What is in a folder and not hidden. Folders that it links to are part of it, those elsewhere and each of them once."""
    whole, linked = folder.resolve(), set()
    for place, folders, files in os.walk(folder, followlinks=True):
        entered = []
        for path in (Path(place, name) for name in folders if not name.startswith(".")):
            if path.is_symlink():
                real = path.resolve()
                if real in linked or real.is_relative_to(whole) or whole.is_relative_to(real):
                    continue
                linked.add(real)
            entered.append(path.name)
        folders[:] = entered
        yield from (Path(place, name) for name in files if not name.startswith("."))


def _described(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in list(record.items())[:8]) or "nothing"


def _known() -> str:
    return ", ".join([*TEXT, ".jsonl", ".json", ".parquet", *(f"(text){suffix}" for suffix in COMPRESSED)])
