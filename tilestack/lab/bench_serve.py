"""`tilestack bench serve`: engines on the same workloads, each in a process of its own, with percent of the memory's roof.

    tilestack             this engine
    tilestack lookup      with look-up speculation, on what repeats itself
    tilestack persistent  with a batch of one decoded by a single kernel
    vllm                  where it is installed
    transformers          `generate`, for the batches of equal length that it is made for

Every candidate answers each workload once to warm up and then a few times with other tokens; the best is kept, since what
disturbs a run only ever adds to it.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from tilestack.lab import machine
from tilestack.lab.roofs import measured

CANDIDATES = ("tilestack", "tilestack lookup", "tilestack persistent", "vllm", "transformers")
QWEN3 = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rope_theta=1e6,
    tie_word_embeddings=True, eos_token_id=151645,
)  # fmt: skip
SMALL = QWEN3 | dict(vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512, eos_token_id=1)  # fmt: skip


def importable(name: str) -> bool:
    module = name.split()[0]
    return module == "tilestack" or importlib.util.find_spec(module) is not None


def bench_serve(
    device: str,
    model: str | None = None,
    candidates: list[str] | None = None,
    only: list[str] | None = None,
    tell: Callable[[str], Any] = print,
) -> list[dict[str, Any]]:
    """A row for each workload and candidate. Without a model: Qwen3-0.6B's shape on a GPU, a small one of the kind on a
    CPU, with weights drawn at random."""
    if wrong := [name for name in candidates or () if name not in CANDIDATES]:
        raise ValueError(f"no engine {', '.join(wrong)}; choose from {', '.join(CANDIDATES)}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "asked.json"
        shape = None if model else QWEN3 if device == "cuda" else SMALL
        asked = dict(
            device=device, model=model, shape=shape, scale=1 if device == "cuda" else 32, only=only, folder=folder
        )
        config.write_text(json.dumps(asked))
        for name in candidates or CANDIDATES:
            if not importable(name):
                tell(f"{name} is not installed here")
                continue
            tell(f"{name} …")
            command = [sys.executable, "-m", "tilestack.lab.serve_candidates", name, str(config)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if done.returncode:
                tell(f"{name} ended with exit code {done.returncode} after {len(found)} workloads")
            rows += found
    return with_roofs(rows, device)


def with_roofs(rows: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """The rows with the share of the memory's rate that their unavoidable bytes amount to, and the versions beside them."""
    rate = measured(device).copy_tb_per_s * 1e12
    stamp = machine.stamp(device)
    for row in rows:
        row["roof"] = round(row.pop("moved") / rate / row["seconds"], 4)
        row["versions"] = stamp.get("versions", {})
    return rows


def render(rows: list[dict[str, Any]]) -> Table:
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
