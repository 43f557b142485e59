"""`tilestack bench serve`: engines on the same workloads, with percent of the memory's roof.

    tilestack             this engine
    tilestack int8        with weights of 8 bits, on a CPU
    tilestack lookup      with look-up speculation, on what repeats itself
    tilestack operators   without the single kernel that decodes a batch of one, on a GPU
    tilestack fp8 kv      with keys and values kept in 8 bits, for the throughput
    tilestack fp8 weights with the layers' weights in 8 bits, on a GPU, for the throughput and batches of 1 and 64
    vllm                  where it is installed, or lies in peers/site beside the checkout
    transformers          `generate`, for the batches of equal length that it is made for

Every candidate answers each workload once to warm up and then a few times with other tokens; the best is kept, since what
disturbs a run only ever adds to it. On a GPU each has a process of its own. On a CPU, which others use too, they share one and
take turns, on all its cores and by the clock, so it should have nothing else to do.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from tilestack.lab import machine
from tilestack.lab.bench import peers
from tilestack.lab.bench.roofs import measure_roofs
from tilestack.lab.stale import is_current
from tilestack.models.checkpoints import PACKAGED

CANDIDATES = (
    "tilestack",
    "tilestack int8",
    "tilestack lookup",
    "tilestack operators",
    "tilestack fp8 kv",
    "tilestack fp8 weights",
    "vllm",
    "transformers",
)
PACKAGED_MODEL = "smollm2"
CPU_READ = 1 << 27  # numbers, half a gigabyte: more than any cache holds
CPU_READS = 200  # a few seconds, for what a machine's memory gives changes with what else uses it
# Engines of others, with the packages that they want: these come first in such an engine's process, and in no other.
PEER_PACKAGES = peers.FOLDER / "site"
QWEN3 = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rope_theta=1e6,
    tie_word_embeddings=True, eos_token_id=151645,
)  # fmt: skip
SMALL = QWEN3 | dict(vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512, eos_token_id=1)  # fmt: skip


def engine_is_importable(name: str) -> bool:
    module = name.split()[0]
    return module == "tilestack" or brings_packages(module) or is_installed(module)


def brings_packages(module: str) -> bool:
    return (PEER_PACKAGES / module).is_dir()


def environment_of(name: str) -> dict[str, str]:
    """What a candidate's process, and those that it starts, are given."""
    found = dict(os.environ)
    if brings_packages(name.split()[0]):
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PEER_PACKAGES), found.get("PYTHONPATH")]))
    return found


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def runs_on(name: str, device: str) -> bool:
    """Whether a candidate is for a device; the others are left out."""
    on_gpus = dict.fromkeys(("tilestack operators", "tilestack fp8 kv", "tilestack fp8 weights", "vllm"), "cuda")
    return ({"tilestack int8": "cpu"} | on_gpus).get(name, device) == device


def bench_serve(
    device: str,
    model: str | None = None,
    candidates: list[str] | None = None,
    only: list[str] | None = None,
    tell: Callable[[str], Any] = print,
    kept: Iterable[dict[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """A row for each workload and candidate, as it is measured, but for those that are kept of the present source. Without a
    model: Qwen3-0.6B's shape with weights drawn at random on a GPU, and on a CPU SmolLM2-135M, or where its package is not
    there a small shape."""
    if wrong := [name for name in candidates or () if name not in CANDIDATES]:
        raise ValueError(f"no engine {', '.join(wrong)}; choose from {', '.join(CANDIDATES)}")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "asked.json"
        model = model or (PACKAGED_MODEL if device == "cpu" and is_installed(PACKAGED[PACKAGED_MODEL][1]) else None)
        shape = None if model else QWEN3 if device == "cuda" else SMALL
        scale = 1 if device == "cuda" else 16 if model else 32
        current = [(row["case"], row["backend"]) for row in kept if stands(row, model)]
        asked = dict(device=device, model=model, shape=shape, scale=scale, only=only, folder=folder, current=current)
        config.write_text(json.dumps(asked))
        rate = memory_rate(device)
        names = list(candidates or CANDIDATES)
        for name in filter(lambda name: not engine_is_importable(name), names):
            tell(f"{name} is not installed here")
        names = [name for name in names if engine_is_importable(name) and runs_on(name, device)]
        measured_any = False
        for together in [names] if device == "cpu" and names else [[name] for name in names]:
            name = ", ".join(together)
            tell(f"{name} …")
            command = [sys.executable, "-m", "tilestack.lab.serving.serve_candidates", str(config), *together]
            for row in results_of(command, name, tell, environment_of(name)):
                tell(f"  {row['case']}, {row['backend']}: {row['figure']:,.2f} {row['unit']}")
                measured_any = True
                yield with_roof(row, rate)
        if not measured_any and not current:
            raise ValueError(
                "nothing was measured: no engine that runs here is for these workloads, or what went wrong is told above"
            )


def name_of(model: str | None) -> str:
    return Path(model).name if model else "random weights"


def stands(row: dict[str, Any], model: str | None) -> bool:
    """Whether a row is of the present source, of this model, and another's of the version that is here."""
    engine = row["backend"].split()[0]
    here = "" if engine == "tilestack" else machine.version_of(engine)
    return is_current(row) and row["model"] == name_of(model) and here in ("", row["versions"].get(engine))


def memory_rate(device: str) -> float:
    """Bytes a second that the memory moves at best: for a GPU those that a copy reads and writes, for a CPU those that all its
    threads read, as an engine reads weights. Measured before any engine runs, which it would disturb, and whose memory it
    gives back."""
    if device == "cuda":
        rate = measure_roofs(device).copy_tb_per_s * 1e12
        torch.cuda.empty_cache()
        return rate
    read = torch.ones(CPU_READ)
    return read.nbytes / min(timeit.repeat(read.max, number=1, repeat=CPU_READS))


def results_of(
    command: list[str], name: str, tell: Callable[[str], Any], environment: dict[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """What a process prints after RESULT, line by line; it ends with whoever listens, and where it fails that is told."""
    found = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("RESULT "):
                    found += 1
                    yield json.loads(line[7:])
        except BaseException:
            process.terminate()
            raise
        if code := process.wait():
            tell(f"{name} ended with exit code {code} after {found} workloads")


def with_roof(row: dict[str, Any], rate: float) -> dict[str, Any]:
    """The row with the share of the memory's rate that its unavoidable bytes amount to."""
    row["roof"] = round(row.pop("moved") / rate / row["seconds"], 4)
    return row


def render_engines(rows: list[dict[str, Any]]) -> Table:
    table = Table("workload", "engine", "figure", "of the memory's rate", "beside the best other", title="Serving")
    for row in rows:
        others = [
            each
            for each in rows
            if each["case"] == row["case"] and each["backend"].split()[0] != row["backend"].split()[0]
        ]
        best = min((each["seconds"] for each in others), default=None)
        ratio = "–" if best is None else f"{best / row['seconds']:.2f}×"
        table.add_row(row["case"], row["backend"], f"{row['figure']:,.2f} {row['unit']}", f"{row['roof']:.0%}", ratio)
    return table
