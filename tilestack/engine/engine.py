"""The engine: requests go in, steps are taken, and what each step added to the answers comes out.

One request through it: `add` checks it and makes a sequence of each answer; the scheduler lets it run when there is room;
every `step` the runner computes its part of the batch and draws a token; one step later the host reads it, decodes it,
looks for stops, and hands it on. Whatever ends, its pages and its row are free for the next.
"""

import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilestack.data import Tokenizer
from tilestack.device import pick_device
from tilestack.engine.adapters import ServedAdapters
from tilestack.engine.admission import Admission
from tilestack.engine.cpu_step import FEW as FEW_ON_CPU
from tilestack.engine.cpu_weights import can_block, pack_for_cpu
from tilestack.engine.outputs import Completion, Delta, TokenLogprob, Usage
from tilestack.engine.pages import PagePool
from tilestack.engine.params import RequestError
from tilestack.engine.pooling import unit_vector
from tilestack.engine.quantised_weights import has_codes, load_decoder, weights_in_words
from tilestack.engine.reading import FEW as FEW_ON_GPU
from tilestack.engine.runner import Runner, Step
from tilestack.engine.scheduler import Part, Plan, Scheduler
from tilestack.engine.sequence import Request, Sequence, first_seeds
from tilestack.engine.settings import EngineSettings, bytes_of_token, make_cache, new_cache
from tilestack.engine.speculation import Drafter, DraftModel, LookUp, check_draft
from tilestack.engine.structure import StructureFailed, Structures
from tilestack.engine.text import TextStream
from tilestack.models import Decoder, PagedCache
from tilestack.models.invariant import why_not_invariant

if TYPE_CHECKING:
    from tilestack.engine.cpu_step import CPUStep

log = logging.getLogger(__name__)
News = tuple[Request, Delta]


class QueueFull(RuntimeError):
    """More requests wait than may; come again later."""


@dataclass
class EngineStats:
    """How the engine is doing: now, and in all since it started."""

    waiting: int
    running: int
    pages: int
    pages_used: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    requests: int = 0
    steps: int = 0


class Engine:
    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None = None,
        settings: EngineSettings | None = None,
        draft: Decoder | None = None,
    ):
        self.settings = settings = settings or EngineSettings()
        self.decoder, self.tokenizer = decoder, tokenizer
        weight = decoder.embedding.weight
        self.weights = weights_in_words(decoder)
        self.vocabulary = decoder.config.vocabulary
        positions = decoder.config.positions
        if settings.context is not None and settings.context > positions:
            raise ValueError(
                f"a context of {settings.context:,} tokens, and the model reads {positions:,}; give {positions:,} or less, or "
                "leave it out"
            )
        self.context = settings.context or positions
        if settings.weights and not has_codes(decoder):
            raise ValueError(
                f"weights of {settings.weights} are made as a model is loaded, by Engine.load; of one that is there, "
                "quantised_weights.quantise_weights makes them"
            )
        if settings.batch_invariant and (reason := why_not_invariant(decoder)):
            raise ValueError(f"no batch-invariant mode: {reason}")
        if settings.batch_invariant and has_codes(decoder):  # on a CPU, in a layer of its own or unpacked
            raise ValueError("no batch-invariant mode: it is for a model as it was trained, and this one is quantised")
        step_tokens = settings.step_tokens or (8192 if weight.device.type == "cuda" else 512)
        if draft is not None:
            check_draft(draft, decoder, self.context)
        cache = make_cache(decoder, settings, self.context, step_tokens, draft)
        assert cache.longest is not None
        self.pool, self.context = PagePool(len(cache.keys[0]), settings.page), cache.longest
        self.adapters = ServedAdapters(decoder, settings.adapters) if settings.adapters else None
        kept = None
        if draft is not None:
            kept = new_cache(draft, len(cache.keys[0]), settings, cache.keys.dtype, cache.longest)
        self.runner = Runner(
            decoder,
            cache,
            rows=settings.max_sequences,
            context=self.context,
            step_tokens=step_tokens,
            adapters=self.adapters,
            draft=None if draft is None or kept is None else (draft, kept),
            graphs=self.in_graphs,
            persistent=None if settings.decode is None else settings.decode == "persistent",
            step=self.cpu_step(cache),
            batch_invariant=settings.batch_invariant,
        )
        if settings.decode == "persistent" and not self.runner.captured:
            log.warning("decoding is not persistent: it runs in CUDA graphs, which are off")
        self.drafter: Drafter | None = None
        if settings.speculate is not None:
            self.drafter = DraftModel(self.runner) if draft is not None else self.look_up()
        asked, drafter = settings.draft_tokens, self.drafter
        self.usual_guesses = (asked or drafter.usual) if drafter else 0
        self.most_guesses = (asked or drafter.most) if drafter else 0
        self.new_scheduler = partial(
            Scheduler,
            rows=settings.max_sequences,
            step_tokens=step_tokens,
            prefix_caching=settings.prefix_caching,
            swap_tokens=settings.swap_memory // bytes_of_token(cache.keys.dtype, decoder, draft),
            drafting_tokens=drafter.step_tokens if drafter else None,
        )
        self.scheduler = self.new_scheduler(self.pool)
        self.admission = Admission(
            self.vocabulary,
            self.context,
            settings.max_sequences,
            settings.queue,
            self.adapter_names,
            reads_text=tokenizer is not None,
        )
        self.ends = frozenset((*(tokenizer.stops if tokenizer else ()), *decoder.config.eos))
        self.structures = Structures(tokenizer, self.vocabulary, self.ends)
        self.arrivals = itertools.count()
        self.requests: dict[str, Request] = {}
        self.held: dict[Request, list[Completion]] = {}  # answers of which the best are given when all have ended
        self.flying: Step | None = None
        self.totals = EngineStats(0, 0, 0, 0)

    @classmethod
    def load(cls, model: str | Path, settings: EngineSettings | None = None) -> "Engine":
        """An engine for a model by its name, folder or file."""
        settings = settings or EngineSettings()
        device = pick_device(settings.device)
        usual = "bfloat16" if device.type == "cuda" or can_block() else "float32"
        dtype = getattr(torch, settings.dtype or usual, None)
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"no dtype {settings.dtype}; choose from float32, bfloat16, float16")
        decoder = load_decoder(model, settings.weights, dtype, device)
        tokenizer = Tokenizer.load(model)
        tokenizer.check_against(decoder.config.vocabulary)
        draft = None
        if settings.speculate not in (None, "lookup"):
            draft = load_decoder(settings.speculate, None, dtype, device)
            if not Tokenizer.load(settings.speculate).same_ids(tokenizer):
                raise ValueError(f"{settings.speculate} has another tokenizer than {model}, so it cannot draft for it")
        engine = cls(decoder, tokenizer, settings, draft)
        log.info("the weights of %s are %s", model, engine.weights)
        if engine.reads_blocks(dtype):
            pack_for_cpu(decoder, "bfloat16")
        return engine

    def look_up(self) -> LookUp:
        """Guesses by looking up: at most as many as a step reads in the time of a few, and in a graph where there are graphs,
        since launching kernel by kernel takes longer than guesses can win."""
        if self.runner.device.type == "cpu":
            return LookUp(most=FEW_ON_CPU - 1)
        return LookUp(most=FEW_ON_GPU // 2 - 1, step_tokens=FEW_ON_GPU if self.runner.captured else None)

    def cpu_step(self, cache: PagedCache) -> "CPUStep | None":
        """A step of a few tokens as one call, on a CPU where there can be one."""
        settings = self.settings
        if cache.keys.device.type != "cpu" or settings.decode or settings.adapters or settings.batch_invariant:
            return None
        from tilestack.engine.cpu_step import cpu_step  # brings all kernels along

        return cpu_step(self.decoder, cache)

    def reads_blocks(self, dtype: torch.dtype) -> bool:
        """Whether bfloat16 weights are better packed: on a CPU that can, where nothing else reads them as they are."""
        settings = self.settings
        plain = not (settings.weights or settings.adapters or settings.batch_invariant or self.runner.step)
        return dtype == torch.bfloat16 and self.runner.device.type == "cpu" and plain and can_block()

    @property
    def in_graphs(self) -> bool:
        """Whether steps run as CUDA graphs: on a GPU, unless told, but not where the host has to know all lengths."""
        wanted = self.decoder.embedding.weight.is_cuda if self.settings.graphs is None else self.settings.graphs
        return wanted and not self.settings.batch_invariant

    @property
    def overlaps(self) -> bool:
        """Whether a step is launched before the one before it is read: on a GPU, unless told. A CPU has computed a step when
        it is launched, so every token would come a step late, and every text would cost one step more."""
        on_gpu = self.decoder.embedding.weight.is_cuda
        return on_gpu if self.settings.overlap is None else self.settings.overlap

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self.flying)

    def stats(self) -> EngineStats:
        return replace(
            self.totals,
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            pages=self.pool.pages,
            pages_used=self.pool.used,
            preemptions=self.scheduler.preemptions,
        )

    def check_queue(self, sequences: int, entering: int = 0) -> None:
        """Refuse so many sequences where too many wait; `entering` others are on their way. Any thread may ask."""
        most = self.settings.queue
        waiting = len(self.scheduler.waiting) + entering
        if most is not None and waiting + sequences > most + len(self.scheduler.free_rows):
            raise QueueFull(f"at most {most} may wait, and there is no room for {sequences} more")

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(self.adapters.numbers) if self.adapters else ()

    def add(self, request: Request) -> None:
        """Queue a request, or refuse it."""
        self.admission.check(request)
        self.check_queue(request.params.drawn)
        self.accept(request)

    def accept(self, request: Request) -> None:
        """Queue a request that was checked, however many wait by now."""
        if request.id in self.requests:
            raise RequestError(f"a request with the id {request.id!r} is being served")
        params = request.params
        most = 1 if request.pooling else self.context - len(request.prompt)  # a vector stands in for one token
        limit = len(request.prompt) + min(most, params.max_tokens or most)
        backend = self.tokenizer.backend if self.tokenizer else None
        sequences = []
        for choice, seed in enumerate(first_seeds(params)):
            sequence = Sequence(
                request,
                choice,
                next(self.arrivals),
                limit,
                seed,
                TextStream(backend, params.stop, params.keep_stop, request.prompt[-1:]),
                frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self.ends),
                self.structures.matcher(params.structure),
                # Penalties and grammars change with every token, so their drafts would have to be drawn one by one.
                guesses=0 if params.penalises or params.structure is not None else self.usual_guesses,
                adapter=self.adapters.numbers[request.adapter] if self.adapters and request.adapter else 0,
            )
            sequences.append(sequence)
        request.sequences, request.prompt_logprobs, request.cached = sequences, [None], 0
        for sequence in sequences:
            self.scheduler.add(sequence)
        self.requests[request.id] = request
        if params.drawn > params.n:
            self.held[request] = [Completion() for _ in request.sequences]
        self.totals.requests += 1
        self.totals.prompt_tokens += len(request.prompt)

    def cancel(self, id: str) -> list[News]:
        """End a request, wherever it is; none with that id is no error, since it may just have ended."""
        request = self.requests.get(id)
        return [] if request is None else self.end(request.sequences, "cancelled")

    def step(self) -> list[News]:
        """Launch a step, and read the one before it (without overlap, the same). One that is interrupted, as by Ctrl-C, takes
        all requests with it: pages are remembered from the plan on, and nobody knows which of them were computed."""
        try:
            return self.launch_and_read()
        except Exception:
            raise
        except BaseException:
            self.drop_everything()
            raise

    def launch_and_read(self) -> list[News]:
        plan = self.scheduler.schedule()
        news: list[News] = []
        launched = None
        try:
            launched = self.launch(plan)
        except Exception as problem:
            swapped = [sequence for sequence, _ in plan.swapped_out]  # perhaps without their pages in host memory
            news += self.fail([*swapped, *(part.sequence for part in plan.parts)], problem)
        steps = [self.flying] if self.overlaps else [self.flying, launched]
        self.flying = launched if self.overlaps else None
        for step in filter(None, steps):
            try:
                news += self.read(step)
            except Exception as problem:
                later = self.flying.parts if self.flying else []
                news += self.fail([part.sequence for part in (*step.parts, *later)], problem)
                self.flying = None
        return news

    def launch(self, plan: Plan) -> Step | None:
        self.runner.swap(plan)  # before anything is written into the pages that were given back
        if not plan.parts:
            return None
        if self.drafter is not None:
            self.drafter.fill(plan.parts)
        self.totals.steps += 1
        return self.runner.launch(plan.parts)

    def read(self, step: Step) -> list[News]:
        """What a step added to the answers."""
        news: list[News] = []
        tokens, place = step.read(), 0
        for part in step.parts:
            if step.prompt_logprobs:
                self.note_prompt(part, step)
            if part.sequence in step.pooled and not part.sequence.ended:
                news += self.end_pooled(part.sequence, step.pooled[part.sequence])
            if not part.draws:
                continue
            count = len(part.drafts) + 1
            if not part.sequence.ended:
                try:
                    news += self.go_on(part, tokens[place : place + count], step, place)
                except StructureFailed as problem:  # by the grammar that was asked for; nothing is wrong here
                    news += self.end([part.sequence], "refused", str(problem))
                except Exception as problem:  # of its text, and no other's
                    log.exception("an answer failed", exc_info=problem)
                    news += self.end([part.sequence], "error", f"{type(problem).__name__}: {problem}")
            place += count
        return news

    def note_prompt(self, part: Part, step: Step) -> None:
        told, top = part.sequence.request.prompt_logprobs, part.sequence.params.prompt_logprobs or 0
        found = [(each, row) for each in step.prompt_logprobs.get(part.sequence, ()) for row in range(len(each.tokens))]
        for place, (each, row) in enumerate(found, part.start + 1):
            if place == len(told):  # else it was told before the sequence had to begin again
                told.append(each.at(row, top))

    def go_on(self, part: Part, tokens: list[int], step: Step, place: int) -> list[News]:
        """A sequence with its new tokens: the drafts that were right, and the token after them."""
        sequence = part.sequence
        sequence.in_flight -= 1
        taken, text, finish = 0, "", None
        for token in tokens:
            if token < 0:
                if sequence.matcher and not sequence.matcher.allowed().any():
                    self.forget_pages(sequence)
                    why = sequence.matcher.problem or "no token is allowed by it any more"
                    raise StructureFailed(f"the structure is too complex: {why}")
                return self.end_not_finite(sequence, "the model's logits are not finite")
            taken += 1
            piece, finish = self.take(sequence, token)
            text += piece
            if finish or (taken <= len(part.drafts) and token != part.drafts[taken - 1]):
                break
        self.totals.completion_tokens += taken
        if part.drafts:
            right = sum(map(int.__eq__, part.drafts, tokens[:taken]))
            self.totals.drafted += len(part.drafts)
            self.totals.accepted += right
            sequence.guesses = self.guesses_after(len(part.drafts), right)
        if sequence.row >= 0:
            sequence.kept += taken - 1
            self.scheduler.remember(sequence)
        logprobs = () if sequence.logprobs is None else self.told(sequence, step, place, taken)
        if finish:
            text += sequence.text.rest()
            finish = "stop" if sequence.text.stopped_by is not None else finish  # it may end what was held back
            return self.end([sequence], finish, ids=tuple(tokens[:taken]), text=text, logprobs=logprobs)
        return self.publish(sequence, Delta(sequence.choice, tuple(tokens[:taken]), text, logprobs))

    def end_pooled(self, sequence: Sequence, total: Tensor) -> list[News]:
        """A text that was read to its end, with what its states have come to."""
        sequence.in_flight -= 1
        if not total.isfinite().all():
            return self.end_not_finite(sequence, "the model's hidden states are not finite")
        return self.end([sequence], "stop", vector=unit_vector(total))

    def end_not_finite(self, sequence: Sequence, what: str) -> list[News]:
        self.forget_pages(sequence)
        return self.end([sequence], "error", what)

    def forget_pages(self, sequence: Sequence) -> None:
        for page in sequence.pages:  # they may hold what is not finite, which others must not find
            self.pool.forget(page)

    def guesses_after(self, guessed: int, right: int) -> int:
        """Tokens that a sequence may guess next: as many as usual, and more and more as long as all of them are right."""
        more = max(2 * guessed + 1, self.usual_guesses)
        return min(more, self.most_guesses) if right == guessed else self.usual_guesses

    def take(self, sequence: Sequence, token: int) -> tuple[str, str | None]:
        """One more token: its text, and why the answer ends with it, if it does."""
        ids, stream = sequence.ids, sequence.text
        ids.append(token)
        may_end = len(ids) - sequence.prompt >= sequence.params.min_tokens
        if may_end and token in sequence.stops:
            return "", "stop"
        text = stream.add(token, may_end)
        if stream.stopped_by is not None:
            return text, "stop"
        if sequence.matcher is not None and not sequence.matcher.accept(token):
            return text, "stop"
        return text, "length" if len(ids) >= sequence.limit else None

    def told(self, sequence: Sequence, step: Step, place: int, count: int) -> tuple[TokenLogprob, ...]:
        top, told = sequence.logprobs, step.logprobs
        if top is None or told is None:
            return ()
        return tuple(told.at(told.rows[place + number], top) for number in range(count))

    def publish(self, sequence: Sequence, delta: Delta) -> list[News]:
        """Hand a delta on; where the best of several are asked for, when all of them are there."""
        request = sequence.request
        if request not in self.held:
            return [(request, delta)]
        self.held[request][sequence.choice].add(delta)
        if not request.ended:
            return []
        found = sorted(self.held.pop(request), key=how_good, reverse=True)[: request.params.n]
        told = request.params.logprobs is not None
        return [
            (request, Delta(place, tuple(each.ids), each.text, tuple(each.logprobs) if told else (), each.finish, each.stopped_by, each.error))
            for place, each in enumerate(found)
        ]  # fmt: skip

    def end(
        self,
        sequences: Iterable[Sequence],
        finish: str,
        error: str | None = None,
        ids: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
        vector: tuple[float, ...] = (),
    ) -> list[News]:
        """End sequences, all for the same reason."""
        news: list[News] = []
        for sequence in sequences:
            if sequence.ended:
                continue
            self.scheduler.remove(sequence)
            self.runner.forget(sequence)
            stopped_by: str | int | None = sequence.text.stopped_by
            if finish == "stop" and stopped_by is None and sequence.ids[-1] in sequence.params.stop_ids:
                stopped_by = sequence.ids[-1]
            request = sequence.request
            if request.ended:
                self.requests.pop(request.id, None)
                self.totals.cached_tokens += request.cached
            delta = Delta(sequence.choice, ids, text, logprobs, finish, stopped_by, error, vector)
            news += self.publish(sequence, delta)
        return news

    def fail(self, sequences: Iterable[Sequence], problem: Exception) -> list[News]:
        """A step broke: those in it end with an error, and nobody trusts what it wrote. The engine goes on."""
        log.exception("a step failed", exc_info=problem)
        self.pool.forget_all()
        for sequence in self.scheduler.running:
            sequence.keys = []
        return self.end(sequences, "error", f"{type(problem).__name__}: {problem}")

    def fail_all(self, problem: Exception, finish: str = "error") -> list[News]:
        """End whatever there is; nobody trusts what was written."""
        self.flying = None
        self.pool.forget_all()
        everything = [*self.scheduler.running, *self.scheduler.waiting]
        return self.end(everything, finish, None if finish == "cancelled" else f"{type(problem).__name__}: {problem}")

    def drop_everything(self) -> None:
        """End whatever there is without a word, from any state, and remember nothing of it."""
        for request in self.requests.values():
            for sequence in request.sequences:
                sequence.ended = True
        self.requests.clear()
        self.held.clear()
        self.flying = None
        self.runner.swapped.clear()
        self.runner.pooler.sums.clear()
        before = self.scheduler
        self.pool = PagePool(self.pool.pages + 1, self.pool.page)
        self.scheduler = self.new_scheduler(self.pool)
        self.scheduler.preemptions, self.scheduler.admissions = before.preemptions, before.admissions

    def usage(self, request: Request) -> Usage:
        made = sum(len(sequence.ids) - sequence.prompt for sequence in request.sequences)
        return Usage(len(request.prompt), request.cached, made)


def how_good(answer: Completion) -> tuple[bool, float]:
    """An answer's rank among several: one that came to its end before one that did not, then by its mean likelihood."""
    mean = sum(each.logprob for each in answer.logprobs) / max(1, len(answer.logprobs))
    return answer.finish in ("stop", "length"), mean
