"""How operators run fast. Importing this package registers every kernel; `tilestack.ops` does so when first asked."""

from tilestack.kernels import (
    aten,
    cross_entropy,
    elementwise,
    linear_cross_entropy,
    matmul,
    memory,
    norm,
    reduce,
    rows,
    softmax,
)
from tilestack.tuning import preferences

__all__ = [
    "aten",
    "cross_entropy",
    "elementwise",
    "linear_cross_entropy",
    "matmul",
    "memory",
    "norm",
    "reduce",
    "rows",
    "softmax",
]

preferences.install()
