"""SFT, DPO and GRPO as whole runs: resumed to the bit, with adapters, left as others open them."""

import io
import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from small import CONFIG, decoder, recipe, tokenizer

from tilestack import models
from tilestack.data import DataError, Tokenizer
from tilestack.models.adapters import WEIGHTS, load_adapters
from tilestack.models.weights import unfused
from tilestack.nn.lora import merge_lora
from tilestack.train import Trainer, fp8
from tilestack.train.align import KINDS, align
from tilestack.train.align.dpo import DPO
from tilestack.train.align.grpo import GRPO
from tilestack.train.align.kto import KTO
from tilestack.train.align.sft import SFT
from tilestack.train.evaluation.evaluate import score
from tilestack.train.evaluation.log_probs import Scored, in_rows
from tilestack.train.run.follow import export

QUIET = Console(quiet=True)
SMALL = {
    "run": {"steps": 4},
    "checkpoint": {"every": 2},
    "data": {"examples": 24, "batch": 2, "vocabulary": 280},
    "optimizer": {"lr": 1e-2},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model to start from."""
    folder = tmp_path_factory.mktemp("base") / "model"
    export(decoder(), tokenizer(), folder)
    return folder


def sections(kind, base, **more):
    made = {name: dict(section) for name, section in SMALL.items()} | {"model": {"path": str(base)}}
    if kind == "grpo":
        made["grpo"] = {"group": 2, "max_new_tokens": 3, "beta": 0.1}
        made["data"] |= {"accumulate": 2}
    return {name: {**made.get(name, {}), **more.get(name, {})} for name in {**made, **more}}


def follow(kind, folder, base, **more):
    return align(kind, recipe(KINDS[kind].recipe, **sections(kind, base, **more)), folder, console=QUIET)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    return dict(unfused(models.load(folder / "model")))


@pytest.mark.parametrize(("kind", "rank"), [("sft", 2), ("dpo", 0), ("kto", 2), ("grpo", 0), ("grpo", 2)])
def test_a_run_that_is_cut_off_ends_as_if_it_had_not_been(kind, rank, base, tmp_path, monkeypatch):
    lora = {"rank": rank, "dropout": 0.1 if rank else 0.0}
    straight = follow(kind, tmp_path / "straight", base, lora=lora)
    objective = {"sft": SFT, "dpo": DPO, "kto": KTO, "grpo": GRPO}[kind]
    loss, calls = objective.loss, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == (7 if kind == "grpo" else 4):
            raise KeyboardInterrupt
        return loss(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(objective, "loss", failing)
        with pytest.raises(KeyboardInterrupt):
            follow(kind, tmp_path / "cut", base, lora=lora)
    assert follow(kind, tmp_path / "cut", base, lora=lora) == straight
    assert rows(tmp_path / "cut") == rows(tmp_path / "straight")
    for (name, ours), theirs in zip(weights(tmp_path / "cut").items(), weights(tmp_path / "straight").values(), strict=True):  # fmt: skip
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(("kind", "rank"), [("dpo", 0), ("dpo", 2), ("kto", 0), ("grpo", 0), ("grpo", 2)])
def test_a_reference_is_asked_in_the_precision_of_the_policy(kind, rank, base, tmp_path, monkeypatch):
    """In another one, a policy that has learned nothing yet would seem to have left it."""
    monkeypatch.setattr(fp8, "lacks_fp8", lambda device: "")  # the definitions compute it
    made = []

    def stopped(trainer):
        made.append(trainer)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", stopped)
    for name, settings in {"bf16": {}, "fp8": {"fp8": True}}.items():
        with pytest.raises(KeyboardInterrupt):
            follow(kind, tmp_path / name, base, precision={"compute": "bfloat16", **settings}, lora={"rank": rank})
    told = []
    for trainer in made:
        with trainer.as_evaluated():
            of_reference, of_policy = both_log_probs(trainer.objective, trainer.model)
        assert torch.equal(of_reference, of_policy)
        told.append(of_reference)
    assert not torch.equal(*told)


def both_log_probs(objective, model):
    """What the reference of an objective says of some sequences, and the policy."""
    if isinstance(objective, GRPO):
        rows = in_rows([Scored(list(range(20, 60)), [1] * 40)])
        return objective.reference_log_probs(rows), objective.log_probs(model, rows)
    sequences = [sequence for pair in objective.pairs + objective.held for sequence in (pair.first, pair.second)]
    told = torch.cat([objective.reference, objective.held_reference]).view(-1)
    return told, torch.tensor([scored.log_prob for scored in score(model, sequences, "cpu")], dtype=told.dtype)


def test_adapters_alone_are_saved_and_the_model_left_is_merged(base, tmp_path):
    follow("sft", tmp_path, base, lora={"rank": 2, "targets": ["*.qkv", "*.down"]})
    checkpoint = next((tmp_path / "checkpoints").glob("step-*/weights.safetensors"))
    assert all(".lora_" in name for name in load_file(checkpoint))
    adapted = models.load(base)
    load_adapters(adapted, tmp_path / "adapter")
    merge_lora(adapted)
    found, before = weights(tmp_path), dict(unfused(models.load(base)))
    for name, tensor in unfused(adapted):
        torch.testing.assert_close(found[name], tensor)
    changed = {name.split(".")[-2] for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "down_proj"}


def test_adapters_stay_float32_beside_bfloat16_weights(base, tmp_path):
    half = {"parameters": "bfloat16", "compute": "bfloat16"}
    follow("sft", tmp_path, base, lora={"rank": 2}, precision=half, run={"steps": 1})
    assert {tensor.dtype for tensor in load_file(tmp_path / "adapter" / WEIGHTS).values()} == {torch.float32}
    assert {tensor.dtype for tensor in weights(tmp_path).values()} == {torch.bfloat16}


def test_a_new_model_gets_a_tokenizer_of_its_own(tmp_path):
    made = sections("sft", "") | {"model": {"config": CONFIG}}
    align("sft", recipe(KINDS["sft"].recipe, **made), tmp_path, console=QUIET)
    saved = Tokenizer.load(tmp_path / "model")
    assert saved.same_ids(Tokenizer.load(tmp_path / "tokenizer"))
    assert saved.vocabulary == models.load(tmp_path / "model").config.vocabulary


@pytest.mark.parametrize(("end", "told"), [("<|im_end|>", False), ("", True)])
def test_a_template_that_ends_no_answer_is_told_of(end, told, base, tmp_path):
    """As GLM's, where the next question ends an answer, and the last one has no end to learn."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    made = recipe(KINDS["sft"].recipe, **sections("sft", base, data={"chat_template": str(template)}, run={"steps": 1}))
    align("sft", made, tmp_path / "run", console=Console(file=(said := io.StringIO()), width=1000))
    assert ("no special token after an answer" in said.getvalue()) == told


def test_runs_write_the_figures_of_their_kind(base, tmp_path):
    expected = {
        "sft": {"validation_loss", "exact_answers"},
        "dpo": {"margin", "accuracy", "reward_chosen", "reward_rejected", "validation_margin"},
        "kto": {"reward_good", "reward_bad", "kl", "validation_accuracy"},
        "grpo": {"reward", "reward_std", "kl", "ratio", "answer_tokens", "groups_alike", "validation_reward"},
    }
    for kind, names in expected.items():
        figures = follow(kind, tmp_path / kind, base, run={"steps": 1})
        assert names <= set(figures)
    assert figures["ratio"] == pytest.approx(1, abs=1e-6)


ROWS = dict(
    sft=lambda n, said: {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": said}]},
    dpo=lambda n, said: {"prompt": f"{n}?", "chosen": said, "rejected": "no"},
    kto=lambda n, said: {"prompt": f"{n}?", "completion": said, "label": bool(n % 2)},
    grpo=lambda n, said: {"prompt": f"{n}?", "answer": said},
)


@pytest.mark.parametrize("kind", ROWS)
def test_a_run_goes_on_with_the_examples_it_began_with_or_not_at_all(kind, base, tmp_path):
    """Others, in the same file, would be learned without a word, and those that were learned would be held out."""
    file = tmp_path / "rows.jsonl"
    write = lambda *said: file.write_text("".join(json.dumps(ROWS[kind](*each)) + "\n" for each in enumerate(said)))
    files = {"data": {"corpus": "files", "files": [str(file)], "validation": 0.25, "examples": 0, "batch": 1}}
    go_on = lambda steps: follow(kind, tmp_path / "run", base, run={"steps": steps}, **files)
    write(*"abcdefgh")
    go_on(2)
    kept = file.read_bytes()
    write(*"abcdefgx")
    with pytest.raises(DataError, match="not those that the run began with"):
        go_on(4)
    file.write_bytes(kept)
    go_on(4)


@pytest.mark.parametrize(("kind", "rank", "stays"), [("sft", 2, True), ("dpo", 0, True), ("grpo", 0, True), ("sft", 0, False)])  # fmt: skip
def test_a_run_goes_on_beside_the_model_it_began_with_or_not_at_all(kind, rank, stays, tmp_path):
    """Adapters of one model say nothing beside another, and a reference is the model as it was. What learns all of its
    weights has them in its checkpoint."""
    model = tmp_path / "model"
    go_on = lambda steps: follow(kind, tmp_path / "run", model, run={"steps": steps}, lora={"rank": rank})
    export(decoder(), tokenizer(), model)
    go_on(2)
    export(decoder(seed=1), tokenizer(), model)
    if not stays:
        go_on(4)
        return
    with pytest.raises(models.CheckpointError, match="not the model that the run in"):
        go_on(4)
    export(decoder(), tokenizer(), model)
    go_on(4)
