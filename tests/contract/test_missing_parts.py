"""A part of Triton that is missing or has moved is the reason why one backend cannot run, and no more than that."""

import subprocess
import sys
import textwrap

import pytest

BLOCK = """
import sys, importlib.abc
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {missing!r} or name.startswith({missing!r} + "."):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
import torch, tilestack
from tilestack import ops
x = torch.ones(2)
assert torch.equal(ops.add(x, x), 2 * x)
"""


def run(missing, rest):
    source = BLOCK.format(missing=missing) + textwrap.dedent(rest)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("missing", ["triton.experimental.gluon", "triton._C", "triton"])
def test_the_rest_works_and_the_error_names_what_is_missing(missing):
    found = run(
        missing,
        """
        q = torch.ones(1, 2, 1, 8)
        try:
            with tilestack.backend("gluon"):
                ops.attention(q, q, q)
        except tilestack.BackendError as error:
            print(error)
        """,
    )
    assert found.returncode == 0, found.stderr
    assert "attention has no gluon backend" in found.stdout
    assert "tilestack.kernels.hopper.attention could not be loaded" in found.stdout
    assert missing.rpartition(".")[2] in found.stdout
