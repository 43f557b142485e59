"""What alignment leaves chats: in transformers and in `tilestack generate`, from a base model that was taught no template."""

import io
import json

import pytest
import torch
from rich.console import Console
from small import CONFIG, recipe, tokenizer

from tilestack import cli, models
from tilestack.data import CHATML, Tokenizer
from tilestack.train import RecipeError
from tilestack.train.align import KINDS, align
from tilestack.train.run.follow import export

QUESTION, ANSWER = "What is 1 + 2?", "It is 3."
MESSAGES = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
ROWS = {
    "sft": {"messages": MESSAGES},
    "dpo": {"prompt": QUESTION, "chosen": ANSWER, "rejected": "No idea."},
    "kto": {"prompt": QUESTION, "completion": ANSWER, "label": True},
    "grpo": {"prompt": QUESTION, "answer": "3"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A pretrained model: no chat template, one end token."""
    folder = tmp_path_factory.mktemp("base") / "model"
    torch.manual_seed(0)
    about = {**CONFIG, "hidden_size": 32, "vocab_size": tokenizer().vocabulary, "eos_token_id": tokenizer().eos}
    export(models.Decoder(models.ModelConfig.from_hf(about)), tokenizer(), folder)
    return folder


def follow(kind, base, folder, **sections):
    rows = folder.with_suffix(".jsonl")
    rows.write_text((json.dumps(ROWS[kind]) + "\n") * 8)
    made = {
        "model": {"path": str(base)},
        "data": {"corpus": "files", "files": [str(rows)], "validation": 0.0, "batch": 2, "examples": 0},
        "checkpoint": {"every": 0},
        **({"grpo": {"group": 2, "max_new_tokens": 3}} if kind == "grpo" else {}),
    }
    made = {name: {**made.get(name, {}), **sections.get(name, {})} for name in {**made, **sections}}
    align(kind, recipe(KINDS[kind].recipe, **made), folder, console=Console(quiet=True))
    return folder / "model"


@pytest.fixture(scope="module")
def taught(base, tmp_path_factory):
    """The base model after it has learned one answer by heart."""
    folder = tmp_path_factory.mktemp("runs") / "sft"
    steps = {"steps": 60, "log_every": 60}
    return follow("sft", base, folder, run=steps, optimizer={"lr": 1e-2}, schedule={"name": "constant"})


def test_transformers_chats_with_it(taught):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(taught)
    model = transformers.AutoModelForCausalLM.from_pretrained(taught)
    asked = theirs.apply_chat_template(MESSAGES[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**asked, max_new_tokens=40, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert theirs.decode(made) == f"{ANSWER}<|im_end|>"  # it stops there
    assert theirs.eos_token == "<|im_end|>"


def test_tilestack_generate_chats_with_it(taught, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", QUESTION, "--model", str(taught), "--device", "cpu", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (ended.value.code, told["text"], told["finish"], told["chat"]) == (0, ANSWER, "stop", True)


def test_it_can_go_on_to_be_aligned_and_still_chats(taught, tmp_path):
    for kind in ("dpo", "kto", "grpo"):
        model = follow(kind, taught, tmp_path / kind, run={"steps": 1}, optimizer={"lr": 1e-5})
        assert_ready_to_chat(model)


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "grpo"])
def test_from_a_base_model_every_kind_leaves_template_and_stops(kind, base, tmp_path):
    assert Tokenizer.load(base).template is None
    assert_ready_to_chat(follow(kind, base, tmp_path / kind, run={"steps": 1}, lora={"rank": 2 * (kind == "sft")}))


def assert_ready_to_chat(folder):
    saved, config = Tokenizer.load(folder), json.loads((folder / "config.json").read_text())
    stops = [saved.backend.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert saved.template == CHATML
    assert saved.eos == stops[0]
    assert config["eos_token_id"] == stops
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == stops
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


def test_a_template_of_ones_own_is_learned_and_left(base, tmp_path):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    path = tmp_path / "own.jinja"
    path.write_text(template)
    model = follow("sft", base, tmp_path / "own", run={"steps": 1}, data={"chat_template": str(path)})
    saved = Tokenizer.load(model)
    assert saved.template == template
    assert saved.decode([saved.eos], special=True) == "<|endoftext|>"  # the template ends answers by it
    with pytest.raises(RecipeError, match=r"data.chat_template: .*none.jinja cannot be read"):
        follow("sft", base, tmp_path / "none", data={"chat_template": str(tmp_path / "none.jinja")})


def test_another_tokenizer_of_equal_size_is_refused(base, tmp_path):
    other = Tokenizer.train(["Sort these words: grid, tile, warp. Spell it backwards."] * 9, tokenizer().vocabulary)
    assert other.vocabulary == tokenizer().vocabulary
    other.save(tmp_path / "other")
    with pytest.raises(RecipeError, match="gives other ids than the tokenizer of"):
        follow("sft", base, tmp_path / "run", data={"tokenizer": str(tmp_path / "other")})
    tokenizer().for_chat().save(tmp_path / "same")  # another end token, the same ids
    follow("sft", base, tmp_path / "same_ids", run={"steps": 1}, data={"tokenizer": str(tmp_path / "same")})


def test_what_was_kept_and_left_out_is_written_down(base, tmp_path):
    rows = tmp_path / "rows.jsonl"
    long = [{"role": "user", "content": "9" * 300}, MESSAGES[1]]
    rows.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in (MESSAGES, long, MESSAGES)))
    said = Console(record=True, file=io.StringIO())
    made = {"model": {"path": str(base)}, "data": {"corpus": "files", "files": [str(rows)], "validation": 0.0}, "run": {"steps": 1}}  # fmt: skip
    align("sft", recipe(KINDS["sft"].recipe, **made), tmp_path / "run", console=said)
    (started,) = json.loads((tmp_path / "run" / "run.json").read_text())
    assert started["data"] == {"conversations": 3, "sequences": 2, "too long for data.sequence": 1}
    assert "3 conversations, 2 sequences, 1 too long for data.sequence" in said.export_text()
