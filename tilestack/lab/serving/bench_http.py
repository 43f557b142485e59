"""`tilestack bench http`: what the way over HTTP costs of the engine's throughput, at 64 streams.

One engine answers the same requests in turns, offline as `LLM.run` does and as streams over HTTP, which `tilestack load` in
another process reads: always 64 at once, the next as soon as one has ended. Answers differ in length, so that requests come
and go all the time; were they all to come at once, it would be measured how fast a client makes connections. Two figures of
each way:

    tokens/s       what whoever asks gets. Where cores are few, the server's and the reader's work is in it too
    µs of CPU      for a token, of the engine's process and of the server's: their own work alone, whatever else runs

The best of a few turns is kept, since what disturbs one only ever adds to it. On a CPU the model computes with one thread, so
that waiting threads do not count as work.
"""

import functools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from rich.table import Table

from tilestack import models
from tilestack.data import Tokenizer
from tilestack.engine import LLM, Engine, EngineSettings, Request, SamplingParams
from tilestack.lab.bench.timing import one_thread_on
from tilestack.lab.labels import dtype_name
from tilestack.lab.serving.bench_serve import QWEN3, SMALL, name_of
from tilestack.lab.serving.load import Ask, make_workload
from tilestack.lab.serving.load.workload import IDS, parse_length
from tilestack.lab.stale import HTTP, is_current, present_source

STREAMS, IN_A_ROW = 64, 4  # how many requests are under way at once, and come one after another
WAYS = ("offline", "http")
TINY = SMALL | dict(vocab_size=IDS[1], hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One run of the workload, for each token of its answers."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Workload:
    """What is asked in one turn, as `tilestack load` says it."""

    requests: int
    input: str
    output: str
    seed: int

    def asks(self) -> list[Ask]:
        return make_workload(
            self.requests, parse_length(self.input, "input"), parse_length(self.output, "output"), seed=self.seed
        )

    def options(self) -> list[str]:
        return [word for name, value in vars(self).items() for word in (f"--{name}", f"{value}")]


def bench_http(
    device: str,
    model: str | None = None,
    *,
    prompt: int = 16,
    answer: int | None = None,
    turns: int = 3,
    tell: Callable[[str], Any] = print,
) -> list[dict[str, Any]]:
    """A row for each way. Without a model: Qwen3-0.6B's shape on a GPU, a small one of the kind on a CPU, with weights drawn
    at random. Answers have `answer` tokens on average."""
    answer = answer or (16 if model and device == "cpu" else 128)
    longest = answer + answer // 2
    asked = functools.partial(Workload, STREAMS * IN_A_ROW, f"{prompt}", f"{answer - answer // 2}:{longest}")
    with one_thread_on(device):
        engine = engine_of(device, model, prompt + longest + 1)
        run = {"offline": offline, "http": over_http}
        best: dict[str, Turn] = {}
        for turn in range(turns + 1):  # the first warms up
            for way in WAYS:
                took = run[way](engine, asked(turn))
                tell(f"{way}: {1 / took.seconds:,.0f} tokens/s{' to warm up' if not turn else ''}")
                if turn:
                    best[way] = fastest(took, best.get(way, took))
    dtype = dtype_name(engine.decoder.embedding.weight.dtype)
    return [
        dict(op=HTTP, case=case_of(model), dtype=dtype, direction="forward", backend=way, unit="tokens/s",
             figure=round(1 / took.seconds, 1), cpu_us=round(1e6 * took.cpu_seconds, 1), device=device,
             source=present_source(HTTP, way, device))
        for way, took in best.items()
    ]  # fmt: skip


def case_of(model: str | None) -> str:
    return f"{name_of(model)}, {STREAMS} streams"


def is_kept(rows: Iterable[dict[str, Any]], model: str | None) -> bool:
    """Whether both ways were measured on the present source."""
    current = {row["backend"] for row in rows if row["case"] == case_of(model) and is_current(row)}
    return current == {*WAYS}


def fastest(one: Turn, other: Turn) -> Turn:
    return Turn(min(one.seconds, other.seconds), min(one.cpu_seconds, other.cpu_seconds))


def engine_of(device: str, model: str | None, context: int) -> Engine:
    settings = EngineSettings(device=device, context=context, max_sequences=STREAMS, queue=None)
    if model:
        return Engine.load(model, settings)
    torch.manual_seed(0)
    shape = QWEN3 if device == "cuda" else TINY
    with torch.device(device):
        decoder = models.Decoder(models.ModelConfig.from_hf(shape))
    decoder = decoder.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
    engine = Engine(decoder, words(decoder.config.vocabulary), settings)
    engine.runner.warm_up()
    return engine


def words(vocabulary: int) -> Tokenizer:
    """A tokenizer whose every token is a word."""
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({f"word{n}": n for n in range(vocabulary)})))


def offline(engine: Engine, asked: Workload) -> Turn:
    """All requests in a list, as `LLM` answers them."""
    asks = asked.asks()
    params = lambda ask: SamplingParams(temperature=0, max_tokens=ask.output, ignore_eos=True)
    requests = [Request(f"{n}", list(map(int, ask.prompt)), params(ask)) for n, ask in enumerate(asks)]
    llm = LLM(engine)
    began, cpu = time.perf_counter(), time.process_time()
    made = sum(output.usage.completion for output in llm.run(requests))
    return of_each_token(time.perf_counter() - began, time.process_time() - cpu, made, asks)


def over_http(engine: Engine, asked: Workload) -> Turn:
    """The same requests as streams that another process reads."""
    with serving(engine) as (address, server):
        command = [sys.executable, "-m", "tilestack", "load", address, "--model", "bench", *asked.options()]
        cpu = time.process_time() + cpu_seconds_of(server)
        done = subprocess.run(
            [*command, "--concurrency", f"{STREAMS}", "--warmup", "0", "--json", "-"], stdout=subprocess.PIPE, text=True
        )
        cpu = time.process_time() + cpu_seconds_of(server) - cpu
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}")
    figures = json.loads(done.stdout)
    return of_each_token(figures["duration"], cpu, figures["total_output_tokens"], asked.asks())


def cpu_seconds_of(process: int) -> float:
    """What a process that runs has taken, in all its threads, as Linux tells it."""
    times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]  # after its name: proc(5)
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def of_each_token(seconds: float, cpu_seconds: float, made: int, asks: list[Ask]) -> Turn:
    """What a run took for each token, if it made all that were asked for."""
    if made != (wanted := sum(ask.output for ask in asks)):
        raise RuntimeError(f"{made} tokens were made, not {wanted}")
    return Turn(seconds / made, cpu_seconds / made)


@contextmanager
def serving(engine: Engine) -> Iterator[tuple[str, int]]:
    """An engine behind HTTP as `tilestack serve` has it: the server's address, and its process."""
    from tilestack.server.apart import ServerApart
    from tilestack.server.settings import ServerSettings

    listening: queue.SimpleQueue[str] = queue.SimpleQueue()
    with ServerApart(ServerSettings(port=0), log=subprocess.DEVNULL) as server:
        host = server.host(engine, "bench", listening.put)
        thread = threading.Thread(target=host.serve, daemon=True)
        thread.start()
        try:
            while listening.empty():
                if not thread.is_alive():
                    raise RuntimeError("the server did not start")
                time.sleep(0.01)
            yield listening.get(), server.process.pid
        finally:
            host.ask_to_end()
            thread.join()


def costs(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """For each case, the share of the throughput that HTTP costs, and of the CPU time for a token that it adds."""
    found = {(row["case"], row["backend"]): row for row in rows}
    of = lambda case: (found[case, "offline"], found[case, "http"])
    cases = dict.fromkeys(row["case"] for row in rows)
    return {
        case: (1 - http["figure"] / plain["figure"], http["cpu_us"] / plain["cpu_us"] - 1)
        for case in cases
        for plain, http in [of(case)]
    }


def render_http(rows: list[dict[str, Any]]) -> Table:
    table = Table("model", "way", "tokens/s", "µs of CPU a token", "HTTP costs", title="The way over HTTP")
    for row in rows:
        rate, cpu = costs(rows)[row["case"]]
        cost = f"{rate:.1%} of the rate, {cpu:.1%} more CPU" if row["backend"] == "http" else "–"
        table.add_row(row["case"], row["backend"], f"{row['figure']:,.1f}", f"{row['cpu_us']:,.1f}", cost)
    return table
