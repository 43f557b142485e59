"""How a server behaves: who may ask, how much, and for how long. Every limit has a default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for; what is more is refused, and the answer names the limit."""

    body_bytes: int = 4 << 20
    upload_seconds: float = 30.0  # for the body to arrive
    request_seconds: float = 600.0  # from there to the end of the answer
    prompt_tokens: int | None = None  # None: as many as the model reads
    output_tokens: int = 4096  # for each answer; also what a chat may take that names no limit
    prompts: int = 64  # texts in one request for completions; of one for embeddings, those that are read at a time
    texts: int = 2048  # in one request for embeddings: as many as OpenAI takes, which clients count on
    choices: int = 16  # n and best_of, for each prompt
    stops: int = 16
    stop_characters: int = 256
    logprobs: int = 20  # likeliest tokens told in each place
    biases: int = 1024  # tokens with a logit bias
    messages: int = 2048
    tools: int = 128
    structure_characters: int = 65536  # of a JSON schema, a regular expression or a grammar
    stored: int = 1000  # responses that can be continued; with more, the oldest are forgotten
    stored_bytes: int = 64 << 20  # of JSON, of all of them together


@dataclass(frozen=True)
class ServerSettings:
    """What a person who starts a server decides."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None  # by which clients ask for the model; the engine's own when None
    api_key: str | None = field(default=None, repr=False)
    cors: tuple[str, ...] = ()  # origins of other sites whose pages may ask
    hosts: tuple[str, ...] = ()  # names by which the server may be addressed, besides its own
    drain: float = 30.0  # seconds that running requests are given once the server is told to end
    events_per_second: float = 1500.0  # of all streams together; tokens that come faster share an event
    retry_after: int = 1  # seconds after which a refused client may try again
    split_reasoning: bool = False  # give what a model writes between <think> and </think> as `reasoning_content`
    limits: Limits = field(default_factory=Limits)
    # What requests take that name no such value, as `engine.defaults.model_defaults` reads it; else OpenAI's defaults.
    sampling: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for origin in self.cors:
            parts = urlsplit(origin)
            if origin not in ("*", "null") and origin != f"{parts.scheme}://{parts.netloc}":
                raise ValueError(
                    f"{origin!r} is no origin as browsers name it, and none would be allowed; give scheme, host and port, such "
                    f"as https://example.org or http://localhost:3000, or * for all"
                )

    @property
    def known_hosts(self) -> frozenset[str] | None:
        """The Host headers that are answered; None for any. A server on the loopback interface answers to its own names
        only, so that a web site whose name is made to point here cannot read from it (DNS rebinding)."""
        if not self.hosts and self.host not in LOOPBACK:
            return None
        return frozenset(name.lower() for name in (*LOOPBACK, self.host, *self.hosts))
