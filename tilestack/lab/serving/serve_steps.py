"""An engine's steps in two parts, for the profiler: all prompts are read, then all sequences are decoded to their end."""

import torch

from tilestack.engine import Engine, SamplingParams
from tilestack.engine.sequence import Request


class ServedSteps:
    """Requests of random tokens, which no prefix cache knows."""

    def __init__(self, engine: Engine, batch: int, prompt: int, tokens: int):
        if prompt + tokens > engine.decoder.config.positions:
            raise ValueError(
                f"{prompt} tokens of a prompt and {tokens} after it are more than the model's {engine.decoder.config.positions}"
            )
        self.engine, self.batch, self.prompt, self.tokens = engine, batch, prompt, tokens
        self.params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.rounds = 0

    def read_prompts(self) -> None:
        """Every request gets as far as its first token."""
        self.rounds += 1
        generator = torch.Generator().manual_seed(self.rounds)
        shape = (self.batch, self.prompt)
        ids = torch.randint(self.engine.decoder.config.vocabulary, shape, generator=generator).tolist()
        for number, prompt in enumerate(ids):
            request = Request(f"{self.rounds}-{number}", prompt, self.params)
            self.engine.admission.check(request)
            self.engine.accept(request)
        answered: set[str] = set()
        while len(answered) < self.batch:
            answered |= self.step()

    def decode(self) -> None:
        """Every request gets to its end."""
        while self.engine.busy:
            self.step()

    def step(self) -> set[str]:
        """The requests that a step of the engine told something of."""
        told = set()
        for request, delta in self.engine.step():
            if delta.error:
                raise RuntimeError(f"request {request.id} failed: {delta.error}")
            told.add(request.id)
        return told
