"""Data: tokenizers, token files, packed batches, chat templates and corpora that need no download; see docs/data.md."""

from tilestack.data import corpora, formats
from tilestack.data.baseline import Baselines, baselines
from tilestack.data.chat import CHATML, Conversation, Message
from tilestack.data.chat_cache import ChatCache
from tilestack.data.errors import DataError
from tilestack.data.packing import NO_LABEL, Batch, answer_labels, pack
from tilestack.data.readers import located, read, texts
from tilestack.data.stream import Packed
from tilestack.data.tokenizer import Tokenizer
from tilestack.data.tokens import TokenFile, write_tokens

__all__ = [
    "CHATML",
    "NO_LABEL",
    "Baselines",
    "Batch",
    "ChatCache",
    "Conversation",
    "DataError",
    "Message",
    "Packed",
    "TokenFile",
    "Tokenizer",
    "answer_labels",
    "baselines",
    "corpora",
    "formats",
    "located",
    "pack",
    "read",
    "texts",
    "write_tokens",
]
