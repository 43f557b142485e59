"""Tokens as OpenAI's API tells them: a text, the bytes, and a log-probability. A token may be part of a character only."""

from functools import lru_cache
from typing import Any

from tilestack.data import Tokenizer
from tilestack.engine.outputs import TokenLogprob

LOWEST = -9999.0  # for minus infinity, which JSON cannot say


class TokenTexts:
    """What each token stands for; those asked for are remembered."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.byte_level = "ByteLevel" in repr(tokenizer.backend.decoder)
        self.special = tokenizer.backend.get_added_tokens_decoder()
        self.bytes_of = lru_cache(maxsize=65536)(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        word = self.tokenizer.backend.id_to_token(token)
        if word is not None and self.byte_level and token not in self.special:
            return bytes(alphabet()[letter] for letter in word)
        return self.tokenizer.decode([token], special=True).encode()

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")

    def chat(self, told: TokenLogprob) -> dict[str, Any]:
        """A token in a chat's `logprobs.content`."""
        top = [self._entry(token, logprob) for token, logprob in told.top]
        return self._entry(told.id, told.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text_of(token), "logprob": max(logprob, LOWEST), "bytes": list(self.bytes_of(token))}

    def echoed(self, ids: list[int]) -> str:
        """A prompt's ids as text, special ones too, but for a first that marks the beginning."""
        return self.tokenizer.decode(ids[1:] if ids[0] in self.special else ids, special=True)

    def first_text(self, token: int, echoed: str) -> str:
        """What a prompt's first token has in the text that is echoed: nothing where it was put before it."""
        text = self.text_of(token)
        return "" if token in self.special and not echoed.startswith(text) else text

    def completion(self, told: list[TokenLogprob | None], offset: int = 0, first: str = "") -> dict[str, Any]:
        """The `logprobs` of a completion; those of a prompt begin with its `first` token, which has none."""
        texts, offsets = [], []
        for each in told:
            texts.append(first if each is None else self.text_of(each.id))
            offsets.append(offset)
            offset += len(texts[-1])
        return {
            "tokens": texts,
            "token_logprobs": [None if each is None else max(each.logprob, LOWEST) for each in told],
            "top_logprobs": [None if each is None else self._likeliest(each) for each in told],
            "text_offset": offsets,
        }

    def _likeliest(self, told: TokenLogprob) -> dict[str, float]:
        pairs = [*told.top, (told.id, told.logprob)]
        return {self.text_of(token): max(logprob, LOWEST) for token, logprob in pairs}

    def prompt(self, told: list[TokenLogprob | None] | None) -> list[Any] | None:
        """`prompt_logprobs` in vLLM's shape: for each token of the prompt but the first, what could stand there by id."""
        return None if told is None else [None if each is None else self._by_id(each) for each in told]

    def _by_id(self, told: TokenLogprob) -> dict[str, Any]:
        pairs = dict([(told.id, told.logprob), *told.top])
        return {
            str(token): {"logprob": max(logprob, LOWEST), "decoded_token": self.text_of(token)}
            for token, logprob in pairs.items()
        }


@lru_cache(maxsize=1)
def alphabet() -> dict[str, int]:
    """The letters in which byte-level tokenizers write bytes: printable ones as they are, others from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
