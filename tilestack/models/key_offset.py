"""What the keys of a model have in common, for a cache of codes to take off: see `key_offset` in ops/kv_write.py.

It is the mean key of each layer and head over some tokens, found once, before the first page is written. Any vector leaves
attention what it is, so tokens at random will do: what stands out of real keys, such as a bias, does so whatever is read.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilestack.models.context import AttentionLayer, Documents
from tilestack.models.decoder import Decoder
from tilestack.models.paged import PagedCache
from tilestack.ops.paged import CODES

TOKENS = 256


@dataclass(frozen=True)
class KeyMeans(Documents):
    """Rows that are read at once, of which the mean key of each layer is kept, [kv_heads, D]."""

    means: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        self.means[layer.number] = k.double().mean((0, 1)).float()
        return super().attend(layer, q, k, v)


def takes_key_offset(decoder: Decoder, cache: PagedCache) -> bool:
    """Whether there are codes, and attention does not see it: a cap is not linear, and latents are values too."""
    return cache.keys.dtype in CODES and cache.values is not None and decoder.config.attention_softcap is None


@torch.no_grad()
def calibrate_key_offset(decoder: Decoder, cache: PagedCache) -> None:
    """Give a cache that nothing was written to the offset of its keys, where it takes one."""
    if not takes_key_offset(decoder, cache):
        return
    weight, config, context = decoder.embedding.weight, decoder.config, KeyMeans()
    count = min(TOKENS, config.positions)
    ids = torch.randint(config.vocabulary, (1, count), generator=torch.Generator().manual_seed(0))
    decoder.hidden(ids.to(weight.device), context=context)
    means = torch.stack([context.means[number] for number in range(config.layers)])
    # Tokens at random may meet what no text does, such as a row of the embedding that was never learned.
    cache.key_offset = means.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
