"""A tokenizer: byte-level BPE of our own making, or whatever a Hugging Face folder or a GGUF file holds.

The work is done by `tokenizers`; this class adds what a model needs around it: which tokens begin and end a text, the
chat template, and a fingerprint by which token files and checkpoints know their tokenizer.
"""

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tilestack import models
from tilestack.data import gguf_tokenizer, tokenizer_sources
from tilestack.data.chat import CHATML, Conversation, Message, render, render_answers
from tilestack.data.chat_cache import ChatCache, digest_of_chats
from tilestack.data.errors import DataError
from tilestack.data.tokenizer_sources import END_OF_TEXT, TURN_END, TURN_START

# Tokens that end a turn or a text in the models of today, whichever of them a tokenizer calls its end token.
ENDS = (TURN_END, "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", END_OF_TEXT, "<|end_of_text|>")
# Words, numbers, scripts, white space and a symbol of four bytes: what pre-tokenizers disagree about.
PROBE = "The 1234 rows' sum isn't 5.67e-8:\n\n\t\tif x_y == 'naïve':  # 漢字 кот 🙂\r\n        return [None]*10   \n"


class Tokenizer:
    """Text to token ids and back. `bos`, `eos` and `pad` are ids, or None where the tokenizer has no such token.

    `template` is the chat template of a model that was taught one; None says that it was not. Conversations are then
    written in ChatML, and `for_chat` is the tokenizer to save with a model that has learned from them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos: str | None = None,
        eos: str | None = None,
        pad: str | None = None,
        template: str | None = None,
    ):
        backend.no_padding()
        backend.no_truncation()
        self.backend, self.template = backend, template
        self.chat_cache: ChatCache | None = None  # where conversations are kept once they are tokenised
        self.bos, self.eos, self.pad = (self._id_of(token) for token in (bos, eos, pad))

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> "Tokenizer":
        """Byte-level BPE learned from texts. Every text begins with <|endoftext|>, the token that also ends documents."""
        return cls(**vars(tokenizer_sources.trained(texts, vocabulary)))

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """From a Hugging Face folder or its tokenizer.json, a .gguf file, or the name of a model that `models.load` knows."""
        file = Path(path) if Path(path).exists() else models.locate(path)
        if file.suffix == ".gguf":
            return cls.from_gguf(models.gguf.GGUF(file).metadata)
        return cls(**vars(tokenizer_sources.from_folder(file)))

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any]) -> "Tokenizer":
        """From a GGUF file's metadata (`tokenizer.*`): byte-level BPE, as Llama 3, Qwen, GPT-2 and SmolLM have it, or
        whatever `to_gguf` put there."""
        return cls(**vars(tokenizer_sources.from_gguf(metadata)))

    def to_gguf(
        self, vocabulary: int, ends: Sequence[int] = (), pre: str | None = None
    ) -> gguf_tokenizer.GGUFTokenizer:
        """The same the other way, for `models.save_gguf`: of a model that knows `vocabulary` tokens and ends its texts with any
        of `ends`. `pre` names a pre-tokenizer of llama.cpp where none is known to cut texts alike."""
        return gguf_tokenizer.to_gguf(self, vocabulary, ends, pre)

    def save(self, folder: str | Path) -> None:
        """Write what `load` and `transformers.AutoTokenizer` open."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 1 << 30,
            "clean_up_tokenization_spaces": False,
        }
        config |= {f"{name}_token": token for name, token in self._named().items() if token is not None}
        self.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        jinja = folder / "chat_template.jinja"
        if self.template is None:
            jinja.unlink(missing_ok=True)
        else:
            jinja.write_text(self.template, encoding="utf-8")

    def to_json(self) -> str:
        """All of it in one text, for another process; `from_json` reads it."""
        return json.dumps({"backend": self.backend.to_str(), "template": self.template, **self._named()})

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        named = json.loads(text)
        return cls(tokenizers.Tokenizer.from_str(named.pop("backend")), **named)

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        """Ids of a text, with what the tokenizer puts around it (a begin token) unless `bare`. Special tokens written in
        the text are read as such."""
        if not isinstance(text, str):
            raise TypeError(f"a text must be a str, not {type(text).__name__}")
        try:
            return self.backend.encode(text, add_special_tokens=not bare).ids
        except TypeError:
            text.encode()  # half of a surrogate pair, which a str can hold and a text cannot; this error says where
            raise

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of whole documents for training, on all cores: begun as `encode` does, ended by `eos`. Special tokens that
        stand in a text are only text here: a document cannot end itself."""
        ends_itself = self.encode("a")[-1:] == [self.eos]
        end = [] if self.eos is None or ends_itself else [self.eos]
        return [encoded.ids + end for encoded in self._literal.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; special tokens are left out unless asked for."""
        return self.backend.decode(list(ids), skip_special_tokens=not special)

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **variables: Any) -> str:
        """A conversation as the model reads it; `variables` go to the template."""
        given = self._template_tokens() | variables
        self._refuse_lost_tools(bool(variables.get("tools")))
        return render(self._template(), messages, add_generation_prompt=add_generation_prompt, **given)

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template looks at a variable, such as `tools`; what it does not is lost without a word."""
        return variable in self._template()

    def chat_ids(
        self, conversations: Sequence[Conversation], *, last_only: bool = False, **variables: Any
    ) -> list[list[tuple[list[int], list[int]]]]:
        """What is to be learned from each conversation: ids, and a mask that is 1 on the assistant's answers, their end
        tokens included. Most conversations are one sequence; those that the template writes differently as they grow are
        several. With `last_only` each is one, of which only the last answer is marked. What is in `chat_cache` is taken
        from there, and what is not is put there."""
        given = self._template_tokens() | variables
        self._refuse_lost_tools(any(each.tools for each in conversations))
        key = ""
        if self.chat_cache:
            asked = [(each.messages, each.tools, each.given) for each in conversations]
            key = digest_of_chats(self.fingerprint, self._template(), given, last_only, asked)
            if (kept := self.chat_cache.load(key)) is not None:
                return kept
        rendered = render_answers(self._template(), conversations, last_only=last_only, **given)
        texts = [each.text for sequences in rendered for each in sequences]
        encoded = iter(self.backend.encode_batch(texts, add_special_tokens=False))
        found = [[_with_mask(next(encoded), each.answers) for each in sequences] for sequences in rendered]
        if self.chat_cache:
            self.chat_cache.save(key, found)
        return found

    def _refuse_lost_tools(self, given: bool) -> None:
        if given and not self.template_reads("tools"):
            raise DataError(
                'the chat template takes no tools, and a conversation comes with some under "tools"; use a template that '
                "does (data.chat_template), or leave them out"
            )

    def for_chat(self, template: str | None = None) -> "Tokenizer":
        """The tokenizer of a model that is taught to chat: with the template given or else in use, and with what ends an
        answer as its end token, as chat models have it."""
        named = self._named() | {"template": self._template() if template is None else template}
        made = Tokenizer(self.backend, **named)
        if made.answer_end is not None and "eos_token" not in str(made.template):
            made.eos = made.answer_end
        return made

    @cached_property
    def answer_end(self) -> int | None:
        """The special token that ends an answer in the chat template, where there is one and it can be told."""
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            (((ids, mask),),) = self.chat_ids([Conversation(probe)], last_only=True)
        except DataError:  # a template that asks for answers otherwise than it writes them still serves for prompts
            return None
        last = [token for token, answered in zip(ids, mask, strict=True) if answered][-1]
        added = self.backend.get_added_tokens_decoder().get(last)
        return last if added is not None and added.special else None

    @property
    def vocabulary(self) -> int:
        """How many ids there are, special tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids that end a text or an answer: generation stops at any of them."""
        turns = [self.backend.token_to_id(token) for token in ENDS]
        return tuple(dict.fromkeys(token for token in (self.eos, *turns) if token is not None))

    @cached_property
    def token_bytes(self) -> list[int]:
        """How many bytes of text each id stands for, 0 for special tokens: by them a loss becomes bits per byte."""
        added = self.backend.get_added_tokens_decoder()
        byte_level = "ByteLevel" in repr(self.backend.decoder)
        return [
            _bytes_of(self.backend.id_to_token(number), added.get(number), byte_level)
            for number in range(self.vocabulary)
        ]

    @cached_property
    def fingerprint(self) -> str:
        """The same for tokenizers that give the same ids: of the vocabulary, the end token, and a probing text's ids."""
        vocabulary = sorted(self.backend.get_vocab(with_added_tokens=True).items(), key=lambda entry: entry[1])
        content = json.dumps([vocabulary, self.eos, self.encode(PROBE)], ensure_ascii=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def same_ids(self, other: "Tokenizer") -> bool:
        """Whether both give a text the same ids, whatever token they call its end."""
        known = [each.backend.get_vocab(with_added_tokens=True) for each in (self, other)]
        return known[0] == known[1] and self.encode(PROBE, bare=True) == other.encode(PROBE, bare=True)

    def check_against(self, vocabulary_size: int) -> None:
        """Refuse a model that has no embedding for some of the ids."""
        highest = max(self.backend.get_vocab(with_added_tokens=True).values())
        if highest >= vocabulary_size:
            raise DataError(
                f"the tokenizer does not match the model: its ids go up to {highest}, the model knows {vocabulary_size} "
                f"tokens. Use the tokenizer that came with the model, or a model with vocab_size ≥ {highest + 1}"
            )

    def _id_of(self, token: str | None) -> int | None:
        number = None if token is None else self.backend.token_to_id(token)
        if token is not None and number is None:
            raise DataError(f"the tokenizer's special token {token!r} is not in its vocabulary")
        return number

    def _named(self) -> dict[str, str | None]:
        ids = {"bos": self.bos, "eos": self.eos, "pad": self.pad}
        return {name: None if number is None else self.backend.id_to_token(number) for name, number in ids.items()}

    def _template(self) -> str:
        if self.template is not None:
            return self.template
        if None in (self.backend.token_to_id(TURN_START), self.backend.token_to_id(TURN_END)):
            raise DataError(
                f"the tokenizer has no chat template, and ChatML, the usual one, needs {TURN_START} and {TURN_END} in the "
                "vocabulary: this is not a chat model. Give it a template of its own (data.chat_template in a recipe)"
            )
        return CHATML

    def _template_tokens(self) -> dict[str, str]:
        return {f"{name}_token": token or "" for name, token in self._named().items()}

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same tokenizer, to which special tokens in a text are text."""
        literal = tokenizers.Tokenizer.from_str(self.backend.to_str())
        literal.encode_special_tokens = True
        return literal


def _with_mask(encoded: tokenizers.Encoding, spans: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Ids, and 1 for those that have a part in one of the spans of characters: where a token begins with the space before an
    answer, it is the answer's, whose first word would not be learned else."""
    mask = [0] * len(encoded.ids)
    starts, ends = zip(*encoded.offsets, strict=True) if encoded.ids else ((), ())
    for first, end in spans:
        begin, after = bisect_right(ends, first), bisect_left(starts, end)
        mask[begin:after] = [1] * (after - begin)
    return encoded.ids, mask


def _bytes_of(token: str | None, added: AddedToken | None, byte_level: bool) -> int:
    if token is None or (added and added.special):
        return 0
    if byte_level and not added:
        return len(token)  # in its alphabet a character is a byte
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return 1  # how SentencePiece writes a byte
    return len(token.replace("▁", " ").encode())
