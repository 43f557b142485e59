"""What Triton's interpreter would get wrong without a word is mended, or CPU users would train on noise."""

import pytest
import torch

from tilestack import ops
from tilestack.contract import backend
from tilestack.contract.cases import Make


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", ["triton", "triton_naive", "triton_split_k"])
def test_half_precisions_multiply(dtype, chosen):
    make = Make(dtype)
    x, weight = make.normal(3, 64), make.normal(40, 64)
    with backend(chosen):
        found = ops.linear(x, weight)
    torch.testing.assert_close(found, torch.nn.functional.linear(x.float(), weight.float()).to(dtype))


def test_attention_of_bfloat16():
    make = Make(torch.bfloat16)
    q, k, v = (make.normal(1, 20, 2, 16) for _ in range(3))
    with backend("triton"):
        found = ops.attention(q, k, v, causal=True)
    expected = ops.attention(q.float(), k.float(), v.float(), causal=True)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
