"""Aligned tensors are read and written 16 bytes at a time; only what is odd may do with less."""

from tilestack.kernels.memory.permute import SPREAD_BYTES

WALK = """
import json
from tilestack.lab.explain import explain
reports = explain(["copy", "transpose", "permute"], 90, every_bench=True)
print(json.dumps([report.row() for report in reports]))
"""
ITEMSIZE = {"bfloat16": 2, "float32": 4}
ALIGNED = ("16384x16384", "64x2048x2048", "16x8192x16x128x0213", "64x64x256x256x0231", "512x512x1024x210")


def test_every_access_is_16_bytes_wide(uninterpreted):
    rows = [row for row in uninterpreted("-c", WALK) if row["case"] in ALIGNED]
    assert {"copy_kernel", "copy_tiles_kernel"} == {row["kernel"] for row in rows}
    assert {"bfloat16", "float32"} == {row["dtype"] for row in rows}
    for row in rows:
        constants = row["constants"]
        elements = constants.get("BLOCK") or constants["ROWS"] * constants["COLS"]
        needed = elements * ITEMSIZE[row["dtype"]] // (16 * 32 * row["num_warps"])
        needed *= 2  # the other half for blocks and tiles at the end
        assert (row["instructions"]["ld.v4"], row["instructions"]["st.v4"]) == (needed, needed), row


SPREAD = """
import json
from tilestack.lab.explain import explain
reports = explain(["strided_copy"], 90, every_bench=True)
print(json.dumps([report.row() for report in reports]))
"""


def test_zeros_between_are_written_16_bytes_at_a_time(uninterpreted):
    rows = [
        row
        for row in uninterpreted("-c", SPREAD)
        if row["kernel"] == "spread_kernel" and row["case"].startswith("8192")
    ]
    assert {row["case"] for row in rows} == {"8192x32768x2", "8192x32768x16"}
    for row in rows:
        assert row["instructions"]["st.v4"] == SPREAD_BYTES // (16 * 32 * row["num_warps"]), row


SUMS = """
import json
from tilestack.lab.explain import explain
reports = explain(["reduce_sum", "embedding"], 90, every_bench=True)
print(json.dumps([report.row() for report in reports]))
"""
LONG_SUMS = ("16384x16384x-1", "16384x16384x0", "8192x151936x1024x151936")


def test_sums_have_whole_tiles_on_their_way(uninterpreted):
    seen = set()
    for row in (row for row in uninterpreted("-c", SUMS) if row["case"] in LONG_SUMS):
        constants = row["constants"]
        if constants.get("STAGES", 1) > 1:  # before the loop all stages but one, and one in it
            how, lines = "cp.async", constants["STAGES"] * constants.get("ROWS", constants.get("LINES"))
        elif row["kernel"] == "embedding_bwd_kernel":
            how, lines = "ld.v4", constants["TILE"]
        else:
            continue
        needed = lines * constants["COLS"] * ITEMSIZE[row["dtype"]] // (16 * 32 * row["num_warps"])
        assert row["instructions"][how] == needed, row
        seen.add((row["kernel"], row["dtype"]))
    kernels = ("sum_rows_kernel", "sum_columns_kernel", "embedding_bwd_kernel")
    assert seen == {(kernel, dtype) for kernel in kernels for dtype in ITEMSIZE}


DROPOUTS = """
import json, torch
from tilestack.lab.explain import explain
reports = explain(["activation_dropout", "gated_dropout"], 90, [torch.bfloat16], every_bench=True)
print(json.dumps([report.row() for report in reports]))
"""


def test_fused_dropout_leaves_registers_for_other_programs(uninterpreted):
    """A program makes its random words before it loads anything; only other programs can use the memory meanwhile."""
    rows = [row for row in uninterpreted("-c", DROPOUTS) if "x8192x1024x" in row["case"]]  # the others launch the same
    assert {"activation_dropout_fwd_kernel", "activation_dropout_bwd_kernel"} <= {row["kernel"] for row in rows}
    for row in rows:
        assert row["registers"] * 32 * row["num_warps"] * 8 <= 65536, row
        constants = row["constants"]
        if constants["TOGETHER"] * constants["SLAB"] * 2 >= 16 * 32 * row["num_warps"]:  # a thread has 16 bytes
            assert row["instructions"]["ld.v4"] > 0, row
            assert row["instructions"]["st.v4"] > 0, row


ODD = """
import json
from tilestack.lab.explain import explain
reports = explain(["layer_norm"], 90, every_bench=True)
print(json.dumps([report.row() for report in reports if report.case == "4096x4097"]))
"""


def test_odd_rows_move_their_bodies_16_bytes_at_a_time(uninterpreted):
    rows = [row for row in uninterpreted("-c", ODD) if row["kernel"].startswith("norm_ragged")]
    assert {(row["dtype"], row["direction"]) for row in rows} == {
        (t, d) for t in ITEMSIZE for d in ("forward", "backward")
    }
    for row in rows:
        constants, itemsize, backward = row["constants"], ITEMSIZE[row["dtype"]], row["direction"] == "backward"
        granules = constants["BODY"] * itemsize // (16 * 32 * row["num_warps"])
        ends = itemsize // 4  # copied ahead as well where an element has 4 bytes, the least that can be
        sums = 2 * constants["BODY"] * 4 // (16 * 32 * row["num_warps"])
        assert row["instructions"]["cp.async"] == constants["STAGES"] * (granules + ends) * (1 + backward), row
        assert row["instructions"]["st.v4"] == granules + backward * sums, row
