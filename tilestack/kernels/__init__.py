"""How operators run fast. Importing this package registers every kernel; `tilestack.ops` does so when first asked."""

from tilestack.kernels import (
    activation,
    activation_dropout,
    aten,
    attention_aten,
    cross_entropy,
    elementwise,
    gated,
    gated_quantised,
    group_norm,
    grouped,
    linear_cross_entropy,
    lookup,
    masked_softmax,
    matmul,
    memory,
    norm,
    random,
    reduce,
    rope,
    rows,
    sampling,
    softmax,
)
from tilestack.tuning import preferences

__all__ = [
    "activation",
    "activation_dropout",
    "aten",
    "attention_aten",
    "cross_entropy",
    "elementwise",
    "gated",
    "gated_quantised",
    "group_norm",
    "grouped",
    "linear_cross_entropy",
    "lookup",
    "masked_softmax",
    "matmul",
    "memory",
    "norm",
    "random",
    "reduce",
    "rope",
    "rows",
    "sampling",
    "softmax",
]

preferences.install()
