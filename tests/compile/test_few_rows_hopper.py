"""The product of few rows in Gluon passes the gates in every configuration, and fetches nothing but weights early."""

from tilestack.kernels.hopper.few_rows import CONFIGS

WALK = """
import json, re, torch
from tilestack.kernels.hopper.few_rows import CONFIGS, few_rows_product
from tilestack.lab.compile.absent_gpu import WAIT, AbsentGpu
matrix = lambda *sides: torch.empty(sides, dtype=torch.bfloat16, device="meta")
# The fewest rows and the most, sums that are shared out, and programs that walk over many tiles with a bias.
cases = [(1, 1024, 2048, False), (64, 4096, 14336, False), (64, 151936, 1024, True)]
rows = []
for name, config in CONFIGS.items():
    with AbsentGpu(90) as gpu:
        for M, N, K, bias in cases:
            few_rows_product(matrix(M, K), matrix(N, K).T, matrix(N) if bias else None, config)
        for report in gpu.reports():
            before, waits, after = report.ptx.partition(WAIT)
            early = dict(waits=bool(waits), fetches=before.count("prefetch.L2"), late_fetches=after.count("prefetch.L2"))
            rows.append(report.row() | early | dict(config=name, resident=config.resident))
print(json.dumps(rows))
"""
OF_A_MULTIPROCESSOR, OF_A_PROGRAM = (
    228 * 1024,
    1024,
)  # bytes of shared memory, and what each program takes of it besides


def test_every_configuration_passes_the_gates(uninterpreted):
    rows = uninterpreted("-c", WALK)
    assert {row["config"] for row in rows} == set(CONFIGS)
    assert [(row["config"], row["constants"], row["failures"]) for row in rows if row["failures"]] == []
    assert not any(row["spill_bytes"] for row in rows)
    for row in rows:
        assert row["instructions"]["wgmma"]
        assert row["instructions"]["tma"]
        assert (row["waits"], row["fetches"], row["late_fetches"]) == (True, 1, 0)


def test_as_many_programs_as_planned_share_a_multiprocessor(uninterpreted):
    for row in uninterpreted("-c", WALK):
        assert row["resident"] * (row["shared_bytes"] + OF_A_PROGRAM) <= OF_A_MULTIPROCESSOR
        assert row["resident"] * row["registers"] * 32 * row["num_warps"] <= 65536
