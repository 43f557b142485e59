"""Products for Hopper proved on a CPU, by an emulation of Gluon: plain, with an epilogue, of fp8 codes, and grouped."""

import gluon_emulation
import pytest
import torch
from gluon_emulation import emulate

from tilestack import ops
from tilestack.contract.launch import launch
from tilestack.kernels.elementwise.dropout import dropout_add_in_place
from tilestack.kernels.hopper import (
    attention_codes,
    fp8,
    fp8_gated_tiles,
    fp8_loss_tiles,
    fp8_tiles,
    fused,
    gated,
    grouped_fp8,
    grouped_outer_fp8,
    matmul,
)
from tilestack.kernels.matmul.epilogue import Epilogue
from tilestack.kernels.quantised import fp8_made_tiles as made_tiles
from tilestack.kernels.quantised import fp8_tiles as tiles
from tilestack.lab.proof.oracle import judge, own_error
from tilestack.ops.activation_dropout import KINDS

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Gluon kernels run in the emulation, on two multiprocessors; activations in PyTorch."""
    run = lambda kernel, *rest, **named: (emulate if "Gluon" in type(kernel).__name__ else launch)(
        kernel, *rest, **named
    )
    for module in (fp8, fused, grouped_fp8, grouped_outer_fp8, matmul):
        monkeypatch.setattr(module, "launch", run)
        monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(fused, "activate", lambda x, kind, half: KINDS[kind](x.float()))
    torch.manual_seed(0)


def check(found, definition, *arguments):
    reference, truth = (definition(*given) for given in (arguments, [wider(x) for x in arguments]))
    assert not (message := judge(found, reference, truth, own_error(reference, truth)).message), message


def wider(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != E4M3 else x


def ends(*at):
    return torch.tensor(at, dtype=torch.int32)


@pytest.mark.parametrize("config", fused.CONFIGS)
@pytest.mark.parametrize("parts", ["gelu", "silu+residual", "residual", "gelu+dropout+residual", "dropout"])
def test_epilogues(config, parts):
    x, weight, bias = torch.randn(150, 200).half(), torch.randn(272, 200).half() / 14, torch.randn(272).half()
    residual = torch.randn(150, 272).half() if "residual" in parts else None
    activation = next((kind for kind in parts.split("+") if kind in KINDS), "none")
    seed, p = (torch.tensor(3**30), 0.3) if "dropout" in parts else (None, 0.0)
    pre = torch.full((150, 272), torch.nan).half()
    epilogue = Epilogue(activation, residual, seed, p, pre if activation != "none" else None)
    found = fused.fused_product(x, weight.T, bias, fused.CONFIGS[config], epilogue)
    check(found, ops.fused_linear.definition, x, weight, bias, residual, seed, activation, p)
    if activation != "none":
        check(pre, ops.linear.definition, x, weight, bias)


@pytest.mark.parametrize("activation", ["gelu", "none"])
def test_gradients_of_a_layer_with_dropout(activation):
    x, weight, residual = torch.randn(70, 40).half(), torch.randn(48, 40).half() / 6, torch.randn(48, 70).half().T
    arriving, seed, config = torch.randn(70, 48).half(), torch.tensor(3**30), fused.CONFIGS["128x64"]
    given = x, weight, None, residual, seed, activation, 0.3
    if activation == "none":
        out, found = (
            fused.fused_linear(*given, config),
            fused.fused_backward(arriving, *given, (True, True, False, True), config),
        )
    else:
        out, pre = fused.fused_and_pre(*given, config)
        found = fused.fused_backward_from_pre(arriving, *given, (True, True, False, True), pre, config)
    check(out, ops.fused_linear.definition, *given)

    def gradients(*given):
        leaves = [given[place].detach().requires_grad_() for place in (0, 1, 3)]
        made = ops.fused_linear.definition(*leaves[:2], None, leaves[2], *given[4:])
        return torch.autograd.grad(made, leaves, arriving.to(made.dtype))

    for place, each in enumerate((found[0], found[1], found[3])):
        check(each, lambda *given, place=place: gradients(*given)[place], *given)


@pytest.mark.parametrize("config", ["128x256", "128x64"])
def test_a_gated_layer_and_its_gradients(config):
    x, weight, bias = torch.randn(150, 72).half(), torch.randn(80, 72).half() / 8, torch.randn(80).half()
    arriving, config = torch.randn(150, 40).half(), matmul.CONFIGS[config]
    out, pair = gated.linear_swiglu_and_pair(x, weight, bias, config)
    check(out, ops.linear_swiglu.definition, x, weight, bias)
    check(pair, ops.linear.definition, x, weight, bias)

    def gradients(*given):
        leaves = [each.detach().requires_grad_() for each in given]
        made = ops.linear_swiglu.definition(*leaves)
        return torch.autograd.grad(made, leaves, arriving.to(made.dtype))

    kept = gated.linear_swiglu_backward_from_pair(arriving, x, weight, bias, (True,) * 3, pair, config)
    again = gated.linear_swiglu_backward(arriving, x, weight, bias, (True,) * 3, config)
    for place, (each, same) in enumerate(zip(kept, again, strict=True)):
        check(each, lambda *given, place=place: gradients(*given)[place], x, weight, bias)
        assert torch.equal(each, same)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_dropout_of_what_a_product_left(p):
    x, residual, seed = torch.randn(3, 2000), torch.randn(2000, 3).T, torch.tensor(7)
    expected = ops.dropout.definition(x, seed, p)
    torch.testing.assert_close(dropout_add_in_place(x.clone(), None, seed, p), expected)
    torch.testing.assert_close(dropout_add_in_place(x.clone(), residual, seed, p), expected + residual)


def codes(*shape):
    return torch.randn(shape).to(E4M3)


@pytest.mark.parametrize("config", grouped_fp8.CONFIGS)
@pytest.mark.parametrize("by", ["rows", "blocks"])
@pytest.mark.parametrize("offsets", [(0, 70, 70, 200, 330), (330, 330, 330, 330, 330), (5, 128, 129, 257, 300)])
def test_grouped_products_of_codes(config, by, offsets):
    x, weight = codes(330, 144), codes(5, 160, 144)
    scales = ((330,), (5, 160)) if by == "rows" else ((330, 2), (5, 2, 2))
    x_scale, scale = ((0.5 + torch.rand(shape)).half() for shape in scales)
    arguments = x, weight, x_scale, scale / 8, ends(*offsets), ""
    check(
        grouped_fp8.grouped_linear_fp8(*arguments, grouped_fp8.CONFIGS[config]),
        ops.grouped_linear_fp8.definition,
        *arguments,
    )


def outer_operands(rows, columns=150, inner=144):
    left_scale, right_scale = (
        (0.5 + torch.rand(shape)).half() for shape in ((columns, -(-rows // 128)), (2, -(-rows // 128)))
    )
    return codes(columns, rows), codes(inner, rows), left_scale, right_scale / 16


@pytest.mark.parametrize("config", grouped_outer_fp8.CONFIGS)
@pytest.mark.parametrize(
    "offsets", [(0, 70, 70, 200, 330), (330, 330, 330), (5, 128, 129, 257, 300), (128, 256), (0, 0), (3, 3, 4)]
)
def test_grouped_sums_over_rows_of_codes(config, offsets):
    arguments = *outer_operands(330), ends(*offsets), ""
    found = grouped_outer_fp8.grouped_outer_fp8(*arguments, grouped_outer_fp8.CONFIGS[config])
    assert found.is_contiguous()
    check(found, ops.grouped_outer_fp8.definition, *arguments)


@pytest.mark.parametrize("spoilt", ["left", "right"])
def test_rows_of_other_groups_do_not_get_through(spoilt):
    left, right, left_scale, right_scale = outer_operands(330)
    offsets = ends(
        70, 200, 200, 300
    )  # of the second group 70 to 128 and 128 to 200; the last block has rows of no group
    (left if spoilt == "left" else right).view(torch.uint8)[:, [*range(70), *range(200, 330)]] = 0x7F  # NaN
    arguments = left, right, left_scale, right_scale, offsets, ""
    found = grouped_outer_fp8.grouped_outer_fp8(*arguments, grouped_outer_fp8.CONFIGS["128x128"])
    assert found[0].isnan().all()
    assert found[3].isnan().all()
    assert not found[2].any()
    check(found[1], lambda *given: ops.grouped_outer_fp8.definition(*given)[1], *arguments)


def test_a_group_without_rows_does_not_meet_the_scales_around_it():
    left, right, left_scale, right_scale = outer_operands(256)
    left_scale[:, 1] = right_scale[:, 1] = torch.nan
    arguments = left, right, left_scale, right_scale, ends(128, 200, 200), ""
    found = grouped_outer_fp8.grouped_outer_fp8(*arguments, grouped_outer_fp8.CONFIGS["128x128"])
    assert found[1].isnan().all()
    assert not found[2].any()
    check(found[0], lambda *given: ops.grouped_outer_fp8.definition(*given)[0], *arguments)


@pytest.mark.parametrize(
    ("rows", "groups", "columns", "inner", "reason"),
    [
        (128, 0, 16, 16, "there is no group"),
        (0, 2, 16, 16, "TMA moves no empty matrix"),
        (128, 2, 0, 16, "TMA moves no empty matrix"),
        (128, 2, 16, 0, "TMA moves no empty matrix"),
    ],
)
def test_sums_over_nothing_are_refused(rows, groups, columns, inner, reason):
    left, right, *_ = outer_operands(rows, columns, inner)
    found = grouped_outer_fp8.can_move_outer(left, right, torch.ones(1, 1).half(), torch.zeros(groups).int(), "")
    assert found == reason


@pytest.mark.parametrize("by", ["tensor", "rows", "blocks"])
def test_products_of_codes(by):
    x, weight, bias = codes(150, 272), codes(200, 272), torch.randn(200).half()
    shapes = dict(tensor=((), ()), rows=((150,), (200,)), blocks=((150, 3), (2, 3)))[by]
    x_scale, scale = ((0.5 + torch.rand(shape)).half() for shape in shapes)
    arguments = x, weight, x_scale, scale / 16, bias, ""
    check(fp8.linear_fp8(*arguments, fp8.CONFIGS["128x128"]), ops.linear_fp8.definition, *arguments)


@pytest.mark.parametrize("seed", range(4))
def test_in_whatever_order_things_happen(seed, monkeypatch):
    monkeypatch.setattr(
        gluon_emulation.emulate, "__kwdefaults__", gluon_emulation.emulate.__kwdefaults__ | dict(seed=seed)
    )
    test_epilogues("128x64", "silu+residual")
    test_grouped_products_of_codes("128x64", "blocks", (5, 128, 129, 257, 300))
    test_grouped_sums_over_rows_of_codes("128x64", (5, 128, 129, 257, 300))


@pytest.fixture
def coding(monkeypatch):
    """The arithmetic of codes is that of other kernels, in PyTorch here; which number goes where is Gluon's own."""
    monkeypatch.setattr(fp8_tiles, "larger_magnitude", lambda a, b: torch.maximum(a.abs(), b.abs()))
    monkeypatch.setattr(fp8_tiles, "scale_of", lambda largest, most: largest.clamp_min(1e-30) / most)
    monkeypatch.setattr(fp8_tiles, "codes_of", lambda x, scale, dtype: (x / scale).to(dtype))
    monkeypatch.setattr(fp8_gated_tiles, "activate", lambda x, kind, half: KINDS[kind](x))
    monkeypatch.setattr(fp8_gated_tiles, "sigmoid_of", lambda x, half: x.sigmoid())
    for module in (tiles, made_tiles):
        monkeypatch.setattr(module, "launch", emulate)


WAYS = pytest.mark.parametrize(("by", "turned_by"), [("rows", "rows"), ("rows", "blocks"), ("blocks", "rows")])


@WAYS
@pytest.mark.parametrize("shape", [(160, 272), (2, 144, 16)])
def test_tiles_are_coded_both_ways(by, turned_by, shape, coding):
    x = torch.randn(shape).half()
    found = tiles.launch_tiles(
        fp8_tiles.code_blocks_kernel, x, by, turned_by, E4M3, fp8_tiles.WARPS, ROWS=fp8_tiles.ROWS
    )
    for made, wanted in zip(found, ops.fp8_tiles.definition(x, by, turned_by), strict=True):
        torch.testing.assert_close(made.float(), wanted.float(), rtol=0, atol=0)


@WAYS
@pytest.mark.parametrize("columns", [144, 256])
def test_gated_pairs_are_coded_both_ways(by, turned_by, columns, coding):
    x = torch.randn(160, 2 * columns).half()
    found = fp8_gated_tiles.code_gated_blocks(None, x, by, turned_by)
    definition = ops.swiglu_fp8_tiles.definition
    for each, reference, truth in zip(
        found, definition(x, by, turned_by), definition(x.double(), by, turned_by), strict=True
    ):
        assert not (message := judge(each, reference, truth, own_error(reference, truth)).message), message


@WAYS
def test_gradients_of_gated_pairs_are_coded_both_ways(by, turned_by, coding):
    x, wider_rows = torch.randn(144, 512).half(), torch.randn(144, 272).half()
    grad = wider_rows[:, :256]  # whose rows lie further apart than those of a tensor of their own
    found = fp8_gated_tiles.code_gated_blocks(grad, x, by, turned_by)
    definition = ops.swiglu_gradient_fp8_tiles.definition
    references, truths = definition(grad, x, by, turned_by), definition(grad.double(), x.double(), by, turned_by)
    for each, reference, truth in zip(found, references, truths, strict=True):
        assert not (message := judge(each, reference, truth, own_error(reference, truth)).message), message


@WAYS
@pytest.mark.parametrize("size", [(144, 272), (160, 16)])
def test_gradients_of_losses_are_coded_both_ways(by, turned_by, size, coding):
    logits, labels = (2 * torch.randn(size)).half(), torch.randint(size[1], size[:1])
    labels[1::3] = -100
    lse = logits.float().logsumexp(1)
    definition = ops.cross_entropy_gradient_fp8_tiles.definition
    found = fp8_loss_tiles.cross_entropy_gradient_fp8_tiles(logits, lse, labels, -100, by, turned_by)
    references = definition(logits, lse, labels, -100, by, turned_by)
    truths = definition(logits.double(), lse.double(), labels, -100, by, turned_by)
    for each, reference, truth in zip(found, references, truths, strict=True):
        assert not (message := judge(each, reference, truth, own_error(reference, truth)).message), message
    assert not found[0].float()[1::3].any()


def test_what_gluon_leaves_to_others_of_gated_pairs():
    at = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")
    gate_up, grad = at(160, 512), at(160, 256)
    assert "multiples of 16" in fp8_gated_tiles.in_vectors(at(160, 536), 16)
    assert "multiples of 16" in fp8_gated_tiles.in_vectors(at(150, 512), 16)
    assert fp8_gated_tiles.in_vectors(gate_up, 128) is True
    assert "whole tiles of 128 columns, not 144" in fp8_gated_tiles.in_vectors(at(160, 288), 128)
    assert fp8_gated_tiles.rows_in_vectors(grad) is True
    assert "rows of grad" in fp8_gated_tiles.rows_in_vectors(at(160, 257)[:, :256])
    assert "rows of grad" in fp8_gated_tiles.rows_in_vectors(at(16, 2**24)[:, :256])
    assert "distances between them" in fp8_gated_tiles.in_vectors(at(2**24, 512), 128)


@pytest.mark.parametrize("rows_first", [False, True])
def test_every_number_of_a_tile_has_one_thread(rows_first):
    """As compiled, a thread's first three registers are neighbours of a row, or with rows first of a column."""
    layout = fp8_tiles.block_layout(fp8_tiles.ROWS, 128, rows_first)
    bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
    assert len(layout.lane_bases) == 5
    assert 2 ** len(layout.warp_bases) == fp8_tiles.WARPS
    assert sorted(map(tuple, bases)) == sorted([(2**n, 0) for n in range(7)] + [(0, 2**n) for n in range(7)])
    assert layout.reg_bases[:3] == ([[1, 0], [2, 0], [4, 0]] if rows_first else [[0, 1], [0, 2], [0, 4]])


def test_what_is_too_large_for_numbers_of_32_bits_is_left_to_others():
    tall = lambda rows: torch.empty(rows, 128, dtype=torch.bfloat16, device="meta")
    assert tiles.of_whole_vectors(tall(2**20))
    assert not tiles.of_whole_vectors(tall(2**24))
    heads = lambda batch: torch.empty(batch, 64, 32, 64, dtype=torch.bfloat16, device="meta")
    assert attention_codes.takes(heads(8), heads(8), heads(8), None, True) is True
    assert "65,535 heads" in attention_codes.takes(heads(4096), heads(4096), heads(4096), None, True)
