"""Whether a result or a proof is of the present source: a row carries the hash of what it measured.

A row with another hash, or with none, was measured on an older source. It is shown as such, with its commit, and
`tilestack bench --stale --save` measures it again. What a peer runs is not our source; its version is in the stamp, or
in its row. An engine's figure also follows the workload it answers, whoever's engine it is.
"""

import functools
import hashlib
from pathlib import Path
from typing import Any

from tilestack.contract.registry import operators
from tilestack.lab.bench.peers import is_peer
from tilestack.lab.source import code_wherever_it_lies, source_hash

PACKAGE = Path(__file__).resolve().parents[1]
TRAINING = "train"  # what rows of `tilestack bench train` have for an operator
OF_A_TRAINING_STEP = (
    "contract", "contract/native/*.h", "ops", "kernels", "nn", "optim", "models/decoder.py", "models/attention.py",
    "models/context.py", "models/norm.py", "models/rotary.py", "train/loop.py", "train/step.py", "train/static_step.py",
    "train/batch_buffer.py", "train/balancing.py", "train/execution.py", "train/optimizers.py", "train/next_token.py",
    "train/fp8*.py", "parallel/mesh.py", "parallel/placement.py", "tuning/*.py", "tuning/tables/*.json",
)  # fmt: skip
# Whole runs: loss curves, chains of recipes, and models that were quantised.
OF_A_RUN = (*OF_A_TRAINING_STEP, "models", "data", "train", "quant", "engine")
LAYER = "layer"  # the same of `tilestack bench layers`
OF_A_LAYER = tuple(part for part in OF_A_TRAINING_STEP if not part.startswith(("optim", "train/", "parallel/"))) + (
    "train/next_token.py",
    "lab/training/layer_candidates.py",
)
OF_AN_OPTIMIZER = (
    "optim", "kernels/optim", "kernels/matmul/gram.py", "kernels/matmul/naive.py", "kernels/tiles.py", "contract/launch.py",
    "contract/backends.py",
)  # fmt: skip
SERVING, HTTP = "serve", "http"  # the same of `tilestack bench serve` and `tilestack bench http`
OF_A_WORKLOAD = ("lab/serving/serve_workloads.py", "lab/serving/serve_candidates.py")
OF_AN_ENGINE = (
    "contract", "contract/native/*.h", "ops", "nn", "quant", "engine", "models/attention.py", "models/cache.py",
    "models/context.py", "models/decoder.py", "models/invariant.py", "models/mla.py", "models/norm.py", "models/paged.py", "models/rotary.py", "garbage.py",
    "tuning/*.py",
)  # fmt: skip
OF_STREAMS = (
    "engine/asynchronous.py",
    "engine/delta_queue.py",
    "engine/host.py",
    "engine/messages.py",
    "engine/remote.py",
    "engine/thread.py",
)  # which a server has, and an engine by itself does without
OF_A_SERVER = ("server", "data/tokenizer.py", "lab/serving/load", "lab/serving/bench_http.py")
OF_A_DEVICE = {
    "cpu": ("kernels/aten.py", "kernels/cpu", "kernels/cpu/*.cpp", "kernels/cpu/*.h"),
    "cuda": (
        "kernels/*.py", "kernels/attention", "kernels/cuda", "kernels/elementwise", "kernels/hopper", "kernels/matmul",
        "kernels/memory", "kernels/norm", "kernels/quantised", "kernels/sampling", "kernels/softmax",
        "tuning/tables/*.json",
    ),
}  # fmt: skip


@functools.cache
def present_source(op: str, backend: str, device: str = "") -> str:
    """The hash of what an operator, an optimizer, a training step or an engine on a device runs today; empty where nothing
    of ours runs it."""
    if op in (SERVING, HTTP):
        return hash_of_parts(parts_of_serving(op, backend, device))
    if is_peer(backend):
        return ""
    operator = next((found for found in operators() if found.name == op), None)
    if operator is not None:
        return source_hash(op, backend) if backend in operator.implementations else ""
    return hash_of_parts({TRAINING: OF_A_TRAINING_STEP, LAYER: OF_A_LAYER}.get(op, OF_AN_OPTIMIZER))


def parts_of_serving(op: str, backend: str, device: str) -> tuple[str, ...]:
    """What decides an engine's figure: for another's engine the workload alone."""
    if is_peer(backend):
        return OF_A_WORKLOAD
    of_either = (*OF_AN_ENGINE, *OF_A_DEVICE[device])
    return (
        (*of_either, *OF_A_SERVER) if op == HTTP else (*of_either, *OF_A_WORKLOAD, *(f"!{part}" for part in OF_STREAMS))
    )


@functools.cache
def hash_of_parts(parts: tuple[str, ...]) -> str:
    """One hash over the code of some of our files, and of every file in some of our folders, of CUDA C++ too; a part may be a
    pattern, and one that begins with an exclamation mark is left out."""
    digest = hashlib.sha256()
    for code in sorted(map(code_wherever_it_lies, files_of_parts(parts))):
        digest.update(f"{code}\n".encode())
    return digest.hexdigest()[:16]


def files_of_parts(parts: tuple[str, ...]) -> set[Path]:
    inside = lambda place: [path for path in place.rglob("*") if path.suffix in (".py", ".cpp", ".cu", ".cuh")]
    left_out = {place for part in parts if part.startswith("!") for place in PACKAGE.glob(part[1:])}
    places = [place for part in parts if not part.startswith("!") for place in PACKAGE.glob(part)]
    return {path for place in places for path in ([place] if place.is_file() else inside(place))} - left_out


def source_of_run() -> str:
    """The hash of what a whole run of training or quantising may take part in today."""
    return hash_of_parts(OF_A_RUN)


def run_is_current(run: dict[str, Any]) -> bool:
    """Whether such a run is of the present source."""
    return run.get("source") == source_of_run()


def is_current(row: dict[str, Any]) -> bool:
    """Whether a row or proof of ours is of the present source."""
    return bool(row.get("source")) and row["source"] == present_source(row["op"], row["backend"], row.get("device", ""))
