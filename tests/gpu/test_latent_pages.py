"""MLA over pages at DeepSeek's sizes, 128 heads over latents of 512 and a rotary key of 64, in the precision that serves it."""

import pytest
import torch

from tilestack import backend, ops
from tilestack.contract.cases import Make
from tilestack.ops.paged import paged_case

CODES = ("int8", "float8_e4m3fn")
OF_CODES = [("paged_attention_codes", cache) for cache in CODES]


@pytest.mark.parametrize(("name", "cache"), [*(("paged_attention", cache) for cache in ("same", *CODES)), *OF_CODES])
@pytest.mark.parametrize(("mix", "heads"), [("decode", 128), ("several", 16), ("many", 128)])
def test_latents_are_read_as_well_as_by_the_definition(name, cache, mix, heads, as_good_as):
    if cache == "float8_e4m3fn" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    operator = ops.operator_named(name)
    made = Make(torch.bfloat16, "cuda")
    arguments = operator.bind(**paged_case(made, mix, 64, heads, 1, 576, 512, cache, "latent"))
    with torch.no_grad(), backend("triton"):
        found, again = operator(**arguments), operator(**arguments)
    assert torch.equal(found, again)
    truth = operator.definition(**arguments | dict(q=arguments["q"].double()))
    as_good_as(found, operator.definition(**arguments), truth)
