"""How operators run fast. Importing this package registers every kernel; `tilestack.ops` does so when first asked."""

from tilestack.kernels import aten, elementwise, matmul, norm, random, softmax

__all__ = ["aten", "elementwise", "matmul", "norm", "random", "softmax"]
