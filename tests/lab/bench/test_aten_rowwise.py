"""PyTorch's grouped product of fp8 as a peer: operands in the form that it wants, of the operator's numbers, or the reason."""

import itertools

import pytest
import torch

from tilestack import ops
from tilestack.contract.cases import Make
from tilestack.kernels.quantised import aten
from tilestack.lab.bench import aten_rowwise, peers
from tilestack.lab.bench import operators as lab
from tilestack.lab.bench.candidates import candidate_of
from tilestack.ops.grouped_fp8 import outer_case, rows_case


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(aten, "has_grouped_fp8", lambda device: True)


def linear_arguments(*case):
    return ops.grouped_linear_fp8.bind(**rows_case(Make(torch.bfloat16), *case))


def outer_arguments(*case):
    return ops.grouped_outer_fp8.bind(**outer_case(Make(torch.bfloat16), *case))


def accepted(operands):
    """The shape that PyTorch's own check of these operands' shapes, strides and dtypes promises."""
    return aten_rowwise.grouped_product(*(operand.to("meta") for operand in operands)).shape


def by_hand(left, right, left_scale, right_scale, offsets):
    """What `torch._scaled_grouped_mm` computes: rows of a group with its matrix, or sums over a group's columns."""
    spans = [slice(*ends) for ends in itertools.pairwise([0, *offsets.tolist()])]
    left, right = left.float(), right.float()
    if right.ndim == 3:
        parts = [left[s] @ right[g] * left_scale[s, None] * right_scale[g] for g, s in enumerate(spans)]
        return torch.cat(parts)
    sums = torch.stack([left[:, s] @ right[s] for s in spans])
    return sums * left_scale.view(len(spans), -1, 1) * right_scale.view(len(spans), 1, -1)


def assert_same_numbers(found, truth):
    """As far as e4m3 with coarser scales holds them: three bits after the point, of errors that average out."""
    assert 0 < (found - truth).norm() < 2**-4 * truth.norm()


def test_products_of_rows_keep_their_numbers_in_scales_of_rows(on_hopper):
    arguments = linear_arguments(300, 4, 272, 144, "short")
    operands = aten_rowwise.linear_operands(**arguments)
    last = int(arguments["offsets"][-1])
    assert accepted(operands) == (300, 144)
    assert_same_numbers(by_hand(*operands), ops.grouped_linear_fp8.definition(**arguments)[:last].float())


@pytest.mark.parametrize("spread", ["uneven", "one", "short", "even"])
def test_sums_over_rows_keep_their_numbers_in_scales_of_each_group(on_hopper, spread):
    arguments = outer_arguments(288, 3, 48, 144, spread)
    operands = aten_rowwise.outer_operands(**arguments)
    truth = ops.grouped_outer_fp8.definition(**arguments).float()
    assert accepted(operands) == truth.shape
    assert all(end % 16 == 0 for end in operands[-1].tolist())  # or a device-side assertion ends the process
    assert_same_numbers(by_hand(*operands), truth)


def test_aten_takes_scales_of_rows_as_they_are(monkeypatch):
    """It is heard here rather than run: PyTorch has it for GPUs only."""
    heard = {}

    def stand_in(left, right, left_scale, right_scale, **options):
        heard.update(operands=(left, right, left_scale, right_scale, options["offs"]))
        return by_hand(*heard["operands"]).to(options["out_dtype"])

    arguments = linear_arguments(40, 3, 32, 48, "even", "rows")
    arguments["offsets"] = torch.tensor([10, 10, 40], dtype=torch.int32)
    truth = ops.grouped_linear_fp8.definition(**arguments)
    arguments["x_scale"] = arguments["x_scale"].repeat_interleave(2)[::2]  # as no kernel takes them
    monkeypatch.setattr(torch, "_scaled_grouped_mm", stand_in)
    found = aten.grouped_linear_fp8(**arguments)
    monkeypatch.undo()
    torch.testing.assert_close(found, truth)
    assert accepted(heard["operands"]) == (40, 48)


REASONS = {
    "older": (dict(), "has no grouped product of fp8, torch._scaled_grouped_mm"),
    "elsewhere": (dict(), "needs compute capability 9.0"),
    "blocks": (dict(by="blocks"), "a scale for each row of both matrices, none for blocks"),
    "float32": (dict(dtype="float32"), "gives bfloat16"),
    "odd": (dict(inner=24), "wants multiples of 16, not 24 to 48"),
    "empty": (dict(rows=0), "wants multiples of 16, not 32 to 48"),
    "fits": (dict(), True),
}


@pytest.mark.parametrize("why", REASONS)
def test_aten_says_what_it_wants(why, monkeypatch):
    change, reason = REASONS[why]
    sizes = dict(rows=40, inner=32, by="rows", dtype="") | change
    if why == "older":
        monkeypatch.delattr(torch, "_scaled_grouped_mm")
    elif why != "elsewhere":
        monkeypatch.setattr(aten, "has_grouped_fp8", lambda device: True)
    arguments = linear_arguments(sizes["rows"], 3, sizes["inner"], 48, "even", sizes["by"])
    found = aten.multiplies_groups_of_fp8(*(arguments[n] for n in ("x", "weight", "weight_scale")), sizes["dtype"])
    assert found is True if reason is True else reason in found


def test_the_bench_shows_the_reason(on_hopper, monkeypatch):
    peer = peers.peers_of(ops.grouped_linear_fp8)["aten-rowwise"]
    with pytest.raises(NotImplementedError, match="the scales are of rows: aten is the peer"):
        peer.setup(*linear_arguments(40, 3, 32, 48, "even", "rows").values())
    monkeypatch.undo()
    arguments = outer_arguments(288, 3, 48, 144)
    candidate = candidate_of(
        ops.grouped_outer_fp8, peers.peers_of(ops.grouped_outer_fp8)["aten-rowwise"], arguments, [], "forward"
    )
    timing = lab.measure({"aten-rowwise": candidate}, 1.0, "cpu")["aten-rowwise"]
    assert "needs compute capability 9.0" in timing.note
