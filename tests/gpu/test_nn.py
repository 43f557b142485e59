import copy

import pytest
import torch

import tilestack
from tilestack import nn, ops
from tilestack.nn.qkv import split_and_turn
from tilestack.nn.sparse import prune_2_4, semi_structured
from tilestack.ops.rope import frequencies, tables
from tilestack.train import fp8

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


@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_experts_in_fp8_follow_their_layer(backend):
    if torch.cuda.get_device_capability() < (8, 9) or (
        backend == "gluon" and torch.cuda.get_device_capability()[0] != 9
    ):
        pytest.skip(f"fp8 on {backend} needs another GPU")
    torch.manual_seed(0)
    exact = nn.MoE(256, 192, experts=8, top_k=2).cuda()
    coded, x = copy.deepcopy(exact), torch.randn(700, 256, device="cuda")
    coded.base_product = fp8.in_fp8
    exact(x).square().sum().backward()
    with tilestack.backend(grouped_linear_fp8=backend, grouped_outer_fp8=backend):
        coded(x).float().square().sum().backward()
    for name in ("gate_up", "down"):
        found, truth = (getattr(moe, name).grad for moe in (coded, exact))
        assert 0 < (found - truth).norm() / truth.norm() < 2**-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_2_4_sparsity_is_as_good_as_the_dense_product(dtype, as_good_as):
    """On PyTorch's own sparse tensor cores: what is kept and multiplied is the pruned matrix and nothing else."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("2:4 sparsity needs compute capability 8.0")
    torch.manual_seed(0)
    weight = prune_2_4(torch.randn(256, 512, device="cuda", dtype=dtype))
    x = torch.randn(96, 512, device="cuda", dtype=dtype)
    kept = semi_structured(weight)
    assert torch.equal(kept.to_dense(), weight)
    truth = x.double() @ weight.double().T
    as_good_as(torch.nn.functional.linear(x, kept), torch.nn.functional.linear(x, weight), truth)


@pytest.mark.parametrize("norm", [False, True])
def test_the_gradient_in_one_piece_has_the_bits_of_a_split(norm):
    torch.manual_seed(0)
    sizes, cos, sin = (16, 8, 8), *(table.cuda() for table in tables(frequencies(128)[0], 333))
    heads = torch.randn(3, 111, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    norms = tuple(torch.randn(128, device="cuda", dtype=torch.bfloat16) for _ in range(2)) if norm else None
    q, k, v = heads.split(sizes, 2)
    apart = ops.qk_norm_rope(q, k, *norms, cos, sin) if norms else ops.rope(q, k, cos, sin)
    joint = split_and_turn(heads, sizes, cos, sin, None, norms)
    arriving = [torch.randn_like(result) for result in joint]
    found, expected = (torch.autograd.grad(results, heads, arriving)[0] for results in (joint, (*apart, v)))
    assert joint[0].grad_fn.name() == "qkv_rope_tritonBackward"
    assert torch.equal(found, expected)
