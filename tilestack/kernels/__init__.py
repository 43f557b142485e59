"""How operators run fast. Importing this package registers every kernel; `tilestack.ops` does so when first asked."""

from tilestack.kernels import aten, elementwise, lookup, matmul, norm, random, rope, sampling, softmax
from tilestack.tuning import preferences

__all__ = ["aten", "elementwise", "lookup", "matmul", "norm", "random", "rope", "sampling", "softmax"]

preferences.install()
