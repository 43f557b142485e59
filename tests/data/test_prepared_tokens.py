"""Tokens are those of the texts as they are now, and are made no more often than that takes."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tilestack.data import DataError, corpora, prepared
from tilestack.data.prepared import prepare_tokens
from tilestack.files import ForeignFolder


@dataclass
class Texts:
    files: list[str]
    validation_files: tuple[str, ...] = ()
    corpus: str = "files"
    most_bytes: int = 0
    tokenizer: str = ""
    vocabulary: int = 300
    tokens: str = ""


@pytest.fixture
def texts(tmp_path):
    def write(*lines):
        (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines) + "\n")
        return Texts([str(tmp_path / "text.jsonl")])

    return write


@pytest.fixture
def made(monkeypatch):
    """How often tokens were written."""
    calls, write = [], prepared.write_parts

    def counting(*args, **kwargs):
        calls.append(args)
        return write(*args, **kwargs)

    monkeypatch.setattr(prepared, "write_parts", counting)
    return calls


def read(prepared_):
    tokenizer, tokens = prepared_
    return list(tokens.texts(tokenizer))


def test_texts_that_changed_are_tokenised_again_and_others_are_not(texts, tmp_path, made):
    run = tmp_path / "run"
    assert read(prepare_tokens(texts("old one", "old two"), run)) == ["old one", "old two"]
    assert read(prepare_tokens(texts("old one", "old two"), run)) == ["old one", "old two"]  # written again, the same
    assert read(prepare_tokens(Texts([str(tmp_path / "text.jsonl")]), run)) == ["old one", "old two"]
    assert len(made) == 1
    status = (tmp_path / "text.jsonl").stat()
    settings = texts("new one", "new two")  # of the same length
    os.utime(tmp_path / "text.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))  # and said to be as old
    assert read(prepare_tokens(settings, run)) == ["new one", "new two"]
    assert len(made) == 2


def test_a_file_that_joins_a_folder_is_noticed(tmp_path, made):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_text("second")
    settings = Texts([str(tmp_path / "texts")])
    assert read(prepare_tokens(settings, tmp_path / "run")) == ["second"]
    (tmp_path / "texts" / "a.txt").write_text("first")
    assert read(prepare_tokens(settings, tmp_path / "run")) == ["first", "second"]


def test_another_tokenizer_under_the_same_name_is_noticed(texts, tmp_path, made):
    settings = texts("some text", "some more")
    first, _ = prepare_tokens(settings, tmp_path / "one")
    other, _ = prepare_tokens(texts("quite something else", "and so on"), tmp_path / "other")
    settings.tokenizer = str(tmp_path / "tokenizer")
    found = []
    for tokenizer in (first, first, other):
        tokenizer.save(tmp_path / "tokenizer")
        found.append(prepare_tokens(settings, tmp_path / "run")[1].meta["tokenizer"])
    assert found == [first.fingerprint, first.fingerprint, other.fingerprint]
    assert len(made) == 4


def test_a_run_that_goes_on_refuses_other_texts_and_does_without_those_that_are_gone(texts, tmp_path, made):
    run = tmp_path / "run"
    prepare_tokens(texts("old one"), run)
    settings = texts("new one")
    with pytest.raises(
        DataError, match=r"text\.jsonl changed since the tokens in .* were made; put it back, or start over"
    ):
        prepare_tokens(settings, run, resumes=True)
    shutil.move(tmp_path / "text.jsonl", tmp_path / "gone.jsonl")
    assert read(prepare_tokens(settings, run, resumes=True)) == ["old one"]
    with pytest.raises(FileNotFoundError, match="no data at"):
        prepare_tokens(settings, run)
    assert len(made) == 1


def test_texts_are_counted_in_bytes(texts, tmp_path):
    settings = texts(*["漢字" * 5] * 9)  # 30 bytes each
    settings.most_bytes = 31
    assert len(read(prepare_tokens(settings, tmp_path / "run"))) == 2


def test_a_tokenizer_is_learned_from_the_texts_for_training_alone(texts, tmp_path):
    settings = texts("the cat sat on the mat " * 9)
    (tmp_path / "held_out.txt").write_text("other words are there " * 99)
    alone, _ = prepare_tokens(settings, tmp_path / "alone")
    settings.validation_files = (str(tmp_path / "held_out.txt"),)
    beside, tokens = prepare_tokens(settings, tmp_path / "beside")
    assert beside.fingerprint == alone.fingerprint
    assert len(tokens.documents("validation")) == 1


def test_the_python_corpus_is_followed_too(tmp_path, monkeypatch, made):
    library = tmp_path / "library"
    library.mkdir()
    (library / "one.py").write_text("import this\n")
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(library))
    settings = Texts([], corpus="python")
    assert read(prepare_tokens(settings, tmp_path / "run")) == ["import this\n"]
    (library / "one.py").write_text("import that\n")
    assert read(prepare_tokens(settings, tmp_path / "run")) == ["import that\n"]


def test_runs_of_the_same_texts_share_a_folder_of_tokens_and_others_are_refused(texts, tmp_path, made):
    settings = texts("some text")
    settings.tokens = str(tmp_path / "shared")
    with ThreadPoolExecutor(3) as pool:  # at once
        found = list(pool.map(lambda run: read(prepare_tokens(settings, tmp_path / run)), ("one", "two", "three")))
    assert found == [["some text"]] * 3
    assert len(made) == 1
    assert not (tmp_path / "one").exists()
    (tmp_path / "text.jsonl").write_text('{"text": "other text"}')
    with pytest.raises(DataError, match=r"text\.jsonl changed since .*name another folder in data\.tokens"):
        prepare_tokens(settings, tmp_path / "four")
    settings = texts("some text")
    settings.tokens, settings.vocabulary = str(tmp_path / "shared"), 310
    with pytest.raises(DataError, match=r"data\.vocabulary changed since .*name another folder in data\.tokens"):
        prepare_tokens(settings, tmp_path / "four")
    settings.tokens = str(tmp_path)
    with pytest.raises(ForeignFolder):
        prepare_tokens(settings, tmp_path / "four")
    assert len(made) == 1


def test_files_to_hold_out_are_held_out_whole_and_no_copy_of_them_is_learned(tmp_path, made):
    lines = {"a": ["one", "two", "shared"], "b": ["", "three"], "held": ["shared", "four"], "more": ["five"]}
    for name, texts in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = lambda name: str(tmp_path / f"{name}.jsonl")
    settings = Texts([path("a"), path("b")], (path("held"), path("more")))
    tokenizer, tokens = prepare_tokens(settings, tmp_path / "run")
    assert (tokens.meta["parts"], tokens.meta["empty"], tokens.meta["held_out"]) == ([3, 1, 2, 1], 1, 2)
    split = lambda name: list(tokens.texts(tokenizer, name, 0.5))
    assert (split("train"), split("validation")) == (["one", "two", "three"], ["shared", "four", "five"])
    assert list(prepared.documents(settings)) == ["one", "two", "shared", "", "three", "shared", "four", "five"]
    assert tokens.parts_of(tokens.documents()).tolist() == [0, 0, 0, 1, 2, 2, 3]
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "changed"}) + "\n")
    assert read(prepare_tokens(settings, tmp_path / "run"))[-1] == "changed"
    prepare_tokens(Texts([path("a"), path("b")], (path("held"),)), tmp_path / "run")
    assert len(made) == 3


def test_most_bytes_are_of_all_files_together(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{n}"}) + "\n" for n in range(4)))
    settings = Texts([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], most_bytes=11)
    assert read(prepare_tokens(settings, tmp_path / "run")) == ["a0", "a1", "a2", "a3", "b0", "b1"]
