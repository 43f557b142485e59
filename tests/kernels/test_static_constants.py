"""Where Triton needs a constant, no kernel puts the result of another function of Triton's: 3.7 folds it, 3.6 does not compile it."""

import ast
import importlib
from pathlib import Path
from types import ModuleType

import triton
import triton.language as tl
from triton.runtime.jit import KernelInterface

from tilestack.lab.mutation.mutants import is_kernel
from tilestack.lab.mutation.suite import import_order

CONSTANT_ARGUMENTS = {"static_range": None, "arange": None, "zeros": 1, "full": 1}  # all of them, or so many


def results_for_constants(module: ModuleType) -> list[str]:
    """Calls of functions that Triton compiles, in its language and ours, at places of a file's kernels that take constants."""
    assert module.__file__
    source = Path(module.__file__).read_text()
    kernels = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and is_kernel(node)]
    return [
        f"{module.__name__} {kernel.name}: {ast.get_source_segment(source, call)}"
        for kernel in kernels
        for place in places_of_constants(kernel)
        for call in ast.walk(place)
        if isinstance(call, ast.Call) and isinstance(value_of(call.func, module), KernelInterface)
    ]


def places_of_constants(kernel: ast.FunctionDef) -> list[ast.expr]:
    found: list[ast.expr] = []
    for node in ast.walk(kernel):
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.annotation) == "tl.constexpr":
            found.append(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CONSTANT_ARGUMENTS:
            found += node.args[: CONSTANT_ARGUMENTS[node.func.attr]]
    return found


def value_of(name: ast.expr, module: ModuleType) -> object:
    """What a function's name stands for, None for what is no plain name of the file's or of a module it imports."""
    if isinstance(name, ast.Attribute):
        return getattr(value_of(name.value, module), name.attr, None)
    return getattr(module, name.id, None) if isinstance(name, ast.Name) else None


@triton.jit
def half(x):
    return x // 2


@triton.jit
def planted_kernel(out_ptr, TAPS: tl.constexpr):
    HALF: tl.constexpr = half(TAPS)
    for i in tl.static_range(tl.cdiv(TAPS, 2)):
        tl.store(out_ptr + i + tl.arange(0, TAPS), tl.zeros([half(TAPS)], tl.float32) + HALF + tl.cdiv(TAPS, 2))


def test_a_result_in_the_place_of_a_constant_is_seen():
    found = results_for_constants(importlib.import_module(__name__))
    calls = [call.removeprefix(f"{__name__} planted_kernel: ") for call in found]
    assert sorted(calls) == ["half(TAPS)", "half(TAPS)", "tl.cdiv(TAPS, 2)"]


def test_constants_of_kernels_are_no_results_of_functions():
    modules = [importlib.import_module(name) for name in import_order()]
    assert len(modules) > 100
    assert [call for module in modules for call in results_for_constants(module)] == []
