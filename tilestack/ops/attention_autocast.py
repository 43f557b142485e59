"""Attention under torch.autocast: its operands are lowered before an implementation is chosen, as PyTorch lowers those of
`scaled_dot_product_attention`, and none of them meets autocast."""

from tilestack.ops.attention import attention
from tilestack.ops.autocast import lower_before
from tilestack.ops.flex_attention import flex_attention

for _operator in (attention, flex_attention):
    lower_before(_operator, "q", "k", "v")
