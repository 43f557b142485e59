"""Mutants: copies of a kernel's source with one small thing wrong in each, made mechanically.

    stride       a row stride that is another's, or one too many
    mask         one of two conditions dropped, or a store that lets everything through
    comparison   < for ≤, = for ≠, and so on
    constant     a number, one more or a hundredth larger
    scale        a factor or a divisor dropped
    term         a summand dropped, or a sum that starts over
    argument     two arguments of a launch swapped, or a copy that makes rows contiguous left out

What only says how fast a kernel runs (warps, stages, tile sizes, hints to the caches) is left alone: nothing is wrong with
another value. Text is cut and pasted at the places that Python's parser names, so the rest stays as written.
"""

import ast
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

KINDS = ("stride", "mask", "comparison", "constant", "scale", "term", "argument")
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
SHAPES = {"program_id", "num_programs", "arange", "static_range", "range", "zeros", "full", "reshape", "load_span"}
HINTS = {"num_warps", "num_stages", "eviction_policy", "cache_modifier", "warps", "stages", "ahead", "programs", "width",
         "height", "depth", "elements", "strip", "shares", "narrow", "deepest", "most", "tile", "most_width", "spans"}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one function; `number` tells apart the same change in several places."""

    module: str
    function: str
    kind: str
    before: str
    after: str
    number: int
    line: int
    source: str = field(repr=False, compare=False)
    statement: range = range(0)  # the lines of the statement that is changed, or of its head; unknown when empty

    @property
    def name(self) -> str:
        again = f" #{self.number}" if self.number > 1 else ""
        return f"{self.module.removeprefix('tilestack.kernels.')} {self.function}: {self.before} → {self.after}{again}"


@dataclass(frozen=True)
class Change:
    kind: str
    node: ast.AST
    text: str


def mutants_of(module: str, path: Path) -> list[Mutant]:
    """Every mutant of a file."""
    source = path.read_text()
    seen: Counter[tuple[str, ...]] = Counter()
    found = []
    for function in functions_in(ast.parse(source)):
        changes = kernel_changes(function, source) if is_kernel(function) else launcher_changes(function, source)
        statements = statements_of(function)
        for change in changes:
            before = one_line(text_of_node(change.node, source))
            what = function.name, change.kind, before, one_line(change.text)
            seen[what] += 1
            line: int = change.node.lineno  # type: ignore[attr-defined]
            mutated = source_with(source, change.node, change.text)
            found.append(Mutant(module, *what, seen[what], line, mutated, statements.get(line, range(line, line + 1))))
    return found


def statements_of(function: ast.FunctionDef) -> dict[int, range]:
    """By line, the lines of the innermost statement there; of one that holds others, the lines before those."""
    found: dict[int, range] = {}
    for node in ast.walk(function):  # the outer ones first
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
            lines = range(node.lineno, max(end, node.lineno + 1))
            found |= dict.fromkeys(lines, lines)
    return found


def functions_in(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def kernel_changes(function: ast.FunctionDef, source: str) -> Iterator[Change]:
    strides = [a.arg for a in function.args.args if a.arg.endswith("stride")]
    for node, parent in nodes_that_compute(function):
        if isinstance(node, ast.Name) and node.id in strides:
            others = [name for name in strides if name != node.id]
            yield Change("stride", node, others[0] if others else f"({node.id} + 1)")
        if isinstance(node, ast.keyword) and node.arg == "mask" and is_store(parent):
            yield Change("mask", node.value, f"({text_of_node(node.value, source)}) | True")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd) and has_comparison(node):
            yield Change("mask", node, text_of_node(node.left, source))
            yield Change("mask", node, text_of_node(node.right, source))
        yield from arithmetic_changes(node, source)
        if isinstance(node, ast.Constant) and (number := another_number(node.value)) and not is_shape(node, parent):
            yield Change("constant", node, number)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name) and not node.target.id.endswith("_ptr"):  # fmt: skip
            yield Change("term", node, f"{node.target.id} = {text_of_node(node.value, source)}")


def launcher_changes(function: ast.FunctionDef, source: str) -> Iterator[Change]:
    for node, parent in nodes_that_compute(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            receiver = text_of_node(node.func.value, source)
            if node.func.attr == "stride" and node.args and isinstance(node.func.value, ast.Name):
                yield Change("stride", node, f"{receiver}.shape[-1]")
            if node.func.attr == "contiguous" and not node.args:
                yield Change("argument", node, receiver)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launch":
            yield from swapped_arguments(node, source)
        of_speed = mentions_hint(node) or (
            isinstance(parent, ast.BinOp | ast.Assign | ast.Call) and mentions_hint(parent)
        )
        if not of_speed:
            yield from (c for c in arithmetic_changes(node, source) if c.kind in ("scale", "term"))


def swapped_arguments(call: ast.Call, source: str) -> Iterator[Change]:
    """Neighbouring names among what a kernel is launched with, after the kernel and the grid."""
    given = call.args[2:]
    for left, right in itertools.pairwise(given):
        if isinstance(left, ast.Name) and isinstance(right, ast.Name):
            both = ast.Tuple(elts=[left, right])
            both.lineno, both.col_offset = left.lineno, left.col_offset
            both.end_lineno, both.end_col_offset = right.end_lineno, right.end_col_offset
            yield Change("argument", both, f"{right.id}, {left.id}")


def arithmetic_changes(node: ast.AST, source: str) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        sides = text_of_node(node.left, source), text_of_node(node.comparators[0], source)
        yield Change("comparison", node, f"{sides[0]} {COMPARISONS[type(node.ops[0])]} {sides[1]}")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        yield Change("scale", node, f"({text_of_node(node.left, source)})")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and not is_text(node):
        yield Change("term", node, f"({text_of_node(node.left, source)})")


def nodes_that_compute(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, ast.AST]]:
    """The nodes of a function's body with their parents, without annotations, docstrings, hints and assertions."""
    waiting: list[tuple[ast.AST, ast.AST]] = [(node, function) for node in reversed(function.body)]
    while waiting:
        node, parent = waiting.pop()
        skipped = isinstance(node, ast.FunctionDef | ast.Assert | ast.Raise) or (
            isinstance(node, ast.keyword) and node.arg in HINTS
        )
        if skipped or (isinstance(node, ast.Call) and is_hint(node)):
            continue
        yield node, parent
        children = [
            c for c in ast.iter_child_nodes(node) if not (isinstance(node, ast.AnnAssign) and c is node.annotation)
        ]
        waiting += [(child, node) for child in reversed(children)]


def is_store(call: ast.AST) -> bool:
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "store"


def is_hint(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("multiple_of", "max_contiguous", "debug_barrier")


def is_shape(node: ast.Constant, parent: ast.AST) -> bool:
    """Whether a number counts dimensions, axes or lanes: another one is a kernel that does not compile."""
    if isinstance(parent, ast.Subscript | ast.List | ast.Slice):
        return True
    if not isinstance(parent, ast.Call) or not isinstance(parent.func, ast.Attribute | ast.Name):
        return isinstance(parent, ast.keyword) and parent.arg in ("axis", "dim")
    name = parent.func.attr if isinstance(parent.func, ast.Attribute) else parent.func.id
    return name in SHAPES or (name in ("sum", "max", "min", "cumsum", "expand_dims") and node in parent.args[1:])


def is_text(node: ast.BinOp) -> bool:
    return any(isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in ast.walk(node))  # fmt: skip


def has_comparison(node: ast.AST) -> bool:
    """Whether `&` joins conditions, or names of conditions, rather than bits."""
    return not any(isinstance(n, ast.Constant) and type(n.value) is int and n.value > 1 for n in ast.walk(node))


def mentions_hint(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Name) and n.id.lower() in HINTS for n in ast.walk(node))


def another_number(value: object) -> str:
    """A number a little larger; empty for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return str(value + 1) if isinstance(value, int) else repr(value * 1.01) if value else "1.0"


def text_of_node(node: ast.AST, source: str) -> str:
    found = ast.get_source_segment(source, node)
    assert found is not None
    return found


def one_line(text: str) -> str:
    return " ".join(text.split())


def source_with(source: str, node: ast.AST, text: str) -> str:
    lines = source.encode().splitlines(keepends=True)
    place = lambda line, column: sum(map(len, lines[: line - 1])) + column
    start = place(node.lineno, node.col_offset)  # type: ignore[attr-defined]
    end = place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
    whole = source.encode()
    return (whole[:start] + text.encode() + whole[end:]).decode()
