"""Results and proofs with made-up numbers, for testing what is written from them. Nothing here was measured."""

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilestack.lab.contests import Result
from tilestack.lab.stale import present_source

MACHINE = {
    "gpu": "Imaginary GPU 9000",
    "slug": "imaginary",
    "driver": "999.1",
    "torch": "2.99.0",
    "triton": "3.99.1",
    "python": "3.11.0",
    "commit": "abc1234",
    "date": "2031-05-06T07:08:09+00:00",
}
ROOFS = {
    "copy_tb_per_s": 4.0,
    "matmul_tflops": {"bfloat16": 700.0, "float16": 690.0, "float32": 50.0},
    "host_floor_us": 3.0,
}


def row(op: str, case: str, backend: str, time_us: float | None, **others: Any) -> dict[str, Any]:
    """A row of the present source whose rates follow from its bytes and flops, as the benchmark's do."""
    moved, flops = others.pop("moved", 268_435_456), others.pop("flops", 500_000_000)
    base = dict(op=op, case=case, dtype="bfloat16", direction="forward", backend=backend, time_us=time_us, spread=0.01, host_us=9.5, ratio_to_best_peer=None, peak_mib=128.0, how="graph", note="", source=present_source(op, backend))  # fmt: skip
    if time_us is None:
        return base | dict.fromkeys(("tb_per_s", "tflops", "roof_fraction", "spread", "host_us", "peak_mib")) | others
    floor = max(moved / ROOFS["copy_tb_per_s"], flops / ROOFS["matmul_tflops"]["bfloat16"]) * 1e-6
    rates = dict(tb_per_s=moved / time_us * 1e-6, tflops=flops / time_us * 1e-6, roof_fraction=floor / time_us)
    return base | rates | others


def contest(op: str, case: str, ours: float, peers: dict[str, float], **others: Any) -> list[dict[str, Any]]:
    best = min(peers.values())
    candidates = {"triton": ours, **peers}
    return [row(op, case, name, time, ratio_to_best_peer=best / time, **others) for name, time in candidates.items()]


def small_result() -> Result:
    """A win at memory's roof, a loss at arithmetic's, a backward without peer, and a candidate that failed."""
    product = dict(moved=100_663_296, flops=137_438_953_472)
    return Result(
        MACHINE,
        ROOFS,
        [
            *contest("softmax", "8192x4096x-1", 80.0, {"aten": 120.0, "compile": 100.0}),
            *contest("softmax", "8192x1024x-1", 32.0, {"aten": 24.0}, moved=67_108_864),
            row("softmax", "8192x4096x-1", "liger", None, note="ran out of <memory>"),
            row("softmax", "8192x4096x-1", "triton", 110.0, direction="backward", moved=402_653_184),
            *contest("linear", "4096x4096x4096xplain", 400.0, {"aten": 220.0}, **product),
        ],
    )


def rows_of_two_backends() -> list[dict[str, Any]]:
    """Three cases whose best peers take 100, 50 and 80 µs: triton is on all of them, gluon on two."""
    times = {
        "64x4096x1024xplain": {"triton": 100.0, "gluon": 50.0, "aten": 100.0, "compile": 200.0},  # 1 and 2
        "8x4096x1024xplain": {"triton": 400.0, "aten": 100.0, "compile": 50.0},  # 1/8
        "256x4096x1024xplain": {"triton": 160.0, "gluon": 40.0, "aten": 80.0},  # 1/2 and 2
    }
    return [row("linear", case, name, time) for case, found in times.items() for name, time in found.items()]


def large_result(seed: int = 0) -> Result:
    """Every operator with many cases, as full a page as the benchmark fills."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for op in ("add", "axpy", "relu", "gelu", "silu", "softmax", "rms_norm", "layer_norm"):
        for n, columns in ((8192, 1024), (8192, 4096), (4096, 16384), (2048, 65536)):
            for direction, tensors in (("forward", 2), ("backward", 3)):
                moved = n * columns * 2 * tensors
                least = moved / 4.0 * 1e-6
                flops = 0 if (op, direction) == ("add", "backward") else n * columns * draw.choice((1, 4, 8))
                times = {"aten": least / draw.uniform(0.4, 0.9), "compile": least / draw.uniform(0.3, 0.95)}
                ours = least / draw.uniform(0.6, 0.97)
                rows += contest(op, f"{n}x{columns}", ours, times, moved=moved, flops=flops, direction=direction, host_us=draw.uniform(4, 60))  # fmt: skip
    for side in (4096, 8192):
        for direction, products in (("forward", 1), ("backward", 2)):
            flops = 2 * side**3 * products
            rows += contest("linear", f"{side}x{side}x{side}xplain", flops / 390e6, {"aten": flops / 680e6}, moved=6 * side * side * products, flops=flops, direction=direction)  # fmt: skip
    return Result(MACHINE, ROOFS, rows)


def proof(op: str, backend: str = "triton", ok: bool | None = True, error: float = 0.004, bound: float = 0.01, **others: Any) -> dict[str, Any]:  # fmt: skip
    return dict(op=op, backend=backend, case="3x33", variant="plain", dtype="float32", direction="forward", ok=ok, error=error, bound=bound, message="") | others  # fmt: skip


def many_proofs() -> list[dict[str, Any]]:
    draw = random.Random(1)
    return [
        proof(op, backend, dtype=dtype, direction=direction, case=case, error=draw.uniform(0, 0.009))
        for op in ("add", "gelu", "softmax", "rms_norm", "linear")
        for backend in ("triton", "aten")
        for dtype in ("float16", "bfloat16", "float32")
        for direction in ("forward", "backward")
        for case in ("1x1", "3x33", "5x1000")
    ]


def save(root: Path, result: Result, name: str = "ops") -> None:
    """Keep a result where the tables look for it."""
    path = root / "results" / result.slug / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result)))


def cells(markdown: str) -> list[list[str]]:
    """The cells of a Markdown table, header first."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]
