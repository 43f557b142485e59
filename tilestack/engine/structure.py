"""Structured output: which tokens may come next so that the answer keeps its form. The work is done by llguidance."""

from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy

from tilestack.data import Tokenizer
from tilestack.engine.params import RequestError, Structure
from tilestack.extras import MissingExtra, install_command


class StructureFailed(RuntimeError):
    """A grammar that was begun with and became too large to go on with."""


class Matcher:
    """One answer's way through its grammar."""

    def __init__(self, matcher: Any, vocabulary: int):
        self.matcher, self.vocabulary = matcher, vocabulary

    @property
    def problem(self) -> str | None:
        """Why the grammar cannot be gone on with, if it cannot."""
        return self.matcher.get_error().splitlines()[0] if self.matcher.is_error() else None

    def allowed(self) -> numpy.ndarray:
        """A boolean for every token of the vocabulary: whether it may come next. None may where the grammar failed, since
        this is asked for many answers at a time, and one of them must not fail the others."""
        bits = numpy.frombuffer(self.matcher.compute_bitmask(), dtype=numpy.uint8)
        if self.matcher.is_error():
            return numpy.zeros(self.vocabulary, dtype=bool)
        return numpy.unpackbits(bits, count=self.vocabulary, bitorder="little").astype(bool)

    def accept(self, token: int) -> bool:
        """Take a step; false where the grammar ends, with this token or before it."""
        goes_on = not self.matcher.is_stopped() and self.matcher.consume_token(token) and not self.matcher.is_stopped()
        if self.problem:
            raise StructureFailed(f"the structure is too complex: {self.problem}")
        return goes_on


class Structures:
    """Grammars over one tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int, ends: Collection[int] = ()):
        """`ends` are the tokens that may end a text, the tokenizer's own among them."""
        self.tokenizer, self.vocabulary, self.ends = tokenizer, vocabulary, sorted(ends)

    @cached_property
    def library(self) -> Any:
        try:
            import llguidance
        except ModuleNotFoundError:
            raise MissingExtra(f"structured output needs llguidance: {install_command('server')}") from None
        return llguidance

    @cached_property
    def tokens(self) -> Any:
        assert self.tokenizer is not None
        return self.library.LLTokenizer(
            self.tokenizer.backend.to_str(), n_vocab=self.vocabulary, eos_token=self.ends or self.tokenizer.eos
        )

    def matcher(self, structure: Structure | None) -> Matcher | None:
        """The beginning of a grammar; a RequestError says what is wrong with it."""
        if structure is None:
            return None
        if self.tokenizer is None:
            raise RequestError("a structure is a form of text, and the engine has no tokenizer", "structure")
        make = self.library.LLMatcher
        try:
            if structure.kind == "regex":
                grammar = make.grammar_from_regex(structure.text)
            elif structure.kind == "grammar":
                grammar = make.grammar_from_lark(structure.text)
            else:
                schema = structure.text if structure.kind == "json_schema" else '{"type": "object"}'
                grammar = make.grammar_from_json_schema(schema)
        except ValueError as problem:
            raise RequestError(f"the {structure.kind} cannot be read: {problem}", "structure") from None
        matcher = make(self.tokens, grammar, log_level=0)  # else it writes to standard error itself
        if matcher.is_error():
            raise RequestError(f"the {structure.kind} cannot be read: {matcher.get_error()}", "structure")
        self.try_first_token(structure.kind, Matcher(matcher.deep_copy(), self.vocabulary))
        return Matcher(matcher, self.vocabulary)

    def try_first_token(self, kind: str, matcher: Matcher) -> None:
        """Refuse a grammar that fails as soon as it is used: how large it is, llguidance finds out only then."""
        allowed = matcher.allowed()
        if not allowed.any():
            raise RequestError(f"the {kind} allows no text: {matcher.problem or 'no token begins it'}", "structure")
        try:
            matcher.accept(int(allowed.argmax()))
        except StructureFailed as problem:
            raise RequestError(f"the {kind} cannot be used: {problem}", "structure") from None
