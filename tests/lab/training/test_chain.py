"""The chain of recipes: each stage is a command that exists, starts from the last model, and its figures are kept."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tilestack.cli import main
from tilestack.cli.recipes import find_recipe, recipe_names
from tilestack.files import ForeignFolder
from tilestack.lab.tables.by_name import table
from tilestack.lab.tables.runs import run_stamp
from tilestack.lab.training import chain
from tilestack.train import Recipe
from tilestack.train.align import KINDS
from tilestack.train.settings import RecipeError

MACHINE = {"slug": "cpu", "gpu": "", "cpu": "a CPU", "torch": "2", "commit": "abc", "date": "2026-11-15T00:00:00Z"}


@pytest.fixture(autouse=True)
def known_commit(monkeypatch):
    monkeypatch.setattr(chain.machine, "commit", lambda: "abc")


class Pretended:
    """Leaves what a run would: two evaluations and a model of twelve weights; answers every other question right."""

    def __init__(self):
        self.commands = []

    def __call__(self, command):
        self.commands.append(list(command))
        if command[0] == "generate":
            numbers = [int(word.strip("?,.")) for word in command[1].split() if word.strip("?,.").isdigit()]
            return f"The answer is {max(numbers) if len(self.commands) % 2 else 0}.\n"
        folder = chain.Path(command[command.index("--folder") + 1])
        (folder / "model").mkdir(parents=True, exist_ok=True)
        names = ("validation_loss", "bits_per_byte", "exact_answers", "validation_accuracy", "validation_reward")
        rows = [{"step": 1, "loss": 3.0}, {"step": 1} | dict.fromkeys(names, 2.0), {"step": 9, "loss": 1.0}, {"step": 9} | dict.fromkeys(names, 0.5)]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        speeds = [{"step": 1, "tokens_per_s": 5.0, "mfu": 0.001}, {"step": 5, "tokens_per_s": 3000.0, "mfu": 0.3}, {"step": 9, "tokens_per_s": 1000.0, "mfu": 0.1}]  # fmt: skip
        (folder / "speed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in speeds))
        save_file({"a": torch.zeros(3, 2), "b": torch.zeros(6)}, folder / "model" / "model.safetensors")
        return ""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_stage_is_a_recipe_that_reads_with_its_changes(device):
    for stage in chain.stages(device):
        kind = Recipe if stage.command == "train" else KINDS[stage.command].recipe
        changes = [*stage.settings, *(["model.path=before"] if stage.command != "train" else [])]
        recipe = kind.load(find_recipe(chain.Path(stage.recipe)), changes)
        assert stage.recipe in recipe_names()
        assert bool(recipe.model.path) != bool(recipe.model.config)
        assert not recipe.run.backend  # each device takes what is fastest there
    with pytest.raises(RecipeError, match="exclude each other"):  # which is why sft gives its own model up
        KINDS["sft"].recipe.load(find_recipe(chain.Path("sft")), ["model.path=before"])


def test_stages_follow_each_other_and_their_figures_fill_the_table(tmp_path):
    run, said = Pretended(), []
    found = chain.run_chain("cpu", tmp_path / "runs", run, said.append)
    assert [command[0] for command in run.commands] == ["train", "sft", "dpo", "grpo", *["generate"] * chain.QUESTIONS]
    starts = [[word for word in command if word.startswith("model.path=")] for command in run.commands[:4]]
    before = lambda name: [f"model.path={tmp_path / 'runs' / name / 'model'}"]
    assert starts == [[], before("train"), before("sft"), before("dpo")]
    assert run.commands[-1][3] == str(tmp_path / "runs/grpo/model")
    assert [stage["parameters"] for stage in found["stages"]] == [12] * 4
    assert "train demo: 9 steps in 0 s; validation loss 2.000 → 0.500, bits per byte 2.000 → 0.500" in said

    chain.save_chain(tmp_path / "results", MACHINE, found, chain.CHAIN)
    written = table("recipes cpu", tmp_path)
    assert (
        "| `sft sft` | validation loss 2.000 → 0.500; exact answers 2.000 → 0.500 | 0.00 M | 9 | 1,500 tokens/s, 15.0% MFU | 0 s |"
        in written
    )
    assert [written.count(f"({word})") for word in ("right", "wrong")] == [2, 1]
    assert "a CPU, torch 2, commit abc, 2026-11-15" in written
    assert "`tilestack chain --save` on the machine `h200`" in table("recipes h200", tmp_path)


def test_recipes_of_alignment_all_begin_with_the_model_of_sft_and_fill_their_table(tmp_path):
    for stage in chain.alignment_stages():
        KINDS[stage.command].recipe.load(find_recipe(chain.Path(stage.recipe)), stage.settings)
    run, said = Pretended(), []
    chain.save_chain(
        tmp_path / "results", MACHINE, chain.run_alignment(tmp_path / "runs", run, said.append), chain.ALIGNMENT
    )
    folders = [command[command.index("--folder") + 1] for command in run.commands]
    assert folders == [str(tmp_path / "runs" / name) for name in ("sft", "grpo", "dpo", "4-dpo", "kto")]
    starts = [[word for word in command if word.startswith("model.path=")] for command in run.commands]
    assert starts == [[], *[[f"model.path={tmp_path / 'runs/sft/model'}"]] * 4]
    written = table("alignment cpu", tmp_path)
    judged = "validation loss 2.000 → 0.500; validation accuracy 2.000 → 0.500 | 0 k | 9 | 0 s |"
    assert f"| `dpo dpo --set lora.rank=8 --set optimizer.lr=3e-3` | {judged}" in written
    assert "a CPU, torch 2, commit abc, 2026-11-15" in written
    assert "`tilestack chain --alignment --save` on the machine `h200`" in table("alignment h200", tmp_path)


def test_a_chain_goes_on_with_the_first_stage_that_is_not_as_it_was(tmp_path, monkeypatch):
    def run_again(commit):
        monkeypatch.setattr(chain.machine, "commit", lambda: commit)
        run = Pretended()
        finished, model = chain.run_stages(stages, tmp_path, run, lambda text: None, resume=True)
        assert model == tmp_path / stages[-1].command / "model"
        return [command[0] for command in run.commands], [stage.commit for stage in finished]

    stages = [chain.Stage(name, name, ("validation_loss",)) for name in ("train", "sft", "grpo")]
    assert run_again("a") == (["train", "sft", "grpo"], ["a"] * 3)
    assert run_again("b") == ([], ["a"] * 3)
    stages[1] = chain.Stage("sft", "sft", ("validation_loss",), ("run.steps=7",))
    assert run_again("c") == (["sft", "grpo"], ["a", "c", "c"])  # the last starts from another model now
    (tmp_path / "grpo.json").unlink()
    assert run_again("d") == (["grpo"], ["a", "c", "d"])
    runs = [{"commit": name} for name in "accd"]
    assert run_stamp(MACHINE, runs) == "a CPU, torch 2, commit a, c, d, 2026-11-15"


@pytest.mark.parametrize("options", [(), ("--alignment",), ("--resume",)], ids=["", "alignment", "resume"])
def test_a_users_folder_is_refused_and_nothing_in_it_changes(tmp_path, monkeypatch, capsys, options):
    monkeypatch.setattr(chain, "run_tilestack", Pretended())
    for name in ("train.json", "sft.json", "grpo.json"):
        (tmp_path / name).write_text("precious")
    with pytest.raises(SystemExit) as ended:
        main(["chain", "--folder", str(tmp_path), *options])
    assert (ended.value.code, "is not a run (it holds" in capsys.readouterr().err) == (1, True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("train.json", "sft.json", "grpo.json"), "precious"
    )


def test_the_two_chains_do_not_share_a_folder(tmp_path):
    run, quiet = Pretended(), lambda text: None
    chain.run_alignment(tmp_path, run, quiet)
    chain.run_alignment(tmp_path, run, quiet, resume=True)
    with pytest.raises(ForeignFolder, match="is a run of `tilestack chain --alignment`; give it a folder of its own"):
        chain.run_chain("cpu", tmp_path, run, quiet)


def test_processor_time_is_that_of_the_commands_alone(tmp_path):
    spin = [chain.sys.executable, "-c", "sum(range(4_000_000))"]
    stage = chain.Stage("train", "demo", ())

    def run(command):
        Pretended()(command)
        sum(range(4_000_000))  # which is ours, and does not count
        chain.subprocess.run(spin, check=True)
        return ""

    (finished,), _ = chain.run_stages([stage], tmp_path, run, lambda text: None)
    assert 0 < finished.processor_seconds < finished.seconds


def test_a_stage_that_fails_ends_the_chain(tmp_path):
    with pytest.raises(ChildProcessError, match="tilestack sft ended with 1, and the chain with it"):
        chain.run_tilestack(["sft", "no-such-recipe"])
