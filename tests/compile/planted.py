"""Kernels that must fail a gate, and a Gluon one that must pass; run as a script it prints their reports for sm_90 as JSON."""

import json
import tempfile
from unittest import mock

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tilestack.lab.compile import absent_gpu
from tilestack.lab.compile.absent_gpu import AbsentGpu


@triton.jit
def spilling_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """512 values a thread, all alive across the sum, where a thread has 255 registers."""
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, x - tl.sum(x, 0))


@triton.jit
def hoarding_kernel(a_ptr, b_ptr, out_ptr, K, BLOCK: tl.constexpr):
    """A pipeline as deep as num_stages, of two BLOCK x BLOCK tiles a stage."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(a_ptr + row * K + k + column)
        total = tl.dot(a, tl.load(b_ptr + (k + row) * BLOCK + column), total)
    tl.store(out_ptr + row * BLOCK + column, total)


@gluon.jit
def product_kernel(a_ptr, b_ptr, out_ptr, SERIALISED: gl.constexpr):
    """One 64x64 product by a warpgroup from shared memory; serialised, its accumulator is used before it is waited for."""
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    TENSOR_CORE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, BLOCKED))[:, None]
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, BLOCKED))[None, :]
    offsets = row * 64 + column
    a = gl.allocate_shared_memory(gl.float16, [64, 64], SHARED, gl.load(a_ptr + offsets))
    b = gl.allocate_shared_memory(gl.float16, [64, 64], SHARED, gl.load(b_ptr + offsets))
    fence_async_shared()
    total = warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, TENSOR_CORE), use_acc=False, is_async=True)
    if SERIALISED:
        in_flight = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
        total = warpgroup_mma(a, b, in_flight * 2, is_async=True)
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    gl.store(out_ptr + offsets, gl.convert_layout(total, BLOCKED))


def reports() -> list[dict]:
    halves, floats = (torch.empty(1 << 20, dtype=dtype, device="meta") for dtype in (torch.float16, torch.float32))
    driver = triton.runtime.driver._active
    with AbsentGpu(90) as gpu:
        spilling_kernel[(1,)](floats, floats, BLOCK=1 << 14, num_warps=1)
        hoarding_kernel[(1,)](halves, halves, floats, 1024, BLOCK=128, num_warps=8, num_stages=4)
        product_kernel[(1,)](halves, halves, floats, SERIALISED=False, num_warps=4)
        product_kernel[(1,)](halves, halves, floats, SERIALISED=True, num_warps=4)
    assert triton.runtime.driver._active is driver, "the stand-in driver was left behind"
    return [report.row() for report in gpu.reports()]


def assert_assembled_once() -> None:
    """Of a kernel that is new, whatever is reported later comes from its compilation."""
    floats = torch.empty(64, device="meta")
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        with mock.patch.object(absent_gpu, "make_cubin", wraps=absent_gpu.make_cubin) as assemble, AbsentGpu(90) as gpu:
            spilling_kernel[(1,)](floats, floats, BLOCK=64, num_warps=1)
            (report,) = gpu.reports()
        assert report.registers > 0
        assert assemble.call_count == 1


if __name__ == "__main__":
    assert_assembled_once()
    print(json.dumps(reports()))
