"""Attention of codes for Hopper compiles for both sizes of heads and all kinds of codes, and passes the gates."""

import pytest

from tilestack.kernels.hopper.attention_codes import CONFIGS

WALK = """
import json, sys
import torch
from tilestack.kernels.hopper.attention_codes import CONFIGS, attention_of_codes
from tilestack.lab.compile.absent_gpu import AbsentGpu
dim, first = int(sys.argv[1]), next(iter(CONFIGS.values()))
q, k = (torch.empty(8, 4096, heads, dim, dtype=torch.float16, device="meta") for heads in (32, 8))
ends = torch.empty(20, dtype=torch.int32, device="meta")
asked = [(True, None, config) for config in CONFIGS.values()] + [(False, None, first), (True, ends, first)]
with AbsentGpu(90) as gpu:
    for codes, values in (("int8", "same"), ("int8", "fp8"), ("float8_e4m3fn", "fp8")):
        for causal, documents, config in asked:
            attention_of_codes(q, k, k, documents, causal, None, getattr(torch, codes), values, config)
    print(json.dumps([report.row() for report in gpu.reports()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_every_configuration_passes_the_gates(uninterpreted, dim):
    rows = uninterpreted("-c", WALK, str(dim))
    assert [(row["kernel"], row["constants"], row["failures"]) for row in rows if row["failures"]] == []
    attends = [row for row in rows if row["kernel"] == "attention_codes_kernel"]
    distinct = len({(config.ping_pong, config.slots) for config in CONFIGS.values()})
    assert len(attends) == 3 * (distinct + 2)
    assert {row["constants"]["LARGEST"] for row in attends} == {127, 448}
    if dim == 64:
        assert max(row["spill_bytes"] for row in attends) <= 8
