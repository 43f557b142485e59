"""What a model's generation_config.json says of sampling, and what is no such file."""

import json

import pytest

from tilestack import models
from tilestack.engine.defaults import defaults_line, model_defaults


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 5}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 20, "min_p": None}, {"temperature": 1.0, "top_k": 20}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": False, "eos_token_id": 2}, {}),
        (None, {}),
    ],
)
def test_the_values_of_a_model(tmp_path, given, found):
    (tmp_path / "config.json").write_text("{}")
    if given is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert model_defaults(tmp_path) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"temperature": "hot"}', "generation_config.json: temperature must be a number, not 'hot'"),
        ('{"top_k": -1}', "generation_config.json: top_k must lie between 0"),
        ("[]", "must hold an object"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_what_cannot_be_used_is_said_by_its_file(tmp_path, text, said):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises((models.ConfigError, models.CheckpointError), match=said):
        model_defaults(tmp_path)


def test_they_are_told_in_a_line():
    assert defaults_line({"temperature": 0.6, "top_k": 20}).endswith(": temperature 0.6, top_k 20")
