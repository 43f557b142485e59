"""The `generate` command: a model continues or answers a text, in the terminal as it comes."""

import json
import sys
from typing import Annotated

import typer

from tilestack.cli.common import given_text
from tilestack.cli.speaker import (
    DeviceName,
    Dtype,
    MaxTokens,
    MinP,
    ModelName,
    Seed,
    Speaker,
    Temperature,
    TopK,
    TopP,
    Weights,
)


def add_to(app: typer.Typer) -> None:
    app.command("generate")(generate_command)


def generate_command(
    prompt: Annotated[
        str, typer.Argument(help="The prompt; - reads it from standard input, without its last line break.")
    ],
    model: ModelName = "smollm2",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text directly, without the chat template.")] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; may be given several times.", show_default=False)
    ] = None,
    device: DeviceName = None,
    dtype: Dtype = None,
    weights: Weights = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead of the text.")
    ] = False,
) -> None:
    """Generate an answer to a prompt, or continue it with --raw. Speed is printed to standard error."""
    if max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, not {max_tokens}")
    speaker = Speaker(model, device, dtype, weights)
    given = given_text(prompt)
    chat = speaker.chats and not raw
    ids = speaker.chat_ids([{"role": "user", "content": given}]) if chat else speaker.tokenizer.encode(given)
    if speaker.room(ids) < 1:
        most = speaker.engine.context - 1
        raise ValueError(f"the prompt has {len(ids)} tokens; this model takes 1 to {most} and an answer")
    sampling = speaker.sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    speech = speaker.speak(ids, max_tokens, stop or (), **sampling)
    text = ""
    for piece in speech:
        text += piece
        if not json_:
            print(piece, end="", flush=True)
    if json_:
        print(json.dumps(dict(model=model, prompt=given, chat=chat, text=text, prompt_tokens=len(ids),
                              tokens=len(speech.made), finish=speech.finish, seconds=round(speech.seconds, 3))))  # fmt: skip
    else:
        print(flush=True)
        for line in filter(None, (speech.figures(), speaker.defaults_line)):
            if sys.stderr is not None:  # or print takes standard output instead
                print(line, file=sys.stderr)
