"""The program that renders chat templates. `tilestack.data.chat` runs it in a process of its own, and talks to it.

A template comes with a model and is a program by a stranger. jinja2's sandbox keeps it from Python's objects, but not from
memory and time: '%1000000000d' % 1 is a gigabyte. So this process takes no more memory than it is told at the start, and no
more of the processor for a conversation than each question allows: then it is ended by SIGPROF.

It writes an empty line when it has started. In comes a line of JSON for some conversations, out goes a line for each of them:

    {"template": …, "ask": "text" | "answers" | "last answer", "seconds": …, "conversations": [{"messages": […], "bos_token": …}, …]}
    {"text": …}   {"sequences": [[text, [[start, end], …]], …]}   {"error": …}

Nothing of tilestack is imported, so that it starts at once and is small.
"""

import itertools
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 1 << 24  # characters of a template, and of what it makes
BEGIN, END = (f"\ufdd0{kind}{os.urandom(8).hex()}\ufdd1" for kind in "be")  # no text holds them by chance or by guess


class Refused(Exception):
    """A template or conversation that cannot be used; the message says why."""


class Generation(Extension):
    """{% generation %}, by which templates mark answers: its body, between marks where these are asked for."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = lambda name: nodes.Output([nodes.Name(name, "load")])
        return [mark("generation_begins"), *body, mark("generation_ends")]


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which powers are small: a huge number takes time that no limit of memory ends."""

    intercepted_binops = frozenset(["**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if not (abs(left) <= 1024 and abs(right) <= 64):
            raise SecurityError("a power is too large")
        return super().call_binop(context, operator, left, right)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own writes HTML entities, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def environment() -> Sandbox:
    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return made


@lru_cache(maxsize=16)
def compiled(template: str) -> jinja2.Template:
    if len(template) > LONGEST:
        raise Refused(f"a chat template of {len(template):,} characters; at most {LONGEST:,} are accepted")
    try:
        return environment().from_string(template)
    except jinja2.TemplateSyntaxError as problem:
        raise Refused(f"the chat template is malformed: {problem.message} (line {problem.lineno})") from problem


def render(template: str, messages: list[Any], **variables: Any) -> str:
    """The conversation as text. `variables` are what templates read besides messages: bos_token, tools, and so on."""
    given = {"tools": None, "documents": None, "add_generation_prompt": False} | variables
    pieces, length = [], 0
    try:
        for piece in compiled(template).generate(messages=messages, **given):
            length += len(piece)
            if length > LONGEST:
                raise Refused(f"the chat template made more than {LONGEST:,} characters; it is not usable")
            pieces.append(piece)
    except TemplateError as problem:
        raise Refused(f"the chat template refused: {one_line(problem)}") from problem
    except (Refused, MemoryError):
        raise
    except Exception as problem:  # whatever a program by a stranger comes to
        raise Refused(f"the chat template failed on these messages: {one_line(problem)}") from problem
    return "".join(pieces)


def one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:500]


Spans = list[tuple[int, int]]


def answers(template: str, messages: list[Any], given: int = 0, **variables: Any) -> list[tuple[str, Spans]]:
    """What is to be learned from a conversation: texts, and where in each the assistant's answers are, end tokens included.
    Answers among the first `given` messages are not, nor are those of weight 0, as OpenAI marks them.

    Templates with {% generation %} say so themselves. For others an answer is what the template adds to the prompt for
    it, in the text that ends with that answer. Most templates begin a longer conversation with the text of the shorter
    one, and all answers lie in one text. Those that write earlier turns differently once later ones follow (reasoning
    models drop old thoughts) give a text for each answer that was written so: it is what the model will have before it.
    """
    refuse_lost_calls(template, messages, **variables)
    if re.search(r"\{%[-+]?\s*generation\b", template):
        text, marks = marked(template, messages, **variables)
        wanted = [is_learned(messages, n, given) for n, each in enumerate(messages) if each["role"] == "assistant"]
        if all(wanted):
            return [(text, marks)]
        if len(marks) != len(wanted):
            raise Refused(
                f"cannot tell which answers not to learn: the chat template marks {len(marks)} texts with {{% generation %}}, and "
                f"{len(wanted)} messages are the assistant's"
            )
        return [(text, list(itertools.compress(marks, wanted)))]
    found: list[tuple[str, Spans]] = []
    for number in reversed([n for n in answered_messages(messages) if is_learned(messages, n, given)]):
        text, span = answer(template, messages[: number + 1], **variables)
        spans = next((spans for longer, spans in found if longer.startswith(text)), None)
        if spans is None:
            found.append((text, [span]))
        else:
            spans.insert(0, span)
    return found[::-1]


def is_learned(messages: list[Any], number: int, given: int) -> bool:
    return number >= given and messages[number].get("weight") != 0


def last_answer(template: str, messages: list[Any], **variables: Any) -> list[tuple[str, Spans]]:
    """The same of the last answer alone, whatever the template does with those before it."""
    refuse_lost_calls(template, messages, **variables)
    text, span = answer(template, messages[: answered_messages(messages)[-1] + 1], **variables)
    return [(text, [span])]


def refuse_lost_calls(template: str, messages: list[Any], **variables: Any) -> None:
    """Refuse calls of tools where the template writes none: what is learned in their place would be to say nothing."""
    silent = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
    if not any(message.get("tool_calls") for message in messages):
        return
    try:
        lost = render(template, silent, **variables) == render(template, messages, **variables)
    except Refused:  # one that insists on them writes them
        return
    if lost:
        raise Refused(
            'the chat template writes no calls of tools, and there are some under "tool_calls"; use one that does'
        )


def answered_messages(messages: list[Any]) -> list[int]:
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not numbers:
        raise Refused("a conversation to learn from needs an answer: a message of the assistant")
    if numbers[0] == 0:
        raise Refused("a conversation cannot begin with the assistant: there is nothing it answers")
    return numbers


def answer(template: str, messages: list[Any], **variables: Any) -> tuple[str, tuple[int, int]]:
    """A conversation that ends with an answer as text, and where in it that answer is."""
    prompt = render(template, messages[:-1], **variables | {"add_generation_prompt": True})
    text = render(template, messages, **variables)
    if not text.startswith(prompt):
        raise Refused(
            f"cannot tell where the answer in message {len(messages) - 1} begins: the chat template writes it otherwise than "
            "it asks for it. Mark answers in the template with {% generation %} and {% endgeneration %}"
        )
    return text, (len(prompt), len(text.rstrip()))


def marked(template: str, messages: list[Any], **variables: Any) -> tuple[str, Spans]:
    """The conversation as text, and where in it {% generation %} was."""
    with_marks = render(template, messages, **variables, generation_begins=BEGIN, generation_ends=END)
    pieces, spans, length, begun = [], [], 0, None
    for piece in re.split(f"({BEGIN}|{END})", with_marks):
        if piece == BEGIN:
            begun = length
        elif piece == END:
            spans.append((length if begun is None else begun, length))
        else:
            pieces.append(piece)
            length += len(piece)
    text = "".join(pieces)
    if text != render(template, messages, **variables):
        raise Refused("the chat template changes the text that it marks with {% generation %}")
    return text, [span for span in spans if span[0] < span[1]]


def reply(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """An answer to each conversation of a request."""
    ask = {"answers": answers, "last answer": last_answer}.get(request["ask"])
    for conversation in request["conversations"]:
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        try:
            if ask:
                yield {"sequences": ask(request["template"], **conversation)}
            else:
                yield {"text": render(request["template"], **conversation)}
        except Refused as problem:
            yield {"error": str(problem)}
        except MemoryError:
            yield {"error": "the chat template takes more memory than it may have; it is not usable"}


def main(memory: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except ValueError:  # macOS has no such limit
        sys.stderr.write("chat templates run here without a limit of memory\n")
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        for found in reply(json.loads(line)):
            sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
            sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
