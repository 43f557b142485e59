"""What a product should take, from its sizes and those of its tiles alone: good enough to tell which are not worth timing.

A GPU works on as many tiles at a time as it has multiprocessors, and takes as many turns as the tiles need. In a turn a
multiprocessor multiplies, while what it multiplies comes from the L2 cache; over all turns together, memory is read once:

    turns = tiles / multiprocessors, rounded up
    time  = max(turns · max(tile's arithmetic, tile's bytes from the cache), all bytes from memory)
"""

from typing import NamedTuple


class Gpu(NamedTuple):
    """Rates of a whole GPU; those of an H200 unless told otherwise. Only their ratios matter."""

    multiprocessors: int = 132
    flops_per_us: float = 700e6
    cache_bytes_per_us: float = 5.5e6
    memory_bytes_per_us: float = 4.2e6


LAUNCH_US = 2.0  # what even the smallest product takes
FILL = 64  # rows of a tile below which tensor cores are not filled


def product_us(M: int, N: int, K: int, tile_m: int, tile_n: int, gpu: Gpu, splits: int = 1, itemsize: int = 2) -> float:
    """The time that an M x N x K product should take in tiles of this size, K shared out among `splits` programs."""
    ceil = lambda number, size: -(-number // size)
    turns = ceil(ceil(M, tile_m) * ceil(N, tile_n) * splits, gpu.multiprocessors)
    depth = ceil(K, splits)
    arithmetic = 2 * max(tile_m, FILL) * tile_n * depth * gpu.multiprocessors / gpu.flops_per_us
    from_cache = (tile_m + tile_n) * depth * itemsize * gpu.multiprocessors / gpu.cache_bytes_per_us
    from_memory = ((M * K + N * K + M * N) * itemsize + 8 * (splits - 1) * M * N) / gpu.memory_bytes_per_us
    return LAUNCH_US + max(turns * max(arithmetic, from_cache), from_memory)
