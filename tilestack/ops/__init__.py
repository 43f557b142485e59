"""What each operator is. Call them as functions; choose their backend with `tilestack.backend`."""

from tilestack.ops.activation import gelu, relu, sigmoid, silu, softcap, squared_relu, tanh
from tilestack.ops.activation_dropout import activation_dropout, gated_dropout
from tilestack.ops.attention import attention
from tilestack.ops.backends import BackendError, backend, configure_backend, register_backend
from tilestack.ops.cases import Case
from tilestack.ops.contract import Cost, Operator, implements, operator
from tilestack.ops.elementwise import add, axpy
from tilestack.ops.gated import geglu, gelu_mul, silu_mul, swiglu, swiglu_linear
from tilestack.ops.gated_quantised import silu_mul_fp8, silu_mul_int8
from tilestack.ops.group_norm import group_norm
from tilestack.ops.grouped import grouped_linear
from tilestack.ops.implementation import AUTOGRAD, Ahead, Implementation, Keeping
from tilestack.ops.lookup import embedding
from tilestack.ops.loss import cross_entropy, linear_cross_entropy
from tilestack.ops.masked_softmax import causal_softmax, masked_softmax
from tilestack.ops.matmul import linear
from tilestack.ops.memory import copy, gather_rows, permute, reduce_sum, scatter_rows, strided_copy, transpose
from tilestack.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tilestack.ops.quantised_norm import add_rms_norm_fp8, add_rms_norm_int8, rms_norm_fp8, rms_norm_int8
from tilestack.ops.random import dropout
from tilestack.ops.registry import operator_named, operators
from tilestack.ops.rope import qk_norm_rope, rope
from tilestack.ops.sampling import argmax, sample, topk
from tilestack.ops.softmax import log_softmax, logsumexp, softmax

__all__ = [
    "AUTOGRAD",
    "Ahead",
    "BackendError",
    "Case",
    "Cost",
    "Implementation",
    "Keeping",
    "Operator",
    "activation_dropout",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "add_rms_norm_int8",
    "argmax",
    "attention",
    "axpy",
    "backend",
    "causal_softmax",
    "configure_backend",
    "copy",
    "cross_entropy",
    "dropout",
    "embedding",
    "gated_dropout",
    "gather_rows",
    "geglu",
    "gelu",
    "gelu_mul",
    "group_norm",
    "grouped_linear",
    "implements",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "masked_softmax",
    "operator",
    "operator_named",
    "operators",
    "permute",
    "qk_norm_rope",
    "reduce_sum",
    "register_backend",
    "relu",
    "rms_norm",
    "rms_norm_fp8",
    "rms_norm_int8",
    "rope",
    "sample",
    "scatter_rows",
    "sigmoid",
    "silu",
    "silu_mul",
    "silu_mul_fp8",
    "silu_mul_int8",
    "softcap",
    "softmax",
    "squared_relu",
    "strided_copy",
    "swiglu",
    "swiglu_linear",
    "tanh",
    "topk",
    "transpose",
]
