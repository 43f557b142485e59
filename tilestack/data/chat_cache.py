"""Tokenised conversations kept on disk, so that a start after the first need not render and tokenise them again.

A file holds what came of some conversations, under a digest of all that it follows from: the conversations, the template
with its variables, and the tokenizer. What no longer follows from anything asked for is swept away.

    chats-<digest>.safetensors    ids, mask: of all sequences one after another; lengths of each; sequences per conversation
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tilestack.data.errors import DataError
from tilestack.files import whole_file

Masked = tuple[list[int], list[int]]  # ids of a sequence, and a mask of the answers in it
PREFIX = "chats-"


class ChatCache:
    """What came of conversations, in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.used: set[str] = set()

    def path(self, key: str) -> Path:
        return self.folder / f"{PREFIX}{key}.safetensors"

    def load(self, key: str) -> list[list[Masked]] | None:
        """The sequences of each conversation; None where they are not kept, or cannot be read."""
        self.used.add(self.path(key).name)
        try:
            kept = load_file(self.path(key))
            ids, mask, lengths, counts = (kept[name] for name in ("ids", "mask", "lengths", "sequences"))
        except (OSError, SafetensorError, KeyError):
            return None
        starts = [0, *accumulate(lengths.tolist())]
        sequences = [(ids[a:b].tolist(), mask[a:b].tolist()) for a, b in pairwise(starts)]
        firsts = [0, *accumulate(counts.tolist())]
        return [sequences[a:b] for a, b in pairwise(firsts)]

    def save(self, key: str, conversations: Sequence[Sequence[Masked]]) -> None:
        sequences = [sequence for each in conversations for sequence in each]
        joined = lambda column, dtype: np.array([x for sequence in sequences for x in sequence[column]], dtype=dtype)
        with whole_file(self.path(key)) as hidden:
            save_file(
                {
                    "ids": joined(0, np.int32),
                    "mask": joined(1, np.uint8),
                    "lengths": np.array([len(ids) for ids, _ in sequences], dtype=np.int64),
                    "sequences": np.array([len(each) for each in conversations], dtype=np.int64),
                },
                hidden,
            )

    def sweep(self) -> None:
        """Remove what was not asked for since this was made."""
        for path in self.folder.glob(f"{PREFIX}*.safetensors"):
            if path.name not in self.used:
                path.unlink()


def digest_of_chats(*about: Any) -> str:
    """The same for conversations, template and tokenizer from which the same follows."""
    try:
        return hashlib.blake2b(json.dumps(about).encode(), digest_size=16).hexdigest()
    except (TypeError, ValueError, RecursionError) as problem:
        raise DataError(f"a conversation must be what JSON can hold: {problem}") from problem
