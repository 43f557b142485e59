"""The runner computes what the scheduler planned: one forward over a flat batch, and the tokens drawn after it.

What the device has to know of a sequence lies in tables, a row for each that runs, and only what changed is sent: its pages
as they are taken, its settings once. The token drawn last stays on the device too, so that the next step can be launched
before the host has read it:

    host     plan 1 │ launch 1 │ plan 2 │ launch 2 │ read 1 │ plan 3 │ launch 3 │ read 2 …
    device            step 1 ───────────│ step 2 ────────────────────│ step 3 ────────── …

Shapes: T tokens of the step, S sequences in it, D tokens drawn, R rows, V vocabulary.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilestack.ahead import SAMPLES, compile_ahead
from tilestack.engine.adapters import ServedAdapters
from tilestack.engine.captured import CapturedSteps, Size, is_plain
from tilestack.engine.cpu_step import FEW, CPUStep, torch_on_one_thread
from tilestack.engine.decoding import DecodingSteps
from tilestack.engine.decoding_one import persistent_steps
from tilestack.engine.outputs import TokenLogprob
from tilestack.engine.pooling import Pooler
from tilestack.engine.reading import ReadingSteps
from tilestack.engine.sampling import Draws, SamplingRows, sample_unfiltered, told_of
from tilestack.engine.scheduler import Part, Plan
from tilestack.engine.sequence import Sequence
from tilestack.engine.transfer import to_device
from tilestack.models import Decoder, PagedBatch, PagedCache, invariant

Report = Callable[[str, int, int], None]  # what is being done, how many are done, and of how many

PROMPT_ROWS = 256  # prompt tokens whose logits are there at a time, when their log-probabilities are asked for


@dataclass
class Told:
    """Log-probabilities on their way to host memory: there once their step is read."""

    tokens: Tensor  # [D]
    own: Tensor  # [D]: of these tokens
    ids: Tensor  # [D, top]: the likeliest
    values: Tensor  # [D, top]: and theirs
    rows: dict[int, int] = field(default_factory=dict)  # of tokens that were drawn, by their places in the step

    def at(self, row: int, top: int) -> TokenLogprob:
        """Of the token in a row, with so many of the likeliest."""
        likeliest = zip(self.ids[row, :top].tolist(), self.values[row, :top].tolist(), strict=True)
        return TokenLogprob(int(self.tokens[row]), float(self.own[row]), tuple(likeliest))


@dataclass
class Step:
    """A step on its way: what was asked, and where the answer will be."""

    parts: list[Part]
    tokens: Tensor  # [D], in host memory once `ready`
    ready: torch.cuda.Event | None
    logprobs: Told | None = None
    prompt_logprobs: dict[Sequence, list[Told]] = field(default_factory=dict)
    pooled: dict[Sequence, Tensor] = field(default_factory=dict)  # [hidden] of texts that were read to their end

    def read(self) -> list[int]:
        """The tokens, waiting for them."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.tokens.tolist()


class Runner:
    """A decoder, its pages, and the rows of the sequences that run."""

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        *,
        rows: int,
        context: int,
        step_tokens: int,
        adapters: ServedAdapters | None = None,
        draft: tuple[Decoder, PagedCache] | None = None,
        graphs: bool = False,
        persistent: bool | None = False,
        step: CPUStep | None = None,
        batch_invariant: bool = False,
    ):
        self.batch_invariant = batch_invariant
        self.step = step  # of a few tokens in one call, on a CPU
        self.decoder, self.cache, self.adapters, self.draft = decoder, cache, adapters, draft
        self.device = decoder.embedding.weight.device
        self.tables = torch.zeros(rows + 1, -(-context // cache.page), dtype=torch.int64, device=self.device)
        # The token drawn last in each row, -1 where the logits were not finite and in the row that is nobody's; the one before
        # that is what steps are filled up with.
        self.last_ids, self.nobody = torch.zeros(rows + 2, dtype=torch.int64, device=self.device), rows + 1
        self.last_ids[self.nobody] = -1
        self.adapter_of = torch.zeros(rows + 1, dtype=torch.int64, device=self.device)
        draw = sample_unfiltered if step is None else step.draw
        self.sampling = SamplingRows(rows, decoder.config.vocabulary, self.device, draw)
        self.synced = [(0, 0)] * rows  # of each row, the admission that it is of, and how many of its pages it knows
        self.lacks_kernels = True  # as far as we know
        self.report: Report | None = None  # told what takes long before a step can begin
        self.graph_memory: Any = None  # which all graphs share, since one runs at a time
        self.swapped: dict[Sequence, list[Tensor]] = {}
        self.pooler = Pooler()
        self.captured: list[CapturedSteps] = []
        if graphs:
            self.captured = [DecodingSteps(self, rows), ReadingSteps(self, rows, step_tokens)]
            if persistent is not False:  # asked for, or where they can be
                self.captured[:0] = persistent_steps(self, rows, asked=bool(persistent))

    @torch.no_grad()
    def launch(self, parts: list[Part]) -> Step:
        """Begin a step; nothing of it waits for the device."""
        few = self.step is not None and sum(map(len_of, parts)) <= FEW
        with self.on_device(), torch_on_one_thread() if few else nullcontext():
            return self.begin(parts)

    def on_device(self) -> AbstractContextManager[Any]:
        """Inside, the model's device is the current one, by which events are recorded and graphs captured."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def begin(self, parts: list[Part]) -> Step:
        self.sync_rows([part.sequence for part in parts])
        kind = None if self.draft else next((each for each in self.captured if each.take(parts)), None)
        return self.kernel_by_kernel(parts) if kind is None else self.captured_step(kind, kind.arranged(parts))

    def captured_step(self, kind: CapturedSteps, parts: list[Part]) -> Step:
        """A step as a graph; what was drawn for parts that ask for more than the tables hold is drawn again, as they ask."""
        tokens, hidden = kind.launch(parts)
        if all(map(is_plain, parts)):
            return Step(parts, self.to_host(tokens), self.record())
        assert hidden is not None  # kinds without it take plain parts alone
        asking = Draws.of(parts, lambda part: not is_plain(part))
        places = self.indices(asking.places)
        drawn, told = self.draw(asking, hidden[places])
        tokens = tokens.index_copy(0, places, drawn.to(tokens.dtype))
        return Step(parts, self.to_host(tokens), self.record(), told)

    def kernel_by_kernel(self, parts: list[Part]) -> Step:
        batch, ids = self.batch_of(parts)
        hidden = self.forward(parts, ids, batch)
        draws = Draws.of(parts)
        drawn, told = torch.zeros(0, dtype=torch.int64), None
        if draws.sequences:
            drawn, told = self.draw(draws, hidden[self.indices(places_of(parts))])
        of_prompts, pooled = self.prompt_logprobs(parts, hidden), self.pool(parts, hidden)
        return Step(parts, self.to_host(drawn), self.record(), told, of_prompts, pooled)

    def draw(self, draws: Draws, hidden: Tensor) -> tuple[Tensor, Told | None]:
        """Tokens [D] by hidden states [D, hidden], which become the last of their rows, and what is told of those whose
        log-probabilities are asked for."""
        rows = self.indices([sequence.row for sequence in draws.sequences])
        logits = self.logits(hidden)
        drawn = self.sampling.draw(logits, draws, rows)
        self.last_ids[rows] = drawn.long()  # of drafts any one: the host will know
        tops = {at: sequence.logprobs for at, sequence in enumerate(draws.sequences) if sequence.logprobs is not None}
        if not tops:
            return drawn, None
        at = self.indices(list(tops))
        told = self.told(logits[at], drawn[at], max(tops.values()))
        told.rows = {draws.places[each]: row for row, each in enumerate(tops)}
        return drawn, told

    @torch.no_grad()
    def warm_up(self, report: Report | None = None) -> None:
        """Capture all graphs there can be, before the first step needs one; nothing where there are none."""
        if self.device.type != "cuda" or self.draft is not None:
            return
        self.report = report
        wanted = [(kind, size) for kind in self.captured for size in kind.sizes() if size not in kind.graphs]
        wanted.sort(key=lambda each: -each[1].tokens)  # what the largest took of their memory has room for all others
        with self.on_device():
            apart = len(wanted) // SAMPLES + 1  # the samples are of all sizes
            self.compile_ahead([each for first in range(apart) for each in wanted[first::apart]])
            for done, (kind, size) in enumerate(wanted, 1):
                kind.capture(size)
                if report is not None:
                    report("capturing graphs", done, len(wanted))
        self.report = None

    def compile_ahead(self, wanted: List[tuple[CapturedSteps, Size]]) -> None:
        """Compile kernels that these steps lack, many at once, until a step lacks none."""
        if self.device.type != "cuda" or not self.lacks_kernels:
            return
        told = self.report and partial(self.report, "compiling kernels")
        calls = [partial(kind.compute_nothing, size) for kind, size in wanted]
        self.lacks_kernels = compile_ahead(calls, told) > 0

    def forward(self, parts: List[Part], ids: Tensor, batch: PagedBatch) -> Tensor:
        """Hidden states [T, hidden] of a batch. A model that drafts reads along, so that its pages hold the same tokens."""
        if self.draft is not None:
            draft, cache = self.draft
            draft.hidden(ids, context=batch.over(cache))
        if self.batch_invariant:
            with invariant.invariant_mode(self.device):
                return invariant.hidden_of_batch(self.decoder, ids, batch)
        if self.step is not None and len(ids) <= self.step.most:
            return self.step.hidden(ids, batch)
        if self.adapters is None:
            return self.decoder.hidden(ids, context=batch)
        numbers = [part.sequence.adapter for part in parts for _ in range(len_of(part))]
        with self.adapters.chosen(self.indices(numbers)) if any(numbers) else nullcontext():
            return self.decoder.hidden(ids, context=batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's scores [D, V] of hidden states [D, hidden]."""
        if self.batch_invariant:
            with invariant.invariant_mode(self.device):
                return invariant.logits_of(self.decoder, hidden)
        if self.step is not None and len(hidden) <= self.step.most:
            return self.step.logits(hidden)
        return self.decoder.logits(hidden.to(self.decoder.embedding.weight.dtype))

    def batch_of(self, parts: List[Part]) -> tuple[PagedBatch, Tensor]:
        """The step as the model reads it: where its tokens lie, and which they are [T]."""
        ids: list[int] = []
        unread, unread_rows = [], []  # places of tokens that only the device knows
        for part in parts:
            sequence, end = part.sequence, part.start + part.count
            ids += sequence.ids[part.start : end]
            if end > len(sequence.ids):
                unread.append(len(ids))
                unread_rows.append(sequence.row)
                ids.append(0)
            ids += part.drafts
        counts = [len_of(part) for part in parts]
        lengths = [part.start + count for part, count in zip(parts, counts, strict=True)]
        given = self.indices(ids)
        if unread:
            given[self.indices(unread)] = self.last_ids[self.indices(unread_rows)].clamp(min=0)
        rows = self.indices([part.sequence.row for part in parts])
        batch = PagedBatch(
            self.cache,
            self.tables[rows, : -(-max(lengths) // self.cache.page)],
            self.indices(lengths),
            self.indices(list(accumulate(counts, initial=0))),
            tokens=len(ids),
            most_queries=max(counts),
        )
        return batch, given

    def sync_rows(self, sequences: List[Sequence]) -> None:
        """Send what the tables lack of these sequences."""
        synced = self.synced
        changed = [each for each in sequences if synced[each.row] != (each.admission, len(each.pages))]
        entered: list[Sequence] = []
        rows: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for sequence in changed:
            admission, known = synced[sequence.row]
            if admission != sequence.admission:
                known = 0
                entered.append(sequence)
                if self.adapters is not None:
                    self.adapter_of[sequence.row] = sequence.adapter
            new = sequence.pages[known:]
            rows += [sequence.row] * len(new)
            columns += range(known, len(sequence.pages))
            pages += new
            synced[sequence.row] = sequence.admission, len(sequence.pages)
        self.sampling.enter(entered)
        if pages:
            at_rows, at_columns, new_pages = self.indices([rows, columns, pages])
            self.tables[at_rows, at_columns] = new_pages

    def swap(self, plan: Plan) -> None:
        """Copy pages to host memory and back; the steps before and after see it done, since one stream does it all."""
        caches = [self.cache] + ([self.draft[1]] if self.draft else [])
        kept = [tensor for cache in caches for tensor in cache.tensors()]
        for sequence, pages in plan.swapped_out:
            self.swapped[sequence] = [tensor[:, self.indices(pages)].cpu() for tensor in kept]
        for sequence, pages in plan.swapped_in:
            for tensor, held in zip(kept, self.swapped.pop(sequence), strict=True):
                tensor[:, self.indices(pages)] = held.to(self.device)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended: drop what is held of it."""
        self.swapped.pop(sequence, None)
        self.pooler.forget(sequence)

    def prompt_logprobs(self, parts: List[Part], hidden: Tensor) -> dict[Sequence, list[Told]]:
        """Of the prompt's tokens that follow those of this step, where a request wants them told."""
        told: dict[Sequence, list[Told]] = {}
        for part, offset in offsets_of(parts):
            sequence, top = part.sequence, part.sequence.params.prompt_logprobs
            if not part.tells_prompt or top is None:
                continue
            following = sequence.ids[part.start + 1 : min(part.start + part.count, sequence.prompt - 1) + 1]
            told[sequence] = []
            for first in range(0, len(following), PROMPT_ROWS):
                ids = following[first : first + PROMPT_ROWS]
                logits = self.logits(hidden[offset + first : offset + first + len(ids)])
                told[sequence].append(self.told(logits, self.indices(ids), top))
        return told

    def told(self, logits: Tensor, tokens: Tensor, top: int) -> Told:
        """What is told of tokens [D]."""
        if self.batch_invariant:
            with invariant.invariant_mode(self.device):
                found = invariant.log_softmax_of(logits)
        else:
            found = torch.log_softmax(logits.float(), -1)
        own, ids, values = told_of(found, tokens.clamp(min=0), top)
        return Told(self.to_host(tokens), self.to_host(own), self.to_host(ids), self.to_host(values))

    def pool(self, parts: List[Part], hidden: Tensor) -> dict[Sequence, Tensor]:
        """What texts that become vectors have come to, of those that end in this step."""
        found: dict[Sequence, Tensor] = {}
        for part, offset in offsets_of(parts):
            if part.pools and (total := self.pooler.add(part, hidden[offset : offset + part.count])) is not None:
                found[part.sequence] = self.to_host(total)
        return found

    def indices(self, values: List[int] | List[List[int]]) -> Tensor:
        """Integers on the device, sent without waiting."""
        return to_device(values, self.device)

    def record(self) -> torch.cuda.Event | None:
        """A mark in the device's work up to here, which can be waited for."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def to_host(self, values: Tensor) -> Tensor:
        return values.to("cpu", non_blocking=True) if self.device.type == "cuda" else values


def len_of(part: Part) -> int:
    """A part's tokens, those that are guesses included."""
    return part.count + len(part.drafts)


def offsets_of(parts: List[Part]) -> Iterator[tuple[Part, int]]:
    """Parts with the place of their first token in the batch."""
    offset = 0
    for part in parts:
        yield part, offset
        offset += len_of(part)


def places_of(parts: List[Part]) -> list[int]:
    """The tokens of the batch that are followed by a new one."""
    drawing = [(part, offset) for part, offset in offsets_of(parts) if part.draws]
    return [place for part, offset in drawing for place in range(offset + part.count - 1, offset + len_of(part))]
