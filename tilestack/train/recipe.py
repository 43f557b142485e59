"""The recipe: everything a training run is made of, as dataclasses, read from TOML plus `--set section.key=value`.

The words are the same in the file, on the command line and in the code, and `tilestack recipe` lists them. A recipe is
written back in full into the run's folder. What says which run it is (model, data, seed) cannot change when the run is
continued; what is operational can.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tilestack.train.settings import RecipeError, as_table, load_table, override, read, section, setting

R = TypeVar("R", bound="Recipe")
TRACKERS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class Run:
    """What the run is called, how long it is, and where and how its steps are executed."""

    name: str = setting("run", "what the run and its folder in runs/ are called", operational=True)
    steps: int = setting(1000, "updates to make", low=1, operational=True)
    seed: int = setting(0, "decides every random choice: weights, order of the data, samples", low=0)
    device: str = setting(
        "auto", "auto is the GPU where there is one", choices=("auto", "cpu", "cuda"), operational=True
    )
    backend: str = setting(
        "", "which implementations run the operators, as TILESTACK_BACKEND says it; empty is auto", operational=True
    )
    compile: str = setting(
        "off",
        "the mode of torch.compile",
        choices=("off", "default", "reduce-overhead", "max-autotune"),
        operational=True,
    )
    graph: str = setting(
        "auto",
        "whole steps as CUDA graphs: auto where they can be, and says why where not; on, or an error; off",
        choices=("auto", "on", "off"),
        operational=True,
    )
    activation_checkpointing: bool = setting(
        False, "compute activations again in the backward instead of keeping them", operational=True
    )
    deterministic: bool = setting(
        True,
        "the same bits in every run on one kind of GPU; attention's backward is slower for it",
        operational=True,
    )
    log_every: int = setting(
        10,
        "steps between lines of the log, the only ones at which the host waits for the device",
        low=1,
        operational=True,
    )
    skip_broken: int = setting(
        0, "steps with a loss or gradient that is not finite to pass over before the run stops", low=0, operational=True
    )
    trackers: tuple[str, ...] = setting(
        (),
        "programs that follow the figures too, where they are installed: tensorboard, wandb, trackio",
        operational=True,
    )

    def __post_init__(self) -> None:
        if unknown := [name for name in self.trackers if name not in TRACKERS]:
            raise RecipeError(f"run.trackers has no {', '.join(unknown)}; there are {', '.join(TRACKERS)}")


@dataclass(frozen=True)
class Model:
    """The model to train: a folder or file to start from, or the configuration of a new one in Hugging Face's words."""

    path: str = setting("", "the folder, .gguf file or known name of a model to start from")
    config: dict[str, Any] = setting(dict, "a new model in the words of a Hugging Face config.json")
    auxiliary_loss: float = setting(
        0.01, "weight of the loss that evens out the load of experts, a mean over layers", low=0, operational=True
    )
    z_loss: float = setting(
        0.001, "weight of the loss that keeps the logits of routers small, a mean over layers", low=0, operational=True
    )
    bias_rate: float = setting(
        0.0, "how fast routers that balance by a bias move it; 0.001 is usual", low=0, operational=True
    )

    def __post_init__(self) -> None:
        if self.path and self.config:
            raise RecipeError(
                "model.path and model.config exclude each other: start from a model, or describe a new one"
            )


@dataclass(frozen=True)
class Data:
    """What the model reads: a built-in corpus or files, and how they become batches of tokens."""

    corpus: str = setting(
        "python",
        "Python's own sources, with libraries those of PyTorch and what it stands on too, or files of one's own",
        choices=("python", "libraries", "files"),
    )
    files: tuple[str, ...] = setting((), "files and folders to read: text, JSONL, parquet, or hf:name")
    weights: tuple[float, ...] = setting((), "how much each of data.files counts in the mixture; empty is by its size")
    validation_files: tuple[str, ...] = setting((), "files to hold out, in place of the share data.validation")
    most_bytes: int = setting(0, "bytes of text to take; 0 takes all", low=0)
    validation: float = setting(0.02, "share of the documents that is held out; 0 holds out none", low=0, high=0.5)
    tokenizer: str = setting("", "a folder or file; empty takes the model's, or trains one on the corpus")
    vocabulary: int = setting(4096, "tokens of a tokenizer to train", low=257)
    tokens: str = setting("", "a folder for the tokens, which runs of the same texts share; empty is the run's own")
    sequence: int = setting(256, "tokens in a row", low=2)
    batch: int = setting(8, "rows in a micro-batch", low=1, operational=True)
    accumulate: int = setting(1, "micro-batches in a step", low=1, operational=True)

    def __post_init__(self) -> None:
        if self.corpus == "files" and not self.files:
            raise RecipeError('data.files must name at least one file or folder where data.corpus is "files"')
        if self.files and self.corpus != "files":
            raise RecipeError(f'data.files are given, but data.corpus is "{self.corpus}"; set data.corpus = "files"')
        if self.weights and len(self.weights) != len(self.files):
            raise RecipeError(
                f"data.weights are {len(self.weights)}, and data.files {len(self.files)}: give one for each"
            )
        if not all(0 < weight < math.inf for weight in self.weights):
            raise RecipeError("data.weights must be above 0; leave a file out of data.files instead")

    @property
    def holds_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.validation or self.validation_files)


@dataclass(frozen=True)
class Optimizer:
    """How gradients become updates. Muon steps hidden matrices with `muon_lr`, and AdamW the rest with `lr`."""

    name: str = setting(
        "adamw",
        "muon steps hidden matrices and leaves the rest to adamw",
        choices=("adamw", "adamw8bit", "sgd", "muon"),
    )
    lr: float = setting(1e-3, "the highest learning rate", above=0, operational=True)
    betas: tuple[float, ...] = setting((0.9, 0.95), "decays of AdamW's two moments", operational=True)
    eps: float = setting(1e-8, "what AdamW adds before it divides", above=0, operational=True)
    weight_decay: float = setting(
        0.1, "decay of matrices; norms, biases and embeddings are not decayed", low=0, operational=True
    )
    momentum: float = setting(0.9, "of sgd", low=0, high=1, operational=True)
    muon_lr: float = setting(0.02, "the highest learning rate of hidden matrices under muon", above=0, operational=True)
    muon_momentum: float = setting(0.95, "of muon", low=0, high=1, operational=True)
    muon_rule: str = setting(
        "original",
        "what muon_lr is multiplied by for a matrix: its shape's, or what gives updates the size of AdamW's",
        choices=("original", "match_rms_adamw"),
        operational=True,
    )
    clip: float = setting(1.0, "the global norm gradients are clipped to; 0 leaves them alone", low=0, operational=True)

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise RecipeError(f"optimizer.betas must be two numbers from 0 to below 1, not {list(self.betas)}")


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run, as a share of its highest: a linear warm-up, then a shape that ends at `final`."""

    name: str = setting(
        "cosine",
        "the shape after the warm-up; wsd is stable, then falls",
        choices=("cosine", "wsd", "linear", "constant"),
    )
    warmup: int = setting(0, "steps in which the rate rises", low=0)
    final: float = setting(0.1, "what the rate ends at, as a share of the highest", low=0, high=1)
    decay: float = setting(0.2, "the share of the steps after the warm-up in which wsd falls", above=0, high=1)


@dataclass(frozen=True)
class Precision:
    """float32 parameters may compute in bfloat16 under autocast. bfloat16 parameters need an optimizer that does not lose
    small updates: rounding at random, or a float32 master copy."""

    parameters: str = setting("float32", "of the weights", choices=("float32", "bfloat16"))
    compute: str = setting("float32", "of matrix products", choices=("float32", "bfloat16"), operational=True)
    updates: str = setting(
        "stochastic", "how bfloat16 parameters are updated", choices=("stochastic", "master", "nearest")
    )
    fp8: bool = setting(False, "matrix products of hidden layers in 8-bit floating point", operational=True)
    fp8_head: bool = setting(False, "with fp8, those of the head in train and sft too", operational=True)

    def __post_init__(self) -> None:
        if self.parameters == "bfloat16" and self.compute == "float32":
            raise RecipeError('precision.compute must be "bfloat16" where precision.parameters are')
        if self.fp8_head and not self.fp8:
            raise RecipeError("precision.fp8_head is for runs with precision.fp8; set that too")


@dataclass(frozen=True)
class Evaluation:
    """What is looked at on the way: loss on held-out text, and samples. 0 steps is never; the end is always looked at."""

    every: int = setting(0, "steps between evaluations; 0 evaluates at the end alone", low=0)
    at_start: bool = setting(False, "evaluate before the first step too, to see what the run changes")
    batches: int = setting(8, "micro-batches of held-out data in an evaluation", low=1)
    sample_every: int = setting(0, "steps between samples; 0 samples at the end alone", low=0)
    prompts: tuple[str, ...] = setting((), "texts that samples continue")
    sample_tokens: int = setting(64, "tokens of a sample", low=1)
    temperature: float = setting(0.8, "of samples; 0 takes the likeliest token", low=0)
    top_k: int = setting(50, "samples draw from so many of the likeliest tokens; 0 is all", low=0)


@dataclass(frozen=True)
class Checkpoint:
    every: int = setting(500, "steps between checkpoints; 0 saves at the end alone", low=0)
    keep: int = setting(2, "how many of the newest are kept", low=1)
    asynchronous: bool = setting(True, "write from a copy in memory while the next steps run")


@dataclass(frozen=True)
class Ema:
    decay: float = setting(
        0.0, "of an average of the weights that is evaluated and kept in their place; 0 is none", low=0, high=1
    )


@dataclass(frozen=True)
class Lora:
    """Adapters trained in place of the model, which stays as it is; see `tilestack.nn.lora`."""

    rank: int = setting(0, "rank of the adapters; 0 trains the model itself", low=0)
    alpha: float = setting(16.0, "what adapters are multiplied by, divided by their rank", above=0)
    dropout: float = setting(0.0, "share of an adapter's inputs that is dropped in training", low=0, high=0.9)
    targets: tuple[str, ...] = setting(("layers.*",), "patterns of the linear layers that get one")

    def __post_init__(self) -> None:
        usual = {field.name: field.default for field in fields(self)}
        if not self.rank and (set_ := [name for name in usual if getattr(self, name) != usual[name]]):
            raise RecipeError(
                f"lora.{set_[0]} has no meaning where lora.rank is 0, which trains the model itself; set lora.rank, such as 16"
            )


@dataclass(frozen=True)
class Parallel:
    """How the processes of a run share its work, where torchrun or --processes starts several. Those that `tensor`, `context`
    and `pipeline` leave train on other texts (data parallelism)."""

    tensor: int = setting(1, "processes that share every layer: heads, width of the feed-forward, words", low=1)
    expert: int = setting(
        1, "of the processes with other tokens, those that share the experts of a mixture, some for each", low=1
    )
    shard: bool = setting(
        False, "divide weights, gradients and optimizer states among processes with other texts (FSDP2)"
    )
    context: int = setting(1, "processes that share every row of tokens", low=1)
    context_by: str = setting(
        "heads",
        "how they meet in attention: each has all tokens for some heads, or keys and values go round in a ring",
        choices=("heads", "ring"),
    )
    pipeline: int = setting(1, "processes that have some of the layers each, one after another", low=1)
    schedule: str = setting(
        "1f1b",
        "how micro-batches follow one another through them: 1f1b keeps activations of few, gpipe of all, interleaved waits less",
        choices=("1f1b", "gpipe", "interleaved"),
    )

    @property
    def divides(self) -> bool:
        """Whether a process has only a part of the model."""
        return self.shard or self.tensor > 1 or self.pipeline > 1 or self.expert > 1


@dataclass(frozen=True)
class Recipe:
    """A pretraining run. Other kinds of run derive from it and add sections of their own."""

    run: Run = section(Run)
    model: Model = section(Model)
    data: Data = section(Data)
    optimizer: Optimizer = section(Optimizer)
    schedule: Schedule = section(Schedule, operational=True)
    precision: Precision = section(Precision)
    evaluation: Evaluation = section(Evaluation, operational=True)
    checkpoint: Checkpoint = section(Checkpoint, operational=True)
    ema: Ema = section(Ema)
    lora: Lora = section(Lora)
    parallel: Parallel = section(Parallel, operational=True)

    def __post_init__(self) -> None:
        if self.schedule.warmup >= self.run.steps:
            raise RecipeError(
                f"schedule.warmup ({self.schedule.warmup}) must be shorter than run.steps ({self.run.steps})"
            )
        half = self.precision.parameters == "bfloat16"
        if self.optimizer.name == "sgd" and half:
            raise RecipeError(
                'optimizer.name "sgd" loses small updates of bfloat16 parameters; '
                'set precision.parameters = "float32", with precision.compute = "bfloat16" for speed'
            )
        if self.optimizer.name == "muon" and half and self.precision.updates != "master":
            raise RecipeError(
                f'optimizer.name "muon" has no precision.updates = "{self.precision.updates}" for bfloat16 parameters; '
                'set precision.updates = "master"'
            )
        if self.parallel.divides:
            self._refuse_divided()
        if self.parallel.context > 1 and self.run.compile != "off":
            raise RecipeError(
                f'parallel.context = {self.parallel.context} does not go together with run.compile = "{self.run.compile}", whose '
                'graphs have no collectives; set run.compile = "off"'
            )

    def _refuse_divided(self) -> None:
        """Refuse what needs the whole of a parameter, where a process has a part of it."""
        sides = self.parallel
        tensor, stages = f"parallel.tensor = {sides.tensor}", f"parallel.pipeline = {sides.pipeline}"
        how = next(name for name, asked in (
            (tensor, sides.tensor > 1), ("parallel.shard", sides.shard), (stages, sides.pipeline > 1),
            (f"parallel.expert = {sides.expert}", sides.expert > 1),
        ) if asked)  # fmt: skip
        wholes = {
            'optimizer.name "muon", which turns whole matrices': self.optimizer.name == "muon"
            and (sides.shard or sides.tensor > 1),
            'optimizer.name "adamw8bit", whose blocks of states are not those of parameters': self.optimizer.name
            == "adamw8bit",
            "precision.fp8, whose scales are of whole weights": self.precision.fp8,
            f'run.compile = "{self.run.compile}", whose graphs have no collectives': self.run.compile != "off",
        }
        if found := [what for what, asked in wholes.items() if asked]:
            raise RecipeError(
                f"{how} does not go together with {'; nor with '.join(found)}. Processes that each have the "
                "whole model (parallel.tensor = 1, parallel.shard = false, parallel.pipeline = 1, parallel.expert = 1) can"
            )
        if sides.pipeline > 1 and self.lora.rank:
            raise RecipeError(
                f"{stages} does not go together with lora.rank = {self.lora.rank}: stages train all of their weights; set "
                "parallel.pipeline = 1, with parallel.shard or parallel.tensor to divide the model"
            )
        if sides.pipeline > 1 and sides.context > 1:
            raise RecipeError(
                f"{stages} does not go together with parallel.context = {sides.context}: stages hand on whole rows; set one of "
                "them to 1"
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
