"""How operators run fast. Importing this package registers every kernel; `tilestack.ops` does so when first asked."""

from tilestack.kernels import aten, elementwise, lookup, matmul, norm, random, rope, sampling, softmax

__all__ = ["aten", "elementwise", "lookup", "matmul", "norm", "random", "rope", "sampling", "softmax"]
