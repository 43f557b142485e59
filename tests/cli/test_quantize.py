"""`tilestack quantize` on a tiny model: every scheme and option, wrong input, and what Ctrl-C leaves behind."""

import json
import os
import shutil

import pytest
import torch

from tilestack import cli, data, models
from tilestack.data.chat import CHATML
from tilestack.files import MARKER, write_marker
from tilestack.quant import QuantisedLinear

SMALL = ("--samples", 8, "--length", 32, "--device", "cpu")
TEXT = "the cat sat on the mat, and the dog sat too; nobody said a word about it. "


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, shift in (("calibrate", 0), ("evaluate", 9)):
        lines = [json.dumps({"text": TEXT[shift:] * 3}) for _ in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantize") / "model"
    tokenizer = data.Tokenizer.train([TEXT * 20], 300)
    tokenizer.template = CHATML
    torch.manual_seed(0)
    config = models.ModelConfig(tokenizer.vocabulary, 64, 96, layers=2, heads=4, kv_heads=2, head_dim=16, positions=64)
    models.save(models.Decoder(config), folder)
    tokenizer.save(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    return folder


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["quantize", *map(str, arguments)])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.mark.parametrize(
    ("scheme", "options", "bits"),
    [
        ("w4a16", (), 4.6),  # groups of 64, and of 32 where rows have 96
        ("w4a16", ("--method", "awq", "--asymmetric", "--group", 32), 4 + 40 / 32),
        ("w8a16", ("--method", "gptq", "--group", 0), None),
        ("w8a8", (), None),
        ("fp8", ("--ignore", "layers.1.*", "--ignore", "*.output"), None),
    ],
)
def test_a_quantised_model_is_written_read_and_measured(capsys, folder, texts, tmp_path, scheme, options, bits):
    out = tmp_path / "out"
    files = ("--evaluate", texts / "evaluate.jsonl")
    files += () if scheme == "fp8" else ("--calibrate", texts / "calibrate.jsonl")
    code, said, problem = run(capsys, folder, out, "--scheme", scheme, *options, *SMALL, *files, "--json", "-")
    assert code == 0, problem
    told = json.loads(said)
    assert told["scheme"] == scheme
    assert told["method"] == (
        options[1] if "--method" in options else dict(w4a16="gptq", w8a8="smooth", fp8="nearest")[scheme]
    )
    assert bits is None or told["size"]["after"]["bits_per_weight"] == pytest.approx(bits)
    assert told["size"]["before"]["bits_per_weight"] == 16
    assert told["size"]["after"]["bytes"] == pytest.approx(
        sum(path.stat().st_size for path in out.glob("*.safetensors")), rel=0.15
    )
    quality = told["quality"]
    assert 0 < quality["kl"]["value"] < 0.1
    assert 0.3 < quality["agreement"]["value"] <= 1
    assert quality["after"]["bits_per_byte"]["value"] == pytest.approx(
        quality["before"]["bits_per_byte"]["value"], rel=0.1
    )
    assert quality["change"]["error"] < quality["after"]["bits_per_byte"]["error"] + 1e-3
    decoder = models.load(out)
    quantised = [path for path, layer in decoder.named_modules() if isinstance(layer, QuantisedLinear)]
    assert quantised == (
        ["layers.0.attention.qkv", "layers.0.mlp.gate_up", "layers.0.mlp.down"] if scheme == "fp8" else
        [f"layers.{n}.{name}" for n in range(2) for name in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")]
    )  # fmt: skip
    assert data.Tokenizer.load(out).chat([{"role": "user", "content": "hi"}]).startswith("<|im_start|>user")
    assert json.loads((out / "generation_config.json").read_text()) == {"temperature": 0.6}
    ids = torch.arange(20)[None] + 5
    original = models.load(folder)
    with torch.no_grad():
        assert 0 < (decoder.float()(ids) - original(ids)).norm() / original(ids).norm() < 0.3


def test_the_table_says_what_was_lost_and_the_folder_can_be_written_again(capsys, folder, texts, tmp_path):
    given = (folder, tmp_path / "my [out]", "--scheme", "w8a16", *SMALL, "--evaluate", texts / "evaluate.jsonl")
    for _ in range(2):
        code, said, problem = run(capsys, *given)
        assert code == 0, problem
    for word in (
        "bits per quantised weight",
        "16.00",
        "bits per byte",
        "perplexity",
        "KL divergence",
        "top-1 agreement",
    ):
        assert word in said
    assert f"written to {tmp_path}/my [out]; try: tilestack generate --model '{tmp_path}/my [out]' 'Hello'" in said
    assert sorted(os.listdir(tmp_path)) == ["my [out]"]
    assert (tmp_path / "my [out]" / MARKER).is_file()


def test_built_in_texts_are_the_default_and_the_parts_differ(capsys, folder, tmp_path):
    from tilestack.data.calibration import builtin_texts

    calibrating, held_out = set(builtin_texts(held_out=False)), set(builtin_texts(held_out=True))
    assert not calibrating & held_out
    assert len(calibrating) > len(held_out) > 20
    code, said, problem = run(capsys, folder, tmp_path / "out", "--method", "clip", *SMALL, "--json", "-")
    assert code == 0, problem
    assert json.loads(said)["calibration"]["texts"] == ["builtin"]


def test_rows_of_text_are_as_many_as_long_and_as_drawn_as_asked(capsys, folder, texts, tmp_path, monkeypatch):
    asked = []

    def noted(name, result):
        return lambda documents, tokenizer, *how: asked.append((name, *how)) or result

    monkeypatch.setattr("tilestack.lab.bench.quantised_models.held_out_windows", noted("held out", []))
    monkeypatch.setattr("tilestack.data.calibration.calibration_ids", noted("calibration", torch.zeros(1, 0)))
    given = ("--samples", 5, "--length", 7, "--seed", 3, "--device", "cpu")
    run(capsys, folder, tmp_path / "out", *given, "--calibrate", texts, "--evaluate", texts)  # ends for want of rows
    assert asked == [("held out", 7, 4096), ("calibration", 5, 7, 3)]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--scheme", "w2a16"), "no scheme 'w2a16'; choose from fp8, w8a8, w8a16, w4a16"),
        (("--method", "best"), "no method 'best'; choose from nearest, clip, gptq, awq, smooth"),
        (("--method", "smooth"), "smooth is for schemes whose inputs become codes"),
        (("--scheme", "w8a8", "--group", "64"), "w8a8 has a scale for each output"),
        (("--scheme", "fp8", "--asymmetric"), "fp8 has a scale for each output"),
        (("--group", "48"), "--group must be 0, for whole rows, or a multiple of 32, not 48"),
        (("--group", "-1"), "--group must be 0, for whole rows, or a multiple of 32, not -1"),
        (("--scheme", "w8a16", "--group", "7"), "--group must be 0, for whole rows, or a multiple of 32, not 7"),
        (("--method", "nearest", "--calibrate", "x.txt"), "nearest reads no calibration texts"),
        (("--calibrate", "nowhere.txt"), "no data at nowhere.txt"),
        (("--evaluate", "nowhere.txt"), "no data at nowhere.txt"),
        (("--ignore", "attn.*"), "nothing is named attn.*; there are paths such as layers.0.attention.qkv"),
        (("--ignore", "*"), "there is nothing left to quantise"),
        (("--samples", "100000"), "100000 are asked for; give more text, fewer samples or a smaller length"),
        (("--samples", "0"), "Invalid value for '--samples'"),
        (("--device", "tpu"), "--device must be cuda or cpu"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(capsys, folder, texts, tmp_path, arguments, problem):
    files = ("--evaluate", texts / "evaluate.jsonl") if "--evaluate" not in arguments else ()
    files += (
        ("--calibrate", texts / "calibrate.jsonl")
        if "--calibrate" not in arguments and "--samples" in arguments
        else ()
    )
    code, said, told = run(capsys, folder, tmp_path / "out", *files, *arguments)
    assert (code, said) == (1, "")
    assert problem in told
    assert len(told.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_foreign_folders_and_the_model_itself_are_left_alone(capsys, folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    assert "was not made by tilestack (it holds letter.txt)" in run(capsys, folder, tmp_path / "mine")[2]
    assert "holds the model that is read" in run(capsys, folder, folder)[2]
    assert "no model at nowhere" in run(capsys, "nowhere", tmp_path / "out")[2]
    (tmp_path / "run").mkdir()
    write_marker(tmp_path / "run", command="train")
    assert "run is a run of `tilestack train`" in run(capsys, folder, tmp_path / "run")[2]
    assert os.listdir(tmp_path / "run") == [MARKER]
    (tmp_path / "file").write_text("")
    assert "is a file" in run(capsys, folder, tmp_path / "file" / "out")[2]
    assert os.listdir(tmp_path / "mine") == ["letter.txt"]


@pytest.mark.parametrize("zero_points", [True, False])
def test_who_does_not_read_zero_points_of_experts_is_named(capsys, folder, texts, tmp_path, zero_points):
    tokenizer = data.Tokenizer.load(folder)
    sizes = dict(
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=16,
        positions=64,
        experts=4,
        top_k=2,
        expert_intermediate=32,
        qk_norm="head",
    )
    config = models.ModelConfig(tokenizer.vocabulary, 64, 96, family="qwen3_moe", **sizes)
    models.save(models.Decoder(config), tmp_path / "mixture")
    tokenizer.save(tmp_path / "mixture")
    (tmp_path / "one.txt").write_text(TEXT)
    given = ("--scheme", "w8a16", *SMALL, "--evaluate", tmp_path / "one.txt", *["--asymmetric"] * zero_points)
    code, told, problem = run(capsys, tmp_path / "mixture", tmp_path / "out", *given)
    assert code == 0, problem
    assert ("transformers does not read zero points of experts" in told) == zero_points
    assert "of 1 document; ±" in told


def test_a_model_of_codes_or_experts_is_refused_by_name(capsys, folder, texts, tmp_path):
    given = ("--scheme", "w8a16", *SMALL, "--evaluate", texts / "evaluate.jsonl")
    run(capsys, folder, tmp_path / "once", *given)
    told = run(capsys, tmp_path / "once", tmp_path / "twice", *given)[2]
    assert "layers.0.attention.qkv is a QuantisedLinear" in told
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize(
    "moment", ["tilestack.models.quantise.quantise_layer", "tilestack.models.checkpoints.save_file"]
)
def test_ctrl_c_leaves_nothing_behind_and_what_was_there_in_place(capsys, folder, texts, tmp_path, monkeypatch, moment):
    out = tmp_path / "out"
    shutil.copytree(folder, out)  # with the marker of a folder that tilestack made
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def interrupted(*_, **__):
        assert (tmp_path / ".out.tilestack-part").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(moment, interrupted)
    files = ("--calibrate", texts / "calibrate.jsonl", "--evaluate", texts / "evaluate.jsonl")
    code, _, said = run(capsys, folder, out, *SMALL, *files)
    assert code == 130
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_what_took_long_is_kept_where_the_comparison_fails(capsys, folder, texts, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tilestack.train.evaluation.comparison.compare", interrupted)
    files = ("--calibrate", texts / "calibrate.jsonl", "--evaluate", texts / "evaluate.jsonl")
    assert run(capsys, folder, tmp_path / "out", *SMALL, *files)[0] == 130
    ids = torch.arange(8)[None]
    assert not torch.equal(models.load(tmp_path / "out")(ids), models.load(folder)(ids))
