"""The command line as people run it: exit codes, one line for bad input, and files written."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tilestack.cli import main
from tilestack.contract import BackendError, backends
from tilestack.extras import install_command
from tilestack.lab.source import source_hash

NINE = {"add", "axpy", "relu", "gelu", "silu", "softmax", "rms_norm", "layer_norm", "linear"}
PLANTED = """
import torch
from tilestack import contract, ops

@contract.implements(ops.add, backend="planted", backward=lambda grad: (grad, grad))
def add(x, y):
    return torch.where(torch.arange(x.numel()).view(x.shape) < x.numel() - 1, x + y, 0)
"""


@dataclass
class Ended:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def tilestack(capsys, monkeypatch, outside):
    """Runs the command in this process, where PyTorch is loaded already."""

    def run(*arguments, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        backends._environment.cache_clear()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return Ended(ended.value.code, *capsys.readouterr())

    return run


def test_a_process_of_its_own_ends_with_the_exit_code_and_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "tilestack", "verify", "gelu", "--device", "cpu"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TILESTACK_BACKEND": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: gelu has no cuda backend (CUDA C++ kernels need a CUDA tensor")


def test_ops_lists_the_operators_with_their_backends(tilestack):
    done = tilestack("ops", "--json", "--device", "cpu")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 0
    assert rows.keys() >= NINE
    assert all("torch" in row["backends"] and len(row["backends"]) > 1 for row in rows.values())
    assert all(row["auto"] in ("aten", "torch") and row["summary"] for row in rows.values())
    assert (rows["softmax"]["auto"], rows["swiglu"]["auto"]) == ("aten", "torch")


def test_ops_of_a_name_shows_all_of_it(tilestack):
    done = tilestack("ops", "softmax", "--device", "cpu")
    shown = " ".join(done.stdout.split())
    assert shown.startswith("softmax(x: Tensor, dim: int = -1) -> Tensor")
    assert "defined in tilestack.ops.softmax; auto takes aten here" in shown
    assert "tilestack.kernels.softmax.rows" in shown
    assert [row["name"] for row in json.loads(tilestack("ops", "softmax", "--json", "--device", "cpu").stdout)] == [
        "softmax"
    ]


def test_verify_proves_and_writes_its_proofs(tilestack, tmp_path):
    done = tilestack("verify", "add", "--device", "cpu", "--quick", "--json", str(tmp_path / "new" / "proofs.json"))
    assert done.returncode == 0, done.stderr
    proofs = json.loads((tmp_path / "new" / "proofs.json").read_text())
    assert {p["backend"] for p in proofs if p["ok"]} >= {"triton", "aten"}
    assert not [p for p in proofs if p["ok"] is False]


def test_verify_names_the_case_that_a_planted_backend_gets_wrong(tilestack, tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    done = tilestack(
        "verify",
        "add",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--backend",
        "planted",
        "--load",
        str(tmp_path / "planted.py"),
    )
    assert done.returncode == 1
    wrong = " ".join(done.stdout.split())  # as a narrow terminal wraps it
    assert "WRONG add planted 33, plain float32 forward: out: 1 of 33 elements are out of bound, worst at [32]" in wrong


CRASHING = """
from tilestack import implements, ops

@implements(ops.relu, backend="crashing")
def relu(x):
    return undefined + x
"""


def test_a_crash_in_a_kernel_of_ones_own_is_shown_once_with_its_place(tilestack, tmp_path):
    (tmp_path / "crashing.py").write_text(CRASHING)
    arguments = (
        "--backend",
        "crashing",
        "--load",
        str(tmp_path / "crashing.py"),
        "--device",
        "cpu",
        "--dtype",
        "float32",
    )
    done = tilestack("verify", "relu", *arguments, "--quick")
    assert done.returncode == 1
    shown = " ".join(done.stdout.split())
    assert shown.count("WRONG") == 1
    assert "more: NameError: name 'undefined' is not defined" in shown
    assert "crashing.py:6)" in "".join(done.stdout.split())


def test_verify_keeps_what_was_proved_of_which_source(tilestack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = tilestack("verify", "relu", "--device", "cpu", "--dtype", "float32", "--backend", "triton", "--save")
    assert done.returncode == 0, done.stderr
    (forward, backward, *_) = json.loads(Path("results/cpu/proofs.json").read_text())["proofs"]
    assert forward["source"] == backward["source"] == source_hash("relu", "triton")
    assert forward["proved"] > 0 == forward["wrong"]
    again = tilestack(
        "verify", "relu", "--device", "cpu", "--dtype", "float32", "--backend", "triton", "--stale", "--json", "-"
    )
    assert json.loads(again.stdout) == []
    late = tilestack("verify", "relu", "--device", "cpu", "--dtype", "float16", "--stale", "--budget", "0")
    assert "were not begun within 0 seconds" in late.stderr


def test_json_to_standard_output_is_only_json(tilestack):
    done = tilestack("verify", "relu", "--device", "cpu", "--quick", "--dtype", "float32", "--json", "-")
    assert done.returncode == 0
    assert {p["dtype"] for p in json.loads(done.stdout)} == {"float32"}


def test_the_environment_narrows_each_operator_by_itself(tilestack):
    arguments = ("verify", "relu", "add", "--device", "cpu", "--quick", "--dtype", "float32", "--json", "-")
    proofs = json.loads(tilestack(*arguments, TILESTACK_BACKEND="relu=aten").stdout)
    backends = {name: {p["backend"] for p in proofs if p["op"] == name} for name in ("relu", "add")}
    assert backends == {"relu": {"aten"}, "add": {"torch", "aten", "cuda", "triton"}}


@pytest.mark.parametrize(
    ("arguments", "environment", "line"),
    [
        (["verify", "softmax", "--device", "cpu"], {"TILESTACK_BACKEND": "cuda"}, "softmax cannot run on cuda: CUDA C++ kernels need a CUDA tensor, not one on cpu; torch, aten, triton can"),
        (["verify", "sofmax"], {}, "no operator is named 'sofmax'; did you mean softmax?"),
        (["verify", "--dtype", "float12"], {}, "no dtype float12; choose from float16, bfloat16, float32, float64"),
        (["verify", "--device", "tpu"], {}, "--device must be cuda or cpu, not 'tpu'"),
        (["verify", "--load", "no-such-file.py"], {}, "no file no-such-file.py to load"),
        (["verify", "relu", "--device", "cpu", "--save", "--quick"], {}, "--save keeps proofs in every variant; leave --quick out"),
        (["verify", "--no-such-option"], {}, "No such option: --no-such-option"),
        (["no-such-command"], {}, "No such command 'no-such-command'."),
        (["verify"], {"TILESTACK_BACKEND": "a,b"}, "cannot read the backend choice 'a,b': write `triton` or `triton,softmax=torch`"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_one(tilestack, arguments, environment, line):
    done = tilestack(*arguments, **environment)
    assert done.returncode == 1
    assert done.stderr == f"error: {line}\n"
    assert done.stdout == ""


def test_the_exception_itself_only_with_debug():
    with pytest.raises(BackendError, match=r"no operator is named 'sofmax'; did you mean softmax\?"):
        main(["--debug", "verify", "sofmax"])


@pytest.mark.parametrize("pressed", [KeyboardInterrupt, EOFError])
def test_ctrl_c_and_ctrl_d_end_a_command_without_a_word(tilestack, monkeypatch, pressed):
    def leave(*_):
        raise pressed

    monkeypatch.setattr("tilestack.lab.bench.compare.rows_of", leave)
    done = tilestack("compare", "before")
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


def test_brackets_in_an_error_are_shown(tilestack, tmp_path):
    (tmp_path / "needy.py").write_text("\nraise ImportError('pip install tilestack[report]')")
    said = f"error: {tmp_path / 'needy.py'}:2: ImportError: pip install tilestack[report]\n"
    assert tilestack("verify", "--load", str(tmp_path / "needy.py")).stderr == said


def test_a_file_that_cannot_be_read_is_named_with_its_line(tilestack, tmp_path):
    (tmp_path / "broken.py").write_text("import torch\n\ndef add(x:\n")
    said = tilestack("verify", "add", "--load", str(tmp_path / "broken.py"), "--device", "cpu").stderr
    assert said.startswith(f"error: {tmp_path / 'broken.py'}:3: SyntaxError: ")
    (tmp_path / "deep.py").write_text("from tilestack import ops\n\nops.operator_named('none')\n")
    said = tilestack("verify", "add", "--load", str(tmp_path / "deep.py"), "--device", "cpu").stderr
    assert said.startswith(f"error: {tmp_path / 'deep.py'}:3: BackendError: no operator is named 'none'")


def test_a_backend_that_nothing_has_is_an_error_before_anything_is_measured(tilestack):
    done = tilestack("bench", "add", "--backend", "triton,nope", "--device", "cpu")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no backend or peer is named nope; add has aten, aten-rowwise, compile, ")


def test_parity_names_an_unknown_operator_before_it_trains(tilestack):
    done = tilestack("parity", "--swap", "rmsnorm", "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr == "error: no operator is named 'rmsnorm'; did you mean rms_norm?\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_is_no_error(tilestack, arguments):
    done = tilestack(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verify" in done.stdout


def test_every_command_is_in_a_group_and_its_paragraphs_wrap_where_the_terminal_ends():
    from tilestack.cli import PANELS, app

    assert {command.rich_help_panel for command in app.registered_commands} == set(PANELS)
    broken = [command.name for command in app.registered_commands if "\n" in (command.help or "").replace("\n\n", "")]
    assert broken == []


@pytest.mark.parametrize("command", ["train", "sft", "dpo", "kto", "grpo"])
def test_the_recipe_that_a_help_names_is_one_the_command_can_follow(tilestack, command):
    from tilestack.cli.recipe_keys import recipe_kinds
    from tilestack.cli.recipes import find_recipe

    shown = " ".join(tilestack(command, "--help").stdout.replace("│", " ").split())
    named = shown.partition("such as ")[2].partition(".")[0]
    recipe_kinds()[command].load(find_recipe(Path(named)))


@pytest.mark.parametrize("drawn", [True, False])
def test_memory_patterns_are_measured_saved_and_shown_with_or_without_plotly(tilestack, monkeypatch, tmp_path, drawn):
    from tilestack.lab import results
    from tilestack.lab.bench import memory_sweeps

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(memory_sweeps, "SWEEPS", [memory_sweeps.sweep_named("offset")])
    if not drawn:
        monkeypatch.setitem(sys.modules, "plotly", None)
        monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    done = tilestack("bench", "memory", "--device", "cpu", "--save")
    assert done.returncode == 0
    assert "elements from an aligned" in done.stdout
    (saved,) = tmp_path.glob("results/*/sweeps/memory.json")
    assert len(json.loads(saved.read_text())["rows"]) == 16
    assert (tmp_path / "runs/memory.html").exists() == drawn
    said = f"no page of plots, since the report needs plotly: {install_command('report')}"
    assert done.stdout.splitlines()[-1] == ("plots in runs/memory.html" if drawn else said)
