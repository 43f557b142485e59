import pytest
import torch

from tilestack.lab.bench import optimizer_steps


def test_the_shapes_are_those_of_qwen3():
    shapes = optimizer_steps.qwen3_shapes()
    assert len(shapes) == 310
    assert sum(torch.Size(shape).numel() for shape in shapes) == 596_049_920


@pytest.mark.parametrize(
    ("name", "dtype", "per_element"),
    [("adamw", torch.float32, 28), ("adamw_clipped", torch.float32, 32), ("adamw_stochastic", torch.bfloat16, 14),
     ("adamw_master", torch.bfloat16, 28), ("adamw8bit", torch.float32, 16), ("adamw8bit", torch.bfloat16, 10),
     ("sgd", torch.float32, 20)],
)  # fmt: skip
def test_bytes_per_element(name, dtype, per_element):
    moved = {}
    optimizer_steps.optimizer_calls(optimizer_steps.CONTESTS[name]["triton"], [(256, 256)], dtype, "cpu", moved, "x", 1)
    assert moved["x"] / 256**2 == pytest.approx(per_element, abs=0.07)


def test_clipping_has_a_peer_that_clips():
    made, moved = optimizer_steps.CONTESTS["adamw_clipped"]["fused"], {}
    params = [torch.nn.Parameter(torch.zeros(64))]
    params[0].grad = torch.full((64,), 10.0)
    made(params).step()
    assert params[0].grad.norm().item() == pytest.approx(1.0, rel=1e-4)
    optimizer_steps.optimizer_calls(made, [(256, 256)], torch.float32, "cpu", moved, "x", 1)
    assert moved["x"] / 256**2 == pytest.approx(32, abs=0.07)


def test_only_what_is_not_of_the_present_source_is_timed_again():
    small = {"tiny": [(64, 64)]}
    timed = lambda kept: [rows[0]["op"] for rows in optimizer_steps.bench_optim(["adamw", "sgd"], ["tiny"], ["float32"], "cpu", small, kept)]  # fmt: skip
    (rows,) = optimizer_steps.bench_optim(["adamw"], ["tiny"], ["float32"], "cpu", small)
    assert [bool(row["source"]) for row in rows] == [True, False, False]
    assert timed(rows) == ["sgd"]
    assert timed([row | {"source": "another"} for row in rows]) == ["adamw", "sgd"]


def test_rows_are_complete_and_consistent():
    (rows,) = optimizer_steps.bench_optim(["adamw"], ["tiny"], ["float32"], "cpu", {"tiny": [(64, 64), (64,)]})
    assert [row["backend"] for row in rows] == ["torch", "fused", "foreach"]
    best = min(row["time_us"] for row in rows[1:])
    for row in rows:
        assert row["tb_per_s"] == pytest.approx((28 * 4160 + 2 * 2 * 4) / row["time_us"] * 1e-6, rel=1e-3)
        assert row["roof_fraction"] > 0
        assert row["host_us"] > 0
    assert rows[0]["ratio_to_best_peer"] == pytest.approx(best / rows[0]["time_us"])


def test_muon_is_held_against_torchs_on_hidden_matrices_alone():
    shapes = {"qwen3-0.6b": [(1 << 16, 2), (24, 16), (16,)], "100x2560x1024": [(8, 8)]}
    asked = ["muon"], list(shapes), ["float32"], "cpu", shapes
    (rows,) = optimizer_steps.bench_optim(*asked)
    assert [row["backend"] for row in rows] == ["torch", "torch.optim"]
    flops = 5 * (16 * 17 * 24 + 16 * 17 * 16 + 2 * 16 * 16 * 24)
    for row in rows:
        assert row["tflops"] == pytest.approx(flops / row["time_us"] * 1e-6)
        assert row["tb_per_s"] == pytest.approx(20 * 24 * 16 / row["time_us"] * 1e-6)
