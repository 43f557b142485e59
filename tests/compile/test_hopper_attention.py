"""Attention for Hopper compiles in every configuration, for both sizes of heads, causal, full and of documents, and passes
the gates."""

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
    documents = torch.empty(8, 4096, 2, dtype=torch.int32, device="meta")
    for causal, bounds in ((True, None), (False, None), (True, documents)):
        with AbsentGpu(90) as gpu:
            forwards = {config.of_64 if dim == 64 else config.of_128 for config in CONFIGS.values()} - {None}
            for forward in forwards:
                out, lse = attention_and_lse(q, k, k, causal, 0.1, forward, bounds)
            gradients(out, q, k, k, out, lse, causal, 0.1, bounds)
            rows += [report.row() | dict(dim=dim, documents=bounds is not None) for report in gpu.reports()]
print(json.dumps(rows))
"""


def test_every_configuration_passes_the_gates(uninterpreted):
    rows = uninterpreted("-c", WALK)
    assert [(row["kernel"], row["constants"], row["failures"]) for row in rows if row["failures"]] == []
    of_64 = [row for row in rows if row["dim"] == 64 and row["kernel"].startswith("attention")]
    assert all(row["spill_bytes"] == 0 for row in of_64)
    compiled = {
        (*(row["constants"][name] for name in ("CONSUMERS", "PING_PONG", "CAUSAL")), row["documents"])
        for row in of_64
        if row["kernel"] == "attention_fwd_kernel"
    }
    asked = {(of.consumers, of.ping_pong) for config in CONFIGS.values() if (of := config.of_64)}
    assert compiled == {(*each, *how) for each in asked for how in ((True, False), (False, False), (True, True))}
    backwards = {(row["dim"], row["documents"]) for row in rows if row["kernel"] == "attention_bwd_kernel"}
    assert backwards == {(dim, documents) for dim in (64, 128) for documents in (True, False)}
