"""Who computes what in the next step.

A step is a flat batch of tokens: a chunk of a prompt here, one token of decoding there. It is filled by priority; among equals
those that run come first, in the order of their arrival, each with the tokens it lacks, and then those that wait, as long as
tokens, rows and pages last. When pages run out the newest of the least priority gives its own back, and computes again what it
had (or copies it to host memory and back, where that is allowed).

Nothing here touches the device, so a schedule can be made while the step before is still being computed.
"""

import math
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field

from tilestack.engine.pages import PagePool
from tilestack.engine.sequence import Sequence


@dataclass(slots=True)
class Part:
    """One sequence's tokens of a step: `count` from `start` on, and then room for some drafts."""

    sequence: Sequence
    start: int
    count: int
    draws: bool  # whether the last of them is followed by a new token
    index: int  # the new token's place in the answer
    room: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def tells_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are told by this part; once for all answers."""
        sequence = self.sequence
        asked = sequence.params.prompt_logprobs is not None
        return asked and not sequence.choice and self.start < sequence.prompt - 1

    @property
    def ends_prompt(self) -> bool:
        return self.start + self.count == self.sequence.prompt

    @property
    def pools(self) -> bool:
        """Whether hidden states of these tokens become part of a vector: all of them for a mean, else the text's last."""
        pooling = self.sequence.pooling
        return pooling == "mean" or (pooling == "last" and self.ends_prompt)


@dataclass
class Plan:
    parts: list[Part] = field(default_factory=list)
    swapped_out: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # pages to copy before the step
    swapped_in: list[tuple[Sequence, list[int]]] = field(default_factory=list)


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        *,
        rows: int,
        step_tokens: int,
        prefix_caching: bool = True,
        swap_tokens: int = 0,
        drafting_tokens: int | None = None,
    ):
        """`drafting_tokens` are those of a step with drafts, if there is such a bound."""
        self.pool, self.step_tokens, self.prefix_caching = pool, step_tokens, prefix_caching
        self.swap_tokens, self.drafting_tokens = swap_tokens, drafting_tokens
        self.free_rows = list(range(rows))[::-1]
        self.waiting: list[Sequence] = []  # both in the order in which they are served
        self.running: list[Sequence] = []
        self.preemptions = self.admissions = 0
        self.reserve = pool.pages // 100  # pages that are left to those who run

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda each: each.order)

    def remove(self, sequence: Sequence) -> None:
        """A sequence that has ended, wherever it is. Steps in flight may still write into its pages: who takes them next
        writes in a later step, and steps follow each other."""
        sequence.ended = True
        if sequence in self.running:
            self.running.remove(sequence)
            self.give_back(sequence)
        else:
            self.waiting.remove(sequence)
            self.swap_tokens += sequence.swapped

    def schedule(self) -> Plan:
        plan, left = Plan(), self.step_tokens
        self.make_way(plan)
        preempted, level = self.preemptions, -math.inf
        drafting = self.drafting_tokens is None or len(self.running) < self.drafting_tokens
        for behind, sequence in list(zip(range(len(self.running) - 1, -1, -1), self.running, strict=True)):
            if sequence.row < 0 or sequence.waits_to_be_read:  # preempted by one before it, or nothing to compute
                continue
            if sequence.request.priority > level and self.preemptions == preempted:
                level = sequence.request.priority
                left = self.admit(plan, left, level)
            count = min(sequence.drawn - sequence.kept, left)
            if not count:
                continue
            room = self.room_for_drafts(sequence, count, left - count - behind) if drafting and sequence.guesses else 0
            if self.find_pages(sequence, sequence.kept + count + room, plan):
                left -= self.enter(plan, sequence, count, room)
        if self.preemptions == preempted:  # else the pages would go back and forth
            self.admit(plan, left)
        return plan

    def make_way(self, plan: Plan) -> None:
        """Let those who run give way to the first who waits, as long as it needs it and has priority over them."""
        while self.waiting and self.running:
            first, last = self.waiting[0], self.running[-1]
            if last.request.priority <= first.request.priority or self.has_room(first):
                return
            self.preempt(last, plan)

    def has_room(self, sequence: Sequence, found: Collection[int] = ()) -> bool:
        """Whether a sequence that waits could begin, with so many pages that were found."""
        need = self.pages_for(sequence.drawn) - len(found)
        free = len(self.pool.free) - sum(not self.pool.users[page] for page in found)
        return bool(self.free_rows) and need <= free - (self.reserve if self.running else 0)

    def admit(self, plan: Plan, left: int, before: float = math.inf) -> int:
        """Let sequences begin that wait and have priority over `before`, in their order, while there is room; how many of the
        step's tokens are left."""
        while self.waiting and self.waiting[0].request.priority < before:
            sequence = self.waiting[0]
            if not self.free_rows or left <= 0 or sequence.in_flight:
                break
            pages, keys = self.known_beginning(sequence)
            if not self.has_room(sequence, pages):
                break
            self.waiting.pop(0)
            insort(self.running, sequence, key=lambda each: each.order)
            if sequence.choice == 0 and not sequence.admission:
                sequence.request.cached = len(pages) * self.pool.page
            self.admissions += 1
            sequence.row, sequence.admission = self.free_rows.pop(), self.admissions
            for page in pages:
                self.pool.share(page)
            sequence.pages, sequence.keys, sequence.kept = pages, keys, len(pages) * self.pool.page
            if sequence.swapped:
                self.take_pages(sequence, sequence.swapped)
                plan.swapped_in.append((sequence, list(sequence.pages)))
                sequence.kept, sequence.swapped = sequence.swapped, 0
                self.swap_tokens += sequence.kept
            count = min(sequence.drawn - sequence.kept, left)
            self.take_pages(sequence, sequence.kept + count)
            left -= self.enter(plan, sequence, count)
        return left

    def enter(self, plan: Plan, sequence: Sequence, count: int, room: int = 0) -> int:
        """Put a sequence's tokens into the plan; how many of the step's they are."""
        start, drawn = sequence.kept, sequence.drawn
        last = start + count == drawn
        draws = last and sequence.pooling is None
        plan.parts.append(Part(sequence, start, count, draws, drawn - sequence.prompt, room))
        sequence.kept = start + count
        sequence.in_flight += last
        self.remember(sequence)
        return count + room

    def remember(self, sequence: Sequence) -> None:
        """Let others find the pages that are full of tokens the host knows."""
        page = self.pool.page
        if not self.prefix_caching or sequence.kept < (len(sequence.keys) + 1) * page:
            return
        known = min(sequence.kept, len(sequence.ids))
        while (place := len(sequence.keys)) < known // page:
            before = sequence.keys[-1] if sequence.keys else sequence.root
            ids = sequence.ids[place * page : (place + 1) * page]
            sequence.keys.append(self.pool.remember(sequence.pages[place], before, ids))

    def known_beginning(self, sequence: Sequence) -> tuple[list[int], list[bytes]]:
        """Pages that hold a sequence's first tokens; the last one is computed in any case, for what follows it."""
        if not self.prefix_caching or sequence.swapped or sequence.needs_all_states:
            return [], []
        return self.pool.find(sequence.root, sequence.ids[:-1])

    def room_for_drafts(self, sequence: Sequence, count: int, left: int) -> int:
        """Tokens that may be guessed behind the one to decode; the token after them has to fit too. Nobody gives way to
        guesses, so they take only pages that are free, and of the step's tokens what is `left` when all who run have one."""
        if sequence.drawn - sequence.kept != 1 or sequence.index < 1:
            return 0
        pages = (len(sequence.pages) + len(self.pool.free)) * self.pool.page - sequence.kept - count
        return max(0, min(sequence.guesses, left, sequence.limit - sequence.drawn - 1, pages))

    def find_pages(self, sequence: Sequence, tokens: int, plan: Plan) -> bool:
        """Give a sequence pages for so many tokens, from the last in the order if need be; False: it was the last. What it has
        beyond them was for guesses of an earlier step, and is for others now."""
        spare = len(sequence.pages) * self.pool.page - tokens
        if spare >= 0:
            if spare >= self.pool.page:
                needed = self.pages_for(tokens)
                self.pool.release(sequence.pages[needed:])
                del sequence.pages[needed:]
            return True
        need = self.pages_for(tokens) - len(sequence.pages)
        while need > len(self.pool.free):
            last = self.running[-1]
            self.preempt(last, plan)
            if last is sequence:
                return False
        self.take_pages(sequence, tokens)
        return True

    def preempt(self, sequence: Sequence, plan: Plan) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        if sequence.kept <= self.swap_tokens:
            plan.swapped_out.append((sequence, sequence.pages[: self.pages_for(sequence.kept)]))
            sequence.swapped = sequence.kept
            self.swap_tokens -= sequence.kept
        self.give_back(sequence)
        self.add(sequence)

    def give_back(self, sequence: Sequence) -> None:
        self.free_rows.append(sequence.row)
        self.pool.release(sequence.pages)
        sequence.row, sequence.kept, sequence.pages, sequence.keys = -1, 0, [], []

    def take_pages(self, sequence: Sequence, tokens: int) -> None:
        sequence.pages += [self.pool.take() for _ in range(self.pages_for(tokens) - len(sequence.pages))]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.page)
