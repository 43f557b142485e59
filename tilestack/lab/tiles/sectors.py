"""A model of warps: how many 32-byte sectors of memory an access touches, and the fewest that its bytes could lie in.

A GPU's memory is fetched in sectors of 32 bytes, and a warp's 32 lanes ask for theirs together. Which lane has which element
is the compiler's choice; the model is what Triton's does in simple cases:

    the tile's elements in a line, the axis along which addresses are consecutive first
    a lane takes a vector of up to 16 bytes, where these are consecutive, aligned, and masked alike
    32 lanes are one request; it touches every sector that one of its elements lies in, once

    32 lanes of float32, side by side     4 sectors, and 128 bytes fill 4      100%
    32 lanes of float32, every second     8 sectors                             50%
    32 lanes of float32, down a column   32 sectors                           12.5%

A compiler may do better (through shared memory, or in an order of its own) and caches hide some of it. What TMA moves is not
asked for by lanes: there, an access is one request.
"""

import numpy as np

SECTOR, VECTOR, LANES = 32, 16, 32  # bytes, bytes of a lane, lanes of a warp


def sectors_of(addresses: np.ndarray, mask: np.ndarray, itemsize: int, whole: bool = False) -> tuple[int, int]:
    """The sectors that a tile's requests touch, and the fewest possible; `whole` where the tile is one request."""
    if not mask.any():
        return 0, 0
    line, used = in_line(addresses, mask, itemsize)
    in_request = len(line) if whole else LANES * vector_of(line, used, itemsize)
    request = np.arange(len(line)) // in_request
    request, asked = request[used], line[used].astype(np.int64)
    asked -= asked.min() // SECTOR * SECTOR
    elements = distinct_by_request(request, asked // itemsize)
    fewest = -(-elements * itemsize // SECTOR)
    return int(distinct_by_request(request, asked // SECTOR).sum()), int(fewest.sum())


def distinct_by_request(request: np.ndarray, what: np.ndarray) -> np.ndarray:
    """How many different numbers each request has."""
    numbered = np.unique(request * (int(what.max()) + 1) + what)
    return np.bincount(numbered // (int(what.max()) + 1))


def in_line(addresses: np.ndarray, mask: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """A tile's addresses and mask as one line, the axis first along which most addresses are consecutive."""
    if addresses.ndim < 2:
        return addresses.reshape(-1), mask.reshape(-1)
    consecutive = [float(np.mean(np.diff(addresses, axis=axis) == itemsize)) if size > 1 else 0.0
                   for axis, size in enumerate(addresses.shape)]  # fmt: skip
    fastest = max(range(addresses.ndim), key=lambda axis: (consecutive[axis], axis))
    return np.moveaxis(addresses, fastest, -1).reshape(-1), np.moveaxis(mask, fastest, -1).reshape(-1)


def vector_of(line: np.ndarray, used: np.ndarray, itemsize: int) -> int:
    """How many elements a lane takes: the most that are consecutive, aligned and masked alike everywhere in the line."""
    elements = max(VECTOR // itemsize, 1)
    while elements > 1:
        if len(line) % elements == 0:
            vectors, masks = line.reshape(-1, elements), used.reshape(-1, elements)
            alike = (masks == masks[:, :1]).all()
            aligned = not (vectors[:, 0] % (elements * itemsize)).any()
            if alike and aligned and (np.diff(vectors, axis=1) == itemsize).all():
                return elements
        elements //= 2
    return 1
