"""Compiles the kernels of a decoding step for Hopper and an older GPU and prints what each does before it waits."""

import json
import re

import torch

from tilestack import ops
from tilestack.contract import registry
from tilestack.lab.compile.absent_gpu import WAIT, AbsentGpu, gate


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def decode_step(rows):
    whole = lambda *shape: meta(*shape, dtype=torch.int64)
    single = lambda *shape: meta(*shape, dtype=torch.float32)
    of = lambda operator, backend: operator.implementations[backend]
    first = lambda implementation: dict(config=next(iter(implementation.configs.values())))
    x, weight, pages = meta(rows, 1024), meta(4096, 1024), meta(100, 16, 8, 128)
    of(ops.add_rms_norm, "triton").forward(x, x, meta(1024), 1e-6)
    product = of(ops.linear, "triton_gemv" if rows <= 4 else "triton_split_k")
    product.forward(x, weight, None, **first(product))
    gated = of(ops.linear_swiglu, "triton_split_k")
    gated.forward(x, meta(6144, 1024), None, **first(gated))
    of(ops.qkv_rope_write, "triton").forward(
        meta(rows, 32, 128), meta(128), meta(128), single(99, 64), single(99, 64), whole(rows), whole(rows), pages, pages,
        16, False, 1e-6, None, None, None,
    )  # fmt: skip
    logits = meta(rows, 9000)
    of(ops.argmax, "triton").forward(logits)
    of(ops.sample, "triton").forward(
        logits, whole(rows), single(rows), meta(rows, dtype=torch.int32), single(rows), single(rows)
    )
    of(ops.paged_attention, "triton").forward(
        meta(rows, 16, 128),
        pages,
        pages,
        whole(rows, 8),
        whole(rows),
        whole(rows + 1),
        1,
        None,
        None,
        None,
        None,
        None,
        None,
    )


registry.load_kernels()
found = []
for capability in (90, 80):
    with AbsentGpu(capability) as gpu, torch.no_grad():
        for rows in (1, 8, 64):
            decode_step(rows)
        for report in gpu.reports():
            before, waits, _ = report.ptx.partition(WAIT)
            fetches = len(re.findall(r"cp\.async\.bulk\.prefetch\.L2", before))
            row = dict(waits=bool(waits), fetches=fetches, lets_next="griddepcontrol.launch_dependents" in report.ptx)
            found.append(dict(kernel=report.kernel, capability=capability, failures=gate(report)) | row)
print(json.dumps(found))
