"""Of the two codes that an instruction makes at once, each store gets the whole pair, or single codes, and no pair both.

ptxas 12.8 for sm_90 packs pairs that are stored whole into words as it converts them; where bytes of the same pair are
stored too, they came from a register that was not yet written. The interpreter knows nothing of that.
"""

import re

WALK = """
import json, torch
from tilestack.kernels.quantised.fp8_made_tiles import code_gated, code_loss
from tilestack.kernels.quantised.fp8_tiles import code_tiles
from tilestack.lab.compile.absent_gpu import AbsentGpu
odd, whole = (torch.empty(*sides, device="meta") for sides in ((64, 260), (160, 144)))
with AbsentGpu(90) as gpu:
    for x in (odd, whole, odd.T, whole.T):
        for by, turned_by in (("rows", "blocks"), ("blocks", "rows"), ("blocks", "blocks")):
            code_tiles(x, by, turned_by, torch.float8_e4m3fn)
            half, row = x[:, : x.shape[1] // 2], torch.empty(x.shape[0], device="meta")
            code_gated(None, x, by, turned_by, torch.float8_e4m3fn)
            code_gated(half, x, by, turned_by, torch.float8_e4m3fn)
            code_loss(x, row, row.long(), -100, by, turned_by, torch.float8_e4m3fn)
print(json.dumps([dict(kernel=report.kernel, ptx=report.ptx) for report in gpu.reports()]))
"""
PAIR = re.compile(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(%rs\d+),")
WHOLE, SINGLE = ("mov.b32", ".b16"), ("shr.", ".b8")


def uses_of_pair(ptx: str, pair: str) -> list[str]:
    """The names of the instructions that read a pair."""
    reading = re.findall(rf"^\s*(?:@\S+\s+)?([a-z]\S+)\s(?!\s*{pair},).*{pair}\b", ptx, re.MULTILINE)
    return [name for name in reading if not name.startswith("cvt.rn")]


def test_no_pair_of_codes_is_stored_both_ways(uninterpreted):
    kernels = uninterpreted("-c", WALK)
    assert {"code_tiles_kernel", "code_strips_kernel", "code_made_kernel"} == {row["kernel"] for row in kernels}
    seen = set()
    for row in kernels:
        for pair in PAIR.findall(row["ptx"]):
            uses = uses_of_pair(row["ptx"], pair)
            kinds = {ends for ends in (WHOLE, SINGLE) for name in uses if any(end in name for end in ends)}
            assert len(kinds) <= 1, (row["kernel"], pair, uses)
            seen |= kinds
    assert seen == {WHOLE, SINGLE}
