"""The `eval` command: how well a model predicts texts, chooses answers, and does at tasks of lm-evaluation-harness."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tilestack.cli.common import JsonFile, console, write_json

if TYPE_CHECKING:
    from tilestack.data import Tokenizer


def add_to(app: typer.Typer) -> None:
    app.command("eval")(eval_command)


def eval_command(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a run's model, a .gguf file, or smollm2.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to predict: files, folders of files, or token files.", show_default=False),
    ] = None,
    choices: Annotated[
        Path | None,
        typer.Option(help='Questions: rows of {"prompt": …, "choices": …, "answer": 0}.', show_default=False),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm_eval by name, comma-separated.", show_default=False)
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Longest context, at most the model's maximum; default: 1024 for texts, the maximum for choices and tasks.",
            show_default=False,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens between windows of long texts; default: the length.", show_default=False),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="At most this many documents or questions of each.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; default: the GPU if there is one.", show_default=False)
    ] = None,
    json_: JsonFile = None,
) -> None:
    """Evaluate a model: perplexity and bits per byte of texts, multiple choice by likelihood, tasks of lm_eval.

    Every figure comes with its standard error. Bits per byte count all bytes of a text, so models with different
    tokenizers can be compared.
    """
    if not texts and choices is None and tasks is None:
        raise ValueError("there is nothing to evaluate: name texts, --choices FILE or --tasks NAMES")
    if any(number is not None and number < 1 for number in (length, stride, limit)):
        raise ValueError("--length, --stride and --limit must be at least 1")
    import torch

    from tilestack import data, models
    from tilestack.device import pick_device
    from tilestack.train.evaluation.evaluate import evaluate_choices, evaluate_texts, question_from

    place = pick_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    decoder, tokenizer = models.load(model, dtype=dtype, device=place), data.Tokenizer.load(model)
    tokenizer.check_against(decoder.config.vocabulary)
    positions = decoder.config.positions
    window, context = min(length or 1024, positions), min(length or positions, positions)
    found: dict[str, Any] = {}
    for source in texts or ():
        some = itertools.islice(scored_documents(source, tokenizer), limit)
        found[source] = asdict(evaluate_texts(decoder, some, place, window, stride))
    if choices is not None:
        rows = itertools.islice(data.located(choices), limit)
        questions = [question_from(row, where) for where, row in rows]
        found[str(choices)] = asdict(evaluate_choices(decoder, tokenizer, questions, place, context))
    for name, figures in run_tasks(decoder, tokenizer, place, context, tasks, limit).items() if tasks else ():
        found[name] = figures
    write_json(json_, {"model": model, "results": without_nan(found)})
    if str(json_) != "-":
        console.print(scores_table(model, found))


def scored_documents(source: str, tokenizer: "Tokenizer") -> Iterator[tuple[Sequence[int], int]]:
    """The documents of a token file, or of whatever `data.read` reads: their ids and how many bytes they are."""
    from tilestack import data
    from tilestack.train.evaluation.evaluate import whole_document

    if (Path(source) / "tokens.bin").is_file():
        tokens = data.TokenFile(source)
        tokens.check(tokenizer)
        for number in range(len(tokens)):
            yield whole_document(tokenizer, tokens[number].tolist()), int(tokens.bytes[number])
        return
    for text in data.texts(source):
        yield whole_document(tokenizer, tokenizer.encode_documents([text])[0]), len(text.encode())


def run_tasks(
    decoder: Any, tokenizer: "Tokenizer", place: Any, length: int, tasks: str, limit: int | None
) -> dict[str, dict[str, Any]]:
    """What lm_eval finds, with its own names for the figures."""
    from tilestack.train.evaluation.harness import harness_model

    adapter = harness_model(decoder, tokenizer, place, length)
    import lm_eval

    results = lm_eval.simple_evaluate(adapter, tasks=tasks.split(","), limit=limit)["results"]
    figures: dict[str, dict[str, Any]] = {}
    for task, measured in results.items():
        named = {
            name.partition(",")[0]: value
            for name, value in measured.items()
            if "," in name and isinstance(value, int | float)
        }
        figures[task] = {
            name: {"value": value, "error": named.get(f"{name}_stderr", math.nan)}
            for name, value in named.items()
            if not name.endswith("_stderr")
        }
    return figures


def without_nan(value: Any) -> Any:
    """The same with None for what is not a number, as JSON has no NaN."""
    if isinstance(value, dict):
        return {name: without_nan(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scores_table(model: str, found: dict[str, dict[str, Any]]) -> Table:
    made = Table(title=model)
    for heading in ("what", "figure", "value", "± standard error"):
        made.add_column(heading, justify="right" if heading in ("value", "± standard error") else "left")
    for what, figures in found.items():
        for number, (name, value) in enumerate(figures.items()):
            shown, error = (value["value"], value["error"]) if isinstance(value, dict) else (value, math.nan)
            made.add_row(
                what if number == 0 else "",
                name.replace("_", " "),
                f"{shown:,}" if isinstance(shown, int) else f"{shown:.4g}",
                "" if math.isnan(error) else f"{error:.2g}",
            )
        made.add_section()
    return made
