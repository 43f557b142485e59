"""How operators run fast. Importing this package registers every kernel; `tilestack.ops` does so when first asked."""

from tilestack.kernels import aten, cross_entropy, elementwise, linear_cross_entropy, matmul, norm, softmax
from tilestack.tuning import preferences

__all__ = ["aten", "cross_entropy", "elementwise", "linear_cross_entropy", "matmul", "norm", "softmax"]

preferences.install()
