"""The stamp and the doctor, here and on machines that lack things."""

import re

import pytest
import torch
from rich.console import Console

from tilestack.lab import machine


def test_the_stamp_says_what_was_measured_on_and_with():
    found = machine.stamp("cpu")
    assert found["slug"] == "cpu"
    assert found["gpu"] == found["driver"] == ""
    assert found["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    assert found["cpu"].endswith("cores")
    assert list(found) == [
        "gpu",
        "slug",
        "driver",
        "capability",
        "multiprocessors",
        "torch",
        "triton",
        "cudnn",
        "liger",
        "transformers",
        "python",
        "cpu",
        "commit",
        "date",
    ]


@pytest.mark.parametrize(("number", "shown"), [(91002, "9.10.2"), (90100, "9.1.0"), (None, "")])
def test_cudnn_is_written_as_its_makers_do(monkeypatch, number, shown):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert machine.cudnn_version() == shown


def test_the_commit_comes_from_the_environment_where_there_is_no_git(monkeypatch):
    machine.commit.cache_clear()
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "0123abc")
    assert machine.commit() == "0123abc"
    machine.commit.cache_clear()


def test_the_doctor_gives_a_fix_for_whatever_is_not_well():
    findings = machine.doctor()
    by_name = {finding.what: finding for finding in findings}
    assert {"Python", "torch", "triton", "GPU", "interpreter", "C compiler", "disk", "memory"} <= set(by_name)
    assert {f"extra {extra}" for extra in machine.EXTRAS} <= set(by_name)
    assert by_name["Python"].status == "ok"
    for finding in findings:
        assert finding.status in machine.MARKS
        assert bool(finding.fix) == (finding.status != "ok"), finding
        assert finding.text


@pytest.fixture
def versions(monkeypatch):
    installed = {"triton": "3.7.1", "numpy": "2.4.6", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(machine, "version_of", lambda package: installed.get(package, ""))
    return installed


@pytest.mark.parametrize(
    ("triton", "numpy", "status"),
    [("3.6.0", "2.4.0", "limited"), ("3.6.0", "2.3.5", "ok"), ("3.7.1", "2.4.6", "ok"), ("", "2.4.6", "missing")],
)
def test_triton_3_6_wants_an_older_numpy_for_its_interpreter(versions, triton, numpy, status):
    versions |= {"triton": triton, "numpy": numpy}
    found = machine.interpreter()
    assert found.status == status
    assert ("numpy<2.4" in found.fix) == (status == "limited")


@pytest.mark.parametrize(
    ("version", "status"),
    [("3.6.0", "ok"), ("3.7.1", "ok"), ("3.5.1", "limited"), ("3.8.0", "limited"), ("", "missing")],
)
def test_triton_is_held_against_the_tested_range(versions, version, status):
    versions["triton"] = version
    assert machine.tested("triton").status == status


def test_a_machine_without_a_compiler_is_told_which_to_install(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert machine.compiler().status == "missing"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "CC=no-such-compiler" in machine.compiler().text


def test_missing_commands_and_files_are_no_errors(monkeypatch):
    assert machine.output_of("no-such-command-at-all") == ""
    assert machine.output_of("false") == ""
    assert machine.text_of_file("/no/such/file") == ""
    monkeypatch.setattr(machine, "text_of_file", lambda path: "")
    assert machine.memory().status == "ok"
    assert machine.cpu_name().endswith("cores")


def test_the_table_keeps_the_brackets_of_a_fix():
    console = Console(width=200)
    with console.capture() as shown:
        console.print(
            machine.render_findings([machine.Finding("extra hf", "missing", "no x", "pip install 'tilestack[hf]'")])
        )
    assert "pip install 'tilestack[hf]'" in shown.get()
