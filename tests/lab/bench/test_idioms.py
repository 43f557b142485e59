"""What people write computes what the operator defines, so that a comparison is one."""

import pytest
import torch

from tilestack import ops
from tilestack.contract.cases import Make
from tilestack.contract.operator import as_tuple
from tilestack.lab.bench.idioms import IDIOMS
from tilestack.lab.bench.peers import by_position, peer_of

CASES = {
    "cross_entropy": ["4x33", "2x3x128"],
    "linear_cross_entropy": ["4x8x33"],
    "embedding": ["7x5x33x5", "2x40x9x20x9"],
    "masked_softmax": ["5x1000x-", "2x3x5x33x12"],
    "causal_softmax": ["3x20x20x0.125", "2x2x5x40x1.0", "40x7x1.0"],
    "rope": ["2x3x4x2x16x16xbatchxFalse", "1x2x40x8x80x80xnonexFalse"],
    "qk_norm_rope": ["2x3x4x2x16x16xbatchxFalse"],
    "argmax": ["3x33", "2x3x40"],
    "topk": ["2x33x4", "2x1x1000x7"],
    "conv2d_int8": ["2x5x6x7x3x1x1", "2x8x6x6x3x2x1x2"],
    "block_sparse_dsd": ["3x16x2x3x20", "2x32x3x2x5"],
    "block_sparse_dds": ["3x16x2x3x20", "2x32x3x2x5"],
    "block_sparse_sdd": ["3x16x2x3x40"],
    "linear_weight_only": ["5x17x64xint4x32xzero+bias", "17x40x128xint8x64xzero", "70x33x48xfp8"],
}


HALVES = ("attention_int8", "attention_fp8")


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in CASES.items() for size in sizes])
def test_an_idiom_computes_what_the_definition_does(name, size):
    described = ops.operator_named(name)
    (case,) = [case for case in described.cases if case.name == size]
    arguments = described.bind(**case.build(Make(torch.float32, "cpu")))
    peer = peer_of(described, IDIOMS[name])
    found = as_tuple(peer.run(*peer.setup(*arguments.values())))
    for ours, defined in zip(found, as_tuple(described.definition(**arguments)), strict=True):
        assert ours.isfinite().any()
        expected = torch.where(
            ours.isnan(), torch.nan, defined
        )  # a row that sees nothing is NaN in PyTorch, zeros here
        torch.testing.assert_close(ours, expected.to(ours.dtype), equal_nan=True)


def test_every_idiom_is_held_against_its_definition_here():
    assert set(IDIOMS) == {*CASES, "rope_", "dropout", "activation_dropout", "gated_dropout", "sample", *HALVES}


@pytest.mark.parametrize("size", ["2x9x9x4x2x16x16xcausal", "1x33x33x1x1x8x8xfull", "1x12x3x1x1x8x8xfull"])
@pytest.mark.parametrize("name", HALVES)
def test_what_codes_are_measured_against_is_attention(name, size):
    described = ops.operator_named(name)
    case = next(case for case in described.cases if case.name.startswith(size))
    arguments = described.bind(**case.build(Make(torch.float32, "cpu")))
    found = by_position(described, IDIOMS[name])(*arguments.values())
    torch.testing.assert_close(found, ops.attention(*(arguments[n] for n in ("q", "k", "v", "cu_seqlens", "causal"))))


@pytest.mark.parametrize("size", ["2x1x13x2x1x16x16xcausal", "2x10x10x2x1x16x16xdocuments"])
def test_pytorch_has_no_function_for_rows_that_are_aligned_at_their_ends_or_packed(size):
    case = next(case for case in ops.attention_fp8.cases if case.name == size)
    arguments = ops.attention_fp8.bind(**case.build(Make(torch.float32, "cpu")))
    assert IDIOMS["attention_fp8"](*arguments.values()) is NotImplemented


def test_turning_in_place_is_turning():
    case = next(case for case in ops.rope.cases if case.name == CASES["rope"][0])
    arguments = ops.rope.bind(**case.build(Make(torch.float32, "cpu")))
    turned = IDIOMS["rope"](*arguments.values())
    assert IDIOMS["rope_"](*arguments.values()) is None
    assert torch.equal(arguments["q"], turned[0])
    assert torch.equal(arguments["k"], turned[1])


@pytest.mark.parametrize("name", ["dropout", "activation_dropout", "gated_dropout"])
def test_dropout_keeps_as_much_and_scales_it_alike(name):
    described = ops.operator_named(name)
    arguments = described.bind(**described.cases[2].build(Make(torch.float32, "cpu"))) | {"p": 0.25}
    for argument in described.tensors:
        if argument != "seed":
            arguments[argument] = torch.ones(4000)
    idiom, defined = by_position(described, IDIOMS[name])(*arguments.values()), described.definition(**arguments)
    assert idiom.max().item() == pytest.approx(defined.max().item(), rel=1e-6)
    assert (idiom != 0).float().mean().item() == pytest.approx(0.75, abs=0.05)


def test_a_sample_keeps_to_its_filters():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 400)
    every = lambda value, dtype=torch.float32: torch.full((400,), value, dtype=dtype)
    draw = lambda temperature=1.0, k=0, p=1.0, least=0.0: set(
        IDIOMS["sample"](logits, every(temperature), every(k, torch.int32), every(p), every(least)).tolist()
    )
    assert draw(temperature=0.0) == {3}
    assert draw() == {0, 1, 2, 3}
    assert draw(k=2) == {2, 3}
    assert draw(p=0.6) == {3}
    assert draw(least=0.3) == {2, 3}
