"""Aligned copies and permutations reach memory 16 bytes at a time on both sides; only what is odd may do with less."""

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
        needed *= 2 if row["kernel"] == "copy_kernel" else 1  # which has a second path, for the end of the vector
        assert (row["instructions"]["ld.v4"], row["instructions"]["st.v4"]) == (needed, needed), row
