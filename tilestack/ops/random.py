"""Random numbers from a seed and a position, so that they need no state and no storage; and dropout, made of them.

Philox 4x32-10 turns a 64-bit key (the seed) and a counter into four 32-bit words, the same on every device. Element i
of a vector takes one of the four words of a counter that it shares with three elements a slab apart,

    element  0 … 1023 | 1024 … 2047 | 2048 … 3071 | 3072 … 4095 | 4096 …
    word         0    |      1      |      2      |      3      |    0
    counter  0 … 1023 |  0 … 1023   |  0 … 1023   |  0 … 1023   | 1024 …

so that a kernel computes each counter once and still reads and writes whole slabs.
"""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import wide

SLAB = 1024  # consecutive elements that take the same word of consecutive counters
LOW = 0xFFFFFFFF  # the low 32 bits
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def product(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of constant * x, by halves of x so that nothing leaves 63 bits."""
    lower = constant * (x & 0xFFFF)
    upper = constant * (x >> 16) + (lower >> 16)
    return upper >> 16, (upper & 0xFFFF) << 16 | lower & 0xFFFF


def philox(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each counter under the seed, as int64 values below 2**32; both arguments are int64."""
    a, b = counter & LOW, counter >> 32 & LOW
    c = d = torch.zeros_like(a)
    key_a, key_b = seed & LOW, seed >> 32 & LOW
    for _ in range(ROUNDS):
        high_a, low_a = product(MULTIPLIERS[0], a)
        high_c, low_c = product(MULTIPLIERS[1], c)
        a, b, c, d = high_c ^ b ^ key_a, low_c, high_a ^ d ^ key_b, low_a
        key_a, key_b = key_a + KEY_STEPS[0] & LOW, key_b + KEY_STEPS[1] & LOW
    return a, b, c, d


def random_words(seed: Tensor, n: int) -> Tensor:
    """n words for each seed, [*seed.shape, n]: int64 values uniform below 2**32."""
    slab = max(min(n, SLAB), 1)  # fewer than a slab take the first word alone
    counters = torch.arange((n + 4 * SLAB - 1) // (4 * SLAB) * slab, device=seed.device)
    words = torch.stack(philox(seed[..., None], counters.expand(*seed.shape, -1)), -2)
    return words.unflatten(-1, (-1, slab)).transpose(-2, -3).flatten(-3)[..., :n]


def dropped_below(p: float) -> int:
    """The word below which an element is dropped: p to within 2**-33, of 2**32."""
    if not 0 <= p <= 1:  # here and not in the operator's check, which sees a float only once per signature
        raise ValueError(f"dropout: p must lie between 0 and 1, not {p}")
    return round(p * 2**32)


def dropout_case(make, *size):
    *shape, p = size
    return dict(x=make.normal(*shape), seed=make.integers(low=-(2**62), high=2**62), p=p)


def one_seed(seed: Tensor) -> bool | str:
    return (
        seed.dtype == torch.int64 and seed.numel() == 1
    ) or f"seed must be one int64 number in a tensor, not {seed.dtype} {tuple(seed.shape)}"


def dropout_gradient(grad: Tensor, seed: Tensor, p: float) -> tuple[Tensor, None]:
    return dropped(grad, seed, p), None


def kept(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Which elements of x are not dropped."""
    return random_words(seed.reshape(()), x.numel()).view(x.shape) >= dropped_below(p)


def dropped(x: Tensor, seed: Tensor, p: float) -> Tensor:
    scale = 2**32 / max(2**32 - dropped_below(p), 1)
    return torch.where(kept(x, seed, p), wide(x) * scale, 0).to(x.dtype)


@operator(
    cases=cases(
        dropout_case,
        check=[(1, 0.5), (33, 0.1), (4096, 0.5), (3, 1500, 0.9), (5000, 0.0), (130, 1.0), (0, 0.5), (2, 3, 7, 0.25)],
        bench=[(8192, 1024, 0.1), (8192, 4096, 0.1), (4096, 16384, 0.1)],
    ),
    cost=lambda x: Cost(flops=x.numel(), backward_flops=x.numel()),
    check=one_seed,
    gradient=dropout_gradient,
)
def dropout(x: Tensor, seed: Tensor, p: float = 0.5) -> Tensor:
    """x with each element zero with probability p and otherwise divided by 1 - p.

    Which elements are dropped depends on the seed and on their position in x counted row by row, on nothing else; the
    gradient finds them again from the seed. A dropped element is zero whatever it was, also NaN.
    """
    return dropped(x, seed, p)
