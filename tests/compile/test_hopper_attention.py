"""Attention for Hopper compiles in every configuration, for both sizes of heads, causal and full, and passes the gates."""

from tilestack.kernels.hopper.attention import CONFIGS

WALK = """
import json
import torch
from tilestack.kernels.hopper.attention import CONFIGS
from tilestack.kernels.hopper.attention_backward import gradients
from tilestack.kernels.hopper.attention_forward import attention_and_lse
from tilestack.lab.compile import AbsentGpu
rows = []
for dim in (64, 128):
    q, k = (torch.empty(8, 4096, heads, dim, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    for causal in (True, False):
        with AbsentGpu(90) as gpu:
            forwards = {config.of_64 if dim == 64 else config.of_128 for config in CONFIGS.values()} - {None}
            for forward in forwards:
                out, lse = attention_and_lse(q, k, k, causal, 0.1, forward)
            gradients(out, q, k, k, out, lse, causal, 0.1)
            rows += [report.row() | dict(dim=dim) for report in gpu.reports()]
print(json.dumps(rows))
"""


def test_every_configuration_passes_the_gates(uninterpreted):
    rows = uninterpreted("-c", WALK)
    assert [(row["kernel"], row["constants"], row["failures"]) for row in rows if row["failures"]] == []
    of_64 = [row for row in rows if row["dim"] == 64 and row["kernel"].startswith("attention")]
    assert all(row["spill_bytes"] == 0 for row in of_64)
    compiled = {
        (row["constants"]["CONSUMERS"], row["constants"]["PING_PONG"], row["constants"]["CAUSAL"])
        for row in of_64
        if row["kernel"] == "attention_fwd_kernel"
    }
    asked = {(of.consumers, of.ping_pong) for config in CONFIGS.values() if (of := config.of_64)}
    assert compiled == {(*each, causal) for each in asked for causal in (True, False)}
    assert {row["dim"] for row in rows if row["kernel"] == "attention_bwd_kernel"} == {64, 128}
