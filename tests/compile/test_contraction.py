"""An element has the same bits wherever it lies and however many lie beside it.

Of a · b + c · d a compiler rounds one product and not the other, whichever suits the code around, and that is another one
in each specialisation of a kernel; of a product and a sum in different blocks it may round both or one. So no sum of an
elementwise kernel may have a product left to be taken: each is one `fma`, and what is added there is no product.
"""

import re
from collections import defaultdict

import pytest

WALK = """
import json, os
import torch
from tilestack.contract import operators
from tilestack.lab.compile.absent_gpu import Call
from tilestack.lab.compile.sample import compile_chosen, walk
from tilestack.lab.compile.explain import elements, telling_cases
from tilestack.lab.compile.launches import cover

def elementwise(implementation):
    return implementation.invariant and implementation.forward.__module__.startswith("tilestack.kernels.elementwise.")

def launches(walked):
    return [launch for _, of_call in walked for launch in of_call]

def calls_with(cases_of, dtype):
    return [
        Call(operator, implementation, case, dtype, direction, 90)
        for operator in operators()
        for implementation in filter(elementwise, operator.implementations.values())
        for case in cases_of(operator)
        for direction in ("forward", "backward")
    ]

single = lambda operator: [case for case in operator.cases if 0 < elements(case) <= 2]  # compiled for by themselves
alone = walk(calls_with(single, torch.float32))
halves, floats = (walk(calls_with(telling_cases, dtype)) for dtype in (torch.bfloat16, torch.float32))
choose = set if os.environ.get("TILESTACK_COMPILE") == "all" else cover
chosen = choose(launches(halves)) | choose(launches(floats)) | set(launches(alone))
reports = compile_chosen(halves + floats + alone, chosen)
print(json.dumps([report.row() | dict(ptx=report.ptx) for report in reports]))
"""
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*)\s+(%\w+), ([^;]*);", re.MULTILINE)


def open_sums(ptx: str) -> list[str]:
    """The sums in which a compiler has a choice: which product it rounds, or whether it rounds one at all."""
    instructions = [(name, to, operands.split(", ")) for name, to, operands in INSTRUCTION.findall(ptx)]
    made_by = defaultdict(set)
    for name, to, _ in instructions:
        made_by[to].add(name)
    added = {"fma.rn.f32": slice(2, 3), "add.f32": slice(0, 2), "sub.f32": slice(0, 2)}
    return [
        f"{name} {to}, {', '.join(operands)}"
        for name, to, operands in instructions
        if name in added and any("mul.f32" in made_by[operand] for operand in operands[added[name]])
    ]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernels(uninterpreted) -> list[dict]:
    return uninterpreted("-c", WALK)


def test_no_sum_leaves_a_choice(kernels):
    assert {"activation_bwd_kernel", "gated_bwd_kernel", "axpy_fwd_kernel"} <= {row["kernel"] for row in kernels}
    found = {
        (row["operator"], row["case"], row["dtype"], row["direction"]): sums
        for row in kernels
        if (sums := open_sums(row["ptx"]))
    }
    assert not found


def test_sums_are_seen(kernels):
    assert any("fma.rn.f32" in row["ptx"] for row in kernels)
    choice = "\tmul.f32 \t%r3, %r1, %r2;\n\t{}\n"
    for sum_of in ("fma.rn.f32 \t%r4, %r1, %r2, %r3;", "add.f32 \t%r4, %r3, %r1;", "sub.f32 \t%r4, %r1, %r3;"):
        assert len(open_sums(choice.format(sum_of))) == 1
    for sum_of in ("fma.rn.f32 \t%r4, %r3, %r2, %r1;", "add.f32 \t%r4, %r1, %r2;", "add.rn.f32 \t%r4, %r3, %r1;"):
        assert not open_sums(choice.format(sum_of))


ROPE = """
import json, torch
from triton.runtime.cache import get_cache_manager
from tilestack.contract import operator_named
from tilestack.lab.compile.sample import compile_cover, walk
from tilestack.lab.compile.explain import calls_of
walked = walk(calls_of([operator_named("rope")], 90, [torch.float32], every_bench=False))
kernels = {report.digest: report.kernel for report in compile_cover(walked)}
files = [get_cache_manager(digest).get_group(f"{kernel}.json")[f"{kernel}.ttir"] for digest, kernel in kernels.items()]
print(json.dumps([open(path).read() for path in files]))
"""


def sums_of_two_products(ttir: str) -> list[str]:
    products = set(re.findall(r"(%\S+) = arith\.mulf ", ttir))
    sums = re.findall(r"arith\.(?:add|sub)f (%\S+), (%\S+) :", ttir)
    return [" and ".join(operands) for operands in sums if products.issuperset(operands)]


def test_a_turn_says_which_product_it_rounds(uninterpreted):
    """As many tokens as a tile has decide how the compiler would."""
    kernels = uninterpreted("-c", ROPE)
    assert not [found for ttir in kernels for found in sums_of_two_products(ttir)]
    assert kernels
    assert all("math.fma" in ttir for ttir in kernels)
