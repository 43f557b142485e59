"""Responses that can be continued, looked up and deleted, in memory: so many, and so many bytes of JSON; the oldest goes first.

Every response holds its whole conversation, so that it outlives those that it continues. What conversations have in common
is held, and counted, once.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Key = tuple[bytes, str]  # who it belongs to, and its id


@dataclass(frozen=True)
class StoredResponse:
    """A response as JSON, in parts that others share."""

    head: bytes  # an object: all of it but its output
    context: tuple[bytes, ...]  # lists of items: what was said before, the request's own input the last
    output: bytes  # a list of items
    ids: tuple[str, ...]  # of the items that came with it, its input's and its output's

    @property
    def parts(self) -> tuple[bytes, ...]:
        return (self.head, *self.context, self.output)

    @property
    def body(self) -> bytes:
        return b'{"output":' + self.output + b"," + self.head[1:]

    def own_items(self) -> dict[str, dict[str, Any]]:
        """The items that came with it, its input's and its output's, by their ids."""
        return {item["id"]: item for part in (self.context[-1], self.output) for item in json.loads(part)}

    def input_items(self) -> Iterator[dict[str, Any]]:
        """All that it answers, the oldest first."""
        for part in self.context:
            yield from json.loads(part)


class ResponseStore:
    """The stored responses of all clients; each finds only its own."""

    def __init__(self, most: int, most_bytes: int):
        self.most, self.most_bytes = most, most_bytes
        self.responses: dict[Key, StoredResponse] = {}  # the oldest first
        self.with_item: dict[Key, Key] = {}  # by the id of an item, the latest response that it came with
        self.uses: Counter[int] = Counter()  # of each part, by its identity
        self.bytes = 0

    def add(self, key: Key, response: StoredResponse) -> None:
        if sum(map(len, response.parts)) > self.most_bytes:
            return  # alone it is too large, and must not cost the others their place
        self.responses[key] = response
        self.with_item |= {(key[0], item): key for item in response.ids}
        for part in response.parts:
            self.uses[id(part)] += 1
            self.bytes += len(part) if self.uses[id(part)] == 1 else 0
        while len(self.responses) > self.most or self.bytes > self.most_bytes:
            self.remove(next(iter(self.responses)))

    def remove(self, key: Key) -> bool:
        """Forget a response; whether there was one."""
        if (response := self.responses.pop(key, None)) is None:
            return False
        for item in response.ids:
            if self.with_item.get((key[0], item)) == key:
                del self.with_item[key[0], item]
        for part in response.parts:
            self.uses[id(part)] -= 1
            if not self.uses[id(part)]:
                del self.uses[id(part)]
                self.bytes -= len(part)
        return True
