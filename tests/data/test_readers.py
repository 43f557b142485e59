"""Readers: every format gives the same records, a piece at a time, and what is wrong is named by file and line."""

import gzip
import json
import os
import tracemalloc

import pytest

from tilestack.data import DataError, located, read, readers, texts

RECORDS = [{"text": f"document {number}\nü 🙂", "number": number} for number in range(5)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)


def write_parquet(path, records=RECORDS):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=2)


def write_zst(path, content):
    import pyarrow

    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(content)


def test_all_formats_give_the_same_records(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINES.replace("\n", "\n\n"), encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    write_zst(tmp_path / "c.jsonl.zst", LINES.encode())
    write_parquet(tmp_path / "d.parquet")
    (tmp_path / "e.json").write_text(json.dumps(RECORDS, indent=2))
    (tmp_path / "f.json.gz").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / ".hidden.jsonl").write_text("not JSON")
    (tmp_path / "notes.bin").write_text("not data")
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.json", "f.json.gz"):
        assert list(read(tmp_path / name)) == RECORDS
    assert list(read(tmp_path)) == RECORDS * 4  # .json in a folder is as often settings as data
    assert list(texts(str(tmp_path / "d.parquet"))) == [record["text"] for record in RECORDS]


def test_objects_in_a_column_have_their_own_keys_alone(tmp_path):
    """A table gives every object the keys of all; a tool would be described with the parameters of another."""
    rows = [
        {"note": None, "messages": [{"role": "user", "content": "Hi"}], "tools": [{"name": "add", "properties": {"a": {"type": "integer"}}}]},
        {"note": "x", "messages": [{"role": "tool", "content": "4", "id": "1"}], "tools": [{"name": "look", "properties": {"up": {"type": "string"}}}]},
    ]  # fmt: skip
    write_parquet(tmp_path / "rows.parquet", rows)
    assert list(read(tmp_path / "rows.parquet")) == rows


def test_a_long_text_comes_in_parts_cut_at_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PART", 1000)
    content = "".join(f"line {number} ü\n" for number in range(500)) + "no newline at the end"
    (tmp_path / "long.txt").write_text(content, encoding="utf-8")
    parts = list(texts(tmp_path / "long.txt"))
    assert "".join(parts) == content
    assert len(parts) > 5
    assert all(part.endswith("\n") for part in parts[:-1])
    lines = [1 + "".join(parts[:number]).count("\n") for number in range(len(parts))]
    assert [where for where, _ in located(tmp_path / "long.txt")] == [f"{tmp_path}/long.txt:{line}" for line in lines]


@pytest.mark.parametrize("name", ["big.jsonl", "big.json"])
def test_a_file_is_never_read_whole(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "PART", 1 << 16)
    line = json.dumps({"text": "x" * 1000})
    (tmp_path / name).write_text(f"{line}\n" * 20_000 if name == "big.jsonl" else f"[{f'{line},' * 19_999}{line}]")
    tracemalloc.start()
    assert sum(1 for _ in read(tmp_path / name)) == 20_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", r"bad\.json, item 1: the list breaks off"),
        ('[{"a": 1}, {"a"', r"bad\.json, item 2: the list breaks off or is not JSON: '\{\"a\"'"),
        ('[{"a": 1},]', r"bad\.json, item 2: expected an object, found '\]'"),
        ('[{"a": 1} {"a": 2}]', r"bad\.json: expected ',' after item 1"),
        ("[1]", r"bad\.json, item 1: expected an object, found '1\]'"),
        ("[]\n[]", r"bad\.json: there is more after the list"),
        (b'[{"a": "\xff"}]', r"bad\.json, item 1: not UTF-8"),
        ('[{"a":' + "[" * 200_000, r"bad\.json, item 1: "),
        ('{"a": 1}\n{"a"\n', r"bad\.json:2: not JSON"),
        (r'[{"a": "\ud83d\ude00"}, {"a": ["\uD83d"]}]', r"bad\.json, item 2: \\ud83d is half of a character"),
    ],
)
def test_a_malformed_list_is_named_by_its_item(tmp_path, content, said):
    (tmp_path / "bad.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=said):
        list(read(tmp_path / "bad.json"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\n{"text": \n', r"bad\.jsonl:2: not JSON: Expecting value at column 1\d"),
        ('{"text": "a"}\n\n[1]\n', r"bad\.jsonl:3: expected an object, found a list"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"bad\.jsonl:2: not UTF-8: byte 0xff"),
        (
            '{"text": "\\ud83d\\ude00 \\\\ud800"}\n{"text": "\\udc00"}\n',
            r"bad\.jsonl:2: \\udc00 is half of a character",
        ),
        (
            '{"text": "a"}\n{"content": "b", "n": 1}\n',
            r"bad\.jsonl:2: expected a string under 'text'.*content \(str\), n",
        ),
        ('{"text": "a"}\n{"text": 3}\n', r"bad\.jsonl:2: expected a string under 'text'"),
        ('{"text": ' + "[" * 200_000 + "\n", r"bad\.jsonl:1: "),
    ],
)
def test_a_malformed_line_is_named(tmp_path, content, said):
    (tmp_path / "bad.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=said):
        list(texts(tmp_path / "bad.jsonl"))


def test_text_that_is_not_utf8_is_named_by_its_line(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"one\ntwo\nthr\xe9e\n")
    with pytest.raises(DataError, match=r"bad\.txt:3: not UTF-8: byte 0xe9"):
        list(read(tmp_path / "bad.txt"))


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST_LINE", 1 << 20)
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n"' + "x" * (1 << 21))
    with pytest.raises(DataError, match=r"bad\.jsonl:2: a line of more than 1 MiB"):
        list(read(tmp_path / "bad.jsonl"))
    monkeypatch.setattr(readers, "PART", 1 << 16)
    (tmp_path / "bad.json").write_text('[{"a": 1}, {"a": "' + "x" * (1 << 21))
    with pytest.raises(DataError, match=r"bad\.json, item 2: longer than 1 MiB, or not JSON"):
        list(read(tmp_path / "bad.json"))


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(LINES.encode() * 100)[:-20])
    (tmp_path / "no.jsonl.gz").write_text("not gzip")
    (tmp_path / "no.jsonl.zst").write_text("not zstandard")
    (tmp_path / "no.parquet").write_text("not parquet")
    write_parquet(tmp_path / "cut.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "cut.parquet").read_bytes()[:-100])
    for name in ("cut.jsonl.gz", "no.jsonl.gz", "no.jsonl.zst", "no.parquet", "cut.parquet"):
        with pytest.raises(DataError, match=name):
            list(read(tmp_path / name))


def test_what_is_not_there_or_not_known_is_said_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data at .*nowhere"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match=r"holds no file that can be read; known are \.txt"):
        read(tmp_path)
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(DataError, match="no suffix that can be read"):
        list(read(tmp_path / "a.csv"))


def test_a_dataset_of_the_hub_is_streamed(monkeypatch):
    import sys
    from types import SimpleNamespace

    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return iter([*RECORDS, {"tools": [{"name": "add", "up": None}]}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(read("hf:org/name:small@test")) == [*RECORDS, {"tools": [{"name": "add"}]}]
    assert asked == [(("org/name", "small"), {"split": "test", "streaming": True})]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '.\[data\]'"):
        list(read("hf:org/name"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.txt", "a.txt.zst"])
def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path, name):
    whole = json.dumps(RECORDS) if name == "a.json" else LINES
    content = b"\xef\xbb\xbf" + whole.encode()
    if name.endswith(".zst"):
        write_zst(tmp_path / name, content)
    else:
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert list(read(tmp_path / name)) == ([{"text": LINES}] if "txt" in name else RECORDS)


def test_a_folder_with_a_pipe_is_refused_and_does_not_wait_for_a_writer(tmp_path):
    (tmp_path / "a.txt").write_text("a text\n")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt is a pipe, socket or device.*leave it out"):
        readers.files_behind(tmp_path)


def test_a_folder_named_like_a_file_is_read_as_a_folder(tmp_path):
    (tmp_path / "notes.md").mkdir()
    (tmp_path / "notes.md" / "a.txt").write_text("a text\n")
    assert list(texts(tmp_path)) == ["a text\n"]


def test_suffixes_are_known_in_capitals_too(tmp_path):
    (tmp_path / "A.TXT").write_text("a text\n")
    (tmp_path / "B.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "another"}\n'))
    assert list(texts(tmp_path)) == ["a text\n", "another"]


def test_folders_that_are_linked_to_are_read_once_and_circles_end(tmp_path):
    for place, name in (("data/own", "a"), ("elsewhere/deep", "b")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / f"{name}.txt").write_text(name)
    links = {
        "data/linked": "elsewhere", "data/again": "elsewhere", "data/inside": "data/own", "data/up": "",
        "elsewhere/round": "elsewhere", "elsewhere/deep/back": "data", "elsewhere/nowhere.txt.d": "missing",
    }  # fmt: skip
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    assert sorted(texts(tmp_path / "data")) == ["a", "b"]


@pytest.mark.parametrize("coding", ["utf-16-le", "utf-16-be"])
def test_utf16_is_called_by_its_name(tmp_path, coding):
    (tmp_path / "a.txt").write_bytes("\ufeffa text\n".encode(coding))
    with pytest.raises(DataError, match=r"a\.txt:1: not UTF-8: byte 0xf[ef]; it begins as UTF-16 does.*iconv"):
        list(texts(tmp_path))
