"""Recipes: what they accept, and errors that name the key."""

import tomllib
from pathlib import Path

import pytest

from tilestack.train import Recipe, RecipeError
from tilestack.train.align import KINDS
from tilestack.train.optimizers import rate_share
from tilestack.train.settings import as_toml, differences, keys_of, read

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"optimzer": {}}, r"^no setting optimzer; did you mean optimizer\?$"),
        ({"optimizer": {"learning": 1}}, r"^no setting optimizer\.learning; optimizer has name, lr, "),
        ({"run": {"step": 5}}, r"^no setting run\.step; did you mean run\.steps\?$"),
        ({"lr": 3}, r"^no setting lr; did you mean optimizer\.lr\?$"),
        ({"every": 3}, r"^no setting every; did you mean evaluation\.every or checkpoint\.every\?$"),
        ({"run": {"learning_rate": 3, "warmup": 1}}, r"^no setting run\.learning_rate; run has name, steps, "),
        ({"run": {"warmup": 1}}, r"^no setting run\.warmup; did you mean schedule\.warmup\?$"),
        ({"run": 5}, r"^run must be a table, not 5$"),
        ({"run": {"steps": "many"}}, r"^run\.steps must be a whole number, not 'many'$"),
        ({"run": {"steps": True}}, r"^run\.steps must be a whole number, not True$"),
        ({"run": {"steps": 0}}, r"^run\.steps must be at least 1, not 0$"),
        ({"optimizer": {"lr": 0}}, r"^optimizer\.lr must be above 0, not 0\.0$"),
        ({"optimizer": {"lr": float("nan")}}, r"^optimizer\.lr must be above 0, not nan$"),
        ({"schedule": {"final": 2}}, r"^schedule\.final must be at least 0 and at most 1, not 2\.0$"),
        ({"optimizer": {"name": "adamv"}}, r"^optimizer\.name must be one of adamw, .* did you mean adamw\?$"),
        ({"run": {"graph": "yes"}}, r"^run\.graph must be one of auto, on, off, not 'yes'$"),
        ({"run": {"graph": True}}, r"^run\.graph must be one of auto, on, off, not True; did you mean on\?$"),
        ({"run": {"graph": False}}, r"^run\.graph must be one of auto, on, off, not False; did you mean off\?$"),
        ({"run": {"graph": ["on"]}}, r"^run\.graph must be one of auto, on, off, not \['on'\]$"),
        ({"optimizer": {"name": True}}, r"^optimizer\.name must be one of adamw, adamw8bit, sgd, muon, not True$"),
        ({"optimizer": {"betas": [0.9, 1.5]}}, r"^optimizer\.betas must be two numbers from 0 to below 1, "),
        ({"optimizer": {"betas": [0.9, "x"]}}, r"^optimizer\.betas\[1\] must be a number, not 'x'$"),
        ({"evaluation": {"prompts": "def"}}, r"^evaluation\.prompts must be a list in brackets, not 'def'$"),
        ({"schedule": {"warmup": 1000}}, r"^schedule\.warmup \(1000\) must be shorter than run\.steps \(1000\)$"),
        ({"data": {"corpus": "files"}}, r"^data\.files must name at least one"),
        ({"model": {"path": "a", "config": {"b": 1}}}, r"^model\.path and model\.config exclude each other"),
        (
            {"lora": {"targets": ["*.qkv"], "alpha": 32}},
            r"^lora\.alpha has no meaning where lora\.rank is 0, which trains the model",
        ),
        ({"precision": {"parameters": "bfloat16"}}, r'^precision\.compute must be "bfloat16"'),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_key(table, message):
    with pytest.raises(RecipeError, match=message):
        read(Recipe, table)


def test_every_setting_says_what_it_means_and_accepts():
    every = [Recipe, *(kind.recipe for kind in KINDS.values())]
    assert [key.name for kind in every for key in keys_of(kind) if not key.means] == []
    keys = {key.name: key for key in keys_of(Recipe)}
    assert (keys["optimizer.lr"].kind, keys["optimizer.lr"].default) == ("a number above 0", 1e-3)
    assert keys["schedule.name"].kind == "cosine, wsd, linear, constant"
    assert {name.split(".")[0] for name, key in keys.items() if not key.operational} == {
        "run", "model", "data", "optimizer", "precision", "ema", "lora"
    }  # fmt: skip
    assert [name for name, key in keys.items() if name.startswith("run.") and not key.operational] == ["run.seed"]


def test_overrides_are_read_as_toml_or_else_as_words(tmp_path):
    (tmp_path / "r.toml").write_text("[run]\nsteps = 7\n")
    changes = [
        "run.steps=9",
        "run.name=quick",
        "optimizer.betas=[0.8, 0.9]",
        "model.config.hidden_size=32",
        "optimizer.lr=1e-2",
    ]
    recipe = Recipe.load(tmp_path / "r.toml", changes)  # fmt: skip
    assert (recipe.run.steps, recipe.run.name, recipe.optimizer.betas) == (9, "quick", (0.8, 0.9))
    assert recipe.model.config == {"hidden_size": 32}
    assert recipe.optimizer.lr == 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.steps", "cannot read --set 'run.steps': write section.key=value"),
        (".steps=1", "cannot read --set"),
        ("run.steps.x=1", "cannot set run.steps.x: run.steps is not a table"),
        ("run.name=3", "run.name must be a text in quotes, not 3"),
    ],
)
def test_overrides_that_make_no_sense_are_refused(tmp_path, change, message):
    (tmp_path / "r.toml").write_text("[run]\nsteps = 7\n")
    with pytest.raises(RecipeError, match=message.replace(".", r"\.")):
        Recipe.load(tmp_path / "r.toml", [change])


def test_a_byte_order_mark_before_a_recipe_is_skipped(tmp_path):
    (tmp_path / "r.toml").write_text("\ufeff[run]\nsteps = 7\n", encoding="utf-8")
    assert Recipe.load(tmp_path / "r.toml").run.steps == 7


def test_files_that_are_no_recipes(tmp_path):
    (tmp_path / "bad.toml").write_text("[run\nsteps = 7\n")
    with pytest.raises(RecipeError, match=r"bad\.toml is not TOML: .*line 1"):
        Recipe.load(tmp_path / "bad.toml")
    with pytest.raises(RecipeError, match=r"^no recipe .*missing\.toml$"):
        Recipe.load(tmp_path / "missing.toml")
    with pytest.raises(RecipeError, match="is a folder"):
        Recipe.load(tmp_path)


def test_a_recipe_survives_being_written():
    table = {
        "run": {"name": 'odd "name" \\ with\nlines ü'}, "optimizer": {"betas": [0.5, 0.6], "lr": 1e-5},
        "model": {"config": {"model_type": "qwen3", "rope_scaling": {"factor": 2.0}, "layers": [1, 2], "odd key!": True}},
    }  # fmt: skip
    recipe = read(Recipe, table)
    written = tomllib.loads(as_toml(recipe.table()))
    assert read(Recipe, written) == recipe
    assert written["schedule"]["name"] == "cosine"  # in full, defaults too


def test_differences_name_keys():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == ["a.c", "d"]
    assert differences({"a": 1}, {"a": True}) == ["a"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_that_come_along_can_be_read(path):
    command = "sft" if path.stem == "finetune" else path.stem
    kind = KINDS[command].recipe if command in KINDS else Recipe
    own = ["data.files=['rows.jsonl']"] if path.stem == "finetune" else []
    assert kind.load(path, own).run.name == path.stem.replace("demo", "python")  # runs/demo is the demo's


def shares(name, steps=100, **settings):
    recipe = read(Recipe, {"run": {"steps": steps}, "schedule": {"name": name, **settings}})
    return [rate_share(recipe.schedule, step, steps) for step in range(steps)]


def test_schedules_warm_up_and_end_where_they_should():
    for name in ("cosine", "wsd", "linear"):
        rates = shares(name, warmup=10, final=0.1)
        assert rates[0] == pytest.approx(0.1)
        assert rates[9] == 1.0
        assert rates[-1] == pytest.approx(0.1)
        assert rates[10:] == sorted(rates[10:], reverse=True)
    assert shares("constant", warmup=4)[4:] == [1.0] * 96
    stable = shares("wsd", decay=0.2, final=0.0)
    assert stable[:79] == [1.0] * 79
    assert shares("wsd", steps=101, decay=0.2, final=0.2)[75::5] == pytest.approx([1, 1, 0.8, 0.6, 0.4, 0.2])
    assert shares("cosine", final=0.0)[50] == pytest.approx(0.5, abs=0.02)
    assert shares("linear", steps=1) == [1.0]
