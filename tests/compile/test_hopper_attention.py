"""Attention for Hopper compiles in every configuration, for both sizes of heads, causal, full and of documents, and passes
the gates."""

import pytest

from tilestack.kernels.hopper.attention import CONFIGS

WALK = """
import json, sys
import torch
from tilestack.kernels.hopper.attention import CONFIGS
from tilestack.kernels.hopper.attention_backward import gradients
from tilestack.kernels.hopper.attention_forward import attention_and_lse
from tilestack.lab.compile.absent_gpu import AbsentGpu
rows, dim = [], int(sys.argv[1])
q, k = (torch.empty(8, 4096, heads, dim, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
documents = torch.empty(8, 4096, 2, dtype=torch.int32, device="meta")
for causal, bounds in ((True, None), (False, None), (True, documents)):
    with AbsentGpu(90) as gpu:
        forwards = {config.of_64 if dim == 64 else config.of_128 for config in CONFIGS.values()} - {None}
        for forward in forwards:
            out, lse = attention_and_lse(q, k, k, causal, 0.1, forward, bounds)
        for ordered in (False, True):
            gradients(out, q, k, k, out, lse, causal, 0.1, bounds, ordered)
        rows += [report.row() | dict(documents=bounds is not None) for report in gpu.reports()]
print(json.dumps(rows))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_every_configuration_passes_the_gates(uninterpreted, dim):
    rows = uninterpreted("-c", WALK, str(dim))
    assert [(row["kernel"], row["constants"], row["failures"]) for row in rows if row["failures"]] == []
    forwards = [row for row in rows if row["kernel"] == "attention_fwd_kernel"]
    compiled = {
        (*(row["constants"][name] for name in ("SLOTS", "PING_PONG", "CAUSAL")), row["documents"]) for row in forwards
    }
    configs = [config.of_64 if dim == 64 else config.of_128 for config in CONFIGS.values()]
    asked = {(own.slots, own.ping_pong) for own in configs if own}
    assert compiled == {(*each, *how) for each in asked for how in ((True, False), (False, False), (True, True))}
    backwards = [row for row in rows if row["kernel"] == "attention_bwd_kernel"]
    assert {row["documents"] for row in backwards} == {True, False}
    if dim == 64:
        assert not any(row["spill_bytes"] for row in forwards + backwards)
