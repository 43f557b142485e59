"""Tests beside the proofs, on which a mutant is tried once it has outlived every claim.

They look at what no small case of a definition shows: a refusal, a threshold that is lowered, the fields of a configuration,
what is asked into the cache ahead. What they catch is counted apart, in a column of its own.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SECONDS = 240  # of a processor, for all tests of a file of kernels
PLUGINS_LEFT_OUT = (
    "cacheprovider",
    "xdist",
    "randomly",
)  # which write down what failed, start processes, or draw an order

# file of kernels: files of tests, or single ones
BESIDE = {
    "attention.documents": ["ops/test_flash_attention.py"],
    "attention.kv_write": ["ops/test_paged_attention.py"],
    "attention.ladder": ["ops/test_flash_attention.py::test_more_heads_than_a_grid_has_room_for_are_left_to_others"],
    "attention.quantised": ["ops/test_quantised_attention.py"],
    "attention.qkv_write": ["ops/test_paged_attention.py"],
    "conv.conv2d": ["ops/test_conv.py"],
    "conv.conv2d_lines": ["ops/test_conv.py"],
    "conv.implicit_gemm": ["ops/test_conv.py"],
    "conv.lines": ["ops/test_conv.py"],
    "conv.weight_gradient": ["ops/test_conv.py"],
    "early": ["kernels/test_early_order.py"],
    "elementwise.dropout": [
        "ops/test_random.py",
        "kernels/test_gluon_products_on_cpu.py::test_dropout_of_what_a_product_left",
    ],
    "matmul.gated_split_k": ["kernels/test_early_order.py"],
    "matmul.gemv": ["kernels/test_early_order.py", "kernels/test_few_rows.py"],
    "matmul.grouped": ["ops/test_grouped.py"],
    "matmul.slices": ["kernels/test_early_order.py", "kernels/test_few_rows.py"],
    "matmul.split_k": ["kernels/test_early_order.py", "kernels/test_few_rows.py"],
    "quantised.grouped_weight_only": ["ops/test_grouped_weight_only.py"],
    "quantised.scaled": ["ops/test_quantised_linear.py"],
    "sampling.noise": ["ops/test_sampling.py"],
    "sparse.blocks": ["nn/test_sparse.py"],
}


class FirstFailure:
    """A plugin of pytest that keeps the name of the first test that fails."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


def first_failure(tests: Sequence[str]) -> str:
    """The name of the first test that fails, in this process; empty where all pass."""
    found = FirstFailure()
    left_out = [option for name in PLUGINS_LEFT_OUT for option in ("-p", f"no:{name}")]
    code = pytest.main(["-x", *left_out, *(str(TESTS / test) for test in tests)], plugins=[found])
    return "" if code == pytest.ExitCode.OK else found.name or f"pytest ends with {code!r}"
