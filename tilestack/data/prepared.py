"""From settings to tokens: the texts they name, a tokenizer found or trained, and both in a run's folder.

data/
  tokenizer/      as transformers.AutoTokenizer opens it
  tokens/         a token file
  made_from.json  the settings they were made from; others make them anew
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console

from tilestack.data import corpora
from tilestack.data.readers import texts
from tilestack.data.tokenizer import Tokenizer
from tilestack.data.tokens import TokenFile, write_tokens
from tilestack.files import whole_folder

FOLDER, MADE_FROM = "data", "made_from.json"


class TextSettings(Protocol):
    """Which texts are wanted, and the tokenizer for them: the data section of a recipe."""

    @property
    def corpus(self) -> str: ...
    @property
    def files(self) -> Sequence[str]: ...
    @property
    def most_bytes(self) -> int: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...


def documents(settings: TextSettings) -> Iterator[str]:
    """The texts of a corpus, up to the number of bytes that is wanted."""
    if settings.corpus == "python":
        yield from (document.text for document in corpora.python_sources(settings.most_bytes or None))
        return
    left = settings.most_bytes or None
    for source in settings.files:
        for text in texts(source):
            if left is not None and left <= 0:
                return
            yield text
            left = None if left is None else left - len(text.encode())


def prepare_tokens(
    settings: TextSettings, folder: Path, *, tokenizer_of: str = "", console: Console | None = None
) -> tuple[Tokenizer, TokenFile]:
    """The tokenizer and the tokens of a run, made on the first call; the folder appears when both are complete. Where the
    settings name no tokenizer it is that of the model `tokenizer_of`, else one is trained on the texts."""
    made_from = {
        "corpus": settings.corpus, "files": list(settings.files), "most_bytes": settings.most_bytes,
        "tokenizer": settings.tokenizer or tokenizer_of, "vocabulary": settings.vocabulary,
    }  # fmt: skip
    target = folder / FOLDER
    if not is_made_from(target, made_from):
        with whole_folder(target) as hidden:
            if made_from["tokenizer"]:
                tokenizer = Tokenizer.load(str(made_from["tokenizer"]))
            else:
                tokenizer = Tokenizer.train(documents(settings), settings.vocabulary)
            tokenizer.save(hidden / "tokenizer")
            write_tokens(hidden / "tokens", documents(settings), tokenizer, source=settings.corpus, console=console)
            (hidden / MADE_FROM).write_text(json.dumps(made_from))
    tokenizer, tokens = Tokenizer.load(target / "tokenizer"), TokenFile(target / "tokens")
    tokens.check(tokenizer)
    return tokenizer, tokens


def is_made_from(folder: Path, settings: dict) -> bool:
    try:
        return json.loads((folder / MADE_FROM).read_text()) == settings
    except (OSError, ValueError):
        return False
