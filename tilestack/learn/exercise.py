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


EXERCISES = {name: Exercise(name) for name in ORDER}


def find_exercise(name: str) -> Exercise:
    """An exercise by name; its file's name will do."""
    if (found := EXERCISES.get(name.removesuffix(".py"))) is not None:
        return found
    near = difflib.get_close_matches(name, EXERCISES, 1, 0.5)
    means = f"did you mean {near[0]}?" if near else f"there are {', '.join(EXERCISES)}"
    raise ValueError(f"there is no exercise {name!r}; {means}")
