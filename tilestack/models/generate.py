"""Generation: a token at a time from a decoder with a cache, a batch of rows side by side."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilestack import ops
from tilestack.models.cache import KVCache
from tilestack.models.decoder import Decoder


class Sampler:
    """Draws a token per row from logits [rows, vocabulary]. The same seed gives the same tokens, whatever the batch size
    of the others: a row's noise depends on its seed and the step alone."""

    def __init__(
        self,
        rows: int,
        device: torch.device,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
    ):
        for name, value, low, high in (
            ("temperature", temperature, 0.0, float("inf")),
            ("top_k", top_k, 0, float("inf")),
            ("top_p", top_p, 0.0, 1.0),
            ("min_p", min_p, 0.0, 1.0),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} must lie between {low} and {high}, not {value}")
        self.greedy = temperature == 0
        every = lambda value, dtype: torch.full((rows,), value, dtype=dtype, device=device)
        self.settings = (
            every(temperature, torch.float32),
            every(top_k, torch.int32),
            every(top_p, torch.float32),
            every(min_p, torch.float32),
        )
        numbers = torch.Generator().manual_seed(seed)
        self.seeds = torch.randint(-(2**62), 2**62, (rows,), generator=numbers).to(device)

    def __call__(self, logits: Tensor) -> Tensor:
        if self.greedy:
            return ops.argmax(logits)
        self.seeds = self.seeds + 1
        return ops.sample(logits, self.seeds, *self.settings)


@torch.no_grad()
def generate(
    decoder: Decoder,
    ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop: Sequence[int] = (),
) -> Iterator[Tensor]:
    """The next token of every row of ids [rows, tokens], step by step, as tensors [rows].

    Greedy at temperature 0. A row that has drawn a token of `stop` gives that token again from there on; the iterator
    ends when all rows have, or after `max_new_tokens`. For rows of different lengths, and for many of them, see
    `tilestack.engine`: this is the plain way that it is held against.
    """
    if ids.ndim != 2 or not ids.shape[1]:
        raise ValueError(f"ids must be [rows, tokens] with at least one token, not {tuple(ids.shape)}")
    sampler = Sampler(
        ids.shape[0], ids.device, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    weight = next(decoder.parameters())  # the embedding's, where the decoder has one here (parallel/pipeline.py)
    cache = KVCache(decoder.config, ids.shape[0], ids.shape[1] + max_new_tokens, weight.dtype, weight.device)
    stops = torch.tensor(list(stop), dtype=ids.dtype, device=ids.device)
    ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    last: Tensor | None = None
    for _ in range(max_new_tokens):
        hidden = decoder.hidden(ids, context=cache)[:, -1]
        drawn = sampler(decoder.logits(hidden)).to(ids.dtype)
        last = drawn if last is None else torch.where(ended, last, drawn)
        yield last
        if len(stop):
            ended = ended | torch.isin(last, stops)
            if bool(ended.all()):  # the one place that waits for the device, and only where there is a stop
                return
        ids = last[:, None]
