"""What an engine refuses before it queues anything. It looks at a request and at limits alone, so any thread may ask."""

from collections.abc import Collection
from dataclasses import dataclass

from tilestack.engine.params import RequestError, SamplingParams, brief
from tilestack.engine.pooling import POOLINGS
from tilestack.engine.sequence import Request


@dataclass(frozen=True)
class Admission:
    """The limits of an engine."""

    vocabulary: int
    context: int  # tokens of a prompt and its answer
    rows: int  # sequences that run at a time
    queue: int | None  # sequences that may wait
    adapters: Collection[str]
    reads_text: bool  # whether there is a tokenizer

    def check(self, request: Request) -> None:
        """Refuse what cannot be served."""
        params, prompt = request.params, request.prompt
        if not prompt:
            raise RequestError("the prompt is empty; there must be at least one token to go on from", "prompt")
        if request.pooling is not None:
            self.check_pooling(request)
        elif len(prompt) >= self.context:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; at most {self.context - 1} leave room for an answer", "prompt"
            )
        self.check_tokens("the prompt", prompt, "prompt")
        self.check_tokens("logit_bias", params.logit_bias, "logit_bias")
        self.check_tokens("stop_ids", params.stop_ids, "stop_ids")
        if request.adapter is not None and request.adapter not in self.adapters:
            raise RequestError(
                f"there is no adapter {request.adapter!r}; there are: {', '.join(self.adapters) or 'none'}", "adapter"
            )
        self.check_fits(params.drawn)
        if params.stop and not self.reads_text:
            raise RequestError("stop texts need a tokenizer, and the engine has none", "stop")

    def check_fits(self, sequences: int) -> None:
        """Refuse so many sequences of one request where they would not fit if nothing else was there."""
        if self.queue is not None and sequences > self.queue + self.rows:
            raise RequestError(
                f"{sequences} sequences, and at most {self.rows} run at a time while {self.queue} wait; ask for "
                f"{self.queue + self.rows} or fewer, or start with a larger queue or max_sequences",
                "n",
            )

    def check_pooling(self, request: Request) -> None:
        """Of a request for a vector; there need be no room for an answer."""
        if request.pooling not in POOLINGS:
            raise RequestError(f"no pooling {request.pooling!r}; choose from {', '.join(POOLINGS)}", "pooling")
        if request.params != SamplingParams():
            raise RequestError("a request with pooling draws no tokens; leave its sampling parameters out", "params")
        if len(request.prompt) > self.context:
            raise RequestError(
                f"the text has {len(request.prompt)} tokens, and the model reads at most {self.context}", "prompt"
            )

    def check_tokens(self, name: str, ids: Collection[int], param: str) -> None:
        if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocabulary):
            return  # as nearly always, and found sooner than by looking at each: prompts of a batch are many tokens
        if wrong := [token for token in ids if not isinstance(token, int) or not 0 <= token < self.vocabulary]:
            raise RequestError(
                f"{name} has token {brief(wrong[0])}, and the model has 0 to {self.vocabulary - 1}", param
            )
