"""The profiler: whose kernels took the time, of one call."""

import json
from types import SimpleNamespace

import pytest
import tiny_models as tiny
import torch

from tilestack import ops
from tilestack.cli import main
from tilestack.cli.profile import WARM_UP, recorded_call
from tilestack.engine import Engine, EngineSettings
from tilestack.lab.bench.profile import Profile, origin_of, our_kernels, record, render_profile
from tilestack.lab.serving.serve_steps import ServedSteps
from tilestack.train.run.profile import Share


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("softmax_bwd_kernel", "tilestack"),
        ("void rms_norm_kernel<float>(float const*, float const*, float*, long, double)", "tilestack"),
        ("tilestack::softmax", "tilestack"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "cuBLAS"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "cuBLAS"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64x128", "cuDNN"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128> >(Flash_fwd_params)", "flash-attn"),
        ("triton_poi_fused_add_mul_0", "torch.compile"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int)", "PyTorch"),
        ("aten::mm", "PyTorch"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", "NCCL"),
        ("somebody_elses", "other"),
    ],
)
def test_a_kernel_is_known_by_its_name(name, origin):
    assert origin_of(name) == origin


def test_all_our_kernels_are_known():
    names = our_kernels()
    assert {"softmax_bwd_kernel", "decode_step_kernel", "add_kernel"} <= names
    assert len(names) > 200
    assert not {name for name in names if origin_of(name) != "tilestack"}


def test_shares_are_of_one_call():
    x = torch.randn(64, 64)
    profile = record(lambda: (x @ x, x + x), torch.device("cpu"), times=4)
    calls = {share.name: share.calls for share in profile.shares}
    assert calls["aten::mm"] == calls["aten::add"] == 1
    assert profile.by_origin() == pytest.approx({"PyTorch": 1.0})
    assert 0 < profile.total_ms <= 4 * profile.wall_ms


def test_wall_time_is_of_one_call_and_begins_when_it_is_warm(monkeypatch):
    ticks, called = iter([3.0, 11.0]), []
    monkeypatch.setattr("tilestack.lab.bench.profile.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    title, profile = recorded_call(torch.device("cpu"), "made up", lambda: called.append(torch.ones(2)), 4, None)
    assert (title, profile.wall_ms) == ("made up", 2000.0)
    assert len(called) == WARM_UP + 4
    assert WARM_UP >= 2  # the first compiles, the second may choose a backend


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_clock_of_a_gpu_runs_from_idle_to_idle(monkeypatch):
    happened = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append("idle"))
    monkeypatch.setattr(
        "tilestack.lab.bench.profile.time", SimpleNamespace(perf_counter=lambda: happened.append("tick") or 1.0)
    )
    record(lambda: happened.append("call"), torch.device("cuda"), times=2)
    assert happened == ["idle", "tick", "call", "call", "idle", "tick"]


def test_the_table_says_whose_the_time_was_and_how_busy_the_gpu():
    shares = [Share("nvjet_x", 2, 6.0), Share("softmax_bwd_kernel", 1, 3.0), Share("Memset (Device)", 1, 1.0)]
    table = render_profile("made up", Profile(shares, 20.0, True), most=2)
    assert table.caption.startswith("cuBLAS 60%, tilestack 30%, copies 10%; 10 ms in 3 different kernels")
    assert "the GPU was busy 50% of 20 ms" in table.caption
    assert table.row_count == 2
    assert "nothing ran" in render_profile("empty", Profile([], 1.0, False), most=2).caption


def test_steps_of_an_engine_are_profiled_in_two_parts():
    decoder = tiny.ours("smollm2", vocab_size=64)
    engine = Engine(decoder, None, EngineSettings(device="cpu", dtype="float32", page=4, kv_memory=1 << 20))
    steps = ServedSteps(engine, batch=3, prompt=5, tokens=4)
    for _ in range(2):
        steps.read_prompts()
        assert engine.busy
        steps.decode()
        assert not engine.busy
    with pytest.raises(ValueError, match="are more than the model's"):
        ServedSteps(engine, 1, decoder.config.positions, 1)


def ran(*asked):
    with pytest.raises(SystemExit) as left:
        main(["profile", "--device", "cpu", *asked])
    return left.value.code


def test_the_command_profiles_operators_and_layers(tmp_path, capsys):
    case = next(case.name for case in ops.softmax.cases if case.kind == "check")
    assert ran("softmax", "--backend", "torch", "--case", case, "--calls", "2", "--json", "-", "--trace", str(tmp_path / "trace.json")) == 0  # fmt: skip
    ((title, found),) = json.loads(capsys.readouterr().out).items()
    assert "float32 both, torch" in title
    assert {line["origin"] for line in found["lines"]} >= {"PyTorch"}
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert ran("layers", "mlp", "--batch", "1", "--prompt", "8", "--calls", "1", "--direction", "forward") == 0
    assert "mlp, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["train"], "tilestack train RECIPE --profile 5"),
        (["softmax", "--direction", "backward"], "--direction is forward or both"),
        (["softmax", "--case", "9"], "softmax has no case '9'"),
        (["softmax", "relu"], "one operator at a time"),
        (["layers", "hed"], "no layer hed"),
        (["softmx"], "softmx"),
        (
            ["layers", "mlp", "--backend", "triton", "--case", "x"],
            "profile layers does not read --backend, --case; it reads",
        ),
        (["serve", "--calls", "3"], "profile serve does not read --calls; it reads"),
        (["softmax", "--recipe", "demo"], "profile of an operator does not read --recipe; it reads"),
        (["serve", "smollm2"], "takes no names, and there is smollm2; the model is --model"),
        (["softmax", "--dtype", "float8"], "no dtype float8; choose from float16"),
        (["softmax", "--dtype", "float32,float64"], "one --dtype at a time"),
        (["layers", "mlp", "--recipe", "demo,demo"], "one --recipe at a time"),
    ],
)
def test_the_command_says_what_it_takes(asked, words, capsys):
    assert ran(*asked) == 1
    assert words in " ".join(capsys.readouterr().err.split())
