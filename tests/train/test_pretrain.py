"""Pretraining from a recipe to a folder that transformers opens, through the command line as people use it."""

import json
import math
import shutil
from itertools import pairwise

import pytest
import torch

from tilestack import models
from tilestack.cli import main
from tilestack.data import Packed, Tokenizer
from tilestack.data.prepared import prepare_tokens
from tilestack.train import Recipe, metrics
from tilestack.train.batch_buffer import difference
from tilestack.train.pretrain import Pretraining
from tilestack.train.step import Step

RECIPE = """
[run]
name = "small"
steps = 4
device = "cpu"
log_every = 2
{run}
[model.config]
model_type = "qwen3"
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 64
tie_word_embeddings = true
[data]
corpus = "files"
files = ["{folder}/text.jsonl"]
vocabulary = 300
validation = 0.2
sequence = 24
batch = 2
[evaluation]
every = 2
batches = 2
prompts = ["def "]
sample_tokens = 4
[checkpoint]
every = 2
"""
HUGE = "num_hidden_layers=1, hidden_size=1000000, intermediate_size=1000000"


@pytest.fixture
def tilestack(capsys, outside):
    """Runs the command in this process: (exit code, what it said on standard error)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return ended.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def small(tmp_path):
    lines = [json.dumps({"text": f"def add_{n}(x):\n    return x + {n}\n" * (1 + n % 5)}) for n in range(60)]
    lines.append('{"text": ""}')
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")

    def write(run=""):
        (tmp_path / "small.toml").write_text(RECIPE.format(folder=tmp_path, run=run))
        return str(tmp_path / "small.toml")

    return write


def test_bits_per_byte_are_of_the_very_text_that_is_asked_for(small, tmp_path):
    recipe = Recipe.load(small())
    tokenizer, tokens = prepare_tokens(recipe.data, tmp_path / "run")

    class Clueless:
        """All tokens are equally likely."""

        head_weight, logit_softcap = torch.zeros(tokenizer.vocabulary, 4), 0.0
        head_loss = models.Decoder.head_loss

        def hidden(self, ids, positions, cu_seqlens):
            return torch.zeros(*ids.shape, 4)

    held_out = Packed(tokens, 24, 2, recipe.run.seed, split="validation", validation=0.2)
    labels = torch.cat([next(held_out).labels.flatten() for _ in range(recipe.evaluation.batches)])
    asked = labels[labels >= 0].tolist()
    found = Pretraining(recipe, tokenizer, tokens, torch.device("cpu")).evaluate(Clueless())
    bits = math.log2(tokenizer.vocabulary)
    assert found["validation_loss"] == pytest.approx(bits * math.log(2))
    assert found["bits_per_byte"] == pytest.approx(len(asked) * bits / len(tokenizer.decode(asked).encode()))


def test_batches_differ_in_nothing_but_contents_over_the_ends_of_epochs(small, tmp_path):
    recipe = Recipe.load(small())
    objective = Pretraining(recipe, *prepare_tokens(recipe.data, tmp_path / "run"), torch.device("cpu"))
    first = objective.next_batch()
    while objective.stream.epoch < 2:
        assert difference(first, objective.next_batch()) == ""


def test_the_command_says_why_no_step_is_captured_and_gives_back_what_steps_keep(
    tilestack, small, tmp_path, monkeypatch
):
    """The model is left when the memory of the steps is free: an average of it, or merged adapters, need some."""
    order = []
    monkeypatch.setattr(Step, "release", lambda step: bool(order.append("release")))
    monkeypatch.setattr("tilestack.train.run.follow.export", lambda *_: order.append("export"))
    code, said = tilestack("train", small(), "--folder", str(tmp_path / "run"))
    assert (code, said.count("steps are not captured in CUDA graphs: the run is on a CPU\n")) == (0, 1)
    assert order == ["release", "export"]
    assert 'graph = "auto"' in (tmp_path / "run/recipe.toml").read_text()
    _, said = tilestack("train", small(), "--folder", str(tmp_path / "off"), "--set", "run.graph=off")
    assert "CUDA graphs" not in said
    code, said = tilestack("train", small(), "--folder", str(tmp_path / "on"), "--set", "run.graph=true")
    assert code == 1
    assert "run.graph must be one of auto, on, off, not True; did you mean on?" in said


def test_a_finished_run_is_a_folder_that_transformers_opens(tilestack, small, tmp_path):
    folder = tmp_path / "run"
    code, said = tilestack("train", small(), "--folder", str(folder))
    assert (code, "step 4/4" in said) == (0, True), said
    assert {"recipe.toml", "run.json", "metrics.jsonl", "speed.jsonl", "loss.html", "checkpoints", "model", "data"} <= {
        path.name for path in folder.iterdir()
    }
    rows = list(metrics.rows(folder))
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "bits_per_byte" in row] == [2, 4]
    assert [row["sample"].startswith("def ") for row in rows if "sample" in row] == [True]
    (entry,) = json.loads((folder / "run.json").read_text())
    assert "commit" in entry
    assert entry["data"]["documents"] + entry["data"]["documents held out"] == 60
    assert entry["data"]["empty documents left out"] == 1
    assert f"{entry['data']['documents']} documents, " in said

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    names = transformers.AutoTokenizer.from_pretrained(folder / "model")
    text = "def add_7(x):\n    return x"
    ids = names(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == Tokenizer.load(folder / "model").encode(text)
    ours = models.load(folder / "model")
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)

    before = (folder / "metrics.jsonl").read_bytes()
    assert tilestack("train", small(), "--folder", str(folder))[0] == 0  # finished: nothing is done again
    assert (folder / "metrics.jsonl").read_bytes() == before
    code, said = tilestack("train", small(), "--folder", str(folder), "--set", "data.sequence=16")
    assert code == 1
    assert "another run: data.sequence differs" in said
    code, _ = tilestack("train", small(), "--folder", str(folder), "--set", "data.sequence=16", "--fresh")
    assert (code, (folder / "metrics.jsonl").read_bytes() != before) == (0, True)


def test_files_are_mixed_by_weight_and_others_held_out(tilestack, small, tmp_path):
    """The second file is one document in many, and a third of what is read; validation is on a file of its own."""
    for name, count in (("more", 1), ("held", 3)):
        lines = (json.dumps({"text": f"{name} {number} is here {name}"}) for number in range(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    files = [str(tmp_path / "text.jsonl"), str(tmp_path / "more.jsonl")]
    changes = [
        f"data.files={json.dumps(files)}", "data.weights=[2, 1]",
        f'data.validation_files=["{tmp_path / "held.jsonl"}"]',
    ]  # fmt: skip
    path = small()
    recipe = Recipe.load(path, changes)
    tokenizer, tokens = prepare_tokens(recipe.data, tmp_path / "run")
    objective = Pretraining(recipe, tokenizer, tokens, torch.device("cpu"))
    assert objective.counts["documents held out"] == 3
    told = []
    for _ in range(200):
        batch = objective.next_batch()
        texts = [tokenizer.decode(batch.ids.flatten()[a:b].tolist()) for a, b in pairwise(batch.cu_seqlens.tolist())]
        assert not any("held" in text for text in texts)
        told += [
            ("more" in text, b - a) for text, (a, b) in zip(texts, pairwise(batch.cu_seqlens.tolist()), strict=True)
        ]
    assert sum(size for more, size in told if more) / sum(size for _, size in told) == pytest.approx(1 / 3, abs=0.1)
    wrong = ["--set", 'data.validation_files=["nowhere.jsonl"]', "--folder", str(tmp_path / "none")]
    code, said = tilestack("train", str(path), *wrong)
    assert (code, "nowhere.jsonl" in said, said.count("\n")) == (1, True, 1)


def test_a_run_thrown_back_to_a_checkpoint_ends_the_same(tilestack, small, tmp_path):
    folder = tmp_path / "run"
    result = lambda: [(folder / name).read_bytes() for name in ("metrics.jsonl", "model/model.safetensors")]
    assert tilestack("train", small(), "--folder", str(folder))[0] == 0
    before = result()
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    code, said = tilestack("train", small(), "--folder", str(folder))
    assert (code, "resuming after step 2" in said) == (0, True)
    assert result() == before


def test_activation_checkpointing_and_mixtures_of_experts(tilestack, small, tmp_path):
    experts = [
        "model.config.model_type=qwen3_moe", "model.config.num_experts=4", "model.config.num_experts_per_tok=2",
        "model.config.moe_intermediate_size=16", "run.steps=2", "evaluation.every=0",
    ]  # fmt: skip
    curves = []
    for again in ("false", "true"):
        folder = tmp_path / again
        changes = [*experts, f"run.activation_checkpointing={again}"]
        code, said = tilestack("train", small(), "--folder", str(folder), *(f"--set={change}" for change in changes))
        assert code == 0, said
        curves.append([row for row in metrics.rows(folder) if "loss" in row])
    assert curves[0] == curves[1]
    assert all(row["imbalance"] >= 1 and row["dead_experts"] >= 0 for row in curves[0])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("data.files=['gone.jsonl']", "no data at gone.jsonl"),
        ("data.files=['bad.jsonl']", "bad.jsonl:2"),
        ("optimizer.lrr=1", "no setting optimizer.lrr; did you mean optimizer.lr?"),
        ("model.config.vocab_size=200", "the tokenizer does not match the model: its ids go up to "),
        ("model.config.model_type=lama", "model_type 'lama' is not read; there are llama"),
        ("run.backend=cuda", "cuda"),
        ("run.backend=trition", "no backend is named 'trition'; did you mean triton?"),
        (
            "run.backend='torch,softmax=liger'",
            "no backend of softmax is named 'liger'; there are aten, auto, cuda, torch",
        ),
        ("data.batch=1000000000", "data.batch = 1000000000 rows of up to 24 tokens need "),
        (
            f"model.config={{model_type='llama', num_attention_heads=1, head_dim=16, {HUGE}}}",
            "the model, its gradients and the optimizer's states need ",
        ),
        ("data.sequence=65", "data.sequence = 65 is more than the 64 positions the model was made for"),
        (
            "data.validation=0.0001",
            "none of the 60 documents falls into the share of 0.0001 that data.validation holds",
        ),
        ("evaluation.sample_tokens=64", "there must be 1 to 64 together"),
        ("model.config={}", "the recipe has no model: set model.path"),
        ("precision.fp8=true", "precision.fp8 needs a GPU"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_half_made(tilestack, small, tmp_path, monkeypatch, change, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": broken\n')
    code, said = tilestack("train", small(), "--set", change)
    assert code == 1
    assert said.splitlines()[-1].startswith("error: ")
    assert line in said
    assert not list(tmp_path.glob("runs/small/checkpoints/*"))
    assert "step " not in said
    assert not list(tmp_path.glob("runs/small/.data*"))


def test_codes_do_not_learn(tilestack, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "codes").mkdir()
    config = {"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "codes" / "config.json").write_text(json.dumps(config))
    code, said = tilestack("train", small(), "--set", "model.path=codes", "--set", "model.config={}")
    assert code == 1
    assert "the weights of codes are codes, which do not learn; start from the model that they were made from" in said
