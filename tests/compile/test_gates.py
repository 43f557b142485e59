"""The gates bite: each planted fault is named, and a sound kernel, Gluon included, passes."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tilestack.lab.compile import spills
from tilestack.lab.compile.absent_gpu import INSTRUCTIONS, KernelReport, gate
from tilestack.lab.compile.spills import Owed, spills_no_longer_owed

SOUND = KernelReport(
    operator="linear",
    backend="triton",
    case="64x64x64",
    dtype="bfloat16",
    direction="forward",
    kernel="matmul_kernel",
    capability=90,
    constants={},
    num_warps=4,
    num_stages=3,
    registers=128,
    spill_bytes=0,
    stack_bytes=0,
    shared_bytes=232_448,
    warnings=[],
    instructions=dict.fromkeys(INSTRUCTIONS, 0) | dict(wgmma=4),
    half_dots=[64],
    seconds=0.0,
    digest="",
    ptx="",
)
NO_TENSOR_CORES = dict.fromkeys(INSTRUCTIONS, 0)


@pytest.fixture(scope="module")
def planted(uninterpreted) -> dict[str, dict]:
    rows = uninterpreted("tests/compile/planted.py")
    return {row["kernel"] + ("_serialised" if row["constants"].get("SERIALISED") else ""): row for row in rows}


def test_a_sound_report_passes():
    assert gate(SOUND) == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (dict(spill_bytes=8), "spills 8 bytes"),
        (dict(shared_bytes=232_449), "asks for 232449 bytes of shared memory, sm_90 has 232448"),
        (dict(capability=80, shared_bytes=166_913), "sm_80 has 166912"),
        (dict(warnings=["(C7510) Potential Performance Loss"]), "C7510"),
        (dict(instructions=NO_TENSOR_CORES), "without tensor cores"),
        (dict(instructions=NO_TENSOR_CORES | dict(mma=8)), "64 rows without wgmma"),
        (dict(ptx="ld.global.b32 %r1, [%rd1]; griddepcontrol.wait;"), "does ld.global.b32 before it waits"),
        (dict(ptx="cp.async.cg.shared.global [%r1], [%rd1]; griddepcontrol.wait;"), "does cp.async.cg.shared.global"),
        (dict(ptx="atom.global.gpu.acq_rel.add.s32 a; griddepcontrol.wait;"), "does atom.global.gpu.acq_rel.add.s32"),
    ],
)
def test_each_fault_is_named(fault, reason):
    (found,) = gate(replace(SOUND, **fault))
    assert reason in found


def test_a_spill_is_owed_up_to_its_limit_on_its_gpu(monkeypatch):
    monkeypatch.setattr(spills, "OLDER", False)
    entry = Owed({90: 16}, ("linear", "64x64x64", "bfloat16"), "a reason")
    monkeypatch.setattr(spills, "SPILLS_OWED", {"matmul_kernel": entry})
    owing = replace(SOUND, spill_bytes=16)
    assert gate(owing) == []
    assert gate(replace(owing, spill_bytes=20)) == ["spills 20 bytes of registers, owed are at most 16 on sm_90"]
    assert gate(replace(owing, capability=100, instructions=dict.fromkeys(INSTRUCTIONS, 0) | dict(tcgen05=2)))
    assert gate(replace(owing, kernel="another_kernel"))
    assert spills_no_longer_owed(["matmul_kernel"], 90, ["linear"]) == []
    assert spills_no_longer_owed(["another_kernel"], 90, ["linear"]) == ["matmul_kernel"]
    assert spills_no_longer_owed([], 90, ["conv2d"]) == []  # not the operator that has it spill
    assert spills_no_longer_owed([], 100, ["linear"]) == []  # owed on another GPU


def test_what_an_older_triton_makes_of_a_kernel_is_let_through_there_alone(monkeypatch):
    monkeypatch.setattr(spills, "SPILLS_OWED", {})
    monkeypatch.setattr(spills, "SPILLS_OF_OLDER", {"matmul_kernel": {90: 16}})
    spilling = replace(SOUND, spill_bytes=16)
    for older in (True, False):
        monkeypatch.setattr(spills, "OLDER", older)
        assert (gate(spilling) == []) is older
        assert gate(replace(spilling, spill_bytes=20))
        assert gate(replace(spilling, kernel="another_kernel"))


@pytest.mark.parametrize(
    "sound",
    [
        dict(ptx="ld.param.b64 a; cp.async.bulk.prefetch.L2.global [a], 32; griddepcontrol.wait; ld.global.b32 b;"),
        dict(ptx="ld.global.b32 %r1, [%rd1];"),  # begins when the one in front has ended
        dict(half_dots=[], instructions=NO_TENSOR_CORES),  # no dot, or one in float32
        dict(half_dots=[32], instructions=NO_TENSOR_CORES | dict(mma=8)),  # too few rows for a warpgroup
        dict(capability=80, shared_bytes=166_912, instructions=NO_TENSOR_CORES | dict(mma=8)),
        dict(capability=100, instructions=NO_TENSOR_CORES | dict(tcgen05=2)),
    ],
)
def test_what_a_gate_leaves_alone(sound):
    assert gate(replace(SOUND, **sound)) == []


def test_a_kernel_that_spills_is_caught(planted):
    row = planted["spilling_kernel"]
    assert row["spill_bytes"] > 0
    assert any("spills" in reason for reason in row["failures"])


def test_a_kernel_that_wants_too_much_shared_memory_is_caught(planted):
    row = planted["hoarding_kernel"]
    assert row["shared_bytes"] == 4 * 2 * 128 * 128 * 2  # stages, operands, tile, bytes
    assert any("shared memory" in reason for reason in row["failures"])
    assert row["half_dots"] == [128]
    assert row["instructions"]["wgmma"] > 0


def test_a_gluon_kernel_compiles_and_passes(planted):
    row = planted["product_kernel"]
    assert row["failures"] == []
    assert row["instructions"]["wgmma"] == 4  # K = 64 in steps of 16
    assert row["shared_bytes"] == 2 * 64 * 64 * 2


def test_a_serialised_warpgroup_product_is_caught(planted):
    (reason,) = planted["product_kernel_serialised"]["failures"]
    assert reason.startswith("(C75")


def test_the_interpreter_is_refused():
    code = "from tilestack.lab.compile.absent_gpu import AbsentGpu; AbsentGpu(90)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | dict(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "start again without TRITON_INTERPRET" in done.stderr
