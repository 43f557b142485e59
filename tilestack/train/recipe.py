"""The recipe: everything a training run is made of, as dataclasses, read from TOML plus `--set section.key=value`.

The words are the same in the file, on the command line and in the code. A recipe is written back in full into the run's
folder; a run resumes only under the recipe it began with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tilestack.train.settings import RecipeError, as_table, load_table, override, read, setting

R = TypeVar("R", bound="Recipe")


@dataclass(frozen=True)
class Run:
    """What the run is called, how long it is, and where and how its steps are executed."""

    name: str = "run"
    steps: int = setting(1000, low=1)
    seed: int = setting(0, low=0)
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    backend: str = ""  # which implementations run the operators, as TILESTACK_BACKEND says it; empty is auto
    compile: str = setting("off", choices=("off", "default", "reduce-overhead", "max-autotune"))
    activation_checkpointing: bool = False
    deterministic: bool = True  # the same bits in every run on one kind of GPU; attention's backward is slower for it
    log_every: int = setting(10, low=1)  # the only steps at which the host waits for the device
    tensorboard: bool = False


@dataclass(frozen=True)
class Model:
    """The model to train: a folder or file to start from, or the configuration of a new one in Hugging Face's words."""

    path: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    auxiliary_loss: float = setting(0.01, low=0)  # weights of a mixture of experts' losses
    z_loss: float = setting(0.001, low=0)
    bias_rate: float = setting(0.001, low=0)  # how fast routers that balance by a bias move it

    def __post_init__(self) -> None:
        if self.path and self.config:
            raise RecipeError(
                "model.path and model.config exclude each other: start from a model, or describe a new one"
            )


@dataclass(frozen=True)
class Data:
    """What the model reads: a built-in corpus or files, and how they become batches of tokens."""

    corpus: str = setting("python", choices=("python", "files"))
    files: tuple[str, ...] = ()
    most_bytes: int = setting(0, low=0)  # of text to take; 0 takes all
    validation: float = setting(0.02, low=0, high=0.5)  # share of the documents that is held out
    tokenizer: str = ""  # a folder or file; empty trains one on the corpus
    vocabulary: int = setting(4096, low=257)  # of the tokenizer to train
    sequence: int = setting(256, low=2)
    batch: int = setting(8, low=1)  # sequences in a micro-batch
    accumulate: int = setting(1, low=1)  # micro-batches in a step

    def __post_init__(self) -> None:
        if self.corpus == "files" and not self.files:
            raise RecipeError('data.files must name at least one file or folder where data.corpus is "files"')
        if self.files and self.corpus != "files":
            raise RecipeError(f'data.files are given, but data.corpus is "{self.corpus}"; set data.corpus = "files"')


@dataclass(frozen=True)
class Optimizer:
    """How gradients become updates. Muon steps hidden matrices with `muon_lr`, and AdamW the rest with `lr`."""

    name: str = setting("adamw", choices=("adamw", "adamw8bit", "sgd", "muon"))
    lr: float = setting(1e-3, above=0)
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = setting(1e-8, above=0)
    weight_decay: float = setting(0.1, low=0)  # of matrices; norms, biases and embeddings are not decayed
    momentum: float = setting(0.9, low=0, high=1)  # of sgd
    muon_lr: float = setting(0.02, above=0)
    muon_momentum: float = setting(0.95, low=0, high=1)
    clip: float = setting(1.0, low=0)  # the global norm gradients are clipped to; 0 leaves them alone

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise RecipeError(f"optimizer.betas must be two numbers from 0 to below 1, not {list(self.betas)}")


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run, as a share of its highest: a linear warm-up, then a shape that ends at `final`."""

    name: str = setting("cosine", choices=("cosine", "wsd", "linear", "constant"))
    warmup: int = setting(0, low=0)  # steps
    final: float = setting(0.1, low=0, high=1)
    decay: float = setting(0.2, above=0, high=1)  # the share of the run in which wsd falls


@dataclass(frozen=True)
class Precision:
    """float32 parameters may compute in bfloat16 under autocast. bfloat16 parameters need an optimizer that does not lose
    small updates: rounding at random, or a float32 master copy."""

    parameters: str = setting("float32", choices=("float32", "bfloat16"))
    compute: str = setting("float32", choices=("float32", "bfloat16"))
    updates: str = setting("stochastic", choices=("stochastic", "master", "nearest"))  # for bfloat16 parameters
    fp8: bool = False  # matrix products of hidden layers in 8-bit floating point

    def __post_init__(self) -> None:
        if self.parameters == "bfloat16" and self.compute == "float32":
            raise RecipeError('precision.compute must be "bfloat16" where precision.parameters are')


@dataclass(frozen=True)
class Evaluation:
    """What is looked at on the way: loss on held-out text, and samples. 0 steps is never; the end is always looked at."""

    every: int = setting(0, low=0)
    batches: int = setting(8, low=1)
    sample_every: int = setting(0, low=0)
    prompts: tuple[str, ...] = ()
    sample_tokens: int = setting(64, low=1)
    temperature: float = setting(0.8, low=0)
    top_k: int = setting(50, low=0)


@dataclass(frozen=True)
class Checkpoint:
    every: int = setting(500, low=0)  # steps; 0 saves only at the end
    keep: int = setting(2, low=1)  # so many of the newest


@dataclass(frozen=True)
class Ema:
    decay: float = setting(0.0, low=0, high=1)  # 0 keeps no average; evaluations and the final model take it otherwise


@dataclass(frozen=True)
class Lora:
    """Adapters trained in place of the model, which stays as it is; see `tilestack.nn.lora`."""

    rank: int = setting(0, low=0)  # 0 trains the model itself
    alpha: float = setting(16.0, above=0)
    dropout: float = setting(0.0, low=0, high=0.9)
    targets: tuple[str, ...] = ("layers.*",)  # patterns of the linear layers that get one


@dataclass(frozen=True)
class Recipe:
    """A pretraining run. Other kinds of run derive from it and add sections of their own."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = field(default_factory=Precision)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    ema: Ema = field(default_factory=Ema)
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        if self.schedule.warmup >= self.run.steps:
            raise RecipeError(
                f"schedule.warmup ({self.schedule.warmup}) must be shorter than run.steps ({self.run.steps})"
            )
        if self.optimizer.name in ("sgd", "muon") and self.precision.parameters == "bfloat16":
            raise RecipeError(
                f'optimizer.name "{self.optimizer.name}" loses small updates of bfloat16 parameters; '
                'set precision.parameters = "float32", with precision.compute = "bfloat16" for speed'
            )

    @classmethod
    def load(cls: type[R], path: Path | str, overrides: Sequence[str] = ()) -> R:
        """A recipe from a TOML file, changed by `section.key=value` assignments."""
        table = load_table(Path(path))
        for assignment in overrides:
            override(table, assignment)
        return read(cls, table)

    def table(self) -> dict[str, Any]:
        return as_table(self)
