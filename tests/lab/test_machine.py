"""The stamp, here and on machines that lack things."""

import re

import pytest
import torch

from tilestack.lab import machine


def test_the_stamp_says_what_was_measured_on_and_with():
    found = machine.stamp("cpu")
    assert found["slug"] == "cpu"
    assert found["gpu"] == found["driver"] == ""
    assert found["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    assert found["cpu"].endswith("cores")
    assert list(found) == [
        "gpu",
        "slug",
        "driver",
        "capability",
        "multiprocessors",
        "torch",
        "triton",
        "cudnn",
        "liger",
        "transformers",
        "python",
        "cpu",
        "commit",
        "date",
    ]


@pytest.mark.parametrize(("number", "shown"), [(91002, "9.10.2"), (90100, "9.1.0"), (None, "")])
def test_cudnn_is_written_as_its_makers_do(monkeypatch, number, shown):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert machine.cudnn_version() == shown


def test_the_commit_comes_from_the_environment_where_there_is_no_git(monkeypatch):
    machine.commit.cache_clear()
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "0123abc")
    assert machine.commit() == "0123abc"
    machine.commit.cache_clear()


def test_missing_commands_and_files_are_no_errors(monkeypatch):
    assert machine.output_of("no-such-command-at-all") == ""
    assert machine.output_of("false") == ""
    assert machine.text_of_file("/no/such/file") == ""
    monkeypatch.setattr(machine, "text_of_file", lambda path: "")
    assert machine.cpu_name().endswith("cores")
