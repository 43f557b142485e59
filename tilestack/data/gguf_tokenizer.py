"""A tokenizer in the words of a GGUF file (`tokenizer.*`), so that llama.cpp gives a text the ids that it had in training.

llama.cpp has two algorithms that go with our models, of which it has only the names and the tables of a file:

    gpt2    byte-level BPE: a text is cut into words in a way that has a name (`pre`), then pairs are merged, first merges first
    llama   SentencePiece: a space is ▁, and of all neighbours that together are a token those of the best score are merged

A way of cutting has the name of one that cuts alike; where none does, or the tables cannot say what a tokenizer does, that is
an error. The whole tokenizer.json is put beside them, as the format provides: llama.cpp passes it over, tilestack reads it.
"""

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenizers import pre_tokenizers

from tilestack.data.errors import DataError
from tilestack.data.pretokenizers import PATTERNS, byte_level, takes_whole_words
from tilestack.data.tokenizer_sources import CONTROL, USER_DEFINED, WHOLE

if TYPE_CHECKING:
    from tilestack.data.tokenizer import Tokenizer

NORMAL, UNKNOWN, UNUSED, BYTE = 1, 2, 5, 6
KNOWN_CUTS = (*PATTERNS, "smollm", "gpt-2")  # of names for the same way of cutting the first is taken
# Characters of every kind that patterns tell apart, for texts on which ways of cutting are compared.
KINDS = "aBǅʰ文\u0301\u0903ⅷ²47'-_/(€+🙂 \t\n\r\u00a0\u3000\x00\u200d"
CONTRACTIONS = ("'s", "'T", "'re", "'VE", "'m", "'ll", "'d", "s't", "X's", "don't", "’s")
# Tokens by whose texts llama.cpp knows by itself that they end an answer.
KNOWN_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>",
    "<EOT>", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
)  # fmt: skip
SPACE, SPACE_PIECE = " ", "▁"


@dataclass
class GGUFTokenizer:
    """The metadata, and what whoever uses the file should know."""

    metadata: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def to_gguf(tokenizer: "Tokenizer", vocabulary: int, ends: Sequence[int] = (), pre: str | None = None) -> GGUFTokenizer:
    """For a model that knows `vocabulary` tokens and ends its texts with any of `ends`. `pre` is the name of a way of cutting,
    where the tokenizer's own has none; ids may then differ."""
    described = json.loads(tokenizer.backend.to_str())
    model, notes = described["model"], list[str]()
    if model["type"] != "BPE":
        raise DataError(f"a tokenizer of the kind {model['type']} cannot be said in a GGUF file; BPE can")
    cutting = "ByteLevel" in json.dumps(described["pre_tokenizer"])
    tokens, types = tokens_of(tokenizer, vocabulary)
    if cutting:
        kind = byte_level_tables(tokenizer, described, pre, notes)
    else:
        kind = sentencepiece_tables(described, tokens, types, pre is not None, notes)
    said = {"tokens": tokens, "token_type": types} | kind | special_tokens(tokenizer, tokens, ends, notes)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    if tokenizer.template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.template
    if any(added[side] for added in described["added_tokens"] for side in ("lstrip", "rstrip")):
        notes.append("some special tokens take the spaces beside them, which llama.cpp leaves where they are")
    return GGUFTokenizer(metadata | {WHOLE: tokenizer.backend.to_str()}, notes)


def tokens_of(tokenizer: "Tokenizer", vocabulary: int) -> tuple[list[str], list[int]]:
    """Every id's token and its kind. llama.cpp wants as many as the model knows, and no two alike."""
    tokenizer.check_against(vocabulary)
    given = tokenizer.backend.get_vocab(with_added_tokens=True)
    named = {number: token for token, number in given.items()}
    unnamed = (f"[PAD{number}]" for number in itertools.count() if f"[PAD{number}]" not in given)
    tokens = [named[number] if number in named else next(unnamed) for number in range(vocabulary)]
    types = [NORMAL if number in named else UNUSED for number in range(vocabulary)]
    for number, added in tokenizer.backend.get_added_tokens_decoder().items():
        types[number] = CONTROL if added.special else USER_DEFINED
    if "" in given:
        raise DataError("the tokenizer has an empty token, which a GGUF file cannot hold")
    return tokens, types


def byte_level_tables(
    tokenizer: "Tokenizer", described: dict[str, Any], pre: str | None, notes: list[str]
) -> dict[str, Any]:
    model = described["model"]
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise DataError("the tokenizer marks where words go on or end, for which a GGUF file has no words")
    if not model["merges"]:
        raise DataError("the tokenizer merges nothing, and a GGUF file needs merges; train it with a larger vocabulary")
    name = pre or name_of_cutting(tokenizer.backend.pre_tokenizer, bool(model.get("ignore_merges")))
    if name is None:
        raise DataError(
            "no pre-tokenizer that llama.cpp knows cuts texts as this tokenizer does, so a text would have other ids there; "
            f"--pre NAME writes one all the same (such as {', '.join(KNOWN_CUTS)})"
        )
    normalizer = described["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC" and pre is None:
        raise DataError(
            f"the tokenizer rewrites texts before it reads them ({normalizer['type']}), which llama.cpp does not; "
            f"--pre {name} writes it all the same"
        )
    if normalizer is not None:
        notes.append(
            "llama.cpp does not compose characters (NFC) as the tokenizer does; most texts are composed already"
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"model": "gpt2", "pre": name, "merges": merges}


def name_of_cutting(cutting: pre_tokenizers.PreTokenizer, whole_words: bool) -> str | None:
    """The name of a pre-tokenizer that is the same, or cuts every probing text alike."""
    known = {name: byte_level(name)[1] for name in KNOWN_CUTS if takes_whole_words(name) == whole_words}
    for name, same in known.items():
        if same.__getstate__() == cutting.__getstate__():
            return name
    texts = probes()
    wanted = [cuts(cutting, text) for text in texts]
    alike = lambda other: all(cuts(other, text) == found for text, found in zip(texts, wanted, strict=True))
    return next((name for name, other in known.items() if alike(other)), None)


def cuts(cutting: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [piece for piece, _ in cutting.pre_tokenize_str(text)]


def probes() -> list[str]:
    """Texts on which two ways of cutting that differ in what they tell apart do so: all short sequences of kinds of
    characters, contractions between them, and long ones, the same every time."""
    short = ["".join(some) for length in (1, 2, 3) for some in itertools.product(KINDS, repeat=length)]
    words = [a + contraction + b for contraction in CONTRACTIONS for a in KINDS for b in KINDS]
    drawn = random.Random(0)
    long = ["".join(drawn.choices([*KINDS, *CONTRACTIONS, "12345678", "word", "    "], k=24)) for _ in range(2000)]
    return [*short, *words, *long]


def sentencepiece_tables(
    described: dict[str, Any], tokens: list[str], types: list[int], forced: bool, notes: list[str]
) -> dict[str, Any]:
    """Scores by which SentencePiece merges what the tokenizer's merges do, and in their order."""
    model = described["model"]
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in model["vocab"]]
    if not model.get("byte_fallback") or missing:
        raise DataError(
            "a BPE tokenizer neither of bytes nor with tokens for them (<0x00>, …) cannot be said in a GGUF file"
        )
    prefix = begins_with_space(described)
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    apart = {added["content"] for added in described["added_tokens"]}  # found in a text before anything is merged
    if not forced and (prefix is None or not merged_by_score(merges, model["vocab"], apart)):
        raise DataError(
            "the tokenizer is none that SentencePiece could have made, so a text would have other ids in llama.cpp; "
            "--pre default writes it all the same"
        )
    rank = {left + right: number for number, (left, right) in reversed(list(enumerate(merges)))}
    scores = [-float(rank[token]) if token in rank else -1e6 for token in tokens]
    for number, token in enumerate(tokens):
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            types[number] = BYTE
        if types[number] == USER_DEFINED:
            tokens[number] = token.replace(SPACE_PIECE, SPACE)  # these are looked for in the text itself
    said = {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix is not False}
    if model.get("unk_token") is not None:
        said["unknown_token_id"] = number = model["vocab"][model["unk_token"]]
        types[number] = UNKNOWN
    if len(set(tokens)) != len(tokens):
        raise DataError(
            "two of the tokenizer's tokens differ only in how they write a space; a GGUF file has one of them"
        )
    if prefix and (described["pre_tokenizer"] or {}).get("type") == "Metaspace":
        notes.append(
            "llama.cpp puts a space before every text and after every special token; the tokenizer only before a text that has none"
        )
    return said


def begins_with_space(described: dict[str, Any]) -> bool | None:
    """Whether a text begins with a ▁ of its own; None where spaces become something else than ▁."""
    normalizer, cutting = described["normalizer"] or {}, described["pre_tokenizer"] or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    replaced = {"type": "Replace", "pattern": {"String": SPACE}, "content": SPACE_PIECE}
    harmless = {"type": "Split", "pattern": {"String": SPACE}, "behavior": "MergedWithPrevious", "invert": False}
    if cutting in ({}, harmless) and steps == [{"type": "Prepend", "prepend": SPACE_PIECE}, replaced]:
        return True
    if cutting in ({}, harmless) and steps == [replaced]:
        return False
    if not steps and cutting.get("type") == "Metaspace" and cutting["replacement"] == SPACE_PIECE:
        return None if cutting.get("split") else cutting["prepend_scheme"] != "never"
    return None


def merged_by_score(merges: Sequence[tuple[str, ...]], vocabulary: dict[str, int], apart: set[str]) -> bool:
    """Whether merges are those of a vocabulary with scores: all ways to make a token of two follow each other."""
    made = [left + right for left, right in merges if left + right not in apart]
    if len([token for token, _ in itertools.groupby(made)]) != len(set(made)):
        return False
    known = set(merges)
    splits = ((token[:cut], token[cut:]) for token in set(made) for cut in range(1, len(token)))
    return all((a, b) in known for a, b in splits if a in vocabulary and b in vocabulary)


def special_tokens(
    tokenizer: "Tokenizer", tokens: Sequence[str], ends: Sequence[int], notes: list[str]
) -> dict[str, Any]:
    """Ids, and what is put around a text. llama.cpp ends at the ends that it knows, one more of its own name and another."""
    known = (number for number in (tokenizer.eos, *ends) if number is not None and 0 <= number < len(tokens))
    all_ends = list(dict.fromkeys(known))
    if not all_ends:
        raise DataError(
            "neither the tokenizer nor the model says which token ends a text, and llama.cpp would take any"
        )
    others = [number for number in all_ends[1:] if tokens[number] not in KNOWN_ENDS]
    said: dict[str, Any] = {"eos_token_id": all_ends[0]}
    said |= dict(zip(("eot_token_id", "eom_token_id"), others, strict=False))
    for number in others[2:]:
        notes.append(f"llama.cpp does not end at {tokens[number]}, which ends a text too: it has no place for a fourth")
    before, behind = around(tokenizer)
    bos = before[0] if before else tokenizer.bos
    said |= {} if bos is None else {"bos_token_id": bos}
    said |= {} if tokenizer.pad is None else {"padding_token_id": tokenizer.pad}
    if len(before) > 1 or behind not in ([], all_ends[:1]):
        raise DataError("the tokenizer puts more around a text than a begin and an end token, which llama.cpp cannot")
    said |= {"add_bos_token": bool(before), "add_eos_token": bool(behind)}
    if before and tokenizer.template is not None and not chat_begins_with(tokenizer, before[0]):
        said["add_bos_token"] = False
        begin = tokens[before[0]]
        notes.append(
            f"a conversation begins without {begin}, so llama.cpp is told to add none; a plain text begins with it in tilestack, "
            "and for llama.cpp you have to write it there yourself"
        )
    return said


def around(tokenizer: "Tokenizer") -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text."""
    bare, whole = tokenizer.encode("a", bare=True), tokenizer.encode("a")
    start = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def chat_begins_with(tokenizer: "Tokenizer", token: int) -> bool:
    try:
        text = tokenizer.chat([{"role": "user", "content": "a"}], add_generation_prompt=True)
    except DataError:  # a template that wants other conversations; its model's tokenizer begins as it says
        return True
    return tokenizer.encode(text, bare=True)[:1] == [token]
