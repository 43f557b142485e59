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
DIGITS = {"qwen2": "", "llama-bpe": "{1,3}"}  # how many digits may share a token
ONE_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
PLAIN = ("gpt-2", "olmo", "phi-2")
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def byte_level(name: str) -> tuple[Any, Any]:
    """The normalizer and the pre-tokenizer of that name."""
    name = ALIASES.get(name, name)
    if name in DIGITS:
        split = pre_tokenizers.Split(Regex(WORDS.format(digits=DIGITS[name])), behavior="isolated")
        unsplit_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        normalizer = normalizers.NFC() if name == "qwen2" else None
        return normalizer, pre_tokenizers.Sequence([split, unsplit_bytes])
    split_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ONE_DIGIT:
        return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split_bytes])
    if name in PLAIN:
        return None, split_bytes
    known = sorted([*DIGITS, *ONE_DIGIT, *PLAIN, *ALIASES])
    raise DataError(f"no pre-tokenizer named {name!r}; known are {', '.join(known)}")
