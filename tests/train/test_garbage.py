"""The garbage collector while a run lasts: on a GPU it walks what the steps make, and nothing of what was there before."""

import gc
import weakref

import pytest
import torch
from tiny import Counting, TinyModel, recipe

from tilestack.garbage import startup_frozen
from tilestack.train import Trainer

CUDA = torch.device("cuda")  # its name; what is tried here is the host's


class Node:
    """Garbage that only a collector finds."""

    def __init__(self):
        self.itself = self


def test_what_was_there_is_passed_over_and_new_garbage_found():
    old, before = Node(), gc.get_freeze_count()
    kept = weakref.ref(old)
    with startup_frozen(CUDA):
        assert gc.get_freeze_count() > before + 10_000
        del old
        new = weakref.ref(Node())
        gc.collect()
        assert kept() is not None
        assert new() is None
    assert gc.get_freeze_count() <= before
    gc.collect()
    assert kept() is None


def test_garbage_from_before_a_run_does_not_stay_with_it():
    left = weakref.ref(Node())
    with startup_frozen(CUDA):
        assert left() is None


def test_inside_another_nothing_is_thawed_early():
    with startup_frozen(CUDA):
        frozen = gc.get_freeze_count()
        with startup_frozen(CUDA):
            pass
        assert gc.get_freeze_count() > frozen // 2  # some of it may have ended since


def test_what_python_froze_itself_is_no_program(monkeypatch):
    """Python 3.12 starts with some hundreds."""
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count() + 375)
    with startup_frozen(CUDA):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() < 10_000


def test_garbage_may_wait_until_after():
    node = Node()
    left = weakref.ref(node)
    with startup_frozen(CUDA, collect=False):
        del node
        gc.collect()
        assert left() is not None
    gc.collect()
    assert left() is None


class Watched(Counting):
    """Notes how much is frozen when a batch is asked for, and fails at one of them."""

    def __init__(self, fails_at=0):
        super().__init__()
        self.fails_at, self.frozen = fails_at, []

    def next_batch(self):
        self.frozen.append(gc.get_freeze_count())
        if len(self.frozen) == self.fails_at:
            raise OSError("the disk is gone")
        return super().next_batch()


@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_run_on_a_gpu_freezes_until_its_end_however_it_ends(tmp_path, fails_at):
    before, objective = gc.get_freeze_count(), Watched(fails_at)
    trainer = Trainer(recipe(), TinyModel(), objective, tmp_path)
    trainer.device = CUDA
    if fails_at:
        with pytest.raises(OSError, match="the disk is gone"):
            trainer.run()
    else:
        trainer.run()
    assert min(objective.frozen) > before + 10_000
    assert gc.get_freeze_count() <= before


def test_a_run_on_a_cpu_freezes_nothing(tmp_path):
    before, objective = gc.get_freeze_count(), Watched()
    Trainer(recipe(), TinyModel(), objective, tmp_path).run()
    assert set(objective.frozen) == {before}
