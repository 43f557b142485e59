"""A model as EleutherAI's lm-evaluation-harness knows one: the three requests that its tasks are made of.

lm_eval.simple_evaluate(harness_model(model, tokenizer, "cuda"), tasks=["hellaswag"])
"""

from collections.abc import Sequence
from typing import Any

import torch

from tilestack import ops
from tilestack.data import NO_LABEL
from tilestack.engine import Request, SamplingParams
from tilestack.extras import MissingExtra, install_command
from tilestack.train.evaluation.answers import answer_all
from tilestack.train.evaluation.evaluate import (
    EvaluationError,
    batches,
    beginning,
    continuation,
    last_tokens,
    opening,
    score,
    windows,
)


class Harness:
    """The requests, each a list of objects whose `args` say what is asked. Without lm_eval's base class, to be mixed in."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device | str, length: int):
        super().__init__()
        self.model, self.tokenizer, self.place, self.length = model.eval(), tokenizer, device, length

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """For (context, continuation): its log-probability, and whether greedy decoding would give it."""
        sequences = [last_tokens(continuation(self.tokenizer, *request.args), self.length) for request in requests]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(sequences)
        for numbers, rows in batches(self.model, sequences):
            rows = rows.to(self.place)
            scored = rows.labels != NO_LABEL
            with torch.no_grad():
                logits = ops.linear(self.model.hidden(rows.ids)[scored], self.model.head_weight)
            labels, each = rows.labels[scored], rows.tokens.tolist()
            losses = (
                ops.cross_entropy(logits, labels, softcap=self.model.logit_softcap, reduction="none")
                .double()
                .split(each)
            )
            matches = (ops.argmax(logits) == labels).split(each)
            sums = [-loss.sum().item() for loss in losses]
            greedy = [bool(match.all()) for match in matches]
            for number, answer in zip(numbers, zip(sums, greedy, strict=True), strict=True):
                found[number] = answer
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """For (text,): the log-probability of all of it, in windows where it is longer than the model reads."""
        found = []
        for request in requests:
            ids = beginning(self.tokenizer) + self.tokenizer.encode(request.args[0], bare=True)
            parts = score(self.model, list(windows(ids, self.length, self.length)), self.place)
            found.append(sum(part.log_prob for part in parts))
        return found

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """For (context, options): the text that follows, up to the first of options["until"]."""
        asked = [self.asked(f"{number}", *request.args) for number, request in enumerate(requests)]
        return [output.text for output in answer_all(self.model, asked, self.tokenizer)]

    def asked(self, id: str, context: str, options: dict[str, Any]) -> Request:
        room = options.get("max_gen_toks", 256)
        if room >= self.length:
            raise EvaluationError(
                f"the task asks for answers of up to {room} tokens, and the model reads {self.length} with the prompt; give a "
                "larger --length where the model allows it, or choose another task"
            )
        until = options.get("until") or []
        params = SamplingParams(
            temperature=options.get("temperature", 0.0) if options.get("do_sample") else 0.0,
            seed=0,
            max_tokens=room,
            stop=tuple(end for end in ([until] if isinstance(until, str) else until) if end),
            stop_ids=() if self.tokenizer.eos is None else (self.tokenizer.eos,),
            ignore_eos=True,
        )
        start = opening(self.tokenizer) if context else beginning(self.tokenizer)
        ids = start + self.tokenizer.encode(context, bare=True)
        return Request(id, ids[room - self.length :], params)


def harness_model(model: Any, tokenizer: Any, device: torch.device | str, length: int) -> Any:
    """The adapter as lm_eval wants it: an instance of its own base class."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise MissingExtra(f"tasks by name need lm_eval: {install_command('evaluation')}") from None
    return type("TilestackModel", (Harness, LM), {})(model, tokenizer, device, length)
