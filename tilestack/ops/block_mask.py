"""Masks made of blocks, as two tensors: which blocks of queries and keys see each other, and the inside of those that do in part.

    blocks   [batch or 1, heads or 1, blocks of queries, blocks of keys]: -1 nothing is seen, 0 everything, n ≥ 1 tile n - 1
    tiles    [count, block_q, block_k]: which pairs of a block are seen

A kernel walks over the blocks that are not -1 and reads a tile only where there is one. PyTorch's BlockMask becomes such a
pair, whatever its mask_mod computes.
"""

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask  # it takes long to import

UNSEEN, WHOLE = -1, 0
KEPT: "WeakKeyDictionary[BlockMask, tuple[Any, dict[str, Tensor]]]" = WeakKeyDictionary()


def block_mask_arguments(mask: "BlockMask") -> dict[str, Any]:
    """PyTorch's block mask as arguments of `flex_attention`: `blocks`, `tiles`, and `causal`, which the mask itself decides.

    Its mask_mod is asked once for each block that is seen in part, which takes a bit (here, a byte) for each of their
    pairs, and waits for the device: make it once and keep it. What lies beyond the lengths it was made for is not seen.
    """
    block_q, block_k = mask.BLOCK_SIZE
    queries, keys = mask.seq_lengths

    def listed(count: Tensor, indices: Tensor) -> Tensor:
        """Whether a block is among the first `count` of its line's indices."""
        valid = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
        found = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool, device=indices.device)
        places = torch.where(valid, indices, indices.shape[-1]).long()  # what is not valid goes to a place beyond
        return found.scatter_(-1, places, True)[..., :-1]

    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    blocks = torch.full(partial.shape, UNSEEN, dtype=torch.int32, device=partial.device)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        blocks[listed(mask.full_kv_num_blocks, mask.full_kv_indices)] = WHOLE
    batch, head, q_block, k_block = partial.nonzero(as_tuple=True)
    blocks[partial] = torch.arange(1, len(batch) + 1, dtype=torch.int32, device=partial.device)
    query = q_block[:, None] * block_q + torch.arange(block_q, device=partial.device)
    key = k_block[:, None] * block_k + torch.arange(block_k, device=partial.device)
    # Pairs beyond the last query or key are asked about too, as if they were the last, and are not seen.
    ask = torch.vmap(mask.mask_mod, (None, None, None, 0))
    ask = torch.vmap(torch.vmap(ask, (None, None, 0, None)))
    tiles = partial.new_zeros(0, block_q, block_k)
    if len(batch):
        tiles = ask(batch, head, query.clamp_max(queries - 1), key.clamp_max(keys - 1))
        tiles = tiles & (query < queries)[:, :, None] & (key < keys)[:, None, :]
    return dict(blocks=blocks, tiles=tiles, causal=False)


@_disable_dynamo  # which blocks a BlockMask shows is read from the device; torch.compiler.disable would import the compiler now
def kept_blocks(mask: "BlockMask") -> dict[str, Tensor]:
    """`blocks` and `tiles` of a mask, made when it is first met and kept as long as it lives: layers share one mask."""
    mask_mod, found = KEPT.get(mask, (None, {}))
    if mask_mod is not mask.mask_mod:
        with torch.inference_mode(False):  # a gradient may be wanted of what is met later
            made = block_mask_arguments(mask)
        found = dict(blocks=made["blocks"], tiles=made["tiles"])
        KEPT[mask] = mask.mask_mod, found
    return found


def mask_of_blocks(blocks: Tensor, tiles: Tensor, queries: int, keys: int) -> Tensor:
    """[batch or 1, heads or 1, queries, keys]: what each query sees."""
    ends = tiles.new_zeros(1, *tiles.shape[1:]), tiles.new_ones(1, *tiles.shape[1:])
    seen = torch.cat([*ends, tiles])[blocks.long() + 1]  # [batch, heads, blocks of queries, of keys, block_q, block_k]
    return seen.transpose(3, 4).flatten(4, 5).flatten(2, 3)[..., :queries, :keys]


def misfit(blocks: Tensor, tiles: Tensor, whole: tuple[int, ...]) -> str:
    """What is wrong with a block mask for attention of these sizes; empty when nothing is."""
    if tiles.ndim != 3 or tiles.dtype != torch.bool or 0 in tiles.shape[1:]:
        return f"tiles must be bool [count, block_q, block_k], not {tiles.dtype} {tuple(tiles.shape)}"
    numbers = [-(-size // block) for size, block in zip(whole[2:], tiles.shape[1:], strict=True)]
    shared = zip(blocks.shape[:2], whole[:2], strict=True)
    if blocks.dtype == torch.int32 and list(blocks.shape[2:]) == numbers and all(n in (1, size) for n, size in shared):
        return ""
    return (
        f"blocks must be int32 [{whole[0]} or 1, {whole[1]} or 1, {numbers[0]}, {numbers[1]}] for tiles of "
        f"{tiles.shape[1]} x {tiles.shape[2]}, not {blocks.dtype} {tuple(blocks.shape)}"
    )


def tiles_exist(blocks: Tensor | None, tiles: Tensor | None) -> bool | str:
    if blocks is None or tiles is None or not blocks.numel():
        return True
    least, most = int(blocks.min()), int(blocks.max())
    if least < UNSEEN or most > len(tiles):
        return f"blocks must lie from {UNSEEN} to {len(tiles)}, the number of tiles, not from {least} to {most}"
    return True
