"""Run a page of the documentation: `TRITON_INTERPRET=1 python tests/docs/run_page.py docs/first-kernel.md`.

Without a page, it reads their names from standard input, runs each in a process forked from this one, which has imported
what takes long, and answers in a line of JSON: whether that succeeded, and what was printed.

What is executed, top to bottom, in an empty folder of its own:

    ```python file=NAME    is written to NAME
    ```python run          runs; the blocks of a page share their names
    ```console             each `$ command` runs in bash and must print what is shown below it

In what a command prints, only the lines shown must appear, in that order; `…` stands for anything. Spaces are not counted.
A command must succeed, unless the next one is `echo $?`.
"""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(?P<about>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
BETWEEN = "\x1e"  # printed between the outputs of a block's commands


class PageError(AssertionError):
    """What a page shows is not what happens."""


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after the fence, its text, and the line of the page it begins on."""

    about: str
    text: str
    line: int

    @property
    def runs(self) -> bool:
        return self.about in ("python run", "console") or self.about.startswith("python file=")


def blocks(page: str) -> list[Block]:
    return [
        Block(m["about"].strip(), m["text"], page.count("\n", 0, m.start("text")) + 1) for m in BLOCK.finditer(page)
    ]


def run(path: Path) -> int:
    """Execute a page in the current folder; returns how many of its blocks ran."""
    ran = [block for block in blocks(path.read_text(encoding="utf-8")) if block.runs]
    names: dict = {"__name__": "page"}
    for block in ran:
        if block.about == "console":
            run_console(block, path)
        elif block.about == "python run":
            exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), names)
        else:
            Path(block.about.partition("=")[2]).write_text(block.text, encoding="utf-8")
    return len(ran)


def run_console(block: Block, path: Path) -> None:
    """Run a block's commands in one shell, so that `echo $?` and variables work as they read."""
    shown = [part.partition("\n") for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]]
    commands = [command for command, _, _ in shown]
    script = "".join(f"{command}\n__status=$?; printf '{BETWEEN}%s{BETWEEN}' $__status; (exit $__status)\n" for command in commands)  # fmt: skip
    done = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    printed = done.stdout.split(BETWEEN)
    for (command, _, expected), output, status, following in zip(
        shown, printed[::2], printed[1::2], [*commands[1:], ""], strict=False
    ):
        where = f"{path}, the block at line {block.line}: `{command}`"
        if status != "0" and following != "echo $?":
            raise PageError(f"{where} ended with exit code {status} and printed\n{output}")
        if (missing := first_missing(expected, output)) is not None:
            raise PageError(f"{where} did not print\n{missing}\nbut\n{output}")


def first_missing(expected: str, output: str) -> str | None:
    """The first line shown that is not printed at its place; None when all are."""
    plain = lambda text: [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    printed = iter(plain(output))
    for line in plain(expected):
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        if not any(map(pattern.fullmatch, itertools.chain(printed, [""] if line == "…" else []))):
            return line
    return None


def shims(folder: Path) -> None:
    """`python` and `tilestack` as a reader has them after installing: this interpreter and this checkout."""
    for name, command in (("python", ""), ("tilestack", " -m tilestack")):
        shim = folder / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}"{command} "$@"\n')
        shim.chmod(0o755)


def run_alone(page: Path) -> None:
    """Execute a page in an empty folder of its own, in a process that is for nothing else."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as programs:
        shims(Path(programs))
        os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        os.environ["PYTHONPATH"] = str(REPOSITORY)
        os.environ["COLUMNS"] = "160"
        sys.path[:0] = [str(REPOSITORY), folder]
        os.chdir(folder)
        print(f"{run(page)} blocks of {page.name} ran as shown")


def run_forked(page: Path) -> tuple[bool, str]:
    """Execute a page in a child of this process; whether it succeeded, and what it printed."""
    with tempfile.TemporaryFile("w+") as printed:
        if not (child := os.fork()):
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            failed = True
            try:
                run_alone(page)
                failed = False
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(failed)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        return status == 0, printed.read()


def serve() -> None:
    sys.path.insert(0, str(REPOSITORY))
    importlib.import_module("tilestack.kernels")
    for page in sys.stdin:
        print(json.dumps(run_forked(Path(page.rstrip("\n")))), flush=True)


if __name__ == "__main__":
    run_alone(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else serve()
