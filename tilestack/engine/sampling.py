"""From logits to tokens: what each request asked for, a row of settings for each sequence that runs.

The noise of a token depends on the sequence's seed and the token's place in its answer alone. So a text is the same
whatever is served beside it, and drawing at several places at once, as speculation does, draws what would have been drawn
one by one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

from tilestack import ops
from tilestack.engine.scheduler import Part
from tilestack.engine.sequence import Sequence
from tilestack.engine.transfer import to_device
from tilestack.ops.random import random_words
from tilestack.ops.sampling import exponential

# What a row holds of a request, in this order; the first is an integer.
SETTINGS = (
    "top_k", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip

# Tokens [D] of logits [D, V], seeds [D] and temperatures [D], unfiltered.
Draw = Callable[[Tensor, Tensor, Tensor], Tensor]


def sample_unfiltered(logits: Tensor, seeds: Tensor, temperature: Tensor) -> Tensor:
    """What `ops.sample` draws with top_k 0, top_p 1 and min_p 0."""
    top = torch.where(logits.isnan(), torch.inf, logits).amax(1, keepdim=True)
    greedy = temperature[:, None] <= 0
    scaled = (logits - top) / torch.where(greedy, 1.0, temperature[:, None])
    noise = -torch.log(exponential(random_words(seeds, logits.shape[1]), logits.dtype))
    score = torch.where(greedy, scaled, scaled + noise)
    return torch.where(top[:, 0].isfinite(), score.argmax(1), -1)


@dataclass
class Draws:
    """Places in a step that are followed by a new token: which sequence's, and how far it is."""

    sequences: list[Sequence] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # the new token's place in the answer
    places: list[int] = field(default_factory=list)  # and among all tokens that the step draws

    @classmethod
    def of(cls, parts: Iterable[Part], wanted: Callable[[Part], bool] = lambda part: True) -> "Draws":
        """Those of the parts that are wanted."""
        draws, first = cls(), 0
        for part in parts:
            count = len(part.drafts) + 1 if part.draws else 0
            if wanted(part):
                draws.sequences += [part.sequence] * count
                draws.indices += range(part.index, part.index + count)
                draws.places += range(first, first + count)
            first += count
        return draws


class SamplingRows:
    """The settings of sequences that run, as tensors on the device, a row each; a row more is for what is padding."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device, draw: Draw = sample_unfiltered):
        self.vocabulary, self.device, self.draw_unfiltered = vocabulary, device, draw
        # One table, so that rows are written and looked up by one kernel; all but top_k are floats' bits.
        self.table = torch.zeros(len(SETTINGS), rows + 1, dtype=torch.int32, device=device)
        self.top_k, floats = self.table[0], self.table.view(torch.float32)
        self.temperature, self.top_p, self.min_p, self.repetition, self.presence, self.frequency = floats[1:]
        self.seen: Tensor | None = None  # [rows + 1, V]: tokens of the prompt or the answer
        self.counts: Tensor | None = None  # [rows + 1, V]: how often each was drawn

    def enter(self, sequences: list[Sequence]) -> None:
        """Sequences begin to run in their rows."""
        if not sequences:
            return
        settings = numpy.array([[getattr(each.params, name) for each in sequences] for name in SETTINGS])
        settings = numpy.concatenate([settings[:1].astype(numpy.int32), settings[1:].astype(numpy.float32).view(numpy.int32)])  # fmt: skip
        rows = to_device([sequence.row for sequence in sequences], self.device)
        self.table.index_copy_(1, rows, to_device(settings, self.device, torch.int32))
        for sequence in sequences:
            if sequence.params.penalises:
                self.count_tokens(sequence)

    def of_rows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature, top_k, top_p and min_p of some rows, as `ops.sample` asks for them."""
        found = self.table[:4].index_select(1, rows)
        temperature, top_p, min_p = found.view(torch.float32)[1:]
        return temperature, found[0], top_p, min_p

    def count_tokens(self, sequence: Sequence) -> None:
        if self.seen is None or self.counts is None:
            shape = len(self.temperature), self.vocabulary
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        ids = to_device(sequence.ids, self.device)
        self.seen[sequence.row].zero_().index_fill_(0, ids, True)  # an assignment would wait for the GPU
        answer = ids[sequence.prompt :]
        self.counts[sequence.row].zero_().index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))

    def draw(self, logits: Tensor, draws: Draws, rows: Tensor) -> Tensor:
        """A token [D] for each of logits [D, V], -1 where none is likely; `rows` [D] are the sequences'."""
        sequences = draws.sequences
        logits = self.adjusted(logits.float(), draws, rows)
        if all(sequence.params.temperature == 0 for sequence in sequences):
            drawn = torch.where(logits.amax(-1).isfinite(), ops.argmax(logits), -1)
        else:
            seeds = [sequence.seed + index for sequence, index in zip(sequences, draws.indices, strict=True)]
            drawn = self.sampled(logits, to_device(seeds, self.device), sequences, rows)
        if self.counts is not None and self.seen is not None:
            penalised = to_device([sequence.params.penalises for sequence in sequences], self.device, torch.bool)
            at = rows, drawn.clamp(min=0).long()
            self.counts.index_put_(at, penalised.int(), accumulate=True)
            self.seen[at] |= penalised
        return drawn

    def sampled(self, logits: Tensor, seeds: Tensor, sequences: list[Sequence], rows: Tensor) -> Tensor:
        """Tokens [D] by `ops.sample`; a CPU need not sort the vocabulary where nobody asked for the likeliest alone."""
        if self.device.type == "cpu" and not any(sequence.params.filters for sequence in sequences):
            return self.draw_unfiltered(logits, seeds, self.temperature[rows])
        return ops.sample(logits, seeds, *self.of_rows(rows))

    def adjusted(self, logits: Tensor, draws: Draws, rows: Tensor) -> Tensor:
        """Logits with penalties, biases, and -inf where a token must not come."""
        sequences = draws.sequences
        if any(sequence.params.penalises for sequence in sequences):
            logits = self.penalised(logits, rows)
        places: list[int] = []
        tokens: list[int] = []
        biases: list[float] = []
        for place, (sequence, index) in enumerate(zip(sequences, draws.indices, strict=True)):
            banned = sequence.stops if index < sequence.params.min_tokens else ()
            changes = dict(sequence.params.logit_bias) | dict.fromkeys(banned, -torch.inf)
            places += [place] * len(changes)
            tokens += changes.keys()
            biases += changes.values()
        if places:
            at = to_device(places, self.device), to_device(tokens, self.device)
            logits = logits.index_put(at, to_device(biases, self.device, logits.dtype), accumulate=True)
        bound = [place for place, sequence in enumerate(sequences) if sequence.matcher]
        if bound:
            allowed = numpy.stack([matcher.allowed() for place in bound if (matcher := sequences[place].matcher)])
            mask, at_bound = to_device(allowed, self.device, torch.bool), to_device(bound, self.device)
            logits = logits.index_copy(0, at_bound, torch.where(mask, logits[at_bound], -torch.inf))
        return logits

    def penalised(self, logits: Tensor, rows: Tensor) -> Tensor:
        assert self.seen is not None
        assert self.counts is not None
        counts, seen = self.counts[rows], self.seen[rows]
        # Rows without penalties have 1, 0 and 0 here, and what the tables say of them does not matter.
        factor = self.repetition[rows, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        return logits - self.presence[rows, None] * (counts > 0) - self.frequency[rows, None] * counts


def told_of(logprobs: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of log-probabilities [D, V], those of tokens [D], and the `top` likeliest: tokens and values [D, top]."""
    values, ids = torch.topk(logprobs, min(top, logprobs.shape[-1]), dim=-1)
    return logprobs.gather(1, tokens[:, None].long())[:, 0], ids, values
