"""What each operator is. Call them as functions; choose their backend with `tilestack.backend`."""

from tilestack.ops.backends import BackendError, backend, configure_backend, register_backend
from tilestack.ops.contract import AUTOGRAD, Case, Cost, Implementation, Operator, implements, operator
from tilestack.ops.elementwise import add, axpy, gelu, relu, silu
from tilestack.ops.lookup import embedding
from tilestack.ops.matmul import linear
from tilestack.ops.norm import layer_norm, rms_norm
from tilestack.ops.random import dropout
from tilestack.ops.registry import operator_named, operators
from tilestack.ops.rope import qk_norm_rope, rope
from tilestack.ops.sampling import argmax, sample, topk
from tilestack.ops.softmax import softmax

__all__ = [
    "AUTOGRAD",
    "BackendError",
    "Case",
    "Cost",
    "Implementation",
    "Operator",
    "add",
    "argmax",
    "axpy",
    "backend",
    "configure_backend",
    "dropout",
    "embedding",
    "gelu",
    "implements",
    "layer_norm",
    "linear",
    "operator",
    "operator_named",
    "operators",
    "qk_norm_rope",
    "register_backend",
    "relu",
    "rms_norm",
    "rope",
    "sample",
    "silu",
    "softmax",
    "topk",
]
