# Written by `make docs`: every operator by the family that defines it.
from tilestack.contract.registry import operator_named as operator_named, operators as operators
from tilestack.ops.activation import gelu as gelu, relu as relu, sigmoid as sigmoid, silu as silu, softcap as softcap, squared_relu as squared_relu, tanh as tanh
from tilestack.ops.activation_dropout import activation_dropout as activation_dropout, gated_dropout as gated_dropout
from tilestack.ops.attention import attention as attention
from tilestack.ops.bmm import bmm as bmm
from tilestack.ops.conv import conv2d as conv2d, conv2d_int8 as conv2d_int8
from tilestack.ops.elementwise import add as add, axpy as axpy
from tilestack.ops.experts import combine_rows as combine_rows, dispatch_rows as dispatch_rows, expert_places as expert_places
from tilestack.ops.flex_attention import flex_attention as flex_attention
from tilestack.ops.fp8_gated_tiles import swiglu_fp8_tiles as swiglu_fp8_tiles, swiglu_gradient_fp8_tiles as swiglu_gradient_fp8_tiles
from tilestack.ops.fp8_loss_tiles import cross_entropy_gradient_fp8_tiles as cross_entropy_gradient_fp8_tiles
from tilestack.ops.fp8_tiles import fp8_tiles as fp8_tiles
from tilestack.ops.fused_linear import fused_linear as fused_linear, linear_swiglu as linear_swiglu
from tilestack.ops.gated import geglu as geglu, gelu_mul as gelu_mul, silu_mul as silu_mul, swiglu as swiglu, swiglu_linear as swiglu_linear
from tilestack.ops.gram import gram as gram, newton_schulz as newton_schulz
from tilestack.ops.group_norm import group_norm as group_norm
from tilestack.ops.grouped import grouped_linear as grouped_linear
from tilestack.ops.grouped_fp8 import grouped_linear_fp8 as grouped_linear_fp8, grouped_outer_fp8 as grouped_outer_fp8
from tilestack.ops.grouped_weight_only import grouped_linear_weight_only as grouped_linear_weight_only
from tilestack.ops.kv_write import kv_write as kv_write, qkv_rope_write as qkv_rope_write
from tilestack.ops.lookup import embedding as embedding
from tilestack.ops.loss import cross_entropy as cross_entropy, linear_cross_entropy as linear_cross_entropy
from tilestack.ops.masked_softmax import causal_softmax as causal_softmax, masked_softmax as masked_softmax
from tilestack.ops.matmul import linear as linear
from tilestack.ops.memory import copy as copy, gather_rows as gather_rows, permute as permute, reduce_sum as reduce_sum, scatter_rows as scatter_rows, strided_copy as strided_copy, transpose as transpose
from tilestack.ops.norm import add_layer_norm as add_layer_norm, add_rms_norm as add_rms_norm, layer_norm as layer_norm, rms_norm as rms_norm
from tilestack.ops.paged import paged_attention as paged_attention
from tilestack.ops.paged_codes import paged_attention_codes as paged_attention_codes
from tilestack.ops.quantised_attention import attention_fp8 as attention_fp8, attention_int8 as attention_int8
from tilestack.ops.quantised_gated import silu_mul_fp8 as silu_mul_fp8, silu_mul_int8 as silu_mul_int8
from tilestack.ops.quantised_linear import linear_fp8 as linear_fp8, linear_int8 as linear_int8
from tilestack.ops.quantised_norm import add_rms_norm_fp8 as add_rms_norm_fp8, add_rms_norm_int8 as add_rms_norm_int8, rms_norm_fp8 as rms_norm_fp8, rms_norm_int8 as rms_norm_int8
from tilestack.ops.quantised_rows import quantise_rows_fp8 as quantise_rows_fp8, quantise_rows_int8 as quantise_rows_int8
from tilestack.ops.random import dropout as dropout
from tilestack.ops.rope import qk_norm_rope as qk_norm_rope, qkv_rope as qkv_rope, rope as rope, rope_ as rope_
from tilestack.ops.routing import route as route
from tilestack.ops.sampling import argmax as argmax, sample as sample, topk as topk
from tilestack.ops.softmax import log_softmax as log_softmax, logsumexp as logsumexp, softmax as softmax
from tilestack.ops.sparse import block_sparse_dds as block_sparse_dds, block_sparse_dsd as block_sparse_dsd, block_sparse_sdd as block_sparse_sdd, csr_matmul as csr_matmul
from tilestack.ops.weight_only import linear_weight_only as linear_weight_only
