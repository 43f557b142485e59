"""`tests/gpu/sanitize.py` without a GPU: what it calls, in the interpreter, and what its exit code says of a tool's."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[1] / "gpu" / "sanitize.py"


@pytest.fixture
def sanitize():
    spec = importlib.util.spec_from_file_location("gpu_sanitize", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_memory_is_checked_in_every_configuration_and_races_in_triton(sanitize):
    found = {tool: {(call.operator.name, call.backend, call.config) for call in sanitize.calls_of(tool)} for tool in sanitize.TOOLS}  # fmt: skip
    configs = sanitize.ops.attention.implementations["gluon"].configs
    assert {("attention", "gluon", config) for config in configs} <= found["memcheck"]
    assert found["racecheck"] == {each for each in found["memcheck"] if each[1].startswith("triton")}
    assert {name for name, *_ in found["racecheck"]} == set(sanitize.OPERATORS)
    heads = {call.case.name.split("x")[5] for call in sanitize.calls_of("memcheck") if call.backend == "gluon"}
    assert {"64", "128"} <= heads
    documents = {call.backend for call in sanitize.calls_of("memcheck") if "documents" in call.case.name}
    assert {"gluon", "triton"} <= documents


def test_calls_go_forward_and_backward_on_the_backend(sanitize, monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "LARGEST", 600)
    monkeypatch.setattr(sanitize, "OPERATORS", ("attention", "flex_attention"))
    ran = set()
    apply = sanitize.torch.autograd.grad

    def noted(outputs, leaves, *given, **named):
        ran.add(len(leaves))
        return apply(outputs, leaves, *given, **named)

    monkeypatch.setattr(sanitize.torch.autograd, "grad", noted)
    assert sanitize.make_calls("racecheck", torch.device("cpu")) == 0
    assert ran >= {3}
    told = capsys.readouterr().out
    assert "attention on triton_standard: " in told
    assert " 0 calls" not in told


def test_a_backend_that_takes_no_call_is_a_failure(sanitize, monkeypatch):
    monkeypatch.setattr(sanitize, "make_call", lambda call, device: call.backend != "triton_blocked")
    assert sanitize.make_calls("racecheck", torch.device("cpu")) == 1


@pytest.mark.parametrize(
    ("ends_with", "code", "told"),
    [
        (0, 0, "memcheck: nothing found\nracecheck: nothing found"),
        (86, 1, "memcheck: something found"),
        (3, 1, "racecheck: it failed with exit code 3"),
    ],
)
def test_the_exit_code_is_that_of_the_tools(sanitize, monkeypatch, tmp_path, capfd, ends_with, code, told):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $@"\nexit {ends_with}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["sanitize.py"])
    assert sanitize.main() == code
    out = capfd.readouterr().out
    assert told in out
    for name in sanitize.TOOLS:
        assert f"1 --tool {name} --error-exitcode 86" in out
        assert f"{sys.executable} {PATH} --inside {name}" in out


def test_where_there_is_no_tool_that_is_said(sanitize, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize, "TOOLKIT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--tool", "memcheck"])
    assert sanitize.main() == 2
    assert "it comes with NVIDIA's CUDA toolkit" in capsys.readouterr().err
