"""Products of codes under torch.autocast: on PyTorch too they are summed as widely as without it, where float16 could not hold
the sums of 8-bit codes; and so are those of attention over pages."""

from tilestack.ops.autocast import compute_without
from tilestack.ops.grouped_fp8 import grouped_linear_fp8, grouped_outer_fp8
from tilestack.ops.grouped_weight_only import grouped_linear_weight_only
from tilestack.ops.paged import paged_attention
from tilestack.ops.paged_codes import paged_attention_codes
from tilestack.ops.quantised_attention import attention_fp8, attention_int8
from tilestack.ops.quantised_linear import linear_fp8
from tilestack.ops.weight_only import linear_weight_only

for _operator in (
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
    compute_without(_operator)
