"""Recipes by name, with what there is when a name is unknown."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from tilestack import shipped
from tilestack.cli.recipes import find_recipe, recipe_names


def test_a_file_of_ones_own_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo").write_text("")
    assert find_recipe(Path("demo")) == Path("demo")


@pytest.mark.parametrize("written", ["demo", "recipes/demo.toml", "qwen3-0.6b"])
def test_a_name_is_found_from_any_folder(tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # a folder is no recipe
    assert find_recipe(Path(written)).is_file()


@pytest.mark.parametrize("written", ["demmo", "recipes/demmo.toml"])
def test_an_unknown_name_is_told_what_there_is(written):
    with pytest.raises(FileNotFoundError) as told:
        find_recipe(Path(written))
    assert str(told.value).startswith(f"there is no recipe {written}. Did you mean demo? tilestack comes with demo, ")
    assert all(name in str(told.value) for name in recipe_names())


def test_a_name_like_no_other_suggests_nothing():
    with pytest.raises(FileNotFoundError, match=r"there is no recipe zzz\. tilestack comes with demo"):
        find_recipe(Path("zzz"))


def test_runs_of_shipped_recipes_are_all_in_different_folders_and_none_in_the_demos():
    import tomllib

    names = [tomllib.loads(find_recipe(Path(name)).read_text())["run"]["name"] for name in recipe_names()]
    assert len(set(names)) == len(names)
    assert "demo" not in names


def test_what_a_wheel_carries_inside_the_package_is_found_first(tmp_path, monkeypatch):
    package = tmp_path / "site" / "tilestack"
    (package / "recipes").mkdir(parents=True)
    monkeypatch.setattr(shipped, "PACKAGE", package)
    assert shipped.shipped("recipes") == package / "recipes"
    assert shipped.checkout() is None


CNN = Path(__file__).parents[2] / "recipes" / "cnn.py"


def test_a_small_cnn_learns_to_tell_shapes_apart_that_it_has_not_seen(capsys):
    recipe, cpu = runpy.run_path(str(CNN)), torch.device("cpu")
    torch.manual_seed(0)
    assert recipe["accuracy"](recipe["network"](), cpu) < 0.5, "untrained, it guesses one of three"
    assert recipe["accuracy"](recipe["train"](20, cpu), cpu) > 0.65
    assert capsys.readouterr().out.startswith("step 20: loss 0.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_what_the_cnn_cannot_do_is_said_before_it_begins(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cnn.py", *options])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(CNN), run_name="__main__")
    assert message in capsys.readouterr().err
