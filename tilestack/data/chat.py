"""Chat templates: a conversation as the text a model was taught to read, rendered by jinja2 in a sandbox.

A template comes with a model and is a program, so it runs where it can reach nothing: no attributes of Python objects, no
mutation, ranges of at most 100,000, no repeated string and no result of more than LIMIT characters.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from tilestack.data.errors import DataError, needs

Message = dict[str, Any]  # {"role": "user", "content": "…"}; templates may know more keys

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LIMIT = 1 << 24


def render(template: str, messages: Sequence[Message], **variables: Any) -> str:
    """The conversation as text. `variables` are what templates read besides messages: bos_token, tools, and so on."""
    jinja2 = needs("jinja2", "a chat template")
    check_messages(messages)
    given = {"tools": None, "documents": None, "add_generation_prompt": False} | variables
    pieces, length = [], 0
    try:
        for piece in _compile(template).generate(messages=list(messages), **given):
            length += len(piece)
            if length > LIMIT:
                raise DataError(f"the chat template made more than {LIMIT:,} characters; it is not usable")
            pieces.append(piece)
    except jinja2.TemplateError as problem:
        raise DataError(f"the chat template refused: {problem}") from problem
    except DataError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as problem:
        raise DataError(f"the chat template failed on these messages: {problem}") from problem
    return "".join(pieces)


def check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str) or not messages:
        raise DataError("a conversation is a non-empty list of messages such as {'role': 'user', 'content': 'Hello'}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"message {number} must have a 'role' and a 'content', not {str(message)[:80]!r}")


def answer_spans(template: str, messages: Sequence[Message], **variables: Any) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text, and where in it the assistant's answers are, their end token included.

    An answer is what the template adds to the prompt for it. That holds only if a longer conversation begins with the
    text of the shorter one; templates that rewrite history when a turn is added are refused.
    """
    full = render(template, messages, **variables)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise DataError("a conversation cannot begin with the assistant: there is nothing it answers")
        prompt = render(template, messages[:number], add_generation_prompt=True, **variables)
        answered = render(template, messages[: number + 1], **variables)
        if not (answered.startswith(prompt) and full.startswith(answered)):
            raise DataError(
                f"cannot tell where the answer in message {number} begins and ends: the chat template writes earlier turns "
                "differently when later ones follow. Train on conversations with one answer, or use a plainer template"
            )
        spans.append((len(prompt), len(answered.rstrip())))
    return full, spans


@lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    jinja2 = needs("jinja2", "a chat template")
    if len(template) > LIMIT:
        raise DataError(f"a chat template of {len(template):,} characters; at most {LIMIT:,} are accepted")
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as problem:
        raise DataError(f"the chat template is malformed: {problem.message} (line {problem.lineno})") from problem


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}, by which some templates mark answers for training: its body, unchanged."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > LIMIT:
                    raise SecurityError("a string or list is repeated too often")
            if operator == "**" and not (abs(left) <= 1024 and abs(right) <= 64):
                raise SecurityError("a power is too large")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson  # jinja2's own writes HTML entities, which no model has seen
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
