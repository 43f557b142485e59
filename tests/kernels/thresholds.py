"""Which comparisons of sizes in the launchers no case decides both ways; run as a script, it prints them as JSON.

The files of kernels are executed again with every comparison noting how it came out, and nothing is launched, so that all
cases of all operators take seconds.
"""

import ast
import importlib
import json
import warnings

import torch
from lowered import LOWERED, lowered

from tilestack import contract, ops
from tilestack.contract.cases import Make
from tilestack.contract.operator import as_tuple
from tilestack.lab.mutation.mutants import is_kernel
from tilestack.lab.mutation.suite import import_order
from tilestack.lab.source import KERNELS, file_of_module

CPU = torch.device("cpu")
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
outcomes: dict[str, set[bool]] = {}


def noted(where, outcome):
    outcomes[where] |= {True, False} if isinstance(outcome, torch.Tensor) else {bool(outcome)}
    return outcome


class Instrument(ast.NodeTransformer):
    """Lets every comparison in the functions of a file, kernels aside, note how it comes out."""

    def __init__(self, file, source):
        self.file, self.source, self.functions = file, source, []

    def visit_FunctionDef(self, node):
        if not is_kernel(node):
            self.functions.append(node.name)
            node.body = [self.visit(statement) for statement in node.body]
            self.functions.pop()
        return node

    def visit_Compare(self, node):
        text = " ".join(ast.get_source_segment(self.source, node).split())
        self.generic_visit(node)
        if not self.functions or not any(isinstance(order, ORDERS) for order in node.ops):
            return node
        where = f"{self.file} {self.functions[-1]}: {text}"
        outcomes[where] = set()
        return ast.Call(ast.Name("noted_", ast.Load()), [ast.Constant(where), node], [])


def instrument():
    for name in import_order():
        path, scope = file_of_module(name), importlib.import_module(name).__dict__
        source = path.read_text()
        tree = Instrument(name.removeprefix(f"{KERNELS}."), source).visit(ast.parse(source))
        scope["noted_"] = noted
        exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), scope)
        if "launch" in scope:
            scope["launch"] = lambda *_, **__: None


def call(operator, backend, arguments):
    implementation = operator.implementations[backend]
    with contract.backend("", **{operator.name: backend}):
        with torch.no_grad():
            operator(**arguments)
        if implementation.backward is not None:
            leaves = {n: t.requires_grad_() if floating(t) else t for n, t in arguments.items()}
            out = [t for t in as_tuple(operator(**leaves)) if t.is_floating_point()]
            arriving = [torch.ones_like(t) for t in out]
            torch.autograd.grad(out, [t for t in leaves.values() if floating(t)], arriving, allow_unused=True)


def floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def call_all(operators):
    for operator in operators:
        for case in (case for case in operator.cases if case.kind == "check"):
            for dtype in (torch.float16, torch.float32, torch.float64):
                for backend, implementation in operator.implementations.items():
                    arguments = operator.bind(**case.build(Make(dtype)))
                    if backend != "torch" and not implementation.refuses(arguments, CPU):
                        call(operator, backend, arguments)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ops.operators()
    instrument()
    call_all(ops.operators())
    for file, constants, names in LOWERED.values():
        with lowered(file, constants):
            call_all([ops.operator_named(name) for name in names])
    print(json.dumps([where for where, found in outcomes.items() if len(found) < 2]))
