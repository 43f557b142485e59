"""How a model's authors would have its tokens drawn: the sampling values of its generation_config.json.

transformers and vLLM take them where a request says nothing, and so do the server, `tilestack chat` and `tilestack generate`.
"""

from collections.abc import Mapping
from pathlib import Path

from tilestack.engine.params import RequestError, SamplingParams
from tilestack.models import ConfigError, locate
from tilestack.models.checkpoints import GENERATION, read_json

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def model_defaults(model: str | Path) -> dict[str, float]:
    """The values for `SamplingParams` that a model comes with; none for one without the file, or in GGUF."""
    path = locate(model) / GENERATION
    given = read_json(path) if path.is_file() else {}
    found = {name: given[name] for name in SAMPLING if given.get(name) is not None}
    if given.get("do_sample") is True:
        found = {"temperature": 1.0} | found  # as transformers has it where the file names none
    try:
        SamplingParams(**found)
    except RequestError as problem:
        raise ConfigError(f"{path}: {problem}") from problem
    return found


def defaults_line(sampling: Mapping[str, float]) -> str:
    """What a person is told who starts a model with such values."""
    values = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
    return f"sampling by the model's {GENERATION} unless told otherwise: {values}"
