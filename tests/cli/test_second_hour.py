"""Commands used wrongly, as people do in their second hour: one clear line, before any work, and nothing lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tilestack.cli import error_in_words, main
from tilestack.cli.common import file_or_output, given_text, writable_file, writable_folder
from tilestack.data.readers import files_behind
from tilestack.lab import results
from tilestack.lab.proof import proofs
from tilestack.lab.training import loss_curves
from tilestack.models.checkpoints import CheckpointError, locate
from tilestack.train.run.folder import RunFolder

HERE = {"gpu": "", "cpu": "one CPU", "slug": "cpu", "commit": "a", "date": "2031-05-06"}
THERE = HERE | {"cpu": "another CPU"}
ROW = {"op": "add", "case": "1", "dtype": "float32", "direction": "forward", "backend": "torch"}


def said(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 1
    return capsys.readouterr().err


def test_an_error_of_the_system_names_its_file_and_no_number(tmp_path):
    with pytest.raises(OSError, match="No such file") as caught:
        (tmp_path / "none").read_text()
    assert error_in_words(caught.value) == f"{tmp_path / 'none'}: no such file or directory"
    assert error_in_words(OSError(28, "No space left on device")) == "no space left on device"


def test_a_place_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").touch()
    for arguments in (
        ["verify", "add", "--save", "--device", "cpu"],
        ["bench", "add", "--save", "--device", "cpu"],
        ["demo", "--output", str(tmp_path / "file" / "demo")],
        ["verify", "add", "--json", str(tmp_path)],
        ["explain", "add", "--ptx", str(tmp_path / "file" / "folder")],
        ["report", "--output", str(tmp_path / "file" / "page.html")],
        ["parity", "--output", str(tmp_path)],
        ["eval", "no-model", "no-text", "--json", str(tmp_path)],
    ):
        assert str(tmp_path) in said(capsys, *arguments)
    assert writable_file(tmp_path / "new" / "rows.json") == tmp_path / "new" / "rows.json"
    assert file_or_output(Path("-")) == Path("-")
    assert writable_folder(None) is None
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=rf"cannot write .*rows\.json: no permission to write {tmp_path}$"):
        writable_file(tmp_path / "new" / "rows.json")
    with pytest.raises(ValueError, match=rf"cannot write {tmp_path}/new: no permission to write {tmp_path}$"):
        writable_folder(tmp_path / "new")


def test_only_json_goes_to_standard_output_by_a_dash(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["tiles", "softmax", "--output", "-"],
        ["profile", "softmax", "--trace", "-"],
        ["load", "--plot", "-"],
        ["report", "--output", "-"],
        ["parity", "--output", "-"],
        ["quantize", "smollm2", "-"],
        ["explain", "add", "--ptx", "-"],
    ):
        assert "- is standard output, which only --json writes to; name a file" in said(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_tilde_that_no_shell_has_read_is_the_home_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["learn", "start", "add", "--folder=~/exercises"])
    assert (tmp_path / "home/exercises/add.py").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert writable_file(Path("~/rows.json")) == tmp_path / "home/rows.json"
    assert writable_folder(Path("~/run")) == tmp_path / "home/run"
    (tmp_path / "home/texts.txt").write_text("text")
    assert files_behind("~/texts.txt") == [tmp_path / "home/texts.txt"]
    (tmp_path / "home/model").mkdir()
    (tmp_path / "home/model/config.json").write_text("{}")
    assert locate("~/model") == tmp_path / "home/model"
    for command in (["train", "demo"], ["chain"]):
        assert f"{tmp_path / 'home/texts.txt'}" in said(capsys, *command, "--folder=~/texts.txt")


def test_a_file_that_no_page_may_replace_is_refused_before_parity_trains(capsys, tmp_path):
    (tmp_path / "index.html").write_text("mine")
    told = said(capsys, "parity", "--output", str(tmp_path / "index.html"))
    assert "index.html is there already, and is not a report of tilestack" in told


def test_a_backend_that_nothing_has_is_known_before_parity_trains(capsys):
    told = said(capsys, "parity", "--backend", "nope", "--device", "cpu")
    assert told.startswith("error: no operator has a nope backend; there are aten, ")
    assert "triton" in told


def test_a_run_is_no_model_and_says_where_its_model_is(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"is no model; the model of this run is {tmp_path / 'model'}$"):
        locate(str(tmp_path))


@pytest.mark.parametrize("stride", ["0", "-3"])
def test_a_stride_that_goes_nowhere_is_refused(capsys, stride):
    assert "--stride" in said(capsys, "eval", "no-model", "no-text", "--stride", stride)


@pytest.mark.parametrize(("command", "option"), [("demo", "--output"), ("sft", "--folder")])
def test_a_folder_of_somebody_else_is_refused_by_the_option_that_names_it(tmp_path, command, option):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(
        ValueError, match=rf"is not a run \(it holds mine\.txt\); give it a folder of its own: {option}"
    ):
        RunFolder(tmp_path, command)


def test_figures_of_another_machine_are_not_mixed_with_those_of_this_one(tmp_path):
    path = results.path_of("cpu", "kernels", tmp_path)
    results.merge(path, THERE, {}, [ROW])
    with pytest.raises(ValueError, match="holds figures of another CPU, and this is one CPU; move it away first"):
        results.merge(path, HERE, {}, [ROW])
    assert results.load(path)["machine"] == THERE
    results.save(kept := tmp_path / "proofs.json", {"machine": THERE, "proofs": []})
    with pytest.raises(ValueError, match="holds figures of another CPU"):
        proofs.save_proofs(kept, HERE, [])
    results.save(results.path_of("cpu", loss_curves.CURVES, tmp_path), {"machine": THERE, "model": "m", "runs": []})
    with pytest.raises(ValueError, match="holds figures of another CPU"):
        loss_curves.merge_curves(tmp_path, HERE, "m", {"name": "all"})


def test_another_machines_file_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results.save(results.path_of("cpu", "kernels"), {"machine": THERE, "roofs": {}, "rows": []})
    assert "results/cpu/kernels.json holds figures of another CPU" in said(
        capsys, "bench", "add", "--device", "cpu", "--save"
    )


@pytest.mark.parametrize("text", ["[1, 2]", "3", "{", "\xff"])
def test_a_file_that_is_no_results_file_is_named(tmp_path, text):
    (tmp_path / "odd.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"odd\.json is not "):
        results.read_json(tmp_path / "odd.json")


def test_a_terminal_without_our_characters_loses_no_result():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "tilestack", "doctor"], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"torch" in done.stdout


def test_what_is_no_text_comes_as_what_can_be_read_of_it(monkeypatch):
    assert given_text("def \udcff漢") == "def �漢"
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="reads standard input, and there is none"):
        given_text("-")


def test_ctrl_c_while_the_imports_run_shows_no_traceback(tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/typer.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "tilestack", "--help"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "slow"), *sys.path])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("command", "recipe", "meant"),
    [
        ("train", "sft", "`tilestack sft sft`"),
        ("sft", "demo", "`tilestack train demo`"),
        ("sft", "grpo", "`tilestack grpo grpo`"),
    ],
)
def test_a_recipe_of_another_command_names_that_command(capsys, command, recipe, meant):
    told = said(capsys, command, recipe)
    assert told.endswith(f". This is a recipe of another command: {meant}\n")


def test_a_wrong_setting_of_a_right_recipe_blames_no_command(capsys):
    assert "another command" not in said(capsys, "train", "demo", "--set", "run.steps=many")


def test_a_sweep_beside_operators_is_refused_by_its_own_name(capsys):
    assert said(capsys, "bench", "memory", "softmax", "--device", "cpu") == (
        "error: bench memory is measured by itself, without other names beside it\n"
    )


def test_a_model_that_is_not_there_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"A run leaves its model there when it ends; begin or finish sft first$"
    ):
        locate("runs/sft/model")
    with pytest.raises(FileNotFoundError, match=r"`hf download Qwen/Qwen3-0\.6B --local-dir Qwen3-0\.6B`"):
        locate("Qwen/Qwen3-0.6B")
    (tmp_path / "models").mkdir()
    for path in ("nowhere", "models/mine", "/no/where", "../other"):
        with pytest.raises(FileNotFoundError, match=r"or one of smollm2$"):
            locate(path)
