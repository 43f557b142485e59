"""Operators whose implementations know nothing of torch.autocast, and what it does to their calls.

Attention gets its operands lowered before an implementation is chosen, as PyTorch lowers those of
`scaled_dot_product_attention`. Products of codes, and attention over pages, are summed as widely as without autocast on
PyTorch too: float16 could not hold the sums of 8-bit codes.

It is said here and not beside each operator, for it is no part of what a proof or a figure of a kernel is of.
"""

from tilestack.ops.attention import attention
from tilestack.ops.autocast import compute_without, lower_before
from tilestack.ops.flex_attention import flex_attention
from tilestack.ops.grouped_fp8 import grouped_linear_fp8, grouped_outer_fp8
from tilestack.ops.grouped_weight_only import grouped_linear_weight_only
from tilestack.ops.paged import paged_attention
from tilestack.ops.paged_codes import paged_attention_codes
from tilestack.ops.quantised_attention import attention_fp8, attention_int8
from tilestack.ops.quantised_linear import linear_fp8
from tilestack.ops.weight_only import linear_weight_only

for _attention in (attention, flex_attention):
    lower_before(_attention, "q", "k", "v")

for _summed_widely in (
    linear_fp8,
    grouped_linear_fp8,
    grouped_outer_fp8,
    linear_weight_only,
    grouped_linear_weight_only,
    attention_int8,
    attention_fp8,
    paged_attention,
    paged_attention_codes,
):
    compute_without(_summed_widely)
