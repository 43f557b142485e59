"""A run that was killed and started again is, to the bit, the run that was not."""

import dataclasses
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import killed
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import Counting, TinyModel, recipe

from tilestack.train import Recipe, RecipeError, Trainer, metrics
from tilestack.train.checkpoint import CheckpointError, Checkpoints, complete
from tilestack.train.errors import TrainingError
from tilestack.train.run.folder import RunFolder

# Processes of their own, which share the time it takes to import PyTorch and nothing else.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["killed"])


def start(folder, dies_at=None, ends=True):
    process = PROCESSES.Process(target=killed.train, args=(folder, dies_at, ends))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(Path(__file__).parent))  # by which the server finds what it is to preload
        process.start()
    return process


def ends(process) -> int:
    process.join()
    return process.exitcode


def wait_for_step(folder, step, process) -> None:
    """Until a checkpoint of that step or a later one is there."""
    while process.is_alive() and not any(s >= step for s in Checkpoints(folder / "checkpoints", 2).steps()):
        time.sleep(0.005)


def everything(folder) -> dict[str, bytes]:
    last = folder / "checkpoints" / "step-000024"
    names = [folder / "metrics.jsonl", *(last / f"{n}.safetensors" for n in ("weights", "optimizer", "average", "rng"))]
    return {path.name: path.read_bytes() for path in names}


def test_killed_at_random_steps_and_during_a_save_it_ends_the_same(tmp_path):
    whole, killed = start(tmp_path / "whole"), start(tmp_path / "killed", 12)
    assert (ends(whole), ends(killed)) == (0, -signal.SIGKILL)
    left = tmp_path / "killed" / "checkpoints"
    assert any(path.name.startswith(".step-000012") for path in left.iterdir())  # it died while it saved
    assert Checkpoints(left, 2).steps()[-1] == 8

    chance = random.Random(3)
    again = start(tmp_path / "killed", ends=False)
    wait_for_step(tmp_path / "killed", 16, again)
    time.sleep(chance.uniform(0, 0.1))
    again.kill()
    assert ends(again) == -signal.SIGKILL

    last = start(tmp_path / "killed")
    assert ends(last) == 0
    assert everything(tmp_path / "killed") == everything(tmp_path / "whole")
    assert not [path for path in left.iterdir() if path.name.startswith(".")]


def test_a_checkpoint_holds_its_step_though_later_ones_come_before_it_is_written(tmp_path):
    checkpoints, go_on = Checkpoints(tmp_path, keep=2, asynchronous=True), threading.Event()
    checkpoints.writer.submit(go_on.wait)
    weight, state = torch.ones(3), {"place": [1]}
    checkpoints.save(1, {"weights": {"w": weight}}, state)
    weight.zero_()
    state["place"][0] = 2
    assert not checkpoints.steps()  # nobody waited for it
    go_on.set()
    checkpoints.wait()
    saved = checkpoints.load(1)
    assert (saved.tensors["weights"]["w"].tolist(), saved.state["place"]) == ([1, 1, 1], [1])


def test_a_run_that_does_not_wait_for_its_checkpoints_writes_those_that_one_does_which_waits(tmp_path):
    def run(folder, asynchronous):
        torch.manual_seed(0)
        settings = dict(checkpoint={"asynchronous": asynchronous}, ema={"decay": 0.9}, run={"steps": 6})
        trainer = Trainer(recipe(**settings), TinyModel(), Counting(), folder)
        write = trainer.checkpoints.write

        def late(step, *given):
            while asynchronous and trainer.step < 6:  # the last step, after which the run waits for those before it
                time.sleep(0.001)
            write(step, *given)

        trainer.checkpoints.write = late
        trainer.run()
        files = (folder / "checkpoints" / "step-000004").glob("*.safetensors")
        return {path.name: path.read_bytes() for path in files}

    waiting, going_on = run(tmp_path / "waits", False), run(tmp_path / "goes on", True)
    assert waiting.keys() >= {"weights.safetensors", "optimizer.safetensors", "average.safetensors"}
    assert going_on == waiting


def test_a_checkpoint_that_could_not_be_written_is_heard_of_before_the_next(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=2, asynchronous=True)
    monkeypatch.setattr("tilestack.train.checkpoint.write_folder", lambda *_: os.close(-1))
    checkpoints.save(1, {}, {})
    with pytest.raises(CheckpointError, match="cannot save the checkpoint of step 1 "):
        checkpoints.save(2, {}, {})


def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    trainer = Trainer(recipe(), TinyModel(), Counting(), tmp_path)
    write = trainer.checkpoints.write

    def on_a_small_disk(step, tensors, state):
        if step < 8:
            return write(step, tensors, state)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))  # logs fit, checkpoints do not
        try:
            return write(step, tensors, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(trainer.checkpoints, "write", on_a_small_disk)
    with pytest.raises(CheckpointError, match=r"cannot save the checkpoint of step 8 .*step 4 is intact.*Make room"):
        trainer.run()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
    assert Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()["loss"] > 0


def test_a_log_that_finds_no_room_says_so():
    log = metrics.Log(Path("/dev/full"))
    log.write(step=1)
    with pytest.raises(TrainingError, match=r"cannot write /dev/full: No space left.*Make room"):
        log.flush()
    log.close()
    assert log.file.closed


def test_a_damaged_checkpoint_is_not_taken(tmp_path):
    Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    assert checkpoints.steps() == [8, 12]
    weights = checkpoints.path(12) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not complete(checkpoints.path(12))
    assert checkpoints.steps() == [8]


def test_another_run_in_the_same_folder_is_refused(tmp_path):
    Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()
    with pytest.raises(RecipeError, match=r"holds another run: run\.seed, optimizer\.name differ\. .*--fresh"):
        Trainer(recipe(optimizer={"name": "sgd"}, run={"seed": 1}), TinyModel(), Counting(), tmp_path)


def test_operational_settings_may_change_and_take_effect(tmp_path):
    Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()
    changed = recipe(
        run={"steps": 20, "log_every": 2}, optimizer={"lr": 0.5}, schedule={"name": "constant"}, checkpoint={"keep": 5}
    )
    trainer = Trainer(changed, TinyModel(), Counting(), tmp_path)
    trainer.run()
    steps, rates = metrics.curve(tmp_path, "lr")
    assert (steps[-8:], rates[-8:]) == (list(range(13, 21)), [0.5] * 8)
    assert all(group["lr"] == 0.5 for group in trainer.optimizer.param_groups)  # not only said
    assert trainer.checkpoints.steps() == [8, 12, 16, 20]
    first, second = json.loads((tmp_path / "run.json").read_text())
    assert "changed" not in first
    assert second["changed"]["optimizer.lr"] == [0.001, 0.5]
    assert set(second["changed"]) == {"optimizer.lr", "run.steps", "run.log_every", "schedule.name", "checkpoint.keep"}
    assert Recipe.load(tmp_path / "recipe.toml") == changed


def test_the_papers_of_a_finished_run_stay_as_they_are(tmp_path):
    Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()
    before = [(tmp_path / name).read_bytes() for name in ("run.json", "recipe.toml", "metrics.jsonl")]
    Trainer(recipe(optimizer={"lr": 0.5}), TinyModel(), Counting(), tmp_path).run()
    assert [(tmp_path / name).read_bytes() for name in ("run.json", "recipe.toml", "metrics.jsonl")] == before


def test_a_strangers_file_among_the_checkpoints_is_left_alone(tmp_path):
    Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()
    strange = [tmp_path / "checkpoints" / ".DS_Store", tmp_path / "checkpoints" / "step-000008" / "notes.txt"]
    for path in strange:
        path.write_text("x")
    Trainer(recipe(run={"steps": 24}), TinyModel(), Counting(), tmp_path).run()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        ".DS_Store", "step-000008.kept", "step-000020", "step-000024"
    ]  # fmt: skip
    assert (tmp_path / "checkpoints/step-000008.kept/notes.txt").read_text() == "x"


@pytest.mark.parametrize("name", ["metrics.jsonl", "speed.jsonl"])
def test_a_log_that_has_lost_its_end_is_refused_and_not_filled_with_zeros(tmp_path, name):
    Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()
    (tmp_path / name).write_bytes(short := (tmp_path / name).read_bytes()[:-40])
    with pytest.raises(TrainingError, match=rf"{name} has .* bytes where the checkpoint counts on .*--fresh"):
        Trainer(recipe(run={"steps": 20}), TinyModel(), Counting(), tmp_path).run()
    assert (tmp_path / name).read_bytes() == short


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_while_it_evaluates_it_saves_that_very_step(tmp_path, number):
    class Asked(Counting):
        def evaluate(self, model):
            signal.raise_signal(number)
            return super().evaluate(model)

    settings = recipe(run={"steps": 40}, evaluation={"every": 10}, checkpoint={"every": 25})
    torch.manual_seed(1)
    start = TinyModel().state_dict()
    trainers = []
    for folder, objective in (("whole", Counting), ("asked", Asked), ("asked", Counting)):
        model = TinyModel()
        model.load_state_dict(start)
        trainers.append(Trainer(settings, model, objective(), tmp_path / folder))
        trainers[-1].run()
    assert (trainers[1].interrupted, trainers[1].step, trainers[1].finished) == (number, 10, False)
    assert trainers[2].interrupted == 0
    assert (tmp_path / "asked/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


@pytest.mark.parametrize("fails", ["evaluate", "loss"])
def test_a_run_that_ends_badly_has_saved_the_steps_it_did(tmp_path, fails):
    class Failing(Counting):
        def evaluate(self, model):
            if fails == "evaluate":
                raise OSError("the held-out file is gone")
            return super().evaluate(model)

        def loss(self, model, batch):
            if fails == "loss" and self.drawn == 2 * 10 + 1:
                raise MemoryError("no room for this batch")
            return super().loss(model, batch)

    settings = recipe(run={"steps": 20}, evaluation={"every": 10}, checkpoint={"every": 0}, data={"accumulate": 2})
    torch.manual_seed(1)
    start = TinyModel().state_dict()

    def train(folder, objective):
        model = TinyModel()
        model.load_state_dict(start)
        trainer = Trainer(settings, model, objective, tmp_path / folder)
        trainer.run()
        return [x.clone() for x in trainer.model.state_dict().values()]

    with pytest.raises((OSError, MemoryError), match=r"gone|no room"):
        train("failed", Failing())
    assert Checkpoints(tmp_path / "failed/checkpoints", 2).steps() == [10]
    again, whole = train("failed", Counting()), train("whole", Counting())
    assert all(map(torch.equal, again, whole))


def test_two_processes_do_not_share_a_folder(tmp_path):
    with RunFolder(tmp_path).held(), pytest.raises(TrainingError, match="another process is training in"):
        Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()


class DrawsEverywhere(Counting):
    """Draws from every source of chance that a process has."""

    def next_batch(self):
        batch = super().next_batch()
        draws = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return batch | {"factor": torch.tensor(0.5 + draws)}


def test_every_source_of_chance_goes_on_where_it_was(tmp_path):
    settings, curves = recipe(schedule={"name": "constant"}), []
    for folder, stops in (("whole", [12]), ("halves", [6, 12])):
        for steps in stops:
            torch.manual_seed(0)
            part = dataclasses.replace(settings, run=dataclasses.replace(settings.run, steps=steps))
            trainer = Trainer(part, TinyModel(), DrawsEverywhere(), tmp_path / folder)
            if steps != stops[0]:
                random.seed(99), np.random.seed(99), torch.manual_seed(99)  # as another process would find them
            trainer.run()
        curves.append(metrics.curve(tmp_path / folder, "loss"))
    assert curves[0] == curves[1]


def test_a_checkpoint_of_another_shape_is_one_line(tmp_path):
    Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()
    with pytest.raises(CheckpointError) as refused:
        Trainer(recipe(), TinyModel(hidden=4), Counting(), tmp_path).run()
    assert "another model: embedding.weight is [16, 8] there and [16, 4] here, and 5 more" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_finished_run_is_left_as_it_is(tmp_path):
    first = Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert Trainer(recipe(), TinyModel(), Counting(), tmp_path).run() == first
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "sgd", "muon"])
def test_every_optimizer_resumes_to_the_bit(tmp_path, name):
    settings = recipe(optimizer={"name": name}, checkpoint={"every": 5}, run={"steps": 10})
    torch.manual_seed(1)
    start = TinyModel().state_dict()

    def trainer(folder):
        model = TinyModel()
        model.load_state_dict(start)
        return Trainer(settings, model, Counting(), folder)

    trainer(tmp_path / "whole").run()
    stopped = trainer(tmp_path / "halves")
    stopped.objective.next_batch = halting(stopped, 7)
    stopped.run()
    assert stopped.step == 7
    trainer(tmp_path / "halves").run()
    ends = [load_file(tmp_path / half / "checkpoints/step-000010/weights.safetensors") for half in ("whole", "halves")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "halves/metrics.jsonl").read_bytes()


def halting(trainer, step):
    """The objective's batches, with an interruption while a step is made, as Ctrl-C would."""
    next_batch = trainer.objective.next_batch

    def drawing():
        if trainer.step == step - 1:
            signal.raise_signal(signal.SIGINT)
        return next_batch()

    return drawing
