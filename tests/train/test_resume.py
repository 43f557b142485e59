"""A run that was killed and started again is, to the bit, the run that was not."""

import multiprocessing
import random
import signal
import time

import killed
import pytest
import torch
from safetensors.torch import load_file
from tiny import Counting, TinyModel, recipe

from tilestack.train import RecipeError, Trainer
from tilestack.train.checkpoint import CheckpointError, Checkpoints, complete
from tilestack.train.loop import TrainingError

# Processes of their own, which share the time it takes to import PyTorch and nothing else.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["killed"])


def start(folder, dies_at=None):
    process = PROCESSES.Process(target=killed.train, args=(folder, dies_at))
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
    again = start(tmp_path / "killed")
    wait_for_step(tmp_path / "killed", 16, again)
    time.sleep(chance.uniform(0, 0.1))
    again.kill()
    assert ends(again) == -signal.SIGKILL

    last = start(tmp_path / "killed")
    assert ends(last) == 0
    assert everything(tmp_path / "killed") == everything(tmp_path / "whole")
    assert not [path for path in left.iterdir() if path.name.startswith(".")]


def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    trainer = Trainer(recipe(), TinyModel(), Counting(), tmp_path)
    save = trainer.checkpoints.save

    def on_a_small_disk(step, tensors, state):
        if step < 8:
            return save(step, tensors, state)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # no file may become larger
        try:
            return save(step, tensors, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(trainer.checkpoints, "save", on_a_small_disk)
    with pytest.raises(CheckpointError, match=r"cannot save the checkpoint of step 8 .*step 4 is intact.*Make room"):
        trainer.run()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
    assert Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()["loss"] > 0


def test_a_damaged_checkpoint_is_not_taken(tmp_path):
    Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    assert checkpoints.steps() == [8, 12]
    weights = checkpoints.path(12) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not complete(checkpoints.path(12))
    assert checkpoints.steps() == [8]


def test_another_recipe_in_the_same_folder_is_refused(tmp_path):
    Trainer(recipe(), TinyModel(), Counting(), tmp_path).run()
    with pytest.raises(RecipeError, match=r"another recipe: optimizer\.lr differs\. .*--fresh"):
        Trainer(recipe(optimizer={"lr": 0.5}), TinyModel(), Counting(), tmp_path)


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


def test_two_processes_do_not_share_a_folder(tmp_path):
    trainer = Trainer(recipe(), TinyModel(), Counting(), tmp_path)
    with trainer._only_one(), pytest.raises(TrainingError, match="another process"):
        trainer.run()


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
