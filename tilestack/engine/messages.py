"""What the engine's process and the server's tell each other, over a socket that nobody else has: JSON behind its length.

    server → engine   ["submit", number, request]   ["cancel", number]   ["listening", address]
    engine → server   ["hello", engine, settings]   ["news", deltas, ends, stats]   ["lost", why]   ["end"]

A step of the engine is one message, whatever the number of its deltas. Both sides read at once whatever comes, and neither
waits to send: what the socket does not take yet is kept.
"""

import json
import socket
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

from tilestack.engine.outputs import TokenLogprob
from tilestack.engine.params import SamplingParams, Structure
from tilestack.engine.sequence import Request

LENGTH = 4  # bytes that say how many follow
LONGEST = 1 << 30  # of those
AT_ONCE = 1 << 18  # bytes read at a time
Message = list[Any]


class Malformed(ValueError):
    """What came is no message, and what follows it cannot be trusted."""


def as_list(told: TokenLogprob) -> tuple[int, float, tuple[tuple[int, float], ...]]:
    """What JSON does not know of itself."""
    return told.id, told.logprob, told.top


encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=as_list).encode


def framed(message: Message) -> bytes:
    said = encode(message).encode()
    return len(said).to_bytes(LENGTH, "little") + said


class Frames:
    """Messages out of bytes, however these are cut."""

    def __init__(self) -> None:
        self.unread = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Those that are whole with these bytes."""
        self.unread += data
        found: list[Message] = []
        start = 0
        while (end := self.end_of(start)) <= len(self.unread):
            found.append(message_of(self.unread[start + LENGTH : end]))
            start = end
        del self.unread[:start]
        return found

    def end_of(self, start: int) -> int:
        if len(self.unread) < start + LENGTH:
            return start + LENGTH
        length = int.from_bytes(self.unread[start : start + LENGTH], "little")
        if length > LONGEST:
            raise Malformed(f"a message of {length:,} bytes, and {LONGEST:,} is the most")
        return start + LENGTH + length


def message_of(said: bytes | bytearray) -> Message:
    try:
        message = json.loads(said)
    except (ValueError, RecursionError) as problem:
        raise Malformed(f"a message is not JSON: {problem}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise Malformed("a message is a list that begins with its name")
    return message


class Sender:
    """Sends without ever waiting; of one thread."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.unsent = bytearray()

    def send(self, message: Message) -> None:
        self.unsent += framed(message)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes. Where the other side is gone nothing is, which whoever reads from it finds out."""
        try:
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()


def read_message(connection: socket.socket) -> Message | None:
    """The next message and no byte more, waiting for it; None where the other side is gone."""
    length = read_bytes(connection, LENGTH)
    said = read_bytes(connection, int.from_bytes(length, "little")) if length else b""
    return message_of(said) if said else None


def read_bytes(connection: socket.socket, count: int) -> bytes:
    """So many, or none where they do not come."""
    found = bytearray()
    with suppress(ConnectionError):
        while len(found) < count and (piece := connection.recv(min(count - len(found), AT_ONCE))):
            found += piece
    return bytes(found) if len(found) == count else b""


def request_as_words(request: Request) -> dict[str, Any]:
    """A request as JSON can say it."""
    params = {field.name: getattr(request.params, field.name) for field in fields(SamplingParams)}
    params["logit_bias"] = list(params["logit_bias"].items())
    params["structure"] = params["structure"] and asdict(params["structure"])
    names = ("id", "prompt", "priority", "adapter", "salt", "pooling")
    return {name: getattr(request, name) for name in names} | {"params": params}


def request_from_words(words: dict[str, Any]) -> Request:
    params = words["params"]
    read = dict(
        logit_bias=dict(params["logit_bias"]),
        structure=params["structure"] and Structure(**params["structure"]),
        stop=tuple(params["stop"]),
        stop_ids=tuple(params["stop_ids"]),
    )
    return Request(**words | {"params": SamplingParams(**params | read)})


def logprob_from_words(words: list[Any]) -> TokenLogprob:
    return TokenLogprob(words[0], words[1], tuple(map(tuple, words[2])))
