"""The pages of a KV cache as a scheduler sees them: who uses them, and what the free ones still remember.

A page that holds a full page of tokens is remembered under a key that stands for those tokens and all before them:

    key(page i) = hash(key(page i - 1), tokens of page i)          key(page -1): the tenant and the adapter

so that a request whose prompt begins alike shares the pages instead of computing them. On a hit the tokens themselves
are compared too: a hash that collides must not show one user's text to another. A page that nobody uses is free and
keeps what it remembers until it is taken for something else, least recently used first.

Page 0 is nobody's (see models/paged.py).
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

ROOT = b""


def root_key(*parts: str) -> bytes:
    """The key before the first page: different for whoever must not share pages."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest() if any(parts) else ROOT


def page_key(before: bytes, ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(before + array("q", ids).tobytes(), digest_size=16).digest()


class PagePool:
    """Pages 1 … pages - 1 of `page` tokens, each with the number of its users."""

    def __init__(self, pages: int, page: int):
        if pages < 2:
            raise ValueError(f"a pool needs page 0 and at least one more, not {pages}")
        self.page, self.pages = page, pages - 1
        self.users = [0] * pages
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, pages))  # least recently used first
        self.remembered: dict[bytes, int] = {}
        self.contents: dict[int, tuple[bytes, bytes, tuple[int, ...]]] = {}  # page: its key, the one before, its tokens

    @property
    def used(self) -> int:
        return self.pages - len(self.free)

    def take(self) -> int:
        """A free page, which forgets what it held."""
        page, _ = self.free.popitem(last=False)
        self.forget(page)
        self.users[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more user of a page that was found."""
        self.users[page] += 1
        self.free.pop(page, None)

    def release(self, pages: Iterable[int]) -> None:
        """One user less for each. Of a text the last pages are forgotten first: what others share is at its beginning."""
        for page in reversed(list(pages)):
            assert self.users[page] > 0, f"page {page} is released by nobody"
            self.users[page] -= 1
            if not self.users[page]:
                self.free[page] = None

    def remember(self, page: int, before: bytes, ids: Sequence[int]) -> bytes:
        """Let others find a full page; returns its key. Where another page holds the same, that one stays the one found."""
        key = page_key(before, ids)
        if key not in self.remembered:
            self.forget(page)
            self.remembered[key] = page
            self.contents[page] = key, before, tuple(ids)
        return key

    def forget(self, page: int) -> None:
        if page in self.contents:
            del self.remembered[self.contents.pop(page)[0]]

    def forget_all(self) -> None:
        """After a step that failed: nobody knows what it wrote."""
        self.remembered.clear()
        self.contents.clear()

    def find(self, root: bytes, ids: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """The pages that hold the longest beginning of a text, and their keys; nobody uses them for it yet."""
        pages: list[int] = []
        keys: list[bytes] = []
        before = root
        for start in range(0, len(ids) - self.page + 1, self.page):
            part = tuple(ids[start : start + self.page])
            key = page_key(before, part)
            page = self.remembered.get(key)
            if page is None or self.contents[page] != (key, before, part):
                break
            pages.append(page)
            keys.append(key)
            before = key
        return pages, keys
