"""How byte-level tokenizers cut text into words before they merge, by the names GGUF files give them.

Each is a pair: a normalizer or None, and a pre-tokenizer. Merges never cross the cuts, so two tokenizers with the same
vocabulary and other cuts give other ids.
"""

from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from tilestack.data.errors import DataError

# A contraction; letters with one leading symbol or space; digits; symbols up to the end of the line; white space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {"qwen2": "", "llama-bpe": "{1,3}", "dbrx": "{1,3}"}  # how many digits may share a token
MARKS = WORDS.replace(r"?\p{{L}}+", r"?[\p{{L}}\p{{M}}]+").replace(
    r"[^\s\p{{L}}\p{{N}}]", r"[^\s\p{{L}}\p{{M}}\p{{N}}]"
)
# Words that begin with capitals and go on in small letters, with a contraction or without.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (
    r"[^\r\n\p{L}\p{N}]?UPPER*LOWER+TAIL|[^\r\n\p{L}\p{N}]?UPPER+LOWER*TAIL|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = CASED.replace("UPPER", UPPER).replace("LOWER", LOWER)
PATTERNS = {name: WORDS.format(digits=digits) for name, digits in DIGITS.items()} | {
    "qwen35": MARKS.format(digits=""),
    "gpt-4o": CASED.replace("TAIL", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", "{1,3}"),
    "tekken": CASED.replace("TAIL", "").replace("DIGITS", ""),
}
WHOLE_WORDS = ("llama-bpe", "tekken")  # which take a word that is a token as it is, whatever the merges say
ONE_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
PLAIN = ("gpt-2", "olmo", "phi-2")
ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "smaug-bpe": "dbrx",
    "glm4": "dbrx",
    "chatglm-bpe": "dbrx",
    "llama4": "gpt-4o",
}


def takes_whole_words(name: str) -> bool:
    return ALIASES.get(name, name) in WHOLE_WORDS


def byte_level(name: str) -> tuple[Any, Any]:
    """The normalizer and the pre-tokenizer of that name."""
    name = ALIASES.get(name, name)
    if name in PATTERNS:
        split = pre_tokenizers.Split(Regex(PATTERNS[name]), behavior="isolated")
        unsplit_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        normalizer = normalizers.NFC() if name in ("qwen2", "qwen35") else None
        return normalizer, pre_tokenizers.Sequence([split, unsplit_bytes])
    split_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ONE_DIGIT:
        return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split_bytes])
    if name in PLAIN:
        return None, split_bytes
    known = sorted([*PATTERNS, *ONE_DIGIT, *PLAIN, *ALIASES])
    raise DataError(f"no pre-tokenizer named {name!r}; known are {', '.join(known)}")
