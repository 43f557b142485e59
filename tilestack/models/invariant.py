"""The batch-invariant mode of a decoder: a token has the same bits whatever is computed beside it, in training and serving.

Matrix products and attention add up in an order that depends on how many rows there are, so that the log-probability a
sampler had and the one a trainer finds differ in their last bits. In this mode they do not:

    GPU   kernels that promise it (`tilestack.batch_invariant`), and attention over whole tiles, so that a query stands in the
          same place of a tile and meets the same tiles of keys, in a chunk of a prompt, alone, or in a row of training
    CPU   one token at a time, as decoding does it, since PyTorch's products promise nothing; slow, by the length of a text

Both sides have to run on one device, with one number of threads and under one autocast.

Shapes: B rows, T tokens, H hidden, V vocabulary, D tokens whose logits are wanted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import backend, batch_invariant
from tilestack.models.context import AttentionLayer
from tilestack.models.decoder import Decoder
from tilestack.models.paged import PagedBatch, PagedCache
from tilestack.ops.paged import rows_in_pages
from tilestack.quant import QuantisedLinear
from tilestack.quant.experts import QuantisedMoE

TILE = 64  # queries and keys that a tile of attention has at most


def one_at_a_time(device: torch.device) -> bool:
    """Whether tokens are computed one by one, since nothing on the device promises more."""
    return device.type != "cuda"


@contextmanager
def invariant_mode(device: torch.device) -> Iterator[None]:
    """The operators inside are those of the mode on a device."""
    with backend("torch") if one_at_a_time(device) else batch_invariant():
        yield


def why_not_invariant(decoder: Decoder) -> str:
    """What keeps a decoder from the mode; empty when nothing does."""
    if any(isinstance(layer, QuantisedLinear | QuantisedMoE) for layer in decoder.modules()):
        return "the model's weights are codes, and their products promise nothing"
    return (
        "the model's rotation depends on the length of the longest text beside it" if decoder.rotates_by_length else ""
    )


def each_alone(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """A function of rows, in the mode: on a CPU of each row by itself, in memory of its own."""
    if not one_at_a_time(rows.device):
        return function(rows)
    return torch.cat([function(row.clone()) for row in rows.split(1)]) if len(rows) else function(rows)


def attention_of_row(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
    """What the last queries of a text see, [1, T, heads, …]; on a GPU in whole tiles, filled up in front of the queries and
    behind everything, where it changes nothing."""
    v = k[..., : layer.value_dim] if v is None else v
    queries, behind = q.shape[1], 0 if one_at_a_time(q.device) else -k.shape[1] % TILE
    before = 0 if one_at_a_time(q.device) else -(queries + behind) % TILE
    pad = lambda x, front: torch.nn.functional.pad(x, (0, 0, 0, 0, front, behind)) if front or behind else x
    seen = ops.attention(
        pad(q, before), pad(k, 0), pad(v, 0), window=layer.window, scale=layer.scale, softcap=layer.softcap
    )
    return seen[:, before : before + queries]


class InvariantText:
    """A text read from its beginning, as a context of `Decoder.hidden`: at once on a GPU, and token by token on a CPU.
    Unlike a cache it lets gradients through."""

    keeps_latents = True
    longest = 0

    def __init__(self) -> None:
        self.read = 0
        self.kept: dict[int, tuple[Tensor, Tensor | None]] = {}  # keys and values of each layer so far

    def start(self, batch: int, tokens: int) -> Tensor | None:
        assert batch == 1, "texts are read one by one"
        self.read += tokens
        return torch.arange(self.read - tokens, self.read)[None] if self.read > tokens else None

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        if layer.number in self.kept:
            keys, values = self.kept[layer.number]
            k, v = torch.cat((keys, k), 1), v if v is None or values is None else torch.cat((values, v), 1)
        self.kept[layer.number] = k, v
        return attention_of_row(layer, q, k.contiguous(), None if v is None else v.contiguous())


class InvariantBatch:
    """A `PagedBatch` whose sequences are attended to one by one, as a text in training is."""

    keeps_latents = True

    def __init__(self, batch: PagedBatch):
        self.batch, self.longest = batch, batch.longest
        ends = batch.cu_queries.tolist()
        self.spans = list(zip(batch.lengths.tolist(), ends, ends[1:], strict=False))

    def start(self, batch: int, tokens: int) -> Tensor:
        return self.batch.start(batch, tokens)

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        cache: PagedCache = self.batch.cache
        ops.kv_write(k[0], None if v is None else v[0], self.batch.slots, *cache.layer(layer.number))
        keys, values, *_ = cache.layer(layer.number)
        seen = []
        for table, (length, start, end) in zip(self.batch.block_tables, self.spans, strict=True):
            pages = table[: -(-length // cache.page)]
            rows = lambda kept: None if kept is None else rows_in_pages(kept, None, pages, length, q.dtype)[None]
            seen.append(attention_of_row(layer, q[:, start:end], rows(keys), rows(values)))  # type: ignore[arg-type]
        return torch.cat(seen, 1)


def hidden_of_text(decoder: Decoder, ids: Tensor) -> Tensor:
    """Hidden states [T, H] of a text [T], in the mode."""
    context = InvariantText()
    return each_alone(lambda some: decoder.hidden(some, context=context), ids)


def hidden_of_batch(decoder: Decoder, ids: Tensor, batch: PagedBatch) -> Tensor:
    """Hidden states [T, H] of the new tokens of some sequences, in the mode."""
    if not one_at_a_time(ids.device):
        return decoder.hidden(ids, context=InvariantBatch(batch))
    found = []
    one = torch.tensor([0, 1])
    for token, sequence, position in zip(ids.split(1), batch.sequences.tolist(), batch.positions, strict=True):
        tables = batch.block_tables[sequence : sequence + 1]
        alone = PagedBatch(batch.cache, tables, position[None] + 1, one, tokens=1, most_queries=1)
        found.append(decoder.hidden(token.clone(), context=InvariantBatch(alone)))
    return torch.cat(found)


def logits_of(decoder: Decoder, hidden: Tensor) -> Tensor:
    """The head's scores [D, V] of hidden states [D, H], in the mode."""
    return each_alone(decoder.logits, hidden)


def log_softmax_of(logits: Tensor) -> Tensor:
    """Log-probabilities [D, V] in float32, in the mode."""
    return each_alone(lambda rows: ops.log_softmax(rows.float()), logits)
