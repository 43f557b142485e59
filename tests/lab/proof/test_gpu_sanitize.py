"""`tests/gpu/sanitize.py` without a GPU: what it calls, in the interpreter, and what it makes of a tool's answers."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "gpu" / "sanitize.py"


@pytest.fixture
def sanitize(monkeypatch):
    monkeypatch.syspath_prepend(PATH.parent)
    spec = importlib.util.spec_from_file_location("gpu_sanitize", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_memory_is_checked_in_every_configuration_and_races_in_triton(sanitize):
    found = {tool: {(call.operator.name, call.backend, call.config) for call in sanitize.calls_of(tool)} for tool in sanitize.OPTIONS}  # fmt: skip
    configs = sanitize.ops.attention.implementations["gluon"].configs
    assert {("attention", "gluon", config) for config in configs} <= found["memcheck"]
    assert found["racecheck"] == {each for each in found["memcheck"] if each[1].startswith("triton")}
    assert {name for name, *_ in found["racecheck"]} == set(sanitize.OPERATORS)
    calls = list(sanitize.calls_of("memcheck"))
    assert len({call.name for call in calls}) == len(calls)
    for config in configs:
        heads = {call.case.name.split("x")[5] for call in calls if (call.backend, call.config) == ("gluon", config)}
        assert {"64", "128"} <= heads
    documents = {(call.backend, call.backward) for call in calls if "documents" in call.case.name}
    assert {("gluon", True), ("gluon", False), ("triton", True)} <= documents


def made_by(sanitize, folder, left, workers=1, until=None):
    (folder / "left.json").write_text(json.dumps(left))
    for worker in range(workers):
        sanitize.make_calls("racecheck", torch.device("cpu"), folder, worker, until or time.time() + 600)
    return [
        [json.loads(line) for line in (folder / f"{worker}.done").read_text().splitlines()] for worker in range(workers)
    ]


def test_calls_go_forward_and_backward_on_the_backend(sanitize, monkeypatch, tmp_path):
    monkeypatch.setattr(sanitize, "LARGEST", 600)
    monkeypatch.setattr(sanitize, "OPERATORS", ("attention", "flex_attention", "kv_write"))
    ran = set()
    apply = sanitize.torch.autograd.grad

    def noted(outputs, leaves, *given, **named):
        ran.add(len(leaves))
        return apply(outputs, leaves, *given, **named)

    monkeypatch.setattr(sanitize.torch.autograd, "grad", noted)
    calls = list(sanitize.calls_of("racecheck"))
    (done,) = made_by(sanitize, tmp_path, list(range(len(calls))))
    assert [number for number, _ in done] == list(range(len(calls)))
    assert {calls[number].backend for number, made in done if made} >= {"triton", "triton_standard", "triton_blocked"}
    assert ran >= {3}


def test_nobody_makes_a_call_that_another_has_begun_or_after_the_end(sanitize, monkeypatch, tmp_path):
    monkeypatch.setattr(sanitize, "make_call", lambda call, device: True)
    first, second = made_by(sanitize, tmp_path, [0, 3, 5], workers=2)
    assert (first, second) == ([[0, True], [3, True], [5, True]], [])
    (tmp_path / "late").mkdir()
    assert made_by(sanitize, tmp_path / "late", [0], until=time.time() - 1) == [[]]


TOOL = """#!{python}
import sys, os, json, pathlib
given = sys.argv[1:]
if "--help" in given:
    print("--base-port arg (=49152)")
    raise SystemExit
tool, folder, worker, until = given[given.index("--inside") + 1 :]
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
assert given[:2] == ["--tool", tool] and given[given.index("--launch-timeout") + 1] == "0"
assert given[given.index("--base-port") + 1] == str(49152 + 16 * int(worker))
left = json.loads((pathlib.Path(folder) / "left.json").read_text())
mine = left[int(worker) :: 2][: {most}]
(pathlib.Path(folder) / f"{{worker}}.done").write_text("".join(json.dumps([n, True]) + "\\n" for n in mine))
print({said!r})
raise SystemExit({code})
"""
CLEAN = "========= ERROR SUMMARY: 0 errors"


def run_with(sanitize, monkeypatch, tmp_path, *options, said=CLEAN, code=0, most=10_000):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable, said=said, code=code, most=most))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    kept = ["--kept", str(tmp_path / "kept.jsonl"), "--jobs", "2", "--tool", "racecheck"]
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *kept, *options])
    monkeypatch.setattr(sanitize, "OPERATORS", ("kv_write",))
    return sanitize.main()


@pytest.mark.parametrize(
    ("said", "code", "told"),
    [
        (CLEAN, 0, "racecheck: nothing found"),
        ("========= RACECHECK SUMMARY: 2 hazards displayed", 0, "something found"),
        (CLEAN, 86, "something found"),
        ("Segmentation fault", 3, "it failed with exit code 3"),
        ("========= Error: No attachable process found. compute-sanitizer timed-out.", 0, "the tool was not watching"),
        ("========= Error: Device not supported", 1, "the tool does not support this GPU"),
    ],
)
def test_the_exit_code_is_that_of_the_tools(sanitize, monkeypatch, tmp_path, capfd, said, code, told):
    found = run_with(sanitize, monkeypatch, tmp_path, said=said, code=code)
    out = capfd.readouterr().out
    assert found == (told != "racecheck: nothing found")
    assert told in out
    assert (said in out) == bool(found)


def test_what_was_clean_is_not_done_again(sanitize, monkeypatch, tmp_path, capfd):
    calls = len(list(sanitize.calls_of("racecheck")))
    assert run_with(sanitize, monkeypatch, tmp_path, "--budget", "60", most=2) == 1
    calls = len(list(sanitize.calls_of("racecheck")))
    assert f"4 calls; {calls - 4} are left" in capfd.readouterr().out
    assert run_with(sanitize, monkeypatch, tmp_path) == 0
    assert f"kv_write on triton: {calls} calls" in capfd.readouterr().out
    assert run_with(sanitize, monkeypatch, tmp_path, code=3) == 0  # nothing is left to be watched
    monkeypatch.setattr(sanitize, "hash_of_code", lambda: "other code")
    assert run_with(sanitize, monkeypatch, tmp_path, code=3) == 1


def test_a_backend_that_takes_no_call_is_a_failure(sanitize, monkeypatch, tmp_path, capfd):
    kept = sanitize.Kept(tmp_path / "kept.jsonl", "code")
    monkeypatch.setattr(sanitize, "OPERATORS", ("kv_write",))
    for call in sanitize.calls_of("racecheck"):
        kept.add("racecheck", call.name, made=False)
    assert not sanitize.watched("", "racecheck", 1, 1.0, kept)
    assert "kv_write on triton took no call, so nothing is known of it" in capfd.readouterr().out


def test_where_there_is_no_tool_that_is_said(sanitize, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize, "TOOLKIT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--tool", "memcheck"])
    assert sanitize.main() == 2
    assert "it comes with NVIDIA's CUDA toolkit" in capsys.readouterr().err
