import copy

import pytest
import torch

import tilestack
from tilestack import nn

MODULES = [
    ("Linear", (64, 48)),
    ("RMSNorm", (64,)),
    ("LayerNorm", (64,)),
    ("Softmax", (-1,)),
    ("GELU", ()),
    ("SiLU", ()),
]


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "arguments"), MODULES)
def test_results_have_pytorchs_dtype_under_autocast(name, arguments, x_dtype):
    x = torch.randn(5, 64, device="cuda", dtype=x_dtype)
    with torch.autocast("cuda", torch.bfloat16):
        expected = getattr(torch.nn, name)(*arguments).cuda()(x)
        assert getattr(nn, name)(*arguments).cuda()(x).dtype == expected.dtype


def test_a_patched_model_on_triton_is_as_good_as_pytorchs(as_good_as):
    torch.manual_seed(0)
    layers = [getattr(torch.nn, name)(*arguments) for name, arguments in MODULES[1:]]
    theirs, x = torch.nn.Sequential(*layers, torch.nn.Linear(64, 48)).cuda(), torch.randn(5, 64, device="cuda")
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    tilestack.patch(ours)
    with tilestack.backend("triton"):
        ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    exact(x.double()).square().sum().backward()
    for parameters in zip(ours.parameters(), theirs.parameters(), exact.parameters(), strict=True):
        as_good_as(*(parameter.grad for parameter in parameters))
