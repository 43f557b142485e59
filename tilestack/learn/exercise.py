"""An exercise, read from its one file in `exercises/`, so that the problem, the code to fill in and the solution agree.

    exercises/add.py              `learn start`           `learn solution`
    ─────────────────────────     ──────────────────      ──────────────────
    docstring: the problem        the same                the same
    # begin: yours
    # | pass                      pass
    x = tl.load(…)                                        x = tl.load(…)
    # end
    # begin: tutor
    HINTS, MISTAKES, CASES
    # end

HINTS go from a nudge to nearly the answer. MISTAKES maps what somebody may have done to the definition with that mistake,
which gives the numbers that they got. CASES are calls to be tried beside the operator's own.

Nothing here imports PyTorch: the list of exercises and a hint are to appear at once.
"""

import ast
import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "exercises"
BACKEND = "mine"
ORDER = (
    "add",
    "relu",
    "mend_copy",
    "transpose",
    "embedding",
    "reduce_sum",
    "softmax",
    "online_softmax",
    "rms_norm",
    "rms_norm_backward",
    "mend_swiglu",
    "silu_mul",
    "quantise_rows",
    "linear",
    "ordered_linear",
    "cross_entropy",
    "attention",
)
BEGIN, GIVEN, END = re.compile(r"\s*# begin: (yours|tutor)$"), re.compile(r"^(\s*)# \|( |$)"), re.compile(r"\s*# end$")


@dataclass(frozen=True)
class Exercise:
    """One exercise by name, which is that of its file."""

    name: str

    @property
    def path(self) -> Path:
        return SOURCES / f"{self.name}.py"

    @functools.cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @functools.cached_property
    def problem(self) -> str:
        return ast.get_docstring(ast.parse(self.source)) or ""

    @property
    def teaches(self) -> str:
        """What is new in it, in a line."""
        return self.problem.partition("\n")[0]

    @property
    def operator(self) -> str:
        """The operator that it implements."""
        found = re.search(rf'@implements\(\s*ops\.(\w+), backend="{BACKEND}"', self.source)
        assert found, f"{self.name} implements no operator"
        return found[1]

    @property
    def is_repair(self) -> bool:
        """Whether the code is complete and wrong, and to be mended."""
        return self.name.startswith("mend_")

    @functools.cached_property
    def directions(self) -> list[str]:
        """Those in which a kernel that is the learner's to write or to mend is launched: by the function that is registered,
        or by its backward."""
        functions = {each.name: each for each in ast.parse(self.source).body if isinstance(each, ast.FunctionDef)}
        begins = [n for n, line in enumerate(self.source.splitlines(), 1) if line.strip() == "# begin: yours"]
        end_of = lambda each: each.end_lineno or each.lineno
        yours = {each.name for each in functions.values() if any(each.lineno <= n <= end_of(each) for n in begins)}
        launched_in = {
            name: {ast.unparse(part.value) for part in ast.walk(each) if isinstance(part, ast.Subscript)}
            for name, each in functions.items()
        }
        registered = next(each for each in functions.values() if "implements" in map(called, each.decorator_list))
        backward = dict(keywords_of(registered)).get("backward", "")
        found = {"forward": registered.name, "backward": backward}
        return [direction for direction, name in found.items() if yours & launched_in.get(name, set())]

    @property
    def direction(self) -> str:
        """Whether its kernel computes results or gradients."""
        return "backward" if self.name.endswith("_backward") else "forward"

    @functools.cached_property
    def hints(self) -> list[str]:
        """From a nudge to nearly the answer."""
        for statement in ast.parse(self.source).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "HINTS":
                return ast.literal_eval(statement.value)
        raise AssertionError(f"{self.name} has no HINTS")

    def given(self, check_with: str) -> str:
        """The file that a learner begins with; its docstring ends with the command that checks it."""
        text = "".join(line for line, part in self._lines() if part != "solution").rstrip() + "\n"
        before, quotes, after = text.partition('\n"""\n')
        return f"{before}\n\nCheck it:  {check_with}{quotes}{after}"

    def solution(self) -> str:
        return "".join(line for line, part in self._lines() if part != "given").rstrip() + "\n"

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Every line that somebody may see, and the part that it belongs to: both, given or solution."""
        region = ""
        for line in self.source.rstrip().splitlines(keepends=True):
            if begun := BEGIN.match(line.rstrip()):
                region = begun[1]
            elif region and END.match(line.rstrip()):
                region = ""
            elif region == "yours" and GIVEN.match(line):
                yield GIVEN.sub(r"\1", line.rstrip() + "\n"), "given"
            elif region != "tutor":
                yield line, "solution" if region else "both"


def called(decorator: ast.expr) -> str:
    """The name of the function that makes a decorator."""
    return ast.unparse(decorator.func) if isinstance(decorator, ast.Call) else ""


def keywords_of(function: ast.FunctionDef) -> Iterator[tuple[str | None, str]]:
    """What the calls that decorate a function are given by name, as it is written."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call):
            yield from ((keyword.arg, ast.unparse(keyword.value)) for keyword in decorator.keywords)


EXERCISES = {name: Exercise(name) for name in ORDER}


def find_exercise(name: str) -> Exercise:
    """An exercise by name; its file's name will do."""
    if (found := EXERCISES.get(name.removesuffix(".py"))) is not None:
        return found
    near = difflib.get_close_matches(name, EXERCISES, 1, 0.5)
    means = f"did you mean {near[0]}?" if near else f"there are {', '.join(EXERCISES)}"
    raise ValueError(f"there is no exercise {name!r}; {means}")
