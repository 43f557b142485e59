"""Workloads of serving, made by code, and the least time the memory allows for them.

    throughput   256 requests, prompts and answers each of 100 to 1024 tokens, all there at the beginning: the workload of
                 nano-vllm's benchmark, 133,966 tokens answered
    batch n      n prompts of 128 tokens, 512 tokens answered: milliseconds a step, without the prompts
    first token  one prompt of 1024 tokens, until its first token
    prefix       64 requests that share their first 1024 tokens
    long         4 prompts as long as the model reads, 64 tokens answered
    copying      a prompt that repeats itself, which look-up speculation can guess; and the same without. Random weights
                 copy nothing: they are made to repeat the last token, which is the most that look-up can gain

On a CPU everything is smaller by `scale`.
"""

import random
from dataclasses import dataclass, field

from tilestack.models import ModelConfig

VOCABULARY = 10_000  # ids are drawn below this


@dataclass(frozen=True)
class Workload:
    """Prompts that are there at once, and how many tokens each is answered with."""

    name: str
    prompts: list[list[int]] = field(repr=False)
    answers: list[int] = field(repr=False)
    temperature: float = 0.6
    unit: str = "tokens/s"  # or "ms/step", or "ms"

    @property
    def answered(self) -> int:
        return sum(self.answers)

    def moved(self, config: ModelConfig, weights: int, itemsize: int) -> int:
        """Bytes that cannot be avoided: so many of weights once a step, and each answer's keys and values, numbers of so many
        bytes, at every step."""
        numbers = config.layers * sum(heads * dim for heads, dim in filter(None, config.cached_shapes))
        kept = sum(
            answer * len(prompt) + answer * (answer - 1) // 2
            for prompt, answer in zip(self.prompts, self.answers, strict=True)
        )
        return weights * max(self.answers) + itemsize * numbers * kept


def workloads(config: ModelConfig, scale: int = 1) -> list[Workload]:
    """What `bench serve` runs; a larger scale makes all of it smaller."""
    draw = random.Random(0)
    top = min(VOCABULARY, config.vocabulary - 1)
    ids = lambda length: [draw.randint(0, top) for _ in range(length)]
    between = lambda: draw.randint(max(1, 100 // scale), 1024 // scale)
    requests = range(max(4, 256 // scale))
    # All prompts, then all lengths of answers: in this order they are nano-vllm's, which engines publish figures of.
    found = [Workload("throughput", [ids(between()) for _ in requests], [between() for _ in requests])]
    for batch in (1, 8, 64 // scale or 1):
        prompts = [ids(max(2, 128 // scale)) for _ in range(batch)]
        found.append(Workload(f"batch {batch}", prompts, [max(8, 512 // scale)] * batch, unit="ms/step"))
    found.append(Workload("first token", [ids(1024 // scale)], [1], unit="ms"))
    shared = ids(1024 // scale)
    found.append(Workload("prefix", [shared + ids(16) for _ in range(max(4, 64 // scale))], [max(4, 32 // scale)] * max(4, 64 // scale)))  # fmt: skip
    longest = min(config.positions, 32768 // scale) - 64
    found.append(Workload("long", [ids(longest) for _ in range(4)], [max(4, 64 // scale)] * 4))
    phrase = ids(64 // min(scale, 8))
    found.append(Workload("copying", [phrase * 8], [max(32, 256 // scale)], temperature=0.0))
    return [
        workload for workload in found if max(map(len, workload.prompts)) + max(workload.answers) <= config.positions
    ]
