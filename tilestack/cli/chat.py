"""The `chat` command: a conversation with a model in the terminal.

Ctrl-C stops an answer, and what was said stays in the conversation, if anything was; at the prompt it takes two in a row to
leave. Answers go to standard output, and all that is told of them to standard error.
"""

import sys
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console

from tilestack.cli.speaker import (
    ChatTemplate,
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

HELP = "/reset begins a new conversation, /quit or Ctrl-D ends; Ctrl-C stops an answer"
notes = Console(stderr=True)
SHARE_OF_ANSWER = 4  # a conversation is full where less than a fourth of what the model reads is left
Messages = list[dict[str, str]]


def add_to(app: typer.Typer) -> None:
    app.command("chat")(chat_command)


def chat_command(
    model: ModelName = "smollm2",
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default=False)] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    chat_template: ChatTemplate = None,
    device: DeviceName = None,
    dtype: Dtype = None,
    weights: Weights = None,
) -> None:
    """Chat with a model. /reset starts over, /quit exits, Ctrl-C stops an answer."""
    if max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, not {max_tokens}")
    if sys.stdin is None or sys.stdout is None:
        raise ValueError("chat reads standard input and writes standard output, and one of them is closed")
    speaker = Speaker(model, device, dtype, weights, chat_template)
    if not speaker.chats:
        raise ValueError(
            f"{model} has no chat template, so it was not taught to converse; use tilestack generate --raw"
        )
    sampling = speaker.sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    notes.print(f"{model} on {speaker.device.type}. {HELP}.", style="dim", highlight=False)
    if speaker.defaults_line:
        notes.print(speaker.defaults_line, style="dim", highlight=False)
    converse(speaker, [{"role": "system", "content": system}] if system else [], max_tokens, sampling)


def converse(speaker: Speaker, opening: Messages, max_tokens: int, sampling: dict[str, Any]) -> None:
    """Ask and answer until the person leaves."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        edit_lines()
    messages = list(opening)
    while (said := asked()) is not None:
        if said == "/reset":
            messages = list(opening)
            notes.print("a new conversation", style="dim")
        elif said.startswith("/"):
            notes.print(HELP, style="dim", highlight=False)
        elif said:
            messages.append({"role": "user", "content": said})
            answer_aloud(speaker, messages, len(opening), max_tokens, sampling)


def edit_lines() -> None:
    """Have `input` edit lines and remember them, and take what is pasted as one message, of any length and number of lines."""
    with suppress(ImportError):  # not all systems have it
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


def asked() -> str | None:
    """What the person types; None when they leave, by /quit, the end of input, or Ctrl-C twice."""
    shown, for_answers = sys.stdin.isatty(), not sys.stdout.isatty()
    for attempt in range(2):
        try:
            if shown and for_answers:  # where input would write it too
                notes.print("> ", end="")
            said = input("> " if shown and not for_answers else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            notes.print()
            if attempt == 0:
                notes.print("Ctrl-C again, or /quit, to leave", style="dim", highlight=False)
            continue
        return None if said in ("/quit", "/exit") else said
    return None


def answer_aloud(speaker: Speaker, messages: Messages, opening: int, max_tokens: int, sampling: dict[str, Any]) -> None:
    """Print the model's answer as it comes and add it to the conversation, from which the oldest turns go when it is full, and
    a question that got no answer."""
    forgotten, wanted = 0, min(max_tokens, speaker.engine.context // SHARE_OF_ANSWER)
    ids = speaker.chat_ids(messages)
    if speaker.room(ids) < wanted:
        alone = speaker.chat_ids([*messages[:opening], messages[-1]])
        if speaker.room(alone) < 1:  # whatever is forgotten for it
            messages.pop()
            notes.print(f"that is {len(alone)} tokens, and the model reads {speaker.engine.context}", style="dim")
            return
    while speaker.room(ids) < wanted and len(messages) > opening + 1:
        del messages[opening : opening + 2]  # a question and its answer
        forgotten += 1
        ids = speaker.chat_ids(messages)
    if forgotten:
        notes.print(f"(the conversation is full; {forgotten} of the oldest turns forgotten)", style="dim")
    speech = speaker.speak(ids, max_tokens, **sampling)
    answer, note = "", ""
    try:
        for piece in speech:
            answer += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        note = "stopped; "
    if speech.finish == "length":
        note = "cut short; "
    print(flush=True)
    if answer:
        messages.append({"role": "assistant", "content": answer})
    else:  # of which a model would learn to say nothing
        messages.pop()
        note += "no answer, so the question is forgotten; "
    notes.print(f"{note}{speech.figures()}", style="dim", highlight=False)
