"""Chat templates: a conversation as the text a model was taught to read, and where in it the answers are.

Templates are programs that come with models. They run in a process of their own, with limits of memory and time; see
`chat_worker` for what they may do and `chat_process` for how it is asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilestack.data import chat_process
from tilestack.data.errors import DataError

Message = dict[str, Any]  # {"role": "user", "content": "…"}; templates may know more keys
Spans = list[list[int]]

CHATML = r"""{%- set told = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\n' + told + 'Functions that may be called:\n<tools>\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
    {{- '</tools>\nCall one by writing <tool_call>\n{"name": …, "arguments": …}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in (messages[1:] if tools and told else messages) %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {%- set function = call.function or call %}
        {{- '\n' if message.content or not loop.first }}
        {{- '<tool_call>\n' + {'name': function.name, 'arguments': function.arguments} | tojson + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


@dataclass(frozen=True)
class Conversation:
    """Messages, and the functions that the assistant may call, described as templates read them. The first `given` messages
    are a prompt: what the assistant says in them is not learned."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    given: int = 0


@dataclass(frozen=True)
class Rendered:
    """A text to learn from, and where in it the assistant's answers are, their end tokens included."""

    text: str
    answers: Spans


def render(template: str, messages: Sequence[Message], **variables: Any) -> str:
    """The conversation as text. `variables` are what templates read besides messages: bos_token, tools, and so on."""
    (found,) = _asked(template, "text", [Conversation(list(messages))], variables)
    return found["text"]


def render_answers(
    template: str, conversations: Sequence[Conversation], *, last_only: bool = False, **variables: Any
) -> list[list[Rendered]]:
    """What is to be learned from each conversation: one text with all of its answers, or several where the template writes
    earlier turns differently once later ones follow. With `last_only`, one text and its last answer."""
    found = _asked(template, "last answer" if last_only else "answers", conversations, variables)
    return [[Rendered(*sequence) for sequence in reply["sequences"]] for reply in found]


def _asked(
    template: str, what: str, conversations: Sequence[Conversation], variables: Mapping[str, Any]
) -> list[dict[str, Any]]:
    asked = []
    for conversation in conversations:
        check_messages(conversation.messages)
        tools = {} if conversation.tools is None else {"tools": conversation.tools}
        given = {"given": conversation.given} if what == "answers" else {}
        asked.append({**variables, **tools, **given, "messages": conversation.messages})
    replies = list(chat_process.ask(template, what, asked))
    for number, reply in enumerate(replies):
        if "error" in reply:
            raise DataError(f"conversation {number}: {reply['error']}" if len(replies) > 1 else reply["error"])
    return replies


def check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str) or not messages:
        raise DataError("a conversation is a non-empty list of messages such as {'role': 'user', 'content': 'Hello'}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"message {number} must have a 'role' and a 'content', not {str(message)[:80]!r}")
