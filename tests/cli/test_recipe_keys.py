"""`tilestack recipe`: every key can be looked up, and a wrong one leads to the right one."""

import json

import pytest
from rich.console import Console

from tilestack.cli import main
from tilestack.train import Recipe
from tilestack.train.align import KINDS
from tilestack.train.settings import keys_of


@pytest.fixture
def tilestack(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


@pytest.mark.parametrize("command", ["train", *KINDS])
def test_every_key_is_listed_with_what_it_is(tilestack, command):
    code, out, _ = tilestack("recipe", "--for", command, "--json", "-")
    listed = {key["name"]: key for key in json.loads(out)}
    kind = KINDS[command].recipe if command in KINDS else Recipe
    assert (code, set(listed)) == (0, {key.name for key in keys_of(kind)})
    assert listed["optimizer.lr"]["default"] == 1e-3
    assert listed["schedule.warmup"]["kind"] == "a whole number at least 0"


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("lr", ["optimizer.lr"]),
        ("data.batch", ["data.batch"]),
        ("every", ["evaluation.every", "checkpoint.every"]),
        ("momentum", ["optimizer.momentum"]),
        ("warmpu", ["schedule.warmup"]),
        ("average", ["ema.decay"]),  # by its meaning
    ],
)
def test_words_find_keys(tilestack, word, keys):
    _, out, _ = tilestack("recipe", word, "--json", "-")
    assert [key["name"] for key in json.loads(out)] == keys


def test_the_table_is_for_people(tilestack):
    code, out, _ = tilestack("recipe", "lr", "seed")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["optimizer.lr", "·", "0.001", "a", "number", "above", "0", "the", "highest", "learning", "rate"] in lines
    assert any(line[:2] == ["run.seed", "0"] for line in lines)


def test_nothing_is_cut_short_on_a_narrow_terminal(tilestack, monkeypatch):
    monkeypatch.setattr("tilestack.cli.recipe_keys.console", Console(width=40))
    assert "…" not in tilestack("recipe", "parallel")[1]


def test_wrong_words_are_one_line(tilestack):
    assert tilestack("recipe", "xyzzy")[2].startswith("error: no key is called or means 'xyzzy'")
    assert "--for must be one of train, sft, dpo, kto, grpo, not 'x'" in tilestack("recipe", "--for", "x")[2]
    code, _, error = tilestack("train", "demo", "--set", "lr=3")
    assert (code, error) == (1, "error: no setting lr; did you mean optimizer.lr?\n")


def test_help_points_to_it(tilestack):
    assert "tilestack recipe" in tilestack("train", "--help")[1]


def test_keys_are_whole_on_a_narrow_terminal_and_behind_a_pipe(tilestack, monkeypatch):
    monkeypatch.setattr("tilestack.cli.recipe_keys.console", Console(width=80))
    _, out, _ = tilestack("recipe")
    shown = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert {key.name for key in keys_of(Recipe)} <= shown
