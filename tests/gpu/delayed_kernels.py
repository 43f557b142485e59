"""Hopper's kernels with delays in them, for tests: at every barrier each group of warps sleeps for a time of its own.

A module of kernels is written again with a `random_delay()` before and after each use of a barrier, so that producer and
consumers meet in orders that they never do at full speed: in each program one group, another in the next and at another time,
is an order of magnitude slower than the rest. Arithmetic and its order stay what they are.
"""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

USE_OF_BARRIER = re.compile(r"^( +)mbarrier\.(?:wait|arrive|expect)\(.*\)(?: *#.*)?$")
AFTER = "from triton.experimental import gluon\n"


@gluon.jit
def random_delay():
    gl.inline_asm_elementwise(
        """{ .reg .u32 time, group, slow; .reg .pred is_slow;
        mov.u32 time, %clock;
        mul.lo.u32 time, time, 0x9E3779B1;
        shr.u32 time, time, 23;
        mov.u32 group, %tid.x;
        shr.u32 group, group, 7;
        mov.u32 slow, %globaltimer_lo;
        shr.u32 slow, slow, 18;
        mov.u32 $0, %ctaid.x;
        add.u32 slow, slow, $0;
        and.b32 slow, slow, 3;
        setp.eq.u32 is_slow, slow, group;
        @is_slow shl.b32 time, time, 3;
        nanosleep.u32 time; }""",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def with_delays(source: str) -> str:
    """A module's source with delays around every use of a barrier, up to where it is registered as an implementation."""
    lines, delays = [], 0
    for line in (
        source.partition("\n@implements(")[0]
        .replace(AFTER, f"{AFTER}from {__name__} import random_delay\n")
        .splitlines()
    ):
        if used := USE_OF_BARRIER.match(line):
            delays += 2
            lines += [f"{used[1]}random_delay()", line, f"{used[1]}random_delay()"]
        else:
            lines.append(line)
    assert delays > 4, "there are no barriers to sleep at"
    return "\n".join(lines) + "\n"


def delayed(module: ModuleType, folder: Path) -> ModuleType:
    """The module with delays, from a file in this folder, where Triton finds its source."""
    name = f"delayed_{module.__name__.rpartition('.')[2]}"
    path = folder / f"{name}.py"
    path.write_text(with_delays(Path(module.__file__).read_text()))  # type: ignore[arg-type]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
