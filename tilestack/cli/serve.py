"""The `serve` command: a model behind OpenAI's API, with a chat page."""

import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tilestack.cli.common import console, progress_bar
from tilestack.cli.speaker import (
    ChatTemplate,
    DeviceName,
    Dtype,
    ModelName,
    Weights,
    check_packages,
    read_template,
    trust_engine,
)
from tilestack.parallel import environment

if TYPE_CHECKING:
    from tilestack.engine import Engine, EngineSettings
    from tilestack.server.apart import ServerApart
    from tilestack.server.process import ServerHere
    from tilestack.server.settings import ServerSettings

GIB = 1 << 30
YEAR = 365 * 86400  # seconds; --drain may be infinite
START_AGAIN = "start the server again"
access, engine, limit = (
    functools.partial(typer.Option, rich_help_panel=panel) for panel in ("Access", "Engine", "Limits")
)  # options, each under its heading of the help


def add_to(app: typer.Typer) -> None:
    app.command("serve")(serve_command)


def serve_command(
    model: ModelName = "smollm2",
    host: Annotated[str, typer.Option(help="Interface to listen on; 0.0.0.0 for all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free port.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="Model name for clients; default: the file's.", show_default=False)] = None,
    drain: Annotated[float, typer.Option(help="Seconds for running requests to finish at shutdown.", min=0)] = 30.0,
    events_per_second: Annotated[float, typer.Option(help="Limit over all streams; above it, several tokens share an event.", min=1)] = 1500.0,
    generation_config: Annotated[str, typer.Option(help="Sampling defaults of requests: the model's generation_config.json, or none of it (then OpenAI's).")] = "model",
    chat_template: ChatTemplate = None,
    two_processes: Annotated[bool | None, typer.Option("--two-processes/--one-process", help="Run HTTP in a process of its own, so that it does not slow the engine; default: where the engine runs on a CPU.", show_default=False)] = None,
    split_reasoning: Annotated[bool, typer.Option("--split-reasoning", help="Return what the model writes between <think> and </think> apart: as reasoning_content, reasoning items or thinking blocks.")] = False,
    api_key: Annotated[str | None, access(help="Require this key on all routes but /health and the chat page, which asks for it. Set it by the environment to keep it out of `ps`.", envvar="TILESTACK_API_KEY", show_default=False)] = None,
    cors: Annotated[list[str] | None, access(help="Allowed CORS origin, such as https://example.org; may be given several times.", show_default=False)] = None,
    allow_host: Annotated[list[str] | None, access(help="Additional accepted host name; may be given several times.", show_default=False)] = None,
    device: DeviceName = None,
    tensor: Annotated[int, engine(help="Processes that share the model, each with a part of every layer, on a GPU of its own.", min=1)] = 1,
    dtype: Dtype = None,
    weights: Weights = None,
    context: Annotated[int | None, engine(help="Maximum context length, prompt and answer together; default: the model's.", min=2, show_default=False)] = None,
    max_sequences: Annotated[int, engine(help="Maximum number of sequences in a batch.", min=1)] = 256,
    step_tokens: Annotated[int | None, engine(help="Maximum tokens per step; longer prompts are split into chunks.", min=1, show_default=False)] = None,
    kv_memory: Annotated[float | None, engine(help="GiB for the KV cache; default: what the GPU has left, or 1 on a CPU.", min=0.001, show_default=False)] = None,
    kv_dtype: Annotated[str | None, engine(help="int8 or fp8: quantise the KV cache to 8 bits, about half of the memory.", show_default=False)] = None,
    swap_memory: Annotated[float, engine(help="GiB of host memory to swap out preempted requests; 0: recompute them.", min=0)] = 0.0,
    prefix_caching: Annotated[bool, engine(help="Reuse the KV cache of shared prefixes.")] = True,
    overlap: Annotated[bool | None, engine(help="Launch the next step before the results of the last are read; default: on a GPU.", show_default=False)] = None,
    warm_up: Annotated[bool, engine(help="On a GPU, capture all CUDA graphs before the first request.")] = True,
    decode: Annotated[str | None, engine(help="How decoding steps run. Default: fused where supported, on a Hopper GPU with nvcc as a single kernel at batch 1 (compiled at the first start for a model), on a CPU as one C++ function. operators: neither. persistent: the single kernel for texts of any length.", show_default=False)] = None,
    speculate: Annotated[str | None, engine(help="Speculative decoding: lookup (n-gram prompt lookup), or a draft model with the same tokenizer.", show_default=False)] = None,
    draft_tokens: Annotated[int | None, engine(help="Draft tokens per step; default: 4 by a model; by lookup 7, growing to 31 (on a CPU 15) while all are accepted.", min=1, show_default=False)] = None,
    adapter: Annotated[list[str] | None, engine(help="NAME=FOLDER, a LoRA adapter that requests select as their model; may be given several times.", show_default=False)] = None,
    queue: Annotated[int, limit(help="Maximum waiting requests; above it the server answers 429.", min=0)] = 1024,
    max_body: Annotated[int, limit(help="Maximum bytes of a request body.", min=1)] = 4 << 20,
    max_prompt_tokens: Annotated[int | None, limit(help="Maximum tokens of a prompt.", min=1, show_default="what the model reads")] = None,
    max_output_tokens: Annotated[int, limit(help="Maximum tokens of an answer.", min=1)] = 4096,
    max_choices: Annotated[int, limit(help="Maximum n and best_of.", min=1)] = 16,
    max_stops: Annotated[int, limit(help="Maximum number of stop strings.", min=0)] = 16,
    max_stored: Annotated[int, limit(help="Maximum responses kept in memory to be continued by previous_response_id; with more, the oldest are forgotten. 0: keep none.", min=0)] = 1000,
    max_stored_bytes: Annotated[int, limit(help="Maximum bytes of all of them together.", min=0)] = 64 << 20,
    timeout: Annotated[float, limit(help="Maximum seconds for an answer.", min=0.001)] = 600.0,
) -> None:  # fmt: skip
    """Serve a model with an OpenAI-compatible API on http://127.0.0.1:8000/v1, and a chat page on http://127.0.0.1:8000.

    Any OpenAI client works: OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none"). /health reports
    readiness, /metrics is for Prometheus. Logs are JSON lines on standard error. On Ctrl-C or SIGTERM running requests may
    finish; a second signal ends the server at once.
    """
    from tilestack.data.errors import needs

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        needs(package, "tilestack serve", "server")
    if api_key is not None and not api_key.strip():
        raise ValueError("the API key is empty; leave --api-key and TILESTACK_API_KEY out for a server without one")
    if generation_config not in ("model", "none"):
        raise ValueError(f"--generation-config is model or none, not {generation_config}")
    check_packages(model)
    template = None if chat_template is None else read_template(chat_template)
    from tilestack.server.listening import address_to_open
    from tilestack.server.settings import LOOPBACK, Limits, ServerSettings

    limits = Limits(
        body_bytes=max_body,
        prompt_tokens=max_prompt_tokens,
        output_tokens=max_output_tokens,
        choices=max_choices,
        stops=max_stops,
        stored=max_stored,
        stored_bytes=max_stored_bytes,
        request_seconds=timeout,
    )
    from tilestack.engine.defaults import defaults_line, model_defaults

    sampling = model_defaults(model) if generation_config == "model" else {}
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
        sampling=sampling,
        split_reasoning=split_reasoning,
    )
    from tilestack.engine import EngineSettings

    trust_engine()
    wanted = EngineSettings(
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
    )
    if environment.launched():
        if tensor not in (1, started := environment.world()):
            raise ValueError(f"--tensor is {tensor}, and {started} processes were started; leave it out")
        tensor = started
    elif tensor > 1:  # by now this process has found what is wrong with the options, so that they do not all say so
        launch_shared(model, wanted, tensor, drain)

    def greet(address: str, called: str) -> None:
        here = address_to_open(address)
        told = f"{called} on {address}: chat in a browser at {here}, or ask {here}/v1"
        console.print(told, highlight=False, soft_wrap=True)
        if sampling:
            console.print(f"{defaults_line(sampling)}; --generation-config none for OpenAI's", soft_wrap=True)
        if host not in LOOPBACK and api_key is None:
            console.print(f"anyone who reaches {host} may use it; --api-key asks for a key", style="yellow")

    apart = runs_apart(two_processes, device)
    with engine_of(model, wanted, tensor, lambda: server_of(settings, apart)) as ready:
        if ready is None:
            return  # the first process has served, and this one followed it
        served, server = ready
        if template is not None and served.tokenizer is not None:
            served.tokenizer.template = template
        if warm_up:
            warm_up_in_sight(served)
        called = Path(model).name
        server.run(served, called, lambda address: greet(address, name or called))


def runs_apart(asked: bool | None, device: str | None) -> bool:
    """Whether HTTP has a process of its own: as asked, else where that was measured to help, which is on a CPU."""
    if os.name != "posix":
        if asked:
            raise ValueError("--two-processes does not work on Windows; leave it out")
        return False
    if asked is not None:
        return asked
    from tilestack.device import pick_device

    return pick_device(device).type == "cpu"


def server_of(settings: "ServerSettings", apart: bool) -> "ServerHere | ServerApart":
    """A server in a process of its own, in which case this one does without its packages, or in this one."""
    if apart:
        from tilestack.server.apart import ServerApart

        return ServerApart(settings)
    from tilestack.server.process import ServerHere

    return ServerHere(settings)


def launch_shared(model: str, settings: "EngineSettings", processes: int, drain: float) -> NoReturn:
    """Serve by the same command in so many processes, and end as they do; what they cannot share, or run on, is refused
    once."""
    import torch

    from tilestack.device import pick_device
    from tilestack.models.checkpoints import config_of
    from tilestack.parallel.launch import ENDING, launch
    from tilestack.parallel.serving import refuse_model, refuse_settings

    device = pick_device(settings.device)
    if device.index is not None:
        raise ValueError(f"--tensor takes a GPU for each process, so --device must be cuda or cpu, not {device}")
    if device.type == "cuda" and (found := torch.cuda.device_count()) < processes:
        raise ValueError(f"--tensor {processes} takes as many GPUs, and there are {found}; give at most as many")
    refuse_settings(settings)
    refuse_model(model, config_of(model), processes)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the hosts' own words stay on this machine
    code = launch(processes, sys.argv[1:], START_AGAIN, ending=int(min(drain, YEAR)) + ENDING)
    ended_in_order = code in (128 + signal.SIGINT, 128 + signal.SIGTERM)  # as a server of one process ends with 0
    raise typer.Exit(0 if ended_in_order else code)


@contextmanager
def engine_of(
    model: str,
    settings: "EngineSettings",
    tensor: int,
    serve: "Callable[[], AbstractContextManager[ServerHere | ServerApart]]",
) -> "Iterator[tuple[Engine, ServerHere | ServerApart] | None]":
    """An engine, and its server, which takes its address before the model is loaded. Of several processes the first has them,
    and while it serves the others follow it."""
    from tilestack.engine import Engine
    from tilestack.server.request_log import log_to_stderr

    if tensor == 1:
        with serve() as alone:
            log_to_stderr()  # what the engine takes, and what it compiles
            yield Engine.load(model, settings), alone
        return
    import torch

    from tilestack.device import pick_device
    from tilestack.parallel.processes import ProcessLost, joined
    from tilestack.parallel.serving import LeadingEngine, Orders, follow, load_shared

    with joined(settings.device or "auto", tensor=tensor, advice=START_AGAIN) as mesh, ExitStack() as stack:
        server = stack.enter_context(serve()) if mesh.first else None
        log_to_stderr(logging.INFO if mesh.first else logging.ERROR)  # what all would say, one says
        on_gpu = pick_device(settings.device).type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        shared = load_shared(model, settings, mesh, device)
        if server is None:
            follow(shared, Orders())
            yield None
            return
        assert isinstance(shared, LeadingEngine)
        yield shared, server
        if shared.lost is not None:
            raise ProcessLost(f"the processes that share the model lost each other: {shared.lost}; {START_AGAIN}")
        shared.close()


def warm_up_in_sight(served: "Engine") -> None:
    """Capture the engine's graphs, with a progress bar where standard error is a terminal; elsewhere it is for the log."""
    progress = progress_bar()
    progress.disable = not progress.console.is_terminal
    prepare = getattr(served, "warm_up", served.runner.warm_up)  # of several processes all have to
    with progress:
        task = progress.add_task("warming up", total=None)
        prepare(lambda what, done, all: progress.update(task, description=what, completed=done, total=all))


def named_folders(given: list[str]) -> dict[str, Path]:
    """Adapters by name, from NAME=FOLDER."""
    pairs = [text.partition("=") for text in given]
    if wrong := [text for text, (name, _, folder) in zip(given, pairs, strict=True) if not (name and folder)]:
        raise ValueError(f"--adapter takes NAME=FOLDER, not {wrong[0]}")
    return {name: Path(folder) for name, _, folder in pairs}
