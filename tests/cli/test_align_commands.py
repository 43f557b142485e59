"""`tilestack sft`, `dpo`, `grpo` and `eval` as people run them."""

import json
import sys
import types

import pytest
from rich.console import Console

from tilestack import data, models, shipped
from tilestack.cli import main
from tilestack.cli.recipes import recipe_names
from tilestack.data import Tokenizer, corpora
from tilestack.train.evaluation import evaluate
from tilestack.train.run.follow import export

CONFIG = dict(
    model_type="llama", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = Tokenizer.train((task.prompt for task in corpora.arithmetic(50)), 280)
    decoder = models.Decoder(models.ModelConfig.from_hf(CONFIG | {"vocab_size": tokenizer.vocabulary}))
    export(decoder, tokenizer, folder)
    return folder


@pytest.fixture
def tilestack(capsys, monkeypatch, tmp_path):
    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return ended.value.code, *capsys.readouterr()

    return run


def test_dpo_from_a_file_of_pairs(tilestack, model, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}\n' * 4)
    (tmp_path / "own.toml").write_text(
        f'[run]\nname = "mine"\nsteps = 2\ndevice = "cpu"\n[model]\npath = "{model}"\n'
        '[data]\ncorpus = "files"\nfiles = ["pairs.jsonl"]\nvalidation = 0.0\nbatch = 2\n'
    )
    code, out, _ = tilestack("dpo", "own.toml", "--set", "optimizer.lr=1e-3")
    assert code == 0
    assert "runs/mine" in out
    assert "margin" in out
    rows = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "margin" in row] == [1, 2]
    assert (tmp_path / "runs/mine/model/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dpo", "own.toml"], 'pairs.jsonl:2: expected a text or messages under "rejected"; this row has prompt, chosen'),
        (["sft", "own.toml"], 'pairs.jsonl:1: expected one of messages, conversations, instruction, completion; this row has prompt, chosen, rejected'),
        (["dpo", "own.toml", "--set", "dpo.bta=1"], "no setting dpo.bta; did you mean dpo.beta?"),
        (["grpo", "own.toml", "--set", "dpo.beta=1"], "no setting dpo; a recipe has run, model, data, optimizer, schedule, precision, evaluation, checkpoint, ema, lora, parallel, grpo"),
        (["grpo", "none.toml"], f"there is no recipe none.toml. tilestack comes with {', '.join(recipe_names())}"),
        (["dpo", "own.toml", "--set", "lora.rank=2", "--set", 'lora.targets=["*.kqv"]', "--set", "data.corpus=preferences", "--set", "data.files=[]"], "lora: no linear layer is named *.kqv; their names end in down, gate_up, output, qkv"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_nothing_is_left_behind(tilestack, model, tmp_path, arguments, message):
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}\n{"prompt": "2 + 2?", "chosen": "4"}\n'
    )
    (tmp_path / "own.toml").write_text(
        f'[run]\nname = "mine"\nsteps = 2\n[model]\npath = "{model}"\n[data]\ncorpus = "files"\nfiles = ["pairs.jsonl"]\n'
    )
    code, out, error = tilestack(*arguments)
    assert (code, out) == (1, "")
    assert error == f"error: {message}\n"
    assert not (tmp_path / "runs" / "mine").exists()


def test_eval_of_texts_questions_and_token_files(tilestack, model, tmp_path):
    texts = [task.prompt for task in corpora.arithmetic(6)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data.write_tokens(tmp_path / "tokens", texts, Tokenizer.load(model), console=Console(quiet=True))
    question = {"prompt": "What is 1 + 2?", "choices": [" 3", " 4"], "answer": 0}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question) + "\n")
    arguments = ("eval", model, "texts.jsonl", "tokens", "--choices", "questions.jsonl", "--device", "cpu")
    code, out, error = tilestack(*arguments, "--json", "-")
    assert code == 0, error
    found = json.loads(out)["results"]
    assert found["texts.jsonl"] == found["tokens"]
    assert found["tokens"]["documents"] == 6
    assert found["tokens"]["bytes"] == sum(len(text) for text in texts)
    assert found["tokens"]["tokens"] == sum(
        len(Tokenizer.load(model).encode(text, bare=True)) for text in texts
    )  # no end
    assert 1 < found["tokens"]["perplexity"]["value"] < 1000
    assert found["tokens"]["bits_per_byte"]["error"] > 0
    assert found["questions.jsonl"]["chance"] == 0.5
    assert found["questions.jsonl"]["accuracy"]["error"] is None  # of one question, and JSON has no NaN
    code, out, _ = tilestack(*arguments, "--limit", "2")
    assert code == 0
    assert "bits per byte" in out
    assert "accuracy per byte" in out


def test_as_many_texts_and_questions_are_read_as_far_as_asked(tilestack, model, tmp_path, monkeypatch):
    asked = []

    def evaluated(decoder, documents, place, *windows):
        asked.append((len(list(documents)), *windows))
        return evaluate.TextFigures(*[evaluate.Estimate(0.5, 0.1)] * 3, 1, 1, 1)

    def chosen(decoder, tokenizer, questions, place, context):
        asked.append((len(questions), context))
        return evaluate.ChoiceFigures(*[evaluate.Estimate(0.5, 0.1)] * 2, 0.5, 1)

    monkeypatch.setattr(evaluate, "evaluate_texts", evaluated)
    monkeypatch.setattr(evaluate, "evaluate_choices", chosen)
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n' * 5)
    (tmp_path / "questions.jsonl").write_text('{"prompt": "1?", "choices": [" 3", " 4"], "answer": 0}\n' * 5)
    for options in ((), ("--length", "20", "--stride", "9", "--limit", "3")):
        arguments = ("texts.jsonl", "--choices", "questions.jsonl", "--device", "cpu", *options)
        assert tilestack("eval", model, *arguments)[0] == 0
    assert asked == [(5, 256, None), (5, 256), (3, 20, 9), (3, 20)]


@pytest.mark.parametrize(("options", "length"), [((), 2048), (("--length", "512"), 512), (("--length", "9999"), 2048)])
def test_tasks_and_choices_are_read_as_far_as_the_model_reads(tilestack, tmp_path, monkeypatch, options, length):
    """Questions with many examples before them, cut at fewer tokens, would have other figures than those people publish."""
    tokenizer = Tokenizer.train((task.prompt for task in corpora.arithmetic(50)), 280)
    config = CONFIG | {"vocab_size": tokenizer.vocabulary, "max_position_embeddings": 2048}
    export(models.Decoder(models.ModelConfig.from_hf(config)), tokenizer, tmp_path / "long")
    asked = []
    evaluated = lambda adapter, tasks, limit: asked.append((adapter.length, tasks, limit)) or {"results": {}}
    modules = {name: types.ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model")}
    modules["lm_eval.api.model"].LM, modules["lm_eval"].simple_evaluate = object, evaluated
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    chosen = lambda *given: (
        asked.append(given[-1]) or evaluate.ChoiceFigures(*[evaluate.Estimate(0.5, 0.1)] * 2, 0.5, 1)
    )
    monkeypatch.setattr(evaluate, "evaluate_choices", chosen)
    question = {"prompt": "What is 1 + 2?", "choices": [" 3", " 4"], "answer": 0}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question) + "\n")
    arguments = ("--tasks", "one,two", "--choices", tmp_path / "questions.jsonl", "--limit", "7", *options)
    assert tilestack("eval", tmp_path / "long", *arguments)[0] == 0
    assert asked == [length, (length, ["one", "two"], 7)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to evaluate: name texts, --choices FILE or --tasks NAMES"),
        (["none.txt"], "no data at none.txt"),
        (["--tasks", "hellaswag"], f"tasks by name need lm_eval: pip install -e '{shipped.checkout()}[evaluation]'"),
        (["--choices", "bad.jsonl"], 'bad.jsonl:1: a question needs "choices", a list of two or more texts'),
        (["bad.jsonl"], "bad.jsonl:1: expected a string under 'text'; this record has prompt (str)"),
        (["good.txt", "--length", "0"], "--length, --stride and --limit must be at least 1"),
        (["good.txt", "--stride", "9999"], "the stride of windows must lie between 1 and their length 256, not 9999"),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_one_line(tilestack, model, tmp_path, arguments, message):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "?"}\n')
    (tmp_path / "good.txt").write_text("What is 1 + 2?\n")
    code, out, error = tilestack("eval", model, *arguments)
    assert (code, out) == (1, "")
    assert error == f"error: {message}\n"
