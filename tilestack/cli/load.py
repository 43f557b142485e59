"""The `load` command: many requests to an OpenAI endpoint, and how they were answered."""

import asyncio
import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.table import Table

from tilestack.cli.common import JsonFile, console, progress_bar, writable_file, write_json, write_text
from tilestack.extras import MissingExtra, install_command

if TYPE_CHECKING:
    from tilestack.lab.serving.load import Ask, Outcome, Target

WHEN, WHAT, REPORT = "Arrival", "Requests", "Output"
LENGTHS = "a number of tokens (512), a range (100:1024), lognormal:MEAN, or sharegpt for lengths as in conversations"


def add_to(app: typer.Typer) -> None:
    app.command("load")(load_command)


def load_command(
    url: Annotated[str, typer.Argument(help="The server, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server lists.", show_default=False)] = None,
    api_key: Annotated[str | None, typer.Option(help="API key, if the server requires one.", envvar="TILESTACK_API_KEY", show_default=False)] = None,
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 100,
    rate: Annotated[float | None, typer.Option(help="Requests per second, at random times (Poisson); default: all at once.", min=1e-6, show_default=False, rich_help_panel=WHEN)] = None,
    concurrency: Annotated[int | None, typer.Option(help="At most this many in flight; without --rate a closed loop.", min=1, show_default=False, rich_help_panel=WHEN)] = None,
    warmup: Annotated[int, typer.Option(help="Warm-up requests, not counted.", min=0, rich_help_panel=WHEN)] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds without a response before a request fails.", min=0.001, rich_help_panel=WHEN)] = 600,
    input_: Annotated[str, typer.Option("--input", help=f"Prompts: {LENGTHS}.", rich_help_panel=WHAT)] = "512",
    output: Annotated[str, typer.Option(help="Output lengths, in the same format.", rich_help_panel=WHAT)] = "128",
    prefix: Annotated[int, typer.Option(help="Tokens of a prefix that prompts share.", min=0, rich_help_panel=WHAT)] = 0,
    prefixes: Annotated[int, typer.Option(help="Number of different prefixes.", min=1, rich_help_panel=WHAT)] = 1,
    text: Annotated[Path | None, typer.Option(help="Prompts are pieces of this file; default: random token ids.", exists=True, dir_okay=False, show_default=False, rich_help_panel=WHAT)] = None,
    vocabulary: Annotated[int, typer.Option(help="Random token ids are below this.", min=1, rich_help_panel=WHAT)] = 10_000,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions; needs --text.", rich_help_panel=WHAT)] = False,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0, rich_help_panel=WHAT)] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Generate the full output length; supported by tilestack and vLLM, not by OpenAI.", rich_help_panel=WHAT)] = True,
    seed: Annotated[int, typer.Option(help="Seed for prompts, lengths and arrival times.", rich_help_panel=WHAT)] = 0,
    goodput: Annotated[list[str] | None, typer.Option(help="Count requests within ttft:MS, tpot:MS or e2el:MS; may be given several times.", show_default=False, rich_help_panel=REPORT)] = None,
    json_: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the latencies to this .svg file.", callback=writable_file, show_default=False, rich_help_panel=REPORT)] = None,
) -> None:  # fmt: skip
    """Load-test an OpenAI-compatible server: throughput, TTFT, TPOT, ITL and end-to-end latency.

    Works with any OpenAI endpoint. The JSON has the field names of `vllm bench serve`.

    tilestack load --concurrency 64 --input 100:1024 --output 100:1024 keeps 64 requests in flight;
    tilestack load --rate 5 --input sharegpt --output sharegpt --prefix 200 --goodput ttft:500 sends five per second.
    """
    if importlib.util.find_spec("httpx2") is None:
        raise MissingExtra(f"tilestack load needs httpx2: {install_command('server')}")
    from tilestack.lab.serving.load import Objectives, Target, make_workload, summary
    from tilestack.lab.serving.load.arrivals import first_model
    from tilestack.lab.serving.load.plot import latency_plot
    from tilestack.lab.serving.load.workload import Prefixes, parse_length

    if chat and text is None:
        raise ValueError("--chat needs words to say: give a file by --text")
    if plot is not None and plot.suffix != ".svg":
        raise ValueError(f"--plot writes an .svg file, not {plot.name}")
    objectives = Objectives.parse(goodput or [])
    words = None if text is None else text.read_text(encoding="utf-8", errors="replace")
    asks = make_workload(
        requests + warmup,
        parse_length(input_, "input"),
        parse_length(output, "output"),
        prefixes=Prefixes(prefix, prefixes),
        text=words,
        vocabulary=vocabulary,
        seed=seed,
    )
    address = address_of_server(url)
    options = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
    target = Target(address, model or asyncio.run(first_model(address, api_key)), chat, options)
    sent = dict(rate=rate, concurrency=concurrency, seed=seed, api_key=api_key, timeout=timeout)
    warm = send_all(target, asks[requests:], "warming up", concurrency=1, api_key=api_key, timeout=timeout)
    if warm and warm[0].error:
        ids = f". Prompts are random ids below {vocabulary:,}; see --vocabulary and --text" if words is None else ""
        raise ValueError(f"{address} does not answer as asked: {warm[0].error}{ids}")
    outcomes = send_all(target, asks[:requests], "asking", **sent)
    figures = summary(outcomes, objectives)
    about = dict(
        date=time.strftime("%Y%m%d-%H%M%S"),
        backend="openai-chat" if chat else "openai",
        model_id=target.model,
        request_rate=rate if rate is not None else "inf",
        max_concurrency=concurrency,
        input=input_,
        output=output,
        prefix=prefix,
        prefixes=prefixes,
        seed=seed,
    )
    if str(json_) != "-":
        print_figures(figures, target.model)
    write_json(json_, about | figures)
    if plot is not None:
        write_text(plot, latency_plot(outcomes, figures, f"{target.model} on {address}"))
    if figures["failed"]:
        raise ValueError(f"{figures['failed']} of {requests} requests failed; the first: {figures['errors'][0]}")


def address_of_server(url: str) -> str:
    """Where the server is, as its requests need it."""
    address = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is none
        usable = False
    if not usable:
        raise ValueError(f"a server is given as http://HOST:PORT, not {url!r}")
    return address


def send_all(target: "Target", asks: "list[Ask]", doing: str, **how: Any) -> "list[Outcome]":
    """All requests, under a progress bar that tells the tokens per second so far."""
    from tilestack.lab.serving.load import run_load

    began, made = time.perf_counter(), 0
    with progress_bar() as progress:
        bar = progress.add_task(doing, total=len(asks))

        def ended(outcome: "Outcome") -> None:
            nonlocal made
            made += outcome.output_tokens
            speed = made / (time.perf_counter() - began)
            progress.update(bar, advance=1, description=f"{doing}, {speed:,.0f} tokens/s")

        return asyncio.run(run_load(target, asks, ended=ended, **how))


def print_figures(figures: dict[str, Any], model: str) -> None:
    told = f"{model}: {figures['completed']} requests in {figures['duration']:.2f} s, {figures['failed']} failed"
    console.print(told, highlight=False)
    rates = {
        "requests/s": "request_throughput",
        "output tokens/s": "output_throughput",
        "all tokens/s": "total_token_throughput",
        "requests/s within the objectives": "request_goodput",
    }
    shown = [f"{figures[key]:,.2f} {words}" for words, key in rates.items() if key in figures]
    console.print(", ".join(shown), highlight=False)
    table = Table("ms", *(f"{head:>8}" for head in ("mean", "p50", "p90", "p99")))
    for name in ("ttft", "tpot", "itl", "e2el"):
        table.add_row(name.upper(), *(f"{figures[f'{kind}_{name}_ms']:,.2f}" for kind in ("mean", "p50", "p90", "p99")))
    console.print(table)
