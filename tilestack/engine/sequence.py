"""A request on its way, and its answers: sequences of tokens of which some are computed.

Three numbers say how far a sequence is, whatever happened to it:

    tokens ├──────────────── drawn ────────────────┤        prompt and answer, the token in flight included
           ├───────────── len(ids) ─────────────┤           those the host has read
           ├──── kept ────┤                                 those whose keys and values lie in its pages

The next step computes tokens from `kept` on. A prefix found in the pool sets `kept` to its length, a chunk of a prompt
advances it by less than all, decoding is a chunk of one, and preemption sets it back to 0: nothing else has to know.
"""

import math
import random
from dataclasses import dataclass, field

from tilestack.engine.outputs import TokenLogprob
from tilestack.engine.pages import root_key
from tilestack.engine.params import SamplingParams
from tilestack.engine.structure import Matcher
from tilestack.engine.text import TextStream


@dataclass(eq=False)
class Request:
    """A prompt and what is asked of it."""

    id: str
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # smaller is served first
    adapter: str | None = None
    salt: str = ""  # requests share prefixes only with those of the same salt
    pooling: str | None = None  # "mean" or "last": not an answer is asked for but the prompt as a vector (pooling.py)
    cached: int = 0  # tokens of the prompt that were found instead of computed
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    sequences: list["Sequence"] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return all(sequence.ended for sequence in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One answer to a request."""

    request: Request
    choice: int
    arrival: int
    limit: int  # tokens, prompt included, at which it ends
    seed: int  # of its first token; the next ones follow
    text: TextStream
    stops: frozenset[int]
    matcher: Matcher | None = None
    guesses: int = 0  # tokens that its next step may guess; 0: it never does
    adapter: int = 0  # its number among the adapters; 0: none
    ids: list[int] = field(default_factory=list)
    in_flight: int = 0  # tokens drawn that the host has not read; or the vector, which stands in for one
    kept: int = 0
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the pages that are remembered
    row: int = -1  # its place in the runner's tables while it runs
    admission: int = 0  # a new number each time that it begins to run
    swapped: int = 0  # tokens that lie in host memory while it waits
    ended: bool = False

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt)
        self.prompt = len(self.ids)
        self.root = root_key(self.request.salt, self.request.adapter or "")
        self.params = params = self.request.params
        self.pooling = self.request.pooling
        # Whether every token of the prompt has something to tell, so that none is found instead of computed.
        self.needs_all_states = self.pooling == "mean" or params.prompt_logprobs is not None
        # How many of the likeliest tokens are told beside each; None: nothing is. To choose the best, 0 are needed.
        self.logprobs = 0 if params.logprobs is None and params.drawn > params.n else params.logprobs
        asks = params.penalises or params.logit_bias or self.matcher is not None or self.logprobs is not None
        # The first token of the answer from which on all that is asked for is in the runner's tables.
        self.plain_from: float = math.inf if asks else params.min_tokens
        self.draws_by_text = self.guesses > 0 or self.matcher is not None  # which the host has to know up to its end

    @property
    def drawn(self) -> int:
        return len(self.ids) + self.in_flight

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: by priority, then by arrival."""
        return self.request.priority, self.arrival

    @property
    def index(self) -> int:
        """The next token's place in the answer."""
        return self.drawn - self.prompt

    @property
    def waits_to_be_read(self) -> bool:
        """Whether the host has to know the tokens in flight before more can be drawn."""
        return self.in_flight > 0 and (self.draws_by_text or self.drawn >= self.limit)


def first_seeds(params: SamplingParams) -> list[int]:
    """A seed for each answer, so far apart that no two draw the same noise."""
    # By its digits: of a number, Random would take the magnitude alone.
    draw = random.Random(f"{params.seed}") if params.seed is not None else random.SystemRandom()
    return [draw.randrange(-(2**62), 2**62) for _ in range(params.drawn)]
