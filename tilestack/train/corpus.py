"""From a recipe to tokens: the corpus it names, a tokenizer found or trained, and both in the run's folder.

data/
  tokenizer/      as transformers.AutoTokenizer opens it
  tokens/         a token file
  made_from.json  the settings they were made from; others make them anew
"""

import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from tilestack import data
from tilestack.data.whole import whole_folder
from tilestack.train.recipe import Recipe

FOLDER, MADE_FROM = "data", "made_from.json"


def documents(settings) -> Iterator[str]:
    """The texts of a recipe's corpus, up to its number of bytes."""
    if settings.corpus == "python":
        yield from (document.text for document in data.corpora.python_sources(settings.most_bytes or None))
        return
    left = settings.most_bytes or None
    for source in settings.files:
        for text in data.texts(source):
            if left is not None and left <= 0:
                return
            yield text
            left = None if left is None else left - len(text.encode())


def prepare(recipe: Recipe, folder: Path, console: Console | None = None) -> tuple[data.Tokenizer, data.TokenFile]:
    """The tokenizer and the tokens of a recipe, made on the first call; the folder appears when both are complete."""
    settings = recipe.data
    made_from = {
        "corpus": settings.corpus, "files": list(settings.files), "most_bytes": settings.most_bytes,
        "tokenizer": settings.tokenizer or recipe.model.path, "vocabulary": settings.vocabulary,
    }  # fmt: skip
    target = folder / FOLDER
    if not is_made_from(target, made_from):
        with whole_folder(target) as hidden:
            if made_from["tokenizer"]:
                tokenizer = data.Tokenizer.load(str(made_from["tokenizer"]))
            else:
                tokenizer = data.Tokenizer.train(documents(settings), settings.vocabulary)
            tokenizer.save(hidden / "tokenizer")
            data.write_tokens(
                hidden / "tokens", documents(settings), tokenizer, source=settings.corpus, console=console
            )
            (hidden / MADE_FROM).write_text(json.dumps(made_from))
    tokenizer, tokens = data.Tokenizer.load(target / "tokenizer"), data.TokenFile(target / "tokens")
    tokens.check(tokenizer)
    return tokenizer, tokens


def is_made_from(folder: Path, settings: dict) -> bool:
    try:
        return json.loads((folder / MADE_FROM).read_text()) == settings
    except (OSError, ValueError):
        return False
