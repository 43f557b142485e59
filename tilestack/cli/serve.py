"""The `serve` command: a model behind OpenAI's API, with a chat page."""

from pathlib import Path
from typing import Annotated

import typer

from tilestack.cli.common import console, progress_bar
from tilestack.cli.speaker import DeviceName, Dtype, ModelName, Weights, check_packages, trust_engine

ENGINE, LIMITS, ACCESS = "Engine", "Limits of a request", "Who may ask"
GIB = 1 << 30


def add_to(app: typer.Typer) -> None:
    app.command("serve")(serve_command)


def serve_command(
    model: ModelName = "smollm2",
    host: Annotated[str, typer.Option(help="Interface to listen on; 0.0.0.0 for all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="By which clients ask for the model; the file's when left out.", show_default=False),
    ] = None,
    drain: Annotated[
        float, typer.Option(help="Seconds that running requests are given when the server is told to end.", min=0)
    ] = 30.0,
    events_per_second: Annotated[
        float,
        typer.Option(
            help="Of all streams together; tokens that come faster share an event, and the engine is spared.", min=1
        ),
    ] = 1500.0,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Ask for this key everywhere but on /health. The environment keeps it out of `ps`.",
            envvar="TILESTACK_API_KEY",
            show_default=False,
            rich_help_panel=ACCESS,
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            help="An origin whose pages may ask, such as https://example.org; may be given several times.",
            show_default=False,
            rich_help_panel=ACCESS,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name by which the server may be addressed besides its own; may be given several times.",
            show_default=False,
            rich_help_panel=ACCESS,
        ),
    ] = None,
    device: DeviceName = None,
    dtype: Dtype = None,
    weights: Weights = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt and answer together, in tokens; the model's own when left out.",
            min=2,
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_sequences: Annotated[
        int, typer.Option(help="Answers that are computed at a time.", min=1, rich_help_panel=ENGINE)
    ] = 256,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that a step computes at most; longer prompts are read in chunks.",
            min=1,
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    kv_memory: Annotated[
        float | None,
        typer.Option(
            help="GiB for keys and values; what the GPU has left, or 1 on a CPU, when left out.",
            min=0.001,
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="int8 or fp8: keep keys and values in 8 bits, for about half of the memory.",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    swap_memory: Annotated[
        float,
        typer.Option(
            help="GiB of host memory for requests that had to give way; 0: they are computed again.",
            min=0,
            rich_help_panel=ENGINE,
        ),
    ] = 0.0,
    prefix_caching: Annotated[
        bool, typer.Option(help="Remember the beginnings of prompts.", rich_help_panel=ENGINE)
    ] = True,
    overlap: Annotated[
        bool, typer.Option(help="Launch a step before the one before it is read.", rich_help_panel=ENGINE)
    ] = True,
    warm_up: Annotated[
        bool,
        typer.Option(
            help="On a GPU, capture all graphs before the first request, which would wait for them.",
            rich_help_panel=ENGINE,
        ),
    ] = True,
    decode: Annotated[
        str | None,
        typer.Option(
            help="How single tokens are computed. Left out: in one call where the model and the machine allow it, on a "
            "Hopper GPU with nvcc a single kernel for an answer that runs alone (compiled at the first start for a model), "
            "on a CPU one function. operators: without either. persistent: the kernel for texts of any length.",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            help="Speculative decoding: lookup (from the prompt), or a smaller model with the same tokenizer.",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens guessed at a time; 4 by a model when left out, and 7 by lookup, up to 31 (on a CPU 15) while all are right.",
            min=1,
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDER, a LoRA adapter that requests choose as their model; may be given several times.",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    queue: Annotated[
        int,
        typer.Option(help="Answers that may wait; more are told to come back (429).", min=0, rich_help_panel=LIMITS),
    ] = 1024,
    max_body: Annotated[int, typer.Option(help="Bytes of a body.", min=1, rich_help_panel=LIMITS)] = 4 << 20,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a prompt.", min=1, show_default="what the model reads", rich_help_panel=LIMITS),
    ] = None,
    max_output_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1, rich_help_panel=LIMITS)] = 4096,
    max_choices: Annotated[int, typer.Option(help="n and best_of.", min=1, rich_help_panel=LIMITS)] = 16,
    max_stops: Annotated[int, typer.Option(help="Stop texts.", min=0, rich_help_panel=LIMITS)] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds for an answer.", min=0.001, rich_help_panel=LIMITS)] = 600.0,
) -> None:
    """Serve a model over OpenAI's API on http://127.0.0.1:8000/v1, and a page to chat with it on http://127.0.0.1:8000.

    Any OpenAI client works: OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none"). /health tells whether requests
    are taken, /metrics is for Prometheus. Logs are lines of JSON on standard error. Ctrl-C or SIGTERM lets running requests
    end; a second one does not.
    """
    from tilestack.data.errors import needs

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        needs(package, "tilestack serve", "server")
    if api_key is not None and not api_key.strip():
        raise ValueError("the API key is empty; leave --api-key and TILESTACK_API_KEY out for a server without one")
    check_packages(model)
    from tilestack.server.process import listen, run_server
    from tilestack.server.request_log import log_to_stderr
    from tilestack.server.settings import LOOPBACK, Limits, ServerSettings

    limits = Limits(
        body_bytes=max_body,
        prompt_tokens=max_prompt_tokens,
        output_tokens=max_output_tokens,
        choices=max_choices,
        stops=max_stops,
        request_seconds=timeout,
    )
    settings = ServerSettings(
        host=host,
        port=port,
        name=name,
        api_key=api_key,
        cors=tuple(cors or ()),
        hosts=tuple(allow_host or ()),
        drain=drain,
        events_per_second=events_per_second,
        limits=limits,
    )
    listening = listen(settings)
    from tilestack.engine import AsyncEngine, EngineSettings

    trust_engine()
    log_to_stderr()  # what the engine takes, and what it compiles
    engine = AsyncEngine.load(
        model,
        EngineSettings(
            device=device,
            dtype=dtype,
            weights=weights,
            context=context,
            max_sequences=max_sequences,
            step_tokens=step_tokens,
            kv_memory=None if kv_memory is None else int(kv_memory * GIB),
            kv_dtype=kv_dtype,
            swap_memory=int(swap_memory * GIB),
            prefix_caching=prefix_caching,
            overlap=overlap,
            decode=decode,
            speculate=speculate,
            draft_tokens=draft_tokens,
            queue=queue,
            adapters=named_folders(adapter or []),
        ),
    )

    if warm_up:
        progress = progress_bar()
        progress.disable = not progress.console.is_terminal  # elsewhere standard error is for the log
        with progress:
            task = progress.add_task("warming up", total=None)
            told = lambda what, done, all: progress.update(task, description=what, completed=done, total=all)
            engine.engine.runner.warm_up(told)

    def greet(address: str) -> None:
        told = f"{name or engine.model_name} on {address}: chat in a browser, or ask {address}/v1"
        console.print(told, highlight=False, soft_wrap=True)
        if host not in LOOPBACK and api_key is None:
            console.print(f"anyone who reaches {host} may use it; --api-key asks for a key", style="yellow")

    run_server(engine, settings, listening, greet)


def named_folders(given: list[str]) -> dict[str, Path]:
    """Adapters by name, from NAME=FOLDER."""
    pairs = [text.partition("=") for text in given]
    if wrong := [text for text, (name, _, folder) in zip(given, pairs, strict=True) if not (name and folder)]:
        raise ValueError(f"--adapter takes NAME=FOLDER, not {wrong[0]}")
    return {name: Path(folder) for name, _, folder in pairs}
