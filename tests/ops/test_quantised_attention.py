"""Attention of codes: what quantising costs, that keys less their mean cost less, and that nothing else changed."""

import itertools
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilestack import BackendError, ops
from tilestack.contract import backend
from tilestack.contract.cases import Make
from tilestack.kernels.attention import quantised as kernels
from tilestack.ops.quantised import LARGEST_CODE, quantised
from tilestack.ops.quantised_attention import (
    BLOCK,
    E4M3,
    codes_of_blocks,
    mean_key,
    with_far_channels,
)

INT8 = torch.int8
HOW = [(INT8, "same"), (INT8, "fp8"), (E4M3, "fp8")]
each_backend = pytest.mark.parametrize("chosen", ["torch", "triton"])


def drawn(rule="causal", tokens=200, heads=4, kv_heads=2, dim=64, dtype=torch.float16, **options):
    return with_far_channels(Make(dtype), 1, tokens, tokens, heads, kv_heads, dim, dim, rule, **options)


def run(chosen, codes, values, arguments):
    operator = ops.attention_int8 if codes == INT8 else ops.attention_fp8
    with backend(chosen):
        return operator(**arguments | (dict(values=values) if codes == INT8 else {}))


@pytest.mark.parametrize(("codes", "values"), HOW)
def test_the_kernels_codes_are_the_definitions_to_the_bit(codes, values):
    arguments = drawn(tokens=300, dim=40)
    k, v = arguments["k"], arguments["v"]
    made = kernels.coded_keys(k, v, codes, values)
    k_codes, k_scale = codes_of_blocks(k.float() - mean_key(k), codes)
    found = made.k[:, :, :300, :40].transpose(1, 2)
    assert torch.equal(found.float(), k_codes.float())
    assert torch.equal(made.k_scale.repeat_interleave(BLOCK, 2)[:, :, :300].transpose(1, 2), k_scale)
    assert not made.k[:, :, 300:].float().any()
    assert k_codes.float().abs().max() == LARGEST_CODE[codes]
    if values == "same":
        assert made.v is None
        return
    order = kernels.in_order_of_weights.fn(torch.arange(made.v.shape[3]))
    assert sorted(order.tolist()) == list(range(made.v.shape[3]))
    in_order = torch.empty_like(made.v.float()).index_copy_(3, order, made.v.float())
    numbers = (in_order * made.v_scale[..., None])[:, :, :40, :300].permute(0, 3, 1, 2)
    assert ((numbers - v.float()).abs() <= v.float().abs() / 16 + made.v_scale[:, None, :, :40] / 2**9).all()


@pytest.mark.parametrize(("codes", "values"), HOW[1:])
def test_values_far_below_one_have_scales_of_their_own(codes, values):
    """Of 300 keys the largest are found in three parts, which a power of two of them has room for."""
    arguments = drawn(tokens=300)
    v = arguments["v"] * 2**-10
    made = kernels.coded_keys(arguments["k"], v, codes, values)
    scale = made.v_scale * LARGEST_CODE[E4M3]
    torch.testing.assert_close(scale, v.float().abs().amax(1))


@each_backend
@pytest.mark.parametrize(("codes", "values"), HOW)
def test_documents_see_only_themselves(chosen, codes, values):
    """Moving the others about, within the block that shares a scale, changes neither codes nor any bit of a result."""
    ends = [0, 3, 70, 71, 110, 120]
    arguments = drawn(tokens=ends[-1], dim=16, heads=2, kv_heads=1)
    arguments["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32)
    whole = run(chosen, codes, values, arguments)
    assert whole.isfinite().all()
    for start, end in itertools.pairwise(ends):
        moved = dict(arguments)
        for name in "qkv":
            x = arguments[name]
            moved[name] = torch.cat([x[:, :start].flip(1), x[:, start:end], x[:, end:].flip(1)], 1)
        own = slice(start, end)
        assert torch.equal(run(chosen, codes, values, moved)[:, own], whole[:, own])


@pytest.mark.parametrize(("codes", "values"), HOW)
def test_queries_before_the_first_key_see_nothing_of_a_whole_tile(codes, values, as_good_as):
    """Of 200 causal queries on 130 keys the first 70 see none, more than a tile of them, and no tile of keys is seen whole."""
    arguments = drawn(dim=16, heads=2, kv_heads=1)
    arguments |= {name: arguments[name][:, :130] for name in "kv"}
    operator = ops.attention_int8 if codes == INT8 else ops.attention_fp8
    how = dict(values=values) if codes == INT8 else {}
    truth = operator.definition(**{n: v.double() if n in "qkv" else v for n, v in arguments.items()}, **how)
    found = run("triton", codes, values, arguments)
    assert not found[:, :70].any()
    as_good_as(found, run("torch", codes, values, arguments), truth)


@pytest.mark.parametrize(
    ("chosen", "error", "said"),
    [
        ("auto", RuntimeError, "has no gradient; call it under torch.no_grad(), or attention"),
        ("triton", BackendError, "it has no backward; call it under torch.no_grad()"),
    ],
)
@pytest.mark.parametrize("operator", [ops.attention_int8, ops.attention_fp8])
def test_a_gradient_is_refused_by_name(chosen, error, said, operator):
    arguments = drawn(tokens=3, dim=16)
    arguments["k"].requires_grad_()
    with backend(chosen), pytest.raises(error, match=rf"{operator.name} .*{re.escape(said)}"):
        operator(**arguments)
    with backend(chosen), torch.no_grad():
        assert not operator(**arguments).requires_grad


def test_what_makes_no_sense_is_told():
    arguments = drawn(tokens=3, dim=16)
    for wrong, said in (
        (dict(values="int8"), "values must be 'same' or 'fp8', not 'int8'"),
        (dict(scale=-1.0), "scale must be positive"),
        (dict(k=arguments["k"][:, :0], v=arguments["v"][:, :0], causal=False), "needs a key"),
    ):
        with pytest.raises(ValueError, match=said):
            ops.attention_int8(**arguments | wrong)


def test_a_kernel_says_what_it_has_no_room_for():
    refused = ops.attention_int8.implementations["triton"].refuses
    meta = lambda batch, dim, heads=1: {
        name: torch.empty(batch, 1, heads, dim, dtype=torch.float16, device="meta") for name in "qkv"
    }
    cpu = torch.device("cpu")
    assert refused(ops.attention_int8.bind(**meta(65_535, 256)), cpu) == ""
    for heads in (1, 2):
        assert "65,535 heads" in refused(ops.attention_int8.bind(**meta(65_536 // heads, 16, heads)), cpu)
    assert "up to 256 dimensions" in refused(ops.attention_int8.bind(**meta(1, 257)), cpu)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
def test_scales_are_quotients_of_tensors(codes):
    """PyTorch divides by a number by multiplying with its inverse on a GPU, and codes halfway between two would fall otherwise."""

    divisors = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket == torch.ops.aten.div:
                divisors.append(args[1])
            return func(*args, **(kwargs or {}))

    with Watch():
        quantised(torch.randn(3, 8), codes)
    assert len(divisors) == 2
    assert all(isinstance(divisor, torch.Tensor) for divisor in divisors)
