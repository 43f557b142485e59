"""The profiler: whose kernels took the time, of one call."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny_models as tiny
import torch
from torch.autograd import DeviceType

from tilestack.cli import main
from tilestack.cli.profile import WARM_UP, recorded_call
from tilestack.engine import Engine, EngineSettings
from tilestack.lab.bench import profile as profiles
from tilestack.lab.bench.kept_profiles import as_kept, keep, load, side_by_side
from tilestack.lab.bench.profile import Profile, length_of_union, origin_of, our_kernels, record, render_profile
from tilestack.lab.serving.serve_steps import ServedSteps
from tilestack.lab.stale import is_current
from tilestack.lab.tables.by_name import table
from tilestack.lab.training.train_steps import Work
from tilestack.train.run.profile import Share

CPU = torch.device("cpu")
SMALL = ["--backend", "torch", "--case", "check"]


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
        ("softmax_triton", "tilestack"),
        ("autograd::engine::evaluate_function: linear_cross_entropy_atenBackward", "tilestack"),
        ("autograd::engine::evaluate_function: MulBackward0", "PyTorch"),
        ("Optimizer.step#AdamW.step", "PyTorch"),
        ("## Call CompiledFxGraph fk6vfo65 ##", "torch.compile"),
        ("CompiledFunctionBackward", "torch.compile"),
        ("mkldnn::_linear_pointwise", "oneDNN"),
        ("LigerRMSNormFunctionBackward", "other"),
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


def test_pytorchs_profiler_says_nothing_of_its_own():
    code = "from tilestack.train.run.profile import quiet_profiler\nwith quiet_profiler(): pass"
    around = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], env=around, capture_output=True, text=True, check=True)
    assert done.stderr == ""


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
    table = render_profile("made up", Profile(shares, 20.0, True, busy_ms=8.0), most=2)
    assert table.caption.startswith("cuBLAS 60%, tilestack 30%, copies 10%; 10 ms in 3 different kernels")
    assert "the GPU was busy 40% of 20 ms" in table.caption  # kernels beside each other counted once
    assert [list(column.cells) for column in table.columns] == [
        ["60%", "30%"], ["6000 µs", "3000 µs"], ["2", "1"], ["cuBLAS", "tilestack"], ["nvjet_x", "softmax_bwd_kernel"]
    ]  # fmt: skip
    assert "; 20 ms by the clock, 50% in code that PyTorch does not see" in render_profile("cpu", Profile(shares, 20.0, False), most=2).caption  # fmt: skip
    assert "nothing ran" in render_profile("empty", Profile([], 1.0, False), most=2).caption


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_lines_of_a_gpu_are_its_kernels_without_the_names_of_parts(monkeypatch):
    """And of a CPU, operators without those that they call."""
    gpu, cpu = DeviceType.CUDA, DeviceType.CPU
    ran = lambda name, device, start, end, count=2, marked=False: SimpleNamespace(
        key=name, device_type=device, is_user_annotation=marked, time_range=SimpleNamespace(start=start, end=end), count=count,
        self_device_time_total=end - start, device_time_total=9e3, self_cpu_time_total=end - start, cpu_time_total=9e3,
    )  # fmt: skip
    part, operator = ran("a part", gpu, 0.0, 8e3, marked=True), ran("aten::mm", cpu, 0.0, 5e3)
    told = [part, operator, ran("one", gpu, 0.0, 2e3), ran("other", gpu, 1e3, 4e3, count=4)]

    class Recorded(SimpleNamespace):
        __enter__ = lambda self: self
        __exit__ = lambda self, *error: None
        events = key_averages = lambda self: told

    monkeypatch.setattr(torch.profiler, "profile", Recorded)
    profile = record(lambda: None, CPU, times=2)
    assert profile.shares == [Share("other", 2.0, 1.5), Share("one", 1.0, 1.0)]
    assert profile.busy_ms == 2.0  # of a call; the two overlapped
    told[:] = [operator, ran("aten::linear", cpu, 0.0, 1e3)]
    profile = record(lambda: None, CPU, times=2)
    assert profile.shares == [Share("aten::mm", 1.0, 2.5), Share("aten::linear", 1.0, 0.5)]
    assert profile.busy_ms == 0


def test_time_in_which_several_kernels_ran_counts_once():
    assert length_of_union([]) == 0
    assert length_of_union([(5.0, 7.0), (0.0, 2.0), (1.0, 4.0), (2.0, 3.0), (7.0, 8.0)]) == 7.0


def test_a_profile_of_several_steps_is_divided_among_them():
    one = Profile([Share("softmax_bwd_kernel", 6, 3.0)], 20.0, True, busy_ms=2.5).divided(5)
    assert one == Profile([Share("softmax_bwd_kernel", 1.2, 0.6)], 4.0, True, busy_ms=0.5)


def test_kept_profiles_replace_their_like_and_refuse_another_machine(tmp_path):
    path, stamp = tmp_path / "profiles.json", {"gpu": "", "cpu": "one", "commit": "abc", "date": "2031-05-06"}
    of = lambda milliseconds: Profile([Share("nvjet_x", 2, milliseconds)], 9.0, True, 8.0)
    ours = ("float32", "tilestack")
    for case, *how, milliseconds in (
        ("a", *ours, 1.0), ("b", *ours, 2.0), ("a", *ours, 3.0), ("a", "bfloat16", "tilestack", 4.0), ("a", "float32", "plain", 5.0)
    ):  # fmt: skip
        keep(path, stamp, as_kept(of(milliseconds), "train", case, *how, "cpu"))
    found = load(path)["profiles"]
    assert [(each["case"], each["total_ms"]) for each in found] == [("a", 3.0), ("b", 2.0), ("a", 4.0), ("a", 5.0)]
    assert [is_current(each) for each in found] == [
        True,
        True,
        True,
        False,
    ]  # of another's step there is no source of ours
    assert all((each["commit"], each["busy_ms"], each["wall_ms"]) == ("abc", 8.0, 9.0) for each in found)
    with pytest.raises(ValueError, match="holds figures of one, and this is two"):
        keep(path, stamp | {"cpu": "two"}, dict(found[0]))
    (tmp_path / "other.json").write_text('{"machine": {}, "rows": []}')
    with pytest.raises(ValueError, match="is not a file of profiles: it has no profiles"):
        load(tmp_path / "other.json")


def test_profiles_side_by_side_name_our_kernels_and_join_those_of_a_library():
    line = lambda name, milliseconds: dict(name=name, milliseconds=milliseconds, origin=origin_of(name))
    one = dict(total_ms=10.0, lines=[line("nvjet_a", 4.0), line("nvjet_b", 2.0), line("softmax_bwd_kernel", 3.95), line("somebody_elses", 0.05)])  # fmt: skip
    two = dict(total_ms=8.0, lines=[line("add_kernel", 0.09), line("softmax_bwd_kernel", 7.89), line("decode_step_kernel", 0.02)])  # fmt: skip
    found = side_by_side([one, two], least=0.01)
    assert found == {
        "`softmax_bwd_kernel`": [3.95, 7.89],
        "cuBLAS": [6.0, 0.0],
        "`add_kernel`": [0.0, 0.09],  # a hundredth of the shorter one
        "other": [pytest.approx(0.05), pytest.approx(0.02)],
    }
    assert list(found) == ["`softmax_bwd_kernel`", "cuBLAS", "`add_kernel`", "other"]  # the longest first


def kept_on_a_gpu(
    case, backend, total, *, op="train", dtype="bfloat16", wall=20.0, busy=8.0, date="2031-05-06T10:00", **changed
):
    """A profile as it lies in a file, of the present source unless it is `changed`."""
    made = as_kept(Profile([Share("nvjet_x", 2, total)], wall, True, busy), op, case, dtype, backend, "cuda")
    return made | {"commit": "abc", "date": date} | changed


def written_table(tmp_path, *kept, kind="train"):
    path = tmp_path / "results" / "h200" / "profiles.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": {"gpu": "NVIDIA H200", "cpu": "one"}, "profiles": kept}))
    return table(f"profiles h200 {kind}", tmp_path)


def test_a_table_says_how_long_any_kernel_ran_and_what_is_old(tmp_path):
    one = kept_on_a_gpu("a, 1x8", "tilestack", 10.0)
    two = kept_on_a_gpu("a, 1x8", "plain", 12.0, wall=16.0, busy=12.0, date="2031-07-01T10:00", commit="def")
    old = kept_on_a_gpu("a, 1x8", "tilestack-graph", 9.0, date="2031-04-01T10:00", source="older")
    decoding = kept_on_a_gpu("qwen", "tilestack", 3.0, op="serve")
    found = written_table(tmp_path, one, two, old, decoding)
    assert "| ms | tilestack | plain | tilestack-graph † |" in found  # whose steps are not ours is never old
    assert "| cuBLAS | 10.00 | 12.00 | 9.00 |" in found
    assert "| **all kernels** | **10.00** | **12.00** | **9.00** |" in found
    assert "| any kernel ran | 8.00 | 12.00 | 8.00 |" in found
    assert "| of the time by the clock | 40% | 75% | 40% |" in found
    assert "_a, 1x8; NVIDIA H200, commit abc, def, 2031-07-01, with the profiler on._" in found
    assert "outdated until measured again; at commit abc a, 1x8._" in found
    assert "| ms | tilestack |\n" in written_table(tmp_path, one, decoding, kind="serve")


@pytest.mark.parametrize(
    ("kept", "names"),
    [
        ([("a", "tilestack", "bfloat16")], "tilestack"),
        ([("a", "tilestack", "bfloat16"), ("b", "tilestack", "bfloat16")], "a | b"),
        ([("a", "tilestack", "bfloat16"), ("a", "tilestack", "float32")], "bfloat16 | float32"),
        ([("a", "tilestack", "bfloat16"), ("b", "plain", "bfloat16"), ("a", "plain", "bfloat16")], "a, tilestack | b, plain | a, plain"),
    ],
)  # fmt: skip
def test_columns_of_a_table_are_told_apart(kept, names, tmp_path):
    found = written_table(tmp_path, *(kept_on_a_gpu(case, backend, 1.0, dtype=dtype) for case, backend, dtype in kept))
    assert f"| ms | {names} |\n" in found


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
    assert ran("softmax", *SMALL, "--calls", "2", "--json", "-", "--trace", str(tmp_path / "trace.json")) == 0  # fmt: skip
    ((title, found),) = json.loads(capsys.readouterr().out).items()
    assert "float32 both, torch" in title
    assert {line["origin"] for line in found["lines"]} >= {"PyTorch"}
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert ran("layers", "mlp", "--batch", "1", "--prompt", "8", "--calls", "1", "--direction", "forward") == 0
    assert "mlp, " in capsys.readouterr().out


@pytest.mark.parametrize("what", [["softmax", *SMALL], ["layers", "mlp", "--batch", "1", "--prompt", "8"]])
def test_a_forward_alone_has_no_backward(what, capsys):
    for direction in ("forward", "both"):
        assert ran(*what, "--direction", direction, "--calls", "1", "--json", "-") == 0
        ((title, found),) = json.loads(capsys.readouterr().out).items()
        assert f" {direction}, " in title
        assert any("Backward" in line["name"] for line in found["lines"]) == (direction == "both")


def test_an_operator_without_gradients_is_profiled_forward(capsys):
    assert ran("embedding", *SMALL, "--calls", "1", "--json", "-") == 0
    assert " both, torch" in next(iter(json.loads(capsys.readouterr().out)))
    assert ran("expert_places", *SMALL, "--calls", "1", "--json", "-") == 0
    assert " forward, torch" in next(iter(json.loads(capsys.readouterr().out)))


def test_so_many_calls_are_recorded_after_those_that_warm_up(capsys, monkeypatch):
    """Of training steps as many warm up as `bench train` has, of serving both parts once."""
    happened, recorded = [], profiles.record
    monkeypatch.setattr(
        profiles,
        "record",
        lambda call, place, times=1, trace=None: happened.append((times,)) or recorded(call, place, times),
    )
    for part in ("read_prompts", "decode"):
        made = getattr(ServedSteps, part)
        monkeypatch.setattr(
            ServedSteps, part, lambda self, made=made, part=part: happened.append((part, self)) or made(self)
        )
    assert ran("softmax", *SMALL, "--calls", "3") == 0
    assert happened == [(3,)]
    happened.clear()
    assert ran("serve", "--recipe", "demo", "--batch", "2", "--prompt", "8", "--tokens", "3") == 0
    names = [name for name, *_ in happened]
    assert [name for name in names if isinstance(name, str)] == ["read_prompts", "decode"] * 2
    steps = happened[0][1]
    assert (steps.batch, steps.prompt, steps.tokens) == (2, 8, 3)
    assert not steps.engine.scheduler.prefix_caching
    warm_up = []
    monkeypatch.setattr("tilestack.cli.profile.recorded_call", lambda *given: warm_up.append(given[5]) or ("", Profile([], 1.0, False)))  # fmt: skip
    assert ran("train", "--recipe", "demo", "--batch", "1", "--prompt", "8") == 0
    assert warm_up == [Work.warmup]


def test_the_command_profiles_steps_and_keeps_them_for_the_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ["--recipe", "demo", "--batch", "1", "--prompt", "8"]
    assert ran("train", *few, "--calls", "1", "--save") == 0
    assert "a training step of python, 1x8, float32, tilestack" in capsys.readouterr().out
    assert ran("serve", *few, "--tokens", "3", "--save", "--json", "serve.json") == 0
    assert "decoding demo, 1 sequences, 2 tokens each after the first" in " ".join(capsys.readouterr().out.split())
    _, decoding = json.loads((tmp_path / "serve.json").read_text()).values()
    train, serve = load(tmp_path / "results" / "cpu" / "profiles.json")["profiles"]
    assert (train["op"], train["case"], train["backend"]) == ("train", "python, 1x8", "tilestack")
    assert (serve["op"], serve["case"], serve["dtype"]) == ("serve", "demo, 1 sequences of 8 tokens", "float32")
    assert is_current(train)
    assert is_current(serve)
    for what in ("total_ms", "wall_ms"):  # kept is one step of the two
        assert serve[what] == pytest.approx(decoding[what] / 2)
    written = table("profiles cpu train", tmp_path)
    assert "| ms | tilestack |" in written
    assert "| PyTorch |" in written
    assert "python, 1x8; " in written
    assert "†" not in written
    assert "any kernel ran" not in written  # which is of GPUs
    assert "not measured yet: `tilestack profile serve --save`" in table("profiles h200 serve", tmp_path)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["train", "demo"], "takes no names, and there is demo; the model is --recipe"),
        (["train", "--candidate", "triton"], "no candidate triton; there are tilestack, tilestack-graph"),
        (["train", "--tokens", "4"], "profile train does not read --tokens; it reads"),
        (["serve", "--recipe", "demo", "--model", "smollm2"], "a --model or a --recipe, not both"),
        (["softmax", "--save"], "profile of an operator does not read --save; it reads"),
        (["softmax", "--direction", "backward"], "--direction is forward or both"),
        (["softmax", "--case", "9"], "softmax has no case '9'"),
        (["softmax", "relu"], "one operator at a time"),
        (["softmax", "--backend", "gluton"], "gluton"),
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
