"""Which backend was fastest where: the tables that `auto` asks on CUDA, one per GPU, made from measured results.

`tables/<gpu>.json` holds, for every operator, backends best first: by dtype and bucket of sizes, and a default for sizes
that were not measured. A bucket is the powers of two below the first tensor's number of elements and its last dimension:

    {"softmax": {"default": ["triton", "aten", "torch"], "bfloat16": {"25x12": ["triton", "aten", "torch"]}}}

A GPU without a table runs Triton where there is a choice, except for what PyTorch's libraries are known to do best.
"""

import functools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestack.contract import Operator, registry
from tilestack.contract.cases import Make

TABLES = Path(__file__).parent / "tables"
UNMEASURED: dict[str, list[str]] = {"linear": ["aten"], "attention": ["aten"], "grouped_linear": ["aten"]}

Entry = dict[str, Any]  # "default": backends, and each dtype: bucket to backends


def install() -> None:
    """Let `auto` ask these tables."""
    registry.set_preference(preferred)


def preferred(described: Operator, arguments: dict[str, Any], device: torch.device) -> list[str]:
    """The backends of a call, fastest first; empty where nothing is known."""
    return look_up(table_of(gpu_slug(torch.cuda.get_device_name(device))), described, arguments)


def look_up(table: dict[str, Entry], described: Operator, arguments: dict[str, Any]) -> list[str]:
    entry = table.get(described.name)
    if entry is None:
        return UNMEASURED.get(described.name, [])
    dtype, bucket = bucket_of(described, arguments)
    return entry.get(dtype, {}).get(bucket, entry["default"])


def bucket_of(described: Operator, arguments: dict[str, Any]) -> tuple[str, str]:
    """The dtype and size class of a call; empty where its sizes are symbols, or its first tensor is not kept."""
    first = arguments.get(described.tensors[0])
    if not isinstance(first, Tensor) or any(isinstance(size, torch.SymInt) for size in first.shape):
        return "", ""
    power = lambda size: max(size, 1).bit_length() - 1
    columns = first.shape[-1] if first.ndim else 1
    return str(first.dtype).removeprefix("torch."), f"{power(first.numel())}x{power(columns)}"


def gpu_slug(name: str) -> str:
    """A GPU's name as a file name: NVIDIA H200 is h200, NVIDIA GeForce RTX 4090 is rtx-4090."""
    plain = re.sub(r"\b(nvidia|geforce|tesla)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


@functools.cache
def table_of(slug: str) -> dict[str, Entry]:
    path = TABLES / f"{slug}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_table(results: dict[str, Any], folder: Path = TABLES) -> Path:
    """Make a GPU's table from its measured results."""
    path = folder / f"{results['machine']['slug']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(make_table(results["rows"]), indent=1, sort_keys=True) + "\n")
    table_of.cache_clear()
    registry.forget_plans()
    return path


def make_table(rows: list[dict[str, Any]]) -> dict[str, Entry]:
    """Backends by time, forward and backward added up; a backend that lacks one of the two is left out of that case."""
    times: dict[tuple, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        described = registry.operator_named(row["op"])
        if row["direction"] != "both" and row["time_us"] is not None and row["backend"] in described.implementations:
            times[row["op"], row["dtype"], row["case"]][row["backend"]][row["direction"]] = row["time_us"]

    slowdowns: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (op, dtype, case_name), by_backend in times.items():
        described = registry.operator_named(op)
        case = next((case for case in described.cases if case.name == case_name), None)
        if case is None:
            continue  # measured before the operator's cases changed
        directions = {direction for found in by_backend.values() for direction in found}
        totals = {name: sum(found.values()) for name, found in by_backend.items() if set(found) == directions}
        best = min(totals.values(), default=0.0)
        bucket = bucket_of(described, case.build(Make(getattr(torch, dtype), "meta")))
        for backend, total in totals.items():
            # A microsecond more for each, since a backward that only passes its gradient on takes none.
            slowdown = (total + 1) / (best + 1)
            slowdowns[op, *bucket][backend].append(slowdown)
            slowdowns[op, "default"][backend].append(slowdown)

    table: dict[str, Entry] = defaultdict(dict)
    for (op, *where), found in slowdowns.items():
        # On average over the cases each took: `auto` goes on to the next where one refuses a call.
        ranking = sorted(found, key=lambda name: sum(found[name]) / len(found[name]))
        if where == ["default"]:
            table[op]["default"] = ranking
        else:
            dtype, bucket = where
            table[op].setdefault(dtype, {})[bucket] = ranking
    return dict(table)
