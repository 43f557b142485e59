"""Which backend, in which configuration, was fastest where: the tables that `auto` asks on CUDA, one per GPU, made from
measured results; and what it takes on a CPU.

`tables/<gpu>.json` holds, for every operator, backends best first, `triton:tall` for one in its configuration `tall`: by
dtype and bucket of sizes, of forward and backward together and of the forward alone, which is all that calls without
gradients need; and a default for dtypes that were not measured. A bucket is the powers of two below the numbers
of the operator's `tuning_key` and its words (the first tensor's elements and last dimension where it has none):

    {"softmax": {"default": ["triton", "aten"], "bfloat16": {"25x12": ["triton", "aten"]},
                 "bfloat16 forward": {"25x12": ["aten", "triton"]}},
     "attention": {"default": ["aten"], "bfloat16": {"6x12x12 dim128 causal": ["gluon", "aten"]}}}

Between the sizes that were measured the nearest bucket with the same words speaks. float16 has as many bytes and the same
tensor cores as bfloat16, which speaks for it until it is measured itself; a backend that takes no float16 is passed over,
as in any ranking. A GPU without a table runs Triton where there is a choice, except for what PyTorch's libraries are known
to do best.

`tilestack tune` measures more on the machine it runs on and keeps it in the user's cache, a table of the same form that
is asked first, bucket by bucket.
"""

import functools
import json
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestack.contract import Operator, registry
from tilestack.contract.cases import Make
from tilestack.contract.named import call_named, parameters_of
from tilestack.files import alone_in, write_text_whole

TABLES = Path(__file__).parent / "tables"
UNMEASURED: dict[str, list[str]] = {
    "linear": ["aten"],
    "bmm": ["aten"],
    "attention": ["aten"],
    "conv2d": ["aten"],
    "grouped_linear": ["aten"],
    "flex_attention": ["gluon"],  # which takes plain attention, and leaves others to Triton
    "linear_swiglu": ["triton_split_k", "triton_parts"],  # the first takes few rows and leaves others to cuBLAS
    # Triton goes through a tile of these twice, Gluon once.
    "swiglu_fp8_tiles": ["gluon"],
    "swiglu_gradient_fp8_tiles": ["gluon"],
    "cross_entropy_gradient_fp8_tiles": ["gluon"],
}

ON_CPU = ["aten"]  # one vectorised pass, where a definition is several; without it, or where it refuses, the definition

BUCKET = re.compile(r"(\d+(x\d+)*)?( \S+)*")  # powers of two, then words; see `bucket_of`
Entry = dict[str, Any]  # "default": backends, and each dtype: bucket to backends


def install() -> None:
    """Let `auto` ask these tables."""
    registry.set_preference(preferred)


def preferred(op: Operator, arguments: dict[str, Any], device: torch.device, with_gradient: bool) -> list[str]:
    """The backends of a call, fastest first; empty where nothing is known."""
    if device.type != "cuda":
        return ON_CPU
    return look_up(known_of(gpu_slug(torch.cuda.get_device_name(device))), op, arguments, with_gradient)


def look_up(table: dict[str, Entry], op: Operator, arguments: dict[str, Any], with_gradient: bool = True) -> list[str]:
    entry = table.get(op.name)
    if entry is None:
        return UNMEASURED.get(op.name, [])
    dtype, bucket = bucket_of(op, arguments)
    measured = rankings_of(entry, dtype, with_gradient)
    near = nearest(bucket, measured) if bucket else None
    return measured[near] if near else entry["default"]


def rankings_of(entry: Entry, dtype: str, with_gradient: bool) -> dict[str, list[str]]:
    """What a call in a dtype goes by, bucket by bucket: float16 by bfloat16's where it has none."""
    found = entry.get(dtype, {}) | ({} if with_gradient else entry.get(f"{dtype} forward", {}))
    return found if found or dtype != "float16" else rankings_of(entry, "bfloat16", with_gradient)


def nearest(bucket: str, measured: Iterable[str]) -> str | None:
    """The measured bucket with the same words whose numbers are the fewest powers of two away; None where there is none."""
    numbers, words = parts_of(bucket)
    alike = [(other, found) for other in measured if (found := parts_of(other))[1] == words]
    distance = lambda found: sum(abs(a - b) for a, b in zip(numbers, found, strict=True))
    near = min(((distance(f), other) for other, (f, _) in alike if len(f) == len(numbers)), default=None)
    return near[1] if near else None


def parts_of(bucket: str) -> tuple[list[int], list[str]]:
    numbers, *words = bucket.split(" ")
    return [int(number) for number in numbers.split("x") if number], words


def bucket_of(op: Operator, arguments: dict[str, Any]) -> tuple[str, str]:
    """The dtype and size class of a call; empty where its sizes are symbols, or what they are of is not kept."""
    first = arguments.get(op.tensors[0]) if op.tensors else None
    key = key_of(op, arguments)
    if not isinstance(first, Tensor) or key is None or any(isinstance(part, torch.SymInt) for part in key):
        return "", ""
    power = lambda size: str(max(size, 1).bit_length() - 1)
    numbers = "x".join(power(part) for part in key if not isinstance(part, str))
    return str(first.dtype).removeprefix("torch."), " ".join(
        [numbers, *(part for part in key if part and isinstance(part, str))]
    )


def key_of(op: Operator, arguments: dict[str, Any]) -> tuple | None:
    """What speed depends on, by the operator's own word; None where an argument of it is not at hand."""
    if op.tuning_key is None:
        first = arguments.get(op.tensors[0]) if op.tensors else None
        return None if not isinstance(first, Tensor) else (first.numel(), first.shape[-1] if first.ndim else 1)
    if any(name not in arguments for name in parameters_of(op.tuning_key)):
        return None
    key = call_named(op.tuning_key, arguments)
    if not isinstance(key, tuple) or not all(isinstance(part, int | str | torch.SymInt) for part in key):
        raise TypeError(f"the tuning_key of {op.name} answers a tuple of whole numbers and words, not {key!r}")
    return key


def gpu_slug(name: str) -> str:
    """A GPU's name as a file name: NVIDIA H200 is h200, NVIDIA GeForce RTX 4090 is rtx-4090."""
    plain = re.sub(r"\b(nvidia|geforce|tesla)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


@functools.cache
def known_of(slug: str) -> dict[str, Entry]:
    """All that is known of a GPU: what was measured on this machine over what is shipped."""
    return merged(table_of(slug), user_table_of(slug))


@functools.cache
def table_of(slug: str) -> dict[str, Entry]:
    path = TABLES / f"{slug}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def user_table_of(slug: str) -> dict[str, Entry]:
    """What `tilestack tune` kept; a file that is none of ours counts for nothing, with a warning."""
    try:
        return read_table(user_table_path(slug))
    except ValueError as error:
        warnings.warn(str(error), stacklevel=2)
        return {}


def read_table(path: Path) -> dict[str, Entry]:
    """A table on disk, empty where there is none yet; a ValueError that says what to do where it is none of ours."""
    try:
        return checked_table(json.loads(path.read_text())) if path.exists() else {}
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no table of `tilestack tune` ({error}); delete it") from None


def user_table_path(slug: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tilestack" / "tuning" / f"{slug}.json"


def checked_table(table: Any) -> dict[str, Entry]:
    """The table, or a ValueError where it is not of our form."""
    words = lambda value: isinstance(value, list) and all(isinstance(word, str) for word in value)
    for op, entry in table.items() if isinstance(table, dict) else [("", None)]:
        if not isinstance(entry, dict) or not words(entry.get("default")):
            raise ValueError(f"{op or 'it'} has no ranking by default")
        for dtype, buckets in entry.items():
            if dtype == "default":
                continue
            if not isinstance(buckets, dict) or not all(map(words, buckets.values())):
                raise ValueError(f"{op} in {dtype} is no ranking by bucket")
            if unclear := next((bucket for bucket in buckets if not BUCKET.fullmatch(bucket)), None):
                raise ValueError(f"{op} in {dtype} has {unclear!r}, which is no bucket")
    return table


def merged(under: dict[str, Entry], over: dict[str, Entry]) -> dict[str, Entry]:
    """Two tables as one: where both know a bucket, the second speaks; a default is the first's, which has more cases."""
    table = dict(under)
    for op, entry in over.items():
        known = under.get(op, {})
        by_dtype = {dtype: known.get(dtype, {}) | found for dtype, found in entry.items() if dtype != "default"}
        table[op] = known | by_dtype | dict(default=known.get("default", entry["default"]))
    return table


def add_to_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Merge what was measured into a table on disk, whole or not at all; others who do so meanwhile wait."""
    measured = make_table(rows)
    with alone_in(path.parent):
        write_text_whole(path, json.dumps(merged(read_table(path), measured), indent=1, sort_keys=True) + "\n")
    forget_tables()


def forget_tables() -> None:
    """Read the tables again at the next call."""
    table_of.cache_clear()
    known_of.cache_clear()
    registry.forget_plans()


def write_table(
    results: dict[str, Any], folder: Path = TABLES, cases: Collection[tuple[str, str, str]] | None = None
) -> Path:
    """Renew a GPU's table by its measured results, which were measured in the configurations that were known. What only
    `tilestack tune` has measured stays; given the cases that a run has measured, as operator, case and dtype, so does what
    is known of others."""
    slug = results["machine"]["slug"]
    path = folder / f"{slug}.json"
    rows = results["rows"] if cases is None else rows_in_buckets(results["rows"], cases)
    measured = with_configs(make_table(rows), known_of(slug))
    with alone_in(path.parent):
        table = merged(read_table(path), measured)
        for op, entry in measured.items():
            if all(table[op][dtype].keys() == entry.get(dtype, {}).keys() for dtype in table[op] if dtype != "default"):
                table[op]["default"] = entry["default"]  # else it was made of more cases than these
        write_text_whole(path, json.dumps(table, indent=1, sort_keys=True) + "\n")
    forget_tables()
    return path


def rows_in_buckets(rows: list[dict[str, Any]], cases: Collection[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """The rows of all cases that share a bucket with one of these; of an operator that has a backward, those of a case whose
    backward was never measured speak of calls without gradients alone."""
    bucket = functools.cache(bucket_of_case)
    place = lambda row: (row["op"], row["case"], row["dtype"])
    touched = {bucket(*case) for case in cases} - {None}
    found = [row for row in rows if bucket(*place(row)) in touched]
    with_backward = {place(row) for row in found if row["direction"] != "forward"}
    alone = lambda row: has_backward(row["op"]) and place(row) not in with_backward
    return [row | dict(forward_only=True) if alone(row) else row for row in found]


def bucket_of_case(op: str, case: str, dtype: str) -> tuple[str, str, str] | None:
    """The operator with the dtype and size class of its case of a name; None where it has no such case any more."""
    operator = registry.operator_named(op)
    found = next((each for each in operator.cases if each.name == case), None)
    if found is None:
        return None
    return op, *bucket_of(operator, operator.bind(**found.build(Make(getattr(torch, dtype), "meta"))))


def has_backward(op: str) -> bool:
    return any(found.backward is not None for found in registry.operator_named(op).implementations.values())


def with_configs(table: dict[str, Entry], known: dict[str, Entry]) -> dict[str, Entry]:
    """A table whose backends have the configurations that a call gets from a known one."""

    def named(backend: str, ranking: list[str]) -> str:
        return next((name for name in ranking if name.partition(":")[0] == backend), backend)

    for op, entry in table.items():
        for key, buckets in entry.items():
            if key == "default":
                continue
            dtype, _, forward = key.partition(" ")
            measured = rankings_of(known.get(op, {}), dtype, with_gradient=not forward)
            for bucket in buckets:
                if near := nearest(bucket, measured):
                    buckets[bucket] = [named(backend, measured[near]) for backend in buckets[bucket]]
    return table


def slowdowns_of(times: dict[str, float]) -> Iterator[tuple[str, float]]:
    """How much slower than the fastest each is; with a microsecond more for each, since a backward that only passes its
    gradient on takes none."""
    best = min(times.values(), default=0.0)
    yield from ((name, (time + 1) / (best + 1)) for name, time in times.items())


def make_table(rows: list[dict[str, Any]]) -> dict[str, Entry]:
    """Backends by time: forward and backward added up, where a backend that lacks one of the two is left out of that case;
    and where there are two, the forward alone. Rows that are `forward_only` say nothing of both. Buckets stand under the dtype
    that calls are looked up by: of a product of codes, theirs."""
    forward_only = {(row["op"], row["dtype"], row["case"]) for row in rows if row.get("forward_only")}
    times: dict[tuple, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        operator = registry.operator_named(row["op"])
        if row["direction"] != "both" and row["time_us"] is not None and row["backend"] in operator.implementations:
            name = ":".join(filter(None, (row["backend"], row.get("config"))))
            times[row["op"], row["dtype"], row["case"]][name][row["direction"]] = row["time_us"]

    slowdowns: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (op, dtype, case_name), by_backend in times.items():
        if (place := bucket_of_case(op, case_name, dtype)) is None:
            continue  # measured before the operator's cases changed
        _, asked_by, bucket = place
        directions = {direction for found in by_backend.values() for direction in found}
        both = {name: sum(found.values()) for name, found in by_backend.items() if set(found) == directions}
        for backend, slowdown in slowdowns_of(both):
            slowdowns[op, "default"][backend].append(slowdown)
            if (op, dtype, case_name) not in forward_only:
                slowdowns[op, asked_by, bucket][backend].append(slowdown)
        if len(directions) > 1 or (op, dtype, case_name) in forward_only:
            forward = {name: found["forward"] for name, found in by_backend.items() if "forward" in found}
            for backend, slowdown in slowdowns_of(forward):
                slowdowns[op, f"{asked_by} forward", bucket][backend].append(slowdown)

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
