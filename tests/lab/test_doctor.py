"""The doctor, here and on machines that lack things."""

import pytest
from rich.console import Console

from tilestack.lab import doctor


def test_the_doctor_gives_a_fix_for_whatever_is_not_well():
    findings = doctor.doctor()
    by_name = {finding.what: finding for finding in findings}
    assert {"Python", "torch", "triton", "GPU", "interpreter", "C compiler", "disk", "memory"} <= set(by_name)
    assert {f"extra {extra}" for extra in doctor.EXTRAS} <= set(by_name)
    assert by_name["Python"].status == "ok"
    for finding in findings:
        assert finding.status in doctor.MARKS
        assert bool(finding.fix) == (finding.status != "ok"), finding
        assert finding.text


@pytest.fixture
def versions(monkeypatch):
    installed = {"triton": "3.7.1", "numpy": "2.4.6", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(doctor, "version_of", lambda package: installed.get(package, ""))
    return installed


@pytest.mark.parametrize(
    ("triton", "numpy", "status"),
    [("3.6.0", "2.4.0", "limited"), ("3.6.0", "2.3.5", "ok"), ("3.7.1", "2.4.6", "ok"), ("", "2.4.6", "missing")],
)
def test_triton_3_6_wants_an_older_numpy_for_its_interpreter(versions, triton, numpy, status):
    versions |= {"triton": triton, "numpy": numpy}
    found = doctor.interpreter()
    assert found.status == status
    assert ("numpy<2.4" in found.fix) == (status == "limited")


@pytest.mark.parametrize(
    ("version", "status"),
    [("3.6.0", "ok"), ("3.7.1", "ok"), ("3.5.1", "limited"), ("3.8.0", "limited"), ("", "missing")],
)
def test_triton_is_held_against_the_tested_range(versions, version, status):
    versions["triton"] = version
    assert doctor.tested("triton").status == status


def test_a_machine_without_a_compiler_is_told_which_to_install(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert doctor.compiler().status == "missing"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "CC=no-such-compiler" in doctor.compiler().text


def test_an_unknown_amount_of_memory_is_no_error(monkeypatch):
    monkeypatch.setattr(doctor, "text_of_file", lambda path: "")
    assert doctor.memory().status == "ok"


def test_the_table_keeps_the_brackets_of_a_fix():
    console = Console(width=200)
    with console.capture() as shown:
        console.print(
            doctor.render_findings([doctor.Finding("extra hf", "missing", "no x", "pip install 'tilestack[hf]'")])
        )
    assert "pip install 'tilestack[hf]'" in shown.get()
