"""A run keeps to its own folder: what is someone else's is refused before anything happens to it."""

import shutil
import subprocess
import sys

import pytest

from tilestack.cli import main
from tilestack.files import MARKER, ForeignFolder, whole_folder
from tilestack.train.align import KINDS
from tilestack.train.errors import TrainingError
from tilestack.train.run.folder import RunFolder

COMMANDS = {"train": "demo", **{kind: kind for kind in KINDS}}


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def users(tmp_path, monkeypatch):
    """A project with everything that a run would like to call its own."""
    for name in ("data/corpus.jsonl", "data/notes.txt", "model/model.safetensors", "checkpoints/step-000001/state.json",
                 "tokenizer/tokenizer.json", "metrics.jsonl", "recipe.toml", ".model/mine", "broken-step-000001/x"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("precious")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("fresh", [(), ("--fresh",)], ids=["", "fresh"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_users_folder_is_refused_and_nothing_in_it_changes(users, command, fresh, capsys):
    before = files_of(users)
    for folder in (".", "data", "model", "checkpoints", "recipe.toml"):
        with pytest.raises(SystemExit) as ended:
            main([command, COMMANDS[command], "--folder", folder, *fresh])
        assert ended.value.code == 1
        assert "--folder" in capsys.readouterr().err
    assert files_of(users) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_another_command_is_refused(tmp_path, command, capsys):
    owner = "sft" if command == "train" else "train"
    with RunFolder(tmp_path, owner).held():
        (tmp_path / "recipe.toml").write_text("precious")
    before = files_of(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([command, COMMANDS[command], "--folder", str(tmp_path), "--fresh"])
    assert ended.value.code == 1
    assert f"is a run of `tilestack {owner}`" in capsys.readouterr().err.replace("\n", " ")
    assert files_of(tmp_path) == before


def test_a_folder_with_hidden_files_alone_is_taken_and_they_stay(tmp_path):
    (tmp_path / ".gitignore").write_text("*")
    with RunFolder(tmp_path).held():
        assert sorted(path.name for path in tmp_path.iterdir()) == [".gitignore", MARKER]
    RunFolder(tmp_path).refuse_others()  # ours from now on
    with pytest.raises(ForeignFolder, match="is a run of `tilestack train`"):
        RunFolder(tmp_path, "dpo")


def test_a_folder_is_held_by_one_process_and_by_that_as_often_as_it_likes(tmp_path):
    mine = RunFolder(tmp_path)
    with mine.held(), mine.held(), pytest.raises(TrainingError, match="another process"), RunFolder(tmp_path).held():
        pass
    with RunFolder(tmp_path).held():
        pass
    assert not tmp_path.exists()  # nothing came of it


RUNNING = """
import fcntl, sys
with open(sys.argv[1], "a") as marker:
    fcntl.flock(marker, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_starting_over_waits_for_nobody_and_touches_nothing_of_a_live_run(tmp_path, capsys):
    run = tmp_path / "run"
    with RunFolder(run).held():
        (run / "metrics.jsonl").write_text("1")
    other = subprocess.Popen(
        [sys.executable, "-c", RUNNING, run / MARKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"held\n"
        (run / "checkpoints" / "step-000004").mkdir(parents=True)
        before = files_of(run)
        with pytest.raises(SystemExit) as ended:
            main(["train", "demo", "--folder", str(run), "--fresh"])
        assert ended.value.code == 1
        assert "another process is training in" in capsys.readouterr().err
        assert files_of(run) == before
        assert (run / "checkpoints" / "step-000004").is_dir()
    finally:
        other.communicate(timeout=60)


def test_a_run_does_not_read_from_the_folder_it_writes_to(tmp_path, capsys):
    with RunFolder(tmp_path / "run", "sft").held():
        (tmp_path / "run" / "model").mkdir()
    with pytest.raises(SystemExit):
        main(["sft", "sft", "--folder", str(tmp_path / "run"), "--set", f"data.tokenizer={tmp_path / 'run' / 'model'}"])
    assert "lies in the run's own folder" in capsys.readouterr().err.replace("\n", " ")


def test_a_model_that_is_not_the_runs_is_found_before_it_trains(tmp_path, capsys):
    run = tmp_path / "run"
    with RunFolder(run).held():
        (run / "model").mkdir()
        (run / "model" / "mine.safetensors").write_text("precious")
    with pytest.raises(SystemExit):
        main(["train", "demo", "--folder", str(run)])
    assert "model was not made by tilestack (it holds mine.safetensors)" in capsys.readouterr().err
    assert set(files_of(run)) == {MARKER, "model/mine.safetensors"}


def test_a_fresh_start_that_fails_leaves_the_run_as_it_was(tmp_path, capsys):
    run = tmp_path / "run"
    with RunFolder(run).held():
        for name in ("metrics.jsonl", "speed.jsonl", "recipe.toml", "checkpoints/notes.txt"):
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).write_text("precious")
        for name in ("checkpoints/step-000004", "broken-step-000002"):
            with whole_folder(run / name) as hidden:
                (hidden / "weights").write_text("precious")
    before = files_of(run)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "train",
                "demo",
                "--folder",
                str(run),
                "--fresh",
                "--set",
                "data.corpus=files",
                "--set",
                "data.files=['x']",
            ]
        )
    assert (ended.value.code, files_of(run)) == (1, before)
    assert "no data at x" in capsys.readouterr().err

    folder = RunFolder(run)
    with folder.held(), folder.starting_over():
        assert not (run / "checkpoints").exists()
        shutil.copytree(run, tmp_path / "killed")  # as a kill would leave it here
    assert set(files_of(run)) == {MARKER, "recipe.toml", "checkpoints/notes.txt"}
    with RunFolder(tmp_path / "killed").held():
        assert files_of(tmp_path / "killed") == before
