"""What a model must beat, in bits per byte: two compressors, and a 5-gram model of bytes.

The n-gram model interpolates by Witten and Bell: a context h that was followed n(h) times, by t(h) different bytes, trusts
itself with weight n(h) / (n(h) + t(h)) and leaves the rest to the context shortened by one byte,

    p(c | h) = (n(h, c) + t(h) p(c | h')) / (n(h) + t(h)),     p(c) = 1 / 256 where nothing is known.

Contexts of up to four bytes and the byte after them fit into an integer, so counting is sorting.
"""

import lzma
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

ORDER = 5


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of the same text under each."""

    zlib: float
    lzma: float
    five_gram: float


def baselines(train: Iterable[str], validation: Iterable[str]) -> Baselines:
    """Measure them on the validation texts. The 5-gram model learns from the training texts; the compressors know only
    what they compress."""
    seen, held_out = [text.encode() for text in train], [text.encode() for text in validation]
    whole = b"".join(held_out)
    if not whole:
        raise ValueError("there is no validation text to measure")
    per_byte = lambda compressed: 8 * len(compressed) / len(whole)
    return Baselines(
        zlib=per_byte(zlib.compress(whole, 9)),
        lzma=per_byte(lzma.compress(whole, preset=6)),
        five_gram=ngram_bits(seen, held_out),
    )


def ngram_bits(train: list[bytes], validation: list[bytes], order: int = ORDER) -> float:
    """Bits per byte of the validation texts under an n-gram model of the training texts."""
    known, asked = _ngrams(train, order), _ngrams(validation, order)
    probability = np.full(len(asked), 1 / 256)
    for length in range(1, order + 1):
        mask = np.uint64(256**length - 1)
        grams, gram_counts = np.unique(known & mask, return_counts=True)
        contexts, first = np.unique(grams >> np.uint64(8), return_index=True)
        followers = np.diff(np.append(first, len(grams)))  # different bytes after each context
        context_counts = np.add.reduceat(gram_counts, first) if len(first) else gram_counts
        seen = _look_up(grams, gram_counts, asked & mask)
        context = (asked & mask) >> np.uint64(8)
        total, kinds = _look_up(contexts, context_counts, context), _look_up(contexts, followers, context)
        blended = (seen + kinds * probability) / np.maximum(total + kinds, 1)
        probability = np.where(total > 0, blended, probability)
    return float(-np.log2(probability).mean())


def _ngrams(texts: list[bytes], order: int) -> np.ndarray:
    """Each byte of each text with those before it, as one integer; the byte itself is lowest, zeros stand before a text."""
    blank = bytes(order - 1)
    whole = np.frombuffer(b"".join(blank + text for text in texts), dtype=np.uint8).astype(np.uint64)
    grams = np.zeros(max(len(whole) - order + 1, 0), dtype=np.uint64)
    for back in range(order):
        grams |= whole[order - 1 - back : len(whole) - back] << np.uint64(8 * back)
    starts = np.cumsum([0] + [len(text) + order - 1 for text in texts])
    inside = np.ones(len(grams), dtype=bool)
    for start in starts[1:-1]:  # those that end in the zeros before the next text
        inside[start - order + 1 : start] = False
    return grams[inside]


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 where it is absent."""
    if not len(keys):
        return np.zeros(len(wanted), dtype=np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
