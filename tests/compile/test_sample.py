"""The sample of launches that is compiled leaves out no kernel and no branch."""

import pytest

from tilestack.lab.compile.launches import Launch, cover, largest_launches


def launch(kernel="product_kernel", types=None, odd=(), num_warps=4, **constants):
    types = types or {"a_ptr": "*bf16"}
    key = repr((kernel, types, odd, num_warps, constants))
    return Launch(kernel, key, types, constants, set(odd), num_warps, num_stages=3)


SMALL, LARGE = launch(BLOCK=64, CAUSAL=True), launch(BLOCK=128, CAUSAL=True)


def test_the_largest_of_each_kernel_is_compiled():
    another = launch("sum_kernel", BLOCK=16)
    for choose in (cover, largest_launches):
        assert choose([SMALL, LARGE, another, SMALL]) == {LARGE, another}
    assert largest_launches([LARGE, launch(BLOCK=128, num_warps=8)]) == {launch(BLOCK=128, num_warps=8)}


@pytest.mark.parametrize(
    "other",
    [
        launch(BLOCK=64, CAUSAL=False),
        launch(BLOCK=64, CAUSAL=True, bias_ptr=None),  # left out
        launch(BLOCK=64, CAUSAL="above"),
        launch(types={"a_ptr": "*i8"}, BLOCK=64, CAUSAL=True),
        launch(odd={"K"}, BLOCK=64, CAUSAL=True),
    ],
)
def test_what_a_kernel_does_another_way_is_compiled_too(other):
    assert cover([SMALL, LARGE, other]) == {LARGE, other}


def test_one_launch_may_have_all_that_is_missing():
    both = launch(BLOCK=32, CAUSAL=False, odd={"K"})
    assert cover([LARGE, launch(BLOCK=64, CAUSAL=False), launch(BLOCK=64, CAUSAL=True, odd={"K"}), both]) == {
        LARGE,
        both,
    }


def test_shapes_of_tiles_in_memory_are_no_choice():
    tiles = [launch(types={"a": f"tensordesc<bf16[64, {side}],Layout(8)>"}, BLOCK=side) for side in (64, 128)]
    assert cover(tiles) == {tiles[1]}


SKIPS = """
import json
import torch
from triton import knobs
from tilestack.contract import operator_named
from tilestack.lab.compile.absent_gpu import compiled_kernels, launches_of
from tilestack.lab.compile.explain import calls_of
call, *_ = calls_of([operator_named("embedding")], 90, [torch.bfloat16], every_bench=False)
backward = call._replace(direction="backward")
first, *others = launches_of(backward)
reports = compiled_kernels(backward, {first.key})
print(json.dumps([[launch.kernel for launch in (first, *others)], [report.kernel for report in reports], knobs.runtime.jit_cache_hook is None]))
"""


def test_only_what_is_asked_for_is_compiled(uninterpreted, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launched, compiled, hook_is_gone = uninterpreted("-c", SKIPS)
    assert len(launched) > 1
    assert compiled == launched[:1]
    assert {path.stem for path in tmp_path.glob("*/*.cubin")} == set(compiled)
    assert hook_is_gone
