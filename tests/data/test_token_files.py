"""Token files: what is written is read back, what is damaged is noticed, and nothing is left half-written."""

import json

import numpy as np
import pytest
from rich.console import Console

from tilestack.data import DataError, TokenFile, Tokenizer, tokens, write_tokens


@pytest.fixture
def file(tokenizer, sources, tmp_path):
    return write_tokens(tmp_path / "tokens", sources, tokenizer, source="sources")


def test_documents_come_back(file, tokenizer, sources):
    assert list(file.texts(tokenizer)) == sources
    assert file[-1].tolist() == tokenizer.encode_documents(sources[-1:])[0]
    assert file.meta["bytes"] == sum(len(text.encode()) for text in sources) == file.bytes.sum()
    assert file.meta["tokens"] == sum(len(file[document]) for document in range(len(file)))
    assert file.meta["source"] == "sources"
    assert file.tokens.dtype == np.uint16
    with pytest.raises(IndexError):
        file[len(file)]


def test_batches_of_the_tokenizer_do_not_show(file, tokenizer, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "CHARACTERS_AT_ONCE", 5000)
    other = write_tokens(tmp_path / "other", iter(["", *sources]), tokenizer, console=Console(quiet=True))
    assert np.array_equal(other.tokens, file.tokens)
    assert np.array_equal(other.index, file.index)


def test_a_large_vocabulary_takes_four_bytes(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(Tokenizer, "vocabulary", 1 << 17)
    file = write_tokens(tmp_path / "tokens", ["text"], tokenizer)
    assert file.tokens.dtype == np.uint32
    assert tokenizer.decode(file[0].tolist()) == "text"


def test_splits_are_disjoint_complete_and_follow_the_text(file, tokenizer, sources, tmp_path):
    held_out, rest = file.documents("validation", 0.3), file.documents("train", 0.3)
    assert sorted([*held_out, *rest]) == list(range(len(file))) == file.documents().tolist()
    assert len(held_out)
    assert len(rest)
    again = write_tokens(tmp_path / "again", sources[::-1] * 2, tokenizer)
    assert set(again.texts(tokenizer, "validation", 0.3)) == set(file.texts(tokenizer, "validation", 0.3))
    assert not len(file.documents("validation", 0.0))
    with pytest.raises(ValueError, match="split must be"):
        file.documents("test")
    with pytest.raises(ValueError, match="validation must be a share"):
        file.documents("train", 1.0)


def test_another_tokenizer_is_refused(file, sources):
    with pytest.raises(DataError, match="made with another tokenizer"):
        file.check(Tokenizer.train(sources[:2], 600))


def damage(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("tokens.bin", lambda raw: raw[:-1], r"tokens\.bin has [\d,]+ bytes where meta\.json promises"),
        ("documents.bin", lambda raw: raw + b"0" * 24, r"documents\.bin has"),
        ("documents.bin", lambda raw: raw[:-24] + bytes(24), "is damaged: its documents end at 0"),
        ("meta.json", lambda raw: raw[:20], r"meta\.json is damaged"),
        ("meta.json", lambda raw: b"[]", r"meta\.json is damaged"),
        ("meta.json", lambda raw: raw.replace(b"uint16", b"object"), "format 1"),
        ("meta.json", lambda raw: json.dumps(json.loads(raw) | {"format": 2}).encode(), "format 1"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(file, name, change, said):
    damage(file.folder, name, change)
    with pytest.raises(DataError, match=said):
        TokenFile(file.folder)


def test_a_missing_file_is_named(file, tmp_path):
    (file.folder / "tokens.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokens\.bin is missing"):
        TokenFile(file.folder)
    with pytest.raises(FileNotFoundError, match=r"no token file at .*nowhere"):
        TokenFile(tmp_path / "nowhere")


def test_nothing_half_written_is_left_behind(tokenizer, tmp_path):
    def documents():
        yield "one"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_tokens(tmp_path / "tokens", documents(), tokenizer)
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="no document"):
        write_tokens(tmp_path / "tokens", [""], tokenizer)
    with pytest.raises(TypeError, match="a document is a str, not a dict"):
        write_tokens(tmp_path / "tokens", [{"text": "one"}], tokenizer)
    (tmp_path / ".tokens.tilestack-part").mkdir()  # as a killed run leaves it
    (tmp_path / ".tokens.tilestack-part" / "tokens.bin").write_bytes(b"half")
    assert len(write_tokens(tmp_path / "tokens", ["one"], tokenizer)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    with pytest.raises(FileExistsError, match="exists already"):
        write_tokens(tmp_path / "tokens", ["one"], tokenizer)
