"""Aligned tensors are read and written 16 bytes at a time; only what is odd may do with less."""

import pytest

from tilestack.kernels.memory.permute import SPREAD_BYTES

WALK = """
import json, sys
import torch
from tilestack.contract import operator_named
from tilestack.lab.compile.explain import calls_of, compile_all
names, dtypes, cases = (given.split(",") for given in sys.argv[1:])
dtypes = [getattr(torch, dtype) for dtype in dtypes]
calls = calls_of([operator_named(name) for name in names], 90, dtypes, every_bench=True)
reports = compile_all(call for call in calls if call.case.name in cases)
print(json.dumps([report.row() for report in reports]))
"""
ITEMSIZE = {"bfloat16": 2, "float32": 4}
ALIGNED = ("16384x16384", "64x2048x2048", "16x8192x16x128x0213", "64x64x256x256x0231", "512x512x1024x210")


@pytest.fixture
def compiled(uninterpreted):
    """Reports of the kernels that operators launch for Hopper in some of their cases."""

    def walk(names, cases, dtypes=ITEMSIZE):
        return uninterpreted("-c", WALK, *(",".join(each) for each in (names, dtypes, cases)))

    return walk


def test_every_access_is_16_bytes_wide(compiled):
    rows = compiled(["copy", "transpose", "permute"], ALIGNED)
    assert {"copy_kernel", "copy_tiles_kernel"} == {row["kernel"] for row in rows}
    assert {"bfloat16", "float32"} == {row["dtype"] for row in rows}
    for row in rows:
        constants = row["constants"]
        elements = constants.get("BLOCK") or constants["ROWS"] * constants["COLS"]
        needed = elements * ITEMSIZE[row["dtype"]] // (16 * 32 * row["num_warps"])
        needed *= 2  # the other half for blocks and tiles at the end
        assert (row["instructions"]["ld.v4"], row["instructions"]["st.v4"]) == (needed, needed), row


def test_zeros_between_are_written_16_bytes_at_a_time(compiled):
    cases = {"8192x32768x2", "8192x32768x16"}
    rows = [row for row in compiled(["strided_copy"], cases) if row["kernel"] == "spread_kernel"]
    assert {row["case"] for row in rows} == cases
    for row in rows:
        assert row["instructions"]["st.v4"] == SPREAD_BYTES // (16 * 32 * row["num_warps"]), row


LONG_SUMS = ("16384x16384x-1", "16384x16384x0", "8192x151936x1024x151936")


def test_sums_have_whole_tiles_on_their_way(compiled):
    seen = set()
    for row in compiled(["reduce_sum", "embedding"], LONG_SUMS):
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


def test_fused_dropout_leaves_registers_for_other_programs(compiled):
    """A program makes its random words before it loads anything; only other programs can use the memory meanwhile."""
    cases = [f"{kind}x8192x1024x0.1" for kind in ("relu", "gelu", "silu", "gelu_tanh")]  # larger ones launch the same
    rows = compiled(["activation_dropout", "gated_dropout"], cases, ["bfloat16"])
    assert {row["case"] for row in rows} == set(cases)
    without_words = "gated_dropout_bits_bwd_kernel"
    drawing = {"activation_dropout_fwd_kernel", "activation_dropout_bwd_kernel", "gated_dropout_bits_fwd_kernel"}
    assert {row["kernel"] for row in rows} == {*drawing, without_words}
    for row in rows:
        assert row["kernel"] == without_words or row["registers"] * 32 * row["num_warps"] * 8 <= 65536, row
        constants = row["constants"]
        if constants["TOGETHER"] * constants["SLAB"] * 2 >= 16 * 32 * row["num_warps"]:  # a thread has 16 bytes
            assert row["instructions"]["ld.v4"] > 0, row
            assert row["instructions"]["st.v4"] > 0, row


def test_odd_rows_move_their_bodies_16_bytes_at_a_time(compiled):
    rows = [row for row in compiled(["layer_norm"], ["4096x4097"]) if row["kernel"].startswith("norm_ragged")]
    assert {(row["dtype"], row["direction"]) for row in rows} == {
        (t, d) for t in ITEMSIZE for d in ("forward", "backward")
    }
    for row in rows:
        constants, itemsize, backward = row["constants"], ITEMSIZE[row["dtype"]], row["direction"] == "backward"
        granules = constants["BODY"] * itemsize // (16 * 32 * row["num_warps"])
        # Ends of 4-byte elements, the least that can be, are copied ahead as well; the forward loads its own a row ahead.
        ends = itemsize // 4 if backward else 0
        sums = 2 * constants["BODY"] * 4 // (16 * 32 * row["num_warps"])
        assert row["instructions"]["cp.async"] == constants["STAGES"] * (granules + ends) * (1 + backward), row
        assert row["instructions"]["st.v4"] == granules + backward * sums, row
