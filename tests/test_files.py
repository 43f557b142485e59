"""What is written is whole or not there, and what somebody else put there stays."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from tilestack import files
from tilestack.files import (
    MARKER,
    BusyFolder,
    ForeignFolder,
    clean_parts,
    discard,
    whole_file,
    whole_folder,
    write_text_whole,
)


def make(target, **contents):
    with whole_folder(target) as hidden:
        for name, text in contents.items():
            (hidden / name).write_text(text)


def seen(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != MARKER}


def test_a_folder_replaces_the_one_made_before(tmp_path):
    make(tmp_path / "model", weights="1", index="2")
    make(tmp_path / "model", weights="3")
    assert seen(tmp_path / "model") == {"weights": "3"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_link_to_a_file_stays_and_a_pipe_is_written_as_it_is(tmp_path):
    real, link, pipe = tmp_path / "disk" / "real.html", tmp_path / "link.html", tmp_path / "pipe"
    link.symlink_to(real)
    for text in ("first", "second"):
        write_text_whole(link, text)
        assert (link.is_symlink(), real.read_text()) == (True, text)
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text_whole(pipe, "through")
    assert (os.read(reading, 100), pipe.is_fifo()) == (b"through", True)
    os.close(reading)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["disk", "link.html", "pipe", "real.html"]


def test_two_who_write_a_file_at_once_both_succeed_and_it_is_whole(tmp_path):
    """As runs do that start together and want the same answers of a reference."""
    target = tmp_path / "same.json"
    with whole_file(target) as first:
        first.write_text("first")
        with whole_file(target) as second:
            second.write_text("sec")
            assert first.read_text() == "first"
        assert target.read_text() == "sec"
        first.write_text("first again")
    assert seen(tmp_path) == {"same.json": "first again"}


def test_what_a_killed_process_left_of_a_file_is_removed_when_it_is_old(tmp_path):
    left, lives, others = (
        tmp_path / f".{name}.tilestack-part" for name in ("a[1].json.00ff", "a[1].json.01ff", "b.00ff")
    )
    for path in (left, lives, others):
        path.write_text("half")
    for path in (left, others):
        os.utime(path, (0, 0))
    write_text_whole(tmp_path / "a[1].json", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([lives.name, others.name, "a[1].json"])


def test_a_folder_in_a_folder_goes_with_it(tmp_path):
    for text in ("1", "2"):
        with whole_folder(tmp_path / "data") as hidden:
            make(hidden / "tokens", ids=text)
    assert seen(tmp_path / "data" / "tokens") == {"ids": "2"}
    discard(tmp_path / "data")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_folder_it_leads_to_is_written(tmp_path, there):
    disk, link = tmp_path / "disk", tmp_path / "link"
    disk.mkdir()
    if there:
        (disk / "real").mkdir()
    link.symlink_to(disk / "real")
    for text in ("first", "second"):
        with whole_folder(link) as hidden:
            assert hidden.parent == disk
            (hidden / "a.txt").write_text(text)
    assert link.is_symlink()
    assert (disk / "real" / "a.txt").read_text() == "second"
    assert [path.name for path in disk.iterdir()] == ["real"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


@pytest.mark.parametrize("name", ["notes.txt", ".hidden"])
def test_a_folder_that_is_someone_elses_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text("precious")
    for write in (make, discard):
        with pytest.raises(ForeignFolder, match=f"data was not made by tilestack .it holds {name}"):
            write(tmp_path / "data")
    assert seen(tmp_path / "data") == {name: "precious"}
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ForeignFolder, match="it is a file"):
        make(tmp_path / "file")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_others_may_read_what_the_umask_lets_them(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with whole_folder(tmp_path / "model") as hidden:
            save_file({"x": torch.zeros(1)}, hidden / "a.safetensors")
        with whole_file(tmp_path / "b.safetensors") as hidden:
            save_file({"x": torch.zeros(1)}, hidden)
    finally:
        os.umask(before)
    for path in (tmp_path / "model" / "a.safetensors", tmp_path / "b.safetensors"):
        assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("said", [None, "Name:\tpython\n"], ids=["no such file", "no such line"])
def test_the_umask_is_known_where_the_system_does_not_tell(tmp_path, monkeypatch, said):
    """macOS has no /proc, and old kernels say less there."""
    monkeypatch.setattr(files, "STATUS", tmp_path / "status")
    if said is not None:
        (tmp_path / "status").write_text(said)
    before = os.umask(0o027)
    try:
        with whole_file(tmp_path / "a") as hidden:
            hidden.touch(0o600)
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_what_somebody_added_is_kept_when_the_folder_makes_way(tmp_path):
    for attempt in ("", "1"):
        make(tmp_path / "model", weights="1")
        (tmp_path / "model" / "notes").mkdir()
        (tmp_path / "model" / "notes" / "mine.txt").write_text("precious")
        make(tmp_path / "model", weights="2") if not attempt else discard(tmp_path / "model")
        assert (tmp_path / f"model.kept{attempt}/notes/mine.txt").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.kept", "model.kept1"]


def test_after_an_error_the_old_folder_stands_and_nothing_half_made_is_left(tmp_path):
    make(tmp_path / "model", weights="1")
    with pytest.raises(TypeError):
        make(tmp_path / "model", weights="2", index=object())
    assert seen(tmp_path / "model") == {"weights": "1"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    """Two would remove and replace each other's half-written files: a configuration beside another's weights."""
    with whole_folder(tmp_path / "model") as hidden:
        (hidden / "weights").write_text("1")
        with pytest.raises(BusyFolder, match=r"another process is writing .*model; wait for it"):
            make(tmp_path / "model", weights="2")
        make(tmp_path / "other", weights="3")
        with whole_folder(
            hidden, carry=lambda path: True
        ) as inner:  # as a model is saved in a folder with its tokenizer
            (inner / "index").write_text("4")
    assert seen(tmp_path / "model") == {"index": "4", "weights": "1"}
    (tmp_path / ".model.tilestack-writing").touch()  # of a process that was killed
    make(tmp_path / "model", weights="5")
    assert seen(tmp_path / "model") == {"weights": "5"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]


def test_a_full_disk_is_said_with_the_file_that_found_it_so(tmp_path):
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*loss.html'"),
        files.whole_file(tmp_path / "loss.html"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*model'"),
        files.whole_folder(tmp_path / "model"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stop", ["aside", "in place"])
def test_killed_between_the_renames_nothing_is_lost(tmp_path, monkeypatch, stop):
    make(tmp_path / "model", weights="1")

    class Killed(BaseException):
        pass

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(files.Path, "replace" if stop == "aside" else "unlink", die)
        patched.setattr(files.shutil, "rmtree", lambda *_, **__: None)  # a killed process tidies nothing
        with pytest.raises(Killed):
            make(tmp_path / "model", weights="2")
    clean_parts(tmp_path)
    assert seen(tmp_path / "model") == {"weights": "1" if stop == "aside" else "2"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_was_half_removed_does_not_come_back(tmp_path, monkeypatch):
    make(tmp_path / "step", weights="1", optimizer="2")

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files.Path, "unlink", die)
        with pytest.raises(KeyboardInterrupt):
            discard(tmp_path / "step")
    assert [path.name for path in tmp_path.iterdir()] == [".step.tilestack-gone"]
    clean_parts(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_marker_from_a_stranger_reaches_nothing_outside(tmp_path):
    (tmp_path / "precious").write_text("1")
    (tmp_path / "model").mkdir()
    listed = ["../precious", str(tmp_path / "precious")]
    (tmp_path / "model" / MARKER).write_text(json.dumps({"made_by": "tilestack", "files": listed}))
    discard(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_clearing_up_takes_only_what_is_ours(tmp_path):
    (tmp_path / ".DS_Store").write_text("x")
    (tmp_path / ".model").mkdir()
    (tmp_path / ".model.tilestack-part").mkdir()
    (tmp_path / ".model.tilestack-part" / "weights").write_text("half")
    clean_parts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".DS_Store", ".model"]


def test_a_folder_may_be_shared_where_the_writer_says_what_stays(tmp_path):
    (tmp_path / "tokenizer.json").write_text("theirs")
    (tmp_path / "config.json").write_text("old")
    with whole_folder(tmp_path, carry=lambda path: path.name != "config.json") as hidden:
        (hidden / "config.json").write_text("new")
    assert seen(tmp_path) == {"tokenizer.json": "theirs", "config.json": "new"}
    assert json.loads((tmp_path / MARKER).read_text())["files"] == [
        "config.json"
    ]  # the tokenizer is not ours to remove


def test_a_file_is_the_old_or_the_new_and_synced_with_its_folder(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files.os, "fsync", lambda handle: synced.append(handle))
    write_text_whole(tmp_path / "run.json", "1")
    assert len(synced) == 2
    with pytest.raises(UnicodeEncodeError):
        write_text_whole(tmp_path / "run.json", "\ud800")
    assert seen(tmp_path) == {"run.json": "1"}
