"""Training steps of one model: ours, eager and compiled, beside a loop in plain PyTorch, and transformers eager, compiled,
and with Liger's kernels.

Each candidate runs in a process of its own, so that its peak memory is its own and nothing is patched for the others. All
do the same work: the same configuration, micro-batch and length, random tokens, full causal attention, parameters and
gradients in one dtype, AdamW, no clipping. Peers are at their best: SDPA attention and PyTorch's fused AdamW. Ours goes
through the very step that `tilestack train` takes.

    python -m tilestack.lab.bench_train '{"candidate": "tilestack", "config": {…}, …}'      one candidate, as JSON
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from tilestack.lab.bench import Row
from tilestack.lab.peers import importable

OURS = ("tilestack", "tilestack-compile")
PEERS = ("plain", "plain-compile", "transformers", "transformers-compile", "transformers-liger")
CANDIDATES = (*OURS, *PEERS)


@dataclass(frozen=True)
class Work:
    """What every candidate does."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)  # in Hugging Face's words
    batch: int = 8
    sequence: int = 2048
    dtype: str = "bfloat16"
    device: str = "cuda"
    backend: str = ""  # of our operators, as a recipe says it
    warmup: int = 4
    steps: int = 10

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def ids(self) -> Tensor:
        shape = (self.batch, self.sequence)
        return torch.randint(self.config["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(
            self.device
        )


def ours(work: Work, compiled: bool) -> Callable[[], Any]:
    """The training step of `tilestack train`."""
    from tilestack import configure_backend, models, ops
    from tilestack.data import NO_LABEL
    from tilestack.train import Loss, Recipe, Trainer
    from tilestack.train.settings import read

    configure_backend(work.backend)
    torch.manual_seed(0)
    with torch.device(work.device):
        model = models.Decoder(models.ModelConfig.from_hf(work.config))
    ids = work.ids()
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], NO_LABEL)], 1)

    class RandomTokens:
        """The same batch again and again."""

        def next_batch(self):
            return ids

        def loss(self, model, batch):
            total = ops.linear_cross_entropy(model.hidden(batch), model.head_weight, labels, reduction="sum")
            return Loss(total, work.batch * (work.sequence - 1), tokens=work.tokens)

        def evaluate(self, model):
            return {}

        def sample(self, model):
            return []

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    recipe = read(
        Recipe,
        {
            "run": {
                "device": work.device, "compile": "default" if compiled else "off", "deterministic": False,
                "steps": 10**6,
            },
            "precision": {"parameters": work.dtype, "compute": work.dtype},
            "optimizer": {"clip": 0, "lr": 1e-4},
        },
    )  # fmt: skip
    trainer = Trainer(recipe, model, RandomTokens(), tempfile.mkdtemp())
    trainer.model.train()
    return trainer.train_step


def theirs(work: Work, way: str) -> Callable[[], Any]:
    """A training step of transformers, as its users write it."""
    importable("liger_kernel")  # finds what is installed beside the environment
    import transformers

    kind = work.config["model_type"]
    if way == "liger":
        from liger_kernel import transformers as liger

        getattr(liger, f"apply_liger_kernel_to_{kind}")()
    torch.manual_seed(0)
    settings = {name: value for name, value in work.config.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **settings)
    dtype = getattr(torch, work.dtype)
    with torch.device(work.device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.to(work.device).train()
    model.config.use_cache = False
    run = torch.compile(model) if way == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = work.ids()

    def step() -> None:
        run(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(work: Work, compiled: bool) -> Callable[[], Any]:
    """A training step in plain PyTorch."""
    from tilestack.lab.plain_model import PlainDecoder

    if work.config["model_type"] not in ("llama", "qwen3"):
        raise ValueError(f"there is no {work.config['model_type']} in plain PyTorch here")
    torch.manual_seed(0)
    model = PlainDecoder(work.config).to(work.device, getattr(torch, work.dtype))
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = work.ids()

    def step() -> None:
        logits = run(ids)[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(candidate: str, work: Work) -> dict[str, Any]:
    """Time the steps of a candidate in this process, after some that are not timed."""
    framework, _, way = candidate.partition("-")
    if framework == "transformers":
        step = theirs(work, way)
    else:
        step = (ours if framework == "tilestack" else plain)(work, way == "compile")
    cuda = work.device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(work.warmup):
        step()
    wait()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(work.steps):
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    return {"seconds": statistics.median(times), "spread": spread(times), "peak_mib": peak}


def spread(times: Sequence[float]) -> float:
    """The interquartile range over the median."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return (high - low) / middle


def available(candidates: Sequence[str] | None) -> list[str]:
    """The candidates that can be had here, or an error for one that was asked for and does not exist."""
    if unknown := [name for name in candidates or () if name not in CANDIDATES]:
        raise ValueError(f"no candidate {', '.join(unknown)}; there are {', '.join(CANDIDATES)}")
    if candidates:
        return list(candidates)
    needs = {
        "transformers": "transformers",
        "transformers-compile": "transformers",
        "transformers-liger": "liger_kernel",
    }
    module_of = lambda name: needs.get(name, "torch")
    return [name for name in CANDIDATES if importable(module_of(name))]


def bench_train(
    work: Work,
    candidates: Sequence[str] | None = None,
    say: Callable[[str], Any] = lambda words: None,
    timeout: float = 600,
) -> list[dict[str, Any]]:
    """A row for every candidate on the same work; one that fails has a note instead of figures."""
    rows = []
    for candidate in available(candidates):
        say(f"{candidate}, micro-batch {work.batch}")
        found = apart(candidate, work, timeout)
        row = Row(
            "train", f"{work.name}, {work.batch}x{work.sequence}", work.dtype, "step", candidate,
            how="wall time of whole steps", note=found.get("note", ""),
        )  # fmt: skip
        if "seconds" in found:
            row.time_us, row.spread, row.peak_mib = found["seconds"] * 1e6, found["spread"], found["peak_mib"]
        rows.append(row)
    timed = {row.backend: row.time_us for row in rows if row.time_us}
    for row in rows:
        others = [time_us for name, time_us in timed.items() if name in PEERS and name != row.backend]
        if row.time_us and others:
            row.ratio_to_best_peer = min(others) / row.time_us
    tokens = lambda row: work.tokens / row.time_us * 1e6 if row.time_us else None
    return [row.as_dict() | {"tokens_per_s": tokens(row)} for row in rows]


def apart(candidate: str, work: Work, timeout: float) -> dict[str, Any]:
    """Measure a candidate in a process of its own."""
    spec = json.dumps({"candidate": candidate, **asdict(work)})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tilestack.lab.bench_train", spec], capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"note": f"not done after {timeout:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    said = done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"]
    return {"note": "out of memory" if "OutOfMemoryError" in done.stderr else said[-1][:200]}


def render(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="training steps", title_justify="left")
    for heading in ("model, micro-batch", "candidate"):
        table.add_column(heading)
    for heading in ("tokens/s", "step", "peak GiB", "× best peer"):
        table.add_column(heading, justify="right")
    table.add_column("note")
    for row in rows:
        shown = [
            f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else "–",
            f"{row['time_us'] / 1e3:,.1f} ms" if row["time_us"] else "–",
            f"{row['peak_mib'] / 1024:.1f}" if row["peak_mib"] else "–",
            f"{row['ratio_to_best_peer']:.2f}×" if row["ratio_to_best_peer"] else "–",
        ]
        table.add_row(row["case"], row["backend"], *shown, row["note"])
    return table


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(measure(asked.pop("candidate"), Work(**asked))))
