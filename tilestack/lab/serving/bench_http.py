"""`tilestack bench http`: what the way over HTTP costs of the engine's throughput, at 64 streams.

One engine answers the same requests in turns: offline as `LLM.run` does, and as streams over HTTP, by a server in its own
process and by one in another (`serve --one-process` and `--two-processes`). `tilestack load` reads them in a process of its
own: always 64 at once, the next as soon as one has ended. Answers differ in length, so that requests come and go all the time;
were they all to come at once, it would be measured how fast a client makes connections. Two figures of each way:

    tokens/s       what whoever asks gets. Where cores are few, the server's and the reader's work is in it too
    µs of CPU      for a token, of the engine's process and of the server's: their own work alone, whatever else runs; left
                   out where the system does not tell it of another process

The best of a few turns is kept, since what disturbs one only ever adds to it. On a CPU the model computes with one thread, so
that waiting threads do not count as work.
"""

import functools
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
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
OFFLINE, ONE_PROCESS, TWO_PROCESSES = WAYS = ("offline", "http", "http, two processes")
TOLD = 15  # lines of a log, at its end, that are told where something fails
TINY = SMALL | dict(vocab_size=IDS[1], hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One run of the workload, for each token of its answers."""

    seconds: float
    cpu_seconds: float | None  # where it is known


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
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each way that works, and of the others what went wrong. Without a model: Qwen3-0.6B's shape on a GPU, a small
    one of the kind on a CPU, with weights drawn at random. Answers have `answer` tokens on average."""
    answer = answer or (16 if model and device == "cpu" else 128)
    longest = answer + answer // 2
    asked = functools.partial(Workload, STREAMS * IN_A_ROW, f"{prompt}", f"{answer - answer // 2}:{longest}")
    with one_thread_on(device):
        engine = engine_of(device, model, prompt + longest + 1)
        best, failed = best_turns(engine, [asked(turn) for turn in range(turns + 1)], tell)
    dtype = dtype_name(engine.decoder.embedding.weight.dtype)
    rows = [
        dict(op=HTTP, case=case_of(model), dtype=dtype, direction="forward", backend=way, unit="tokens/s",
             figure=round(1 / took.seconds, 1), **cpu_figure(took), device=device,
             source=present_source(HTTP, way, device))
        for way, took in best.items()
    ]  # fmt: skip
    return rows, failed


def best_turns(
    engine: Engine, asked: list[Workload], tell: Callable[[str], Any]
) -> tuple[dict[str, Turn], dict[str, str]]:
    """The fastest turns of each way, of which the first only warms up; and what went wrong with those that failed."""
    run: dict[str, Callable[[Engine, Workload], Turn]] = {
        OFFLINE: offline,
        ONE_PROCESS: functools.partial(over_http, serving=in_one_process),
        TWO_PROCESSES: functools.partial(over_http, serving=in_two_processes),
    }
    best: dict[str, Turn] = {}
    failed: dict[str, str] = {}
    for turn, work in enumerate(asked):
        for way in [way for way in WAYS if way not in failed]:
            try:
                took = run[way](engine, work)
            except Exception as problem:  # whatever it is, the other ways are measured
                if way == OFFLINE:  # which they are compared with
                    raise
                failed[way] = str(problem) or type(problem).__name__
                best.pop(way, None)
                tell(f"{way}: failed")
                continue
            tell(f"{way}: {1 / took.seconds:,.0f} tokens/s{' to warm up' if not turn else ''}")
            if turn:
                best[way] = fastest(took, best.get(way, took))
    return best, failed


def cpu_figure(took: Turn) -> dict[str, float]:
    return {} if took.cpu_seconds is None else {"cpu_us": round(1e6 * took.cpu_seconds, 1)}


def case_of(model: str | None) -> str:
    return f"{name_of(model)}, {STREAMS} streams"


def is_kept(rows: Iterable[dict[str, Any]], model: str | None) -> bool:
    """Whether all ways were measured on the present source."""
    current = {row["backend"] for row in rows if row["case"] == case_of(model) and is_current(row)}
    return current == {*WAYS}


def fastest(one: Turn, other: Turn) -> Turn:
    of_cpu = [turn.cpu_seconds for turn in (one, other) if turn.cpu_seconds is not None]
    return Turn(min(one.seconds, other.seconds), min(of_cpu, default=None))


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


@dataclass(frozen=True)
class Server:
    """One that listens."""

    address: str
    cpu_seconds: Callable[[], float | None]  # what its process has taken, where it is not the engine's


Serving = Callable[[Engine, int], AbstractContextManager[Server]]


def over_http(engine: Engine, asked: Workload, serving: Serving) -> Turn:
    """The same requests as streams that another process reads."""
    with told_with_log() as log, serving(engine, log) as server:
        command = [sys.executable, "-m", "tilestack", "load", server.address, "--model", "bench", *asked.options()]
        before = time.process_time(), server.cpu_seconds()
        done = subprocess.run(
            [*command, "--concurrency", f"{STREAMS}", "--warmup", "0", "--json", "-"], capture_output=True, text=True
        )
        after = time.process_time(), server.cpu_seconds()
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ended with exit code {done.returncode}:\n{last_lines(done.stderr)}"
            )
        figures = json.loads(done.stdout)
        taken = [now - then for now, then in zip(after, before, strict=True) if now is not None and then is not None]
        cpu = sum(taken) if len(taken) == len(before) else None
        return of_each_token(figures["duration"], cpu, figures["total_output_tokens"], asked.asks())


@contextmanager
def told_with_log() -> Iterator[int]:
    """A file for a server's log, by its number; what goes wrong is told with its end."""
    with tempfile.TemporaryFile() as log:
        try:
            yield log.fileno()
        except Exception as problem:
            log.seek(0)
            said = last_lines(log.read().decode(errors="replace"))
            raise RuntimeError(f"{problem}\nthe server's log ends with\n{said}" if said else str(problem)) from problem


def last_lines(said: str) -> str:
    """The end of what a process said, but for requests that it answered."""
    return "\n".join([line for line in said.splitlines() if '"level": "info"' not in line][-TOLD:])


def cpu_seconds_of(process: int) -> float | None:
    """What a process that runs has taken, in all its threads, where it is told as Linux does."""
    try:
        told = Path(f"/proc/{process}/stat").read_text()
        times = told.rpartition(")")[2].split()[11:13]  # after its name: proc(5)
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def of_each_token(seconds: float, cpu_seconds: float | None, made: int, asks: list[Ask]) -> Turn:
    """What a run took for each token, if it made all that were asked for."""
    if made != (wanted := sum(ask.output for ask in asks)):
        raise RuntimeError(f"{made} tokens were made, not {wanted}")
    return Turn(seconds / made, None if cpu_seconds is None else cpu_seconds / made)


@contextmanager
def in_two_processes(engine: Engine, log: int) -> Iterator[Server]:
    """An engine behind HTTP as `tilestack serve --two-processes` has it."""
    from tilestack.server.apart import ServerApart
    from tilestack.server.settings import ServerSettings

    listening: queue.SimpleQueue[str] = queue.SimpleQueue()
    with ServerApart(ServerSettings(port=0), log) as server:
        host = server.host(engine, "bench", listening.put)
        thread = threading.Thread(target=host.serve, daemon=True)
        thread.start()
        try:
            address = address_told(listening, thread, server.end_in_words)
            yield Server(address, functools.partial(cpu_seconds_of, server.process.pid))
        finally:
            host.ask_to_end()
            thread.join()


@contextmanager
def in_one_process(engine: Engine, log: int) -> Iterator[Server]:
    """The same as `tilestack serve --one-process` has it."""
    from tilestack.engine import AsyncEngine
    from tilestack.server.listening import listen
    from tilestack.server.process import run_server
    from tilestack.server.settings import ServerSettings

    listening: queue.SimpleQueue[str] = queue.SimpleQueue()
    settings, asynchronous = ServerSettings(port=0), AsyncEngine(engine, "bench")
    with listen(settings) as taken, logged_in(log):
        thread = threading.Thread(target=run_server, args=(asynchronous, settings, taken, listening.put), daemon=True)
        thread.start()
        try:
            yield Server(address_told(listening, thread, lambda: "the server did not start"), lambda: 0.0)
        finally:
            asynchronous.ending = True
            thread.join()


def address_told(listening: "queue.SimpleQueue[str]", thread: threading.Thread, why_not: Callable[[], str]) -> str:
    """Where a server listens, once it does; it never will where its thread has ended."""
    while thread.is_alive():
        try:
            return listening.get(timeout=0.1)
        except queue.Empty:
            pass
    raise RuntimeError(why_not())


@contextmanager
def logged_in(log: int) -> Iterator[None]:
    """Standard error in a file, with the log of a server that takes the process for its own."""
    loggers = [logging.getLogger(name) for name in ("tilestack", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    with open(log, "w", buffering=1, closefd=False) as file, redirect_stderr(file):
        try:
            yield
        finally:
            for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
                logger.handlers, logger.propagate = handlers, propagate
                logger.setLevel(level)


def costs(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, float | None]]:
    """For each case and way over HTTP, the share of the throughput that it costs, and of the CPU time for a token that it
    adds, where that is known."""
    found = {(row["case"], row["backend"]): row for row in rows}
    cases = dict.fromkeys(case for case, _ in found)
    return {
        (case, way): (
            1 - found[case, way]["figure"] / found[case, OFFLINE]["figure"],
            cpu_added(found[case, way], found[case, OFFLINE]),
        )
        for case in cases
        for way in (ONE_PROCESS, TWO_PROCESSES)
        if (case, way) in found and (case, OFFLINE) in found
    }


def cpu_added(http: dict[str, Any], plain: dict[str, Any]) -> float | None:
    return http["cpu_us"] / plain["cpu_us"] - 1 if "cpu_us" in http and "cpu_us" in plain else None


def render_http(rows: list[dict[str, Any]]) -> Table:
    table = Table("model", "way", "tokens/s", "µs of CPU a token", "HTTP costs", title="The way over HTTP")
    found = costs(rows)
    for row in rows:
        cost = cost_in_words(*found[key]) if (key := (row["case"], row["backend"])) in found else "–"
        cpu = f"{row['cpu_us']:,.1f}" if "cpu_us" in row else "–"
        table.add_row(row["case"], row["backend"], f"{row['figure']:,.1f}", cpu, cost)
    return table


def cost_in_words(rate: float, cpu: float | None) -> str:
    return f"{rate:.1%} of the rate" + ("" if cpu is None else f", {cpu:.1%} more CPU")
