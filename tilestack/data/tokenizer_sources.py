"""Where tokenizers come from: trained on texts, a Hugging Face folder, or the metadata of a GGUF file.

Each gives the parts of a `Tokenizer`: a backend of the package `tokenizers`, the names of its special tokens, and a chat
template if there is one.
"""

import json
import re
import reprlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from tilestack.data.errors import DataError
from tilestack.data.pretokenizers import byte_level, takes_whole_words

END_OF_TEXT, TURN_START, TURN_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens, as GGUF numbers them
WHOLE = "tokenizer.huggingface.json"  # under which a GGUF file may have all of a tokenizer.json
LONGEST_RUN = 4096
RUNS = re.compile(rf"\S{{1,{LONGEST_RUN}}}|\s{{1,{LONGEST_RUN}}}")


@dataclass(frozen=True)
class Parts:
    backend: tokenizers.Tokenizer
    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    template: str | None = None


def trained(texts: Iterable[str], vocabulary: int) -> Parts:
    smallest = 256 + len(SPECIAL)
    if vocabulary < smallest:
        raise DataError(
            f"a vocabulary of {vocabulary} is too small; {smallest} are needed for bytes and special tokens"
        )
    backend = tokenizers.Tokenizer(BPE())
    _, backend.pre_tokenizer = byte_level("qwen2")  # unnormalised: what is decoded is what was encoded, to the byte
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    train_in_a_thread(backend, trainer, texts)
    backend.post_processor = _between(backend, END_OF_TEXT)
    return Parts(backend, bos=END_OF_TEXT, eos=END_OF_TEXT, pad=END_OF_TEXT)


def train_in_a_thread(backend: tokenizers.Tokenizer, trainer: trainers.Trainer, texts: Iterable[str]) -> None:
    """Train beside the main thread, so that Ctrl-C ends it at once. Compiled code would keep it waiting until all is read and
    merged, for a gigabyte minutes."""
    given_up = threading.Event()
    failed: list[BaseException] = []

    def parts() -> Iterator[str]:
        for text in texts:
            if given_up.is_set():
                raise InterruptedError("nobody waits for this tokenizer any more")
            yield from in_parts(text)

    def train() -> None:
        try:
            backend.train_from_iterator(parts(), trainer)
        except BaseException as problem:
            failed.append(problem)

    thread = threading.Thread(target=train, name="tokenizer", daemon=True)
    thread.start()
    try:
        thread.join()
    finally:
        given_up.set()
    if failed:
        raise failed[0]


def in_parts(text: str) -> Iterator[str]:
    """A text, cut where it goes on for `LONGEST_RUN` characters with or without a space. The merges of one word take a time
    that grows with the square of its length."""
    start = 0
    for run in RUNS.finditer(text):
        if len(run[0]) == LONGEST_RUN:
            yield text[start : run.end()]
            start = run.end()
    if start < len(text):
        yield text[start:]


def from_folder(path: Path) -> Parts:
    """From a folder with a tokenizer.json, or that file."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer in {path}: it has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as problem:  # tokenizers raises bare Exception
        raise DataError(f"{file} is not a tokenizer: {_on_one_line(problem)}") from problem
    config = _read_json(file.with_name("special_tokens_map.json")) | _read_json(file.with_name("tokenizer_config.json"))
    bos, eos, pad = (_token_text(config.get(f"{name}_token")) for name in ("bos", "eos", "pad"))
    if pad is not None and backend.token_to_id(pad) is None:
        pad = None  # often named for tools that insist on one, and no part of the vocabulary
    jinja = file.with_name("chat_template.jinja")
    template = jinja.read_text(encoding="utf-8") if jinja.is_file() else _default_template(config)
    return Parts(backend, bos, eos, pad, template)


def from_gguf(metadata: dict[str, Any]) -> Parts:
    def of(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    tokens, merges, pre = of("tokens"), of("merges"), of("pre", "gpt-2")
    if metadata.get(WHOLE) is not None:
        return from_whole(metadata)
    if of("model") != "gpt2" or tokens is None or merges is None:
        raise DataError(
            f"the GGUF file holds a tokenizer of the kind {reprlib.repr(of('model'))}; "
            "only byte-level BPE ('gpt2') is read"
        )
    if not (_are(str, tokens) and _are(str, merges) and _are(int, of("token_type", [])) and isinstance(pre, str)):
        raise DataError("the GGUF file's tokenizer is malformed: tokens and merges must be texts, their types numbers")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        backend = tokenizers.Tokenizer(BPE(vocabulary, pairs, ignore_merges=takes_whole_words(pre)))
    except Exception as problem:  # tokenizers raises bare Exception
        raise DataError(f"the GGUF file's tokenizer is malformed: {_on_one_line(problem)}") from problem
    backend.normalizer, backend.pre_tokenizer = byte_level(pre)
    backend.decoder = decoders.ByteLevel()
    kinds = zip(tokens, of("token_type", []), strict=False)
    whole = [(token, kind) for token, kind in kinds if kind in (CONTROL, USER_DEFINED)]
    backend.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in whole])
    bos, eos, pad = _ends_of(metadata)
    # Where a file does not say, as llama.cpp has it.
    begin = bos if of("add_bos_token", takes_whole_words(pre)) else None
    end = eos if of("add_eos_token", False) else None
    if begin is not None or end is not None:
        backend.post_processor = _between(backend, begin, end)
    return Parts(backend, bos, eos, pad, metadata.get("tokenizer.chat_template"))


def from_whole(metadata: dict[str, Any]) -> Parts:
    """From a file that has the tokenizer.json too."""
    try:
        backend = tokenizers.Tokenizer.from_str(metadata[WHOLE])
    except Exception as problem:  # tokenizers raises bare Exception
        raise DataError(f"the GGUF file's {WHOLE} is not a tokenizer: {_on_one_line(problem)}") from problem
    bos, eos, pad = _ends_of(metadata)
    return Parts(backend, bos, eos, pad, metadata.get("tokenizer.chat_template"))


def _ends_of(metadata: dict[str, Any]) -> list[str | None]:
    """The tokens that begin, end and fill up texts."""
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    if not _are(str, tokens):
        raise DataError("the GGUF file's tokenizer is malformed: tokens must be texts")
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding"))
    return [_at(tokens, number) for number in ids]


def _between(backend: tokenizers.Tokenizer, begin: str | None, end: str | None = None) -> processors.PostProcessor:
    """Texts begin with one token and end with another."""
    known = [(token, backend.token_to_id(token)) for token in dict.fromkeys((begin, end)) if token is not None]
    around = lambda text: " ".join(part for part in (begin, text, end) if part is not None)
    return processors.TemplateProcessing(
        single=around("$A"), pair=f"{around('$A')} {around('$B')}", special_tokens=known
    )


def _on_one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:300]


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _at(tokens: list[str], number: Any) -> str | None:
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise DataError(f"the GGUF file names token {reprlib.repr(number)}, but has only {len(tokens)}")
    return tokens[number]


def _token_text(token: Any) -> str | None:
    """A special token in tokenizer_config.json is its text, or an object that has it."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise DataError(f"a special token of the tokenizer must be a text, not {reprlib.repr(text)}")
    return text


def _default_template(config: dict[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise DataError(f"the tokenizer's chat_template must be a text, not {reprlib.repr(template)}")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{path} is not JSON: {problem}") from problem
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold an object, not a {type(content).__name__}")
    return content
