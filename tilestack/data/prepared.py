"""From settings to tokens: the texts they name, a tokenizer found or trained, and both in a run's folder.

data/
  tokenizer/      as transformers.AutoTokenizer opens it
  tokens/         a token file
  made_from.json  the settings and what the files held; others make them anew
"""

import fcntl
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from tilestack.data import corpora
from tilestack.data.errors import DataError
from tilestack.data.fingerprints import changed_files, fingerprints
from tilestack.data.readers import files_behind, texts
from tilestack.data.tokenizer import Tokenizer
from tilestack.data.tokens import TokenFile, write_parts
from tilestack.files import beside, whole_folder, write_text_whole

FOLDER, MADE_FROM = "data", "made_from.json"


class TextSettings(Protocol):
    """Which texts are wanted, and the tokenizer for them: the data section of a recipe."""

    @property
    def corpus(self) -> str: ...
    @property
    def files(self) -> Sequence[str]: ...
    @property
    def validation_files(self) -> Sequence[str]: ...
    @property
    def most_bytes(self) -> int: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def tokens(self) -> str: ...


def parts(settings: TextSettings) -> Iterator[Iterator[str]]:
    """The texts to learn from, those of each file in turn, up to the number of bytes that is wanted."""
    if settings.corpus != "files":
        found = corpora.python_sources(settings.most_bytes or None, libraries=settings.corpus == "libraries")
        yield (document.text for document in found)
        return
    left = settings.most_bytes or math.inf

    def up_to_most(source: str) -> Iterator[str]:
        nonlocal left
        for text in texts(source):
            if left <= 0:
                return
            yield text
            left -= len(text.encode())

    yield from map(up_to_most, settings.files)


def held_out_parts(settings: TextSettings) -> Iterator[Iterator[str]]:
    return map(texts, settings.validation_files)


def documents(settings: TextSettings) -> Iterator[str]:
    """All texts, in the order of their tokens."""
    return chain.from_iterable(chain(parts(settings), held_out_parts(settings)))


def sources(settings: TextSettings) -> list[Path]:
    """The files that the texts are read from; a dataset of the hub has none here."""
    read = [file for source in (*settings.files, *settings.validation_files) for file in files_behind(source)]
    if settings.corpus == "files":
        return read
    return [*corpora.python_files(settings.most_bytes or None, settings.corpus == "libraries").values(), *read]


def prepare_tokens(
    settings: TextSettings,
    folder: Path,
    *,
    tokenizer_of: str = "",
    resumes: bool = False,
    console: Console | None = None,
) -> tuple[Tokenizer, TokenFile]:
    """The tokenizer and the tokens of a run, made on the first call and again when the texts or the tokenizer have
    changed; the folder appears when both are complete. Where the settings name no tokenizer it is that of the model
    `tokenizer_of`, else one is trained on the texts.

    A run that `resumes` goes on with its tokens even where the files are gone, and refuses files that have changed. So does
    a run that shares its tokens with others, in the folder `settings.tokens`.
    """
    target = tokens_folder(settings, folder)
    with one_at_a_time(target) if settings.tokens else nullcontext():
        update_tokens(settings, target, settings.tokenizer or tokenizer_of, resumes, console)
    return open_tokens(settings, folder)


def open_tokens(settings: TextSettings, folder: Path) -> tuple[Tokenizer, TokenFile]:
    """The tokenizer and the tokens of a run as `prepare_tokens` has left them, whatever became of the texts."""
    target = tokens_folder(settings, folder)
    tokenizer, tokens = Tokenizer.load(target / "tokenizer"), TokenFile(target / "tokens")
    tokens.check(tokenizer)
    return tokenizer, tokens


def tokens_folder(settings: TextSettings, folder: Path) -> Path:
    return Path(settings.tokens) if settings.tokens else folder / FOLDER


def update_tokens(settings: TextSettings, target: Path, named: str, resumes: bool, console: Console | None) -> None:
    """Make the tokens of a folder, unless they are there and still follow from the texts and the tokenizer."""
    known = read_made_from(target)
    asked: dict[str, Any] = {
        "corpus": settings.corpus, "files": list(settings.files), "validation_files": list(settings.validation_files),
        "most_bytes": settings.most_bytes, "tokenizer": named, "vocabulary": settings.vocabulary,
    }  # fmt: skip
    before = {"validation_files": []} | known  # which tokens of earlier versions say nothing of
    changed = [f"data.{name}" for name, value in asked.items() if before.get(name) != value]
    if resumes and not changed and is_missing(settings, named):
        return
    given = Tokenizer.load(named) if named else None
    asked["sources"] = fingerprints(sources(settings), known.get("sources", ()))
    asked["fingerprint"] = given.fingerprint if given else ""
    changed += what_changed(known, asked)
    if changed and known and (resumes or settings.tokens):
        told = ", ".join(changed[:3])
        raise DataError(
            f"{told} changed since the tokens in {target} were made; put it back, or "
            + ("name another folder in data.tokens" if settings.tokens else "start over (--fresh)")
        )
    if changed:
        make(target, settings, given, asked, console)
    elif asked != known:  # touched, and yet the same
        write_text_whole(target / MADE_FROM, json.dumps(asked))


@contextmanager
def one_at_a_time(target: Path) -> Iterator[None]:
    """Let runs that share a folder of tokens wait for whoever makes them."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(beside(target, "tilestack-lock"), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(
    target: Path, settings: TextSettings, given: Tokenizer | None, asked: dict[str, Any], console: Console | None
) -> None:
    with whole_folder(target) as hidden:
        tokenizer = given or learn_tokenizer(chain.from_iterable(parts(settings)), settings.vocabulary, console)
        tokenizer.save(hidden / "tokenizer")
        write_parts(
            hidden / "tokens",
            chain(parts(settings), held_out_parts(settings)),
            tokenizer,
            held_out=len(settings.validation_files),
            source=settings.corpus,
            console=console,
        )
        (hidden / MADE_FROM).write_text(json.dumps(asked))


def learn_tokenizer(texts: Iterable[str], vocabulary: int, console: Console | None) -> Tokenizer:
    """`Tokenizer.train`, which takes minutes for a gigabyte, with how far it has read."""
    columns = (TextColumn("learning a tokenizer"), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with Progress(*columns, console=console or Console(quiet=True), transient=True) as progress:
        task = progress.add_task("learning a tokenizer", total=None, said="")

        def counted() -> Iterator[str]:
            size = 0
            for text in texts:
                yield text
                size += len(text)
                progress.update(task, said=f"{size / 1e6:,.1f} M characters")

        return Tokenizer.train(counted(), vocabulary)


def what_changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The files, or the tokenizer, that are not what they were."""
    other = before.get("fingerprint") != now["fingerprint"]
    return changed_files(before.get("sources", ()), now["sources"]) + ([now["tokenizer"]] if other else [])


def is_missing(settings: TextSettings, named: str) -> bool:
    """Whether some of what the tokens were made from is no longer there."""
    paths = [*settings.files, *settings.validation_files, *([named] if "/" in named else [])]
    return any(not path.startswith("hf:") and not Path(path).exists() for path in paths)


def read_made_from(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / MADE_FROM).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
