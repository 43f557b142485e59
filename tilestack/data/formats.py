"""Rows as people share them, and what they are here: conversations, preferences, judged answers and tasks.

    conversations  {"messages": [{"role": "user", "content": "…"}, …], "tools": […]}; an answer of "weight": 0 is not learned
                   {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}], "system": "…"}     ShareGPT
                   {"instruction": "…", "input": "…", "output": "…", "system": "…", "history": [["…", "…"]]}   Alpaca
                   {"prompt": "…" or messages, "completion": "…" or messages}; learned is the completion     TRL
    preferences    {"prompt": "…" or messages, "chosen": "…" or messages, "rejected": "…" or messages, "system": "…"}
                   {"chosen": messages, "rejected": messages}, the prompt being what both begin with
    judged         {"prompt": "…" or messages, "completion": "…" or messages, "label": true, "system": "…"}, or a preference
    tasks          {"prompt": "…" or messages, "answer": "…", "system": "…"}, and whatever else a reward wants to see

What is wrong with a row is a DataError; who reads the rows says where it stands.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tilestack.data.chat import Conversation, Message
from tilestack.data.corpora import Preference, Task
from tilestack.data.errors import DataError

Row = Mapping[str, Any]

# What ShareGPT and those who write like it call the roles.
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "assistant": "assistant", "system": "system", "tool": "tool", "function": "tool",
    "observation": "tool", "function_call": "assistant",
}  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A conversation that awaits an answer, an answer, and whether it is a good one."""

    messages: list[Message]
    answer: str
    good: bool
    tools: list[dict[str, Any]] | None = None


def conversation(row: Row) -> Conversation:
    """A conversation to learn from, in any of the formats."""
    for key, read in CONVERSATIONS.items():
        if row.get(key) is not None:
            messages = read(row)
            break
    else:
        raise DataError(f"expected one of {', '.join(CONVERSATIONS)}; this row has {names(row)}")
    messages = with_system(messages, row)
    given = len(prompt_of(row)) if key == "completion" else 0
    if not any(message["role"] == "assistant" and message.get("weight") != 0 for message in messages[given:]):
        raise DataError("a conversation to learn from needs an answer: a message of the assistant")
    return Conversation(messages, tools_of(row), given)


def preference(row: Row) -> Preference:
    """Two answers to one prompt; where there is no prompt, it is what both conversations begin with."""
    if row.get("prompt") is None and all(isinstance(row.get(key), list) for key in ("chosen", "rejected")):
        chosen, rejected = (messages_under(key, row) for key in ("chosen", "rejected"))
        if chosen[:-1] != rejected[:-1] or len(chosen) < 2:
            raise DataError('without a "prompt", "chosen" and "rejected" must differ in their last message alone')
        prompt = with_system(chosen[:-1], row)
    else:
        prompt = prompt_of(row)
    asked, better = answer_under("chosen", row, prompt)
    asked_of_other, worse = answer_under("rejected", row, prompt)
    if spoken(asked) != spoken(asked_of_other):
        raise DataError(
            '"chosen" and "rejected" must answer the same conversation, and differ in their last message alone'
        )
    return Preference(asked, better, worse, tools_of(row))


def judged(row: Row) -> list[Judged]:
    """An answer that was judged, or the two of a preference."""
    if row.get("label") is None and row.get("chosen") is not None:  # parquet writes all keys in every row
        return judged_both(preference(row))
    if not isinstance(row.get("label"), bool):
        raise DataError(f'expected true or false under "label"{instead_of("label", row)}')
    asked, answer = answer_under("completion", row, prompt_of(row))
    return [Judged(asked, answer, row["label"], tools_of(row))]


def judged_both(pair: Preference) -> list[Judged]:
    """A preference as two judgements: the chosen answer is good, the other is not."""
    answers = ((pair.chosen, True), (pair.rejected, False))
    return [Judged(pair.messages, answer, good, pair.tools) for answer, good in answers]


def task(row: Row, answered: bool = True) -> Task:
    """A prompt and the answer to check by; rewards that need none may do without."""
    messages = prompt_of(row)
    answer = text_under("answer", row) if answered or row.get("answer") is not None else ""
    tools_of(row)  # which stay in the row
    return Task(messages[-1]["content"], answer, "file", tuple(messages), dict(row))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def with_system(messages: list[Message], row: Row) -> list[Message]:
    """A conversation with the system prompt that stands beside it in its row, if it has none of its own."""
    if not row.get("system") or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": text_under("system", row)}, *messages]


def prompt_of(row: Row) -> list[Message]:
    """What is to be answered, as messages."""
    if isinstance(row.get("prompt"), str):
        return with_system([user(text_under("prompt", row))], row)
    messages = messages_under("prompt", row, "a text or messages")
    if messages[-1]["role"] == "assistant":
        raise DataError('"prompt" must end before the answer, not with a message of the assistant')
    return with_system(messages, row)


def answer_under(key: str, row: Row, prompt: list[Message]) -> tuple[list[Message], str]:
    """An answer and what it answers: of a text that is the prompt, and of messages what stands before the last of them."""
    if isinstance(row.get(key), str):
        return prompt, text_under(key, row)
    *before, last = messages_under(key, row, "a text or messages")
    if last["role"] != "assistant" or last.get("tool_calls") or not last["content"]:
        raise DataError(f'the last message under "{key}" must be a text of the assistant')
    return asked_before(key, before, prompt), last["content"]


def asked_before(key: str, before: list[Message], prompt: list[Message]) -> list[Message]:
    """What an answer answers, with some messages `before` it: the prompt again, all or the end of it; or a conversation of
    which the prompt is the beginning or the end; or one that goes on from the prompt."""
    given, again = spoken(prompt), spoken(before)
    if given[len(given) - len(again) :] == again:
        return prompt
    if given in (again[: len(given)], again[len(again) - len(given) :]):
        asked = before
    elif before[0]["role"] == "assistant":
        asked = [*prompt, *before]
    else:
        raise DataError(
            f'what stands before the answer under "{key}" is not what stands under "prompt"; leave out one of them'
        )
    if asked[-1]["role"] == "assistant":
        raise DataError(
            f'under "{key}" two messages of the assistant follow each other; the last is the answer to a question'
        )
    return asked


def spoken(messages: list[Message]) -> list[tuple[str, str]]:
    """Who said what, by which a conversation is known again."""
    return [(message["role"], message["content"].strip()) for message in messages]


def of_share_gpt(row: Row) -> list[Message]:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise DataError('expected a list of messages under "conversations"')
    if all("role" in turn for turn in turns):
        return messages_under("conversations", row)
    messages = []
    for number, turn in enumerate(turns):
        role, text = turn.get("from"), turn.get("value")
        if role not in ROLES or not isinstance(text, str):
            raise DataError(
                f'message {number} under "conversations" needs a text under "value" and one of {", ".join(ROLES)} under "from"'
            )
        weight = {"weight": turn["weight"]} if "weight" in turn else {}
        messages.append(
            plain({"role": ROLES[role], "content": text, **weight}, f'message {number} under "conversations"')
        )
    return messages


def of_alpaca(row: Row) -> list[Message]:
    messages = []
    for number, turn in enumerate(row.get("history") or []):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise DataError(f'turn {number} under "history" must be a question and its answer')
        messages += [user(turn[0]), {"role": "assistant", "content": turn[1]}]
    asked = text_under("instruction", row)
    if row.get("input"):
        asked += "\n\n" + text_under("input", row)
    return [*messages, user(asked), {"role": "assistant", "content": text_under("output", row)}]


def of_completion(row: Row) -> list[Message]:
    if isinstance(row["completion"], str):
        return [*prompt_of(row), {"role": "assistant", "content": text_under("completion", row)}]
    return [*prompt_of(row), *messages_under("completion", row)]


CONVERSATIONS: dict[str, Callable[[Row], list[Message]]] = {
    "messages": lambda row: messages_under("messages", row),
    "conversations": of_share_gpt,
    "instruction": of_alpaca,
    "completion": of_completion,
}


def messages_under(key: str, row: Row, expected: str = "a list of messages") -> list[Message]:
    """A list of messages with role and content, as chat templates read them."""
    messages = row.get(key)
    if not isinstance(messages, list) or not messages:
        raise DataError(f'expected {expected} under "{key}"; this row has {names(row)}')
    return [plain(message, f'message {number} under "{key}"') for number, message in enumerate(messages)]


def plain(message: Any, where: str) -> Message:
    """A message whose content is a text: its parts put together, nothing beside a call of a tool, arguments as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f'{where} needs texts under "role" and "content"')
    made = {name: value for name, value in message.items() if value is not None}  # parquet writes all keys in every row
    if made.get("weight", 1) not in (0, 1):
        raise DataError(f'{where} has the "weight" {made["weight"]!r}; 0 says not to learn an answer, 1 to learn it')
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [plain_call(call, where) for call in calls]
        made.setdefault("content", "")
    if isinstance(made.get("content"), list):
        made["content"] = joined(made["content"], where)
    if not isinstance(made.get("content"), str):
        raise DataError(f'{where} needs texts under "role" and "content"')
    return made


def joined(parts: list[Any], where: str) -> str:
    """The text of content in parts; an image or a sound is not dropped in silence."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(f"{where} has a part that is no text, but {kind!r}; only texts are learned here")
    return "".join(part["text"] for part in parts)


def plain_call(call: Any, where: str) -> dict[str, Any]:
    """A call of a tool with its arguments as an object; OpenAI's are JSON in a text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f'{where} has a call under "tool_calls" without the name of a function')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as problem:
            raise DataError(
                f"{where} calls {function['name']} with arguments that are not JSON: {problem}"
            ) from problem
    return {**call, "function": {**function, "arguments": arguments}} if "function" in call else {**call, "arguments": arguments}  # fmt: skip


def tools_of(row: Row) -> list[dict[str, Any]] | None:
    tools = row.get("tools") or None
    if isinstance(tools, str):  # as datasets without nested columns keep them
        try:
            tools = json.loads(tools)
        except ValueError as problem:
            raise DataError(f'"tools" is a text that is not JSON: {problem}') from problem
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError('expected a list of objects under "tools"')
    return tools


def text_under(key: str, row: Row) -> str:
    if not isinstance(row.get(key), str) or not row[key]:
        raise DataError(f'expected a text under "{key}"{instead_of(key, row)}')
    return row[key]


def instead_of(key: str, row: Row) -> str:
    """What a row has where something else is expected."""
    if row.get(key) is None:
        return f"; this row has {names(row)}"
    shown = repr(row[key])
    return f", not {shown if len(shown) <= 60 else shown[:59] + '…'}"


def names(row: Row) -> str:
    return ", ".join(row) or "nothing"
