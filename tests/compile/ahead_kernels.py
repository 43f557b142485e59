"""Kernels that can be compiled, cannot, cannot be hashed, and kill the process that compiles them; and the calls of which tests compile kernels
ahead: those, Gluon kernels with descriptors, and the steps of an engine.

`python ahead_kernels.py ahead` compiles ahead, `again` launches the same on a GPU that is not there; both print JSON.
"""

import json
import os
import sys
from functools import partial

import torch
import triton
import triton.language as tl

from tilestack import models
from tilestack.ahead import compile_ahead, pool
from tilestack.ahead.listing import Listing
from tilestack.contract import backend, operator_named, register_backend
from tilestack.contract.cases import Make
from tilestack.contract.launch import launch
from tilestack.engine import Engine, EngineSettings
from tilestack.lab.compile.absent_gpu import AbsentGpu


@triton.constexpr_function
def die(value):
    __import__("os").kill(__import__("os").getpid(), 9)  # Triton hashes what a kernel names, and `os` has no source


@triton.jit
def sound_kernel(x_ptr, dtype: tl.constexpr, factor: tl.constexpr):
    tl.store(x_ptr, (tl.load(x_ptr) * factor).to(dtype))


@triton.jit
def broken_kernel(x_ptr, n):
    tl.static_assert(False, "planted")


@triton.jit
def deadly_kernel(x_ptr, n):
    tl.store(x_ptr, die(1))


@triton.constexpr_function
def process(value):
    return os.getpid()


@triton.jit
def nameless_kernel(x_ptr, n):
    tl.store(x_ptr, process(1))


def planted() -> None:
    from ahead_kernels import broken_kernel, deadly_kernel, nameless_kernel, sound_kernel  # as other processes do

    x = torch.empty(64, device="meta")
    launch(broken_kernel, (1,), x, 3)
    launch(deadly_kernel, (1,), x, 3)
    launch(nameless_kernel, (1,), x, 3)
    assert nameless_kernel.hash is None or not nameless_kernel.hash.startswith("recursion")
    launch(sound_kernel, (1,), x, dtype=tl.float32, factor=0.5)


def hopper() -> None:
    op = operator_named("linear")
    arguments = op.bind(
        **next(case for case in op.cases if case.name == "64x64x64").build(Make(torch.bfloat16, "meta"))
    )
    op.implementations["gluon"].forward(
        *arguments.values(), config=next(iter(op.implementations["gluon"].configs.values()))
    )


def steps() -> list:
    sizes = dict(vocabulary=512, hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, head_dim=64, positions=64)
    with torch.device("meta"):
        decoder = models.Decoder(models.ModelConfig(**sizes)).bfloat16().eval()
    usual = EngineSettings(step_tokens=1, max_sequences=1, kv_memory=1 << 22, graphs=True, decode="operators")
    kinds = Engine(decoder, None, usual).runner.captured
    return [partial(kind.compute_nothing, size) for kind in kinds for size in kind.sizes()]


def main(what: str) -> None:
    for name in ("triton", "gluon"):
        register_backend(name, lambda device: True)  # on tensors without memory, too
    sys.path.insert(0, os.path.dirname(__file__))
    with AbsentGpu(90) as gpu, torch.no_grad(), backend("triton"):
        calls = [hopper, *steps()]
        if what == "again":
            for call in calls:
                call()
            print(json.dumps(dict(compiled=list(gpu.seconds), launched=sorted(gpu.launched))))
            return
        with Listing() as listed:
            for call in (planted, *calls):
                call()
        before = len(gpu.launched)
        told: list = []
        found = compile_ahead((planted, *calls), lambda *progress: told.append(progress))
        with Listing() as left:
            for call in (planted, *calls):
                call()
        problems = pool.compile_all(left.missing, 2)
        print(json.dumps(dict(
            listed=[(each.name, each.digest) for each in listed.missing], launched=before, compiled=len(gpu.seconds),
            found=found, told=told, left={each.name: each.digest for each in left.missing}, problems=problems,
        )))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
