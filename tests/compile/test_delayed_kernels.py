"""Hopper's attention with the delays that `tests/gpu/test_attention_delays.py` stresses it by: it compiles, and all roles sleep."""

import pytest

WALK = """
import json, sys, tempfile, time
from pathlib import Path
import torch
sys.path.insert(0, "tests/gpu")
from delayed_kernels import delayed
from tilestack.kernels.hopper import attention_backward, attention_codes, attention_forward
from tilestack.lab.compile.absent_gpu import AbsentGpu
folder = Path(tempfile.mkdtemp())
name, dim = sys.argv[1], int(sys.argv[2])
q, k = (torch.empty(2, 1000, heads, dim, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
lse = torch.empty(2, 4, 1000, device="meta")
with AbsentGpu(90) as gpu:
    if name == "forward":
        made = delayed(attention_forward, folder)
        made.attention_and_lse(q, k, k, True, 0.1, attention_forward.Forward(ping_pong=dim == 64))
    elif name == "backward":
        delayed(attention_backward, folder).gradients(q, q, k, k, q, lse, True, 0.1)
    else:
        made = delayed(attention_codes, folder)
        made.attention_of_codes(q, k, k, None, True, None, torch.int8, "same", attention_codes.Config(ping_pong=True))
    print(json.dumps([report.row() | dict(sleeps=report.ptx.count("nanosleep")) for report in gpu.reports()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dim", "count"), [("forward", 64, 1), ("forward", 128, 1), ("backward", 64, 1), ("backward", 128, 1), ("codes", 128, 1)]
)  # fmt: skip
def test_delays_are_in_every_role(uninterpreted, name, dim, count):
    slept = [row for row in uninterpreted("-c", WALK, name, str(dim)) if row["sleeps"]]
    assert len(slept) == count
    for row in slept:
        assert row["kernel"] in ("attention_fwd_kernel", "attention_bwd_kernel", "attention_codes_kernel")
        assert row["sleeps"] >= 20
