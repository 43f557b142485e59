"""One model served by several processes, each with its share of every layer (tensor.py).

    rank 0   requests ──► what to do before the next step, as JSON ──┐
             scheduler ─► its heads ──┐                              │
                                      ├─ sums: the same logits on all, so the same tokens
    rank 1   scheduler ─► its heads ──┘                              │
                 ▲───────────────────────────────────────────────────┘

Every process runs the same engine. What it does follows from the requests and cancellations and from the order in which they
came, so pages, batches and seeds agree without another word. Each step's orders carry a check sum of all tokens that the
first process has read, and how many answers it is at; one that differs stops everything rather than answer from two minds.

A step that fails on one process leaves the others in the middle of a sum. Nobody can go on from there: all requests end with
an error, and so does the group.
"""

import json
import os
import random
import signal
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tilestack import models
from tilestack.ahead.pool import JOBS_VARIABLE
from tilestack.data import Tokenizer
from tilestack.engine import EngineSettings
from tilestack.engine.engine import Engine, News
from tilestack.engine.messages import request_as_words, request_from_words
from tilestack.engine.runner import Step
from tilestack.engine.sequence import Request, Sequence
from tilestack.engine.settings import memory_for_pages
from tilestack.models import Decoder, ModelConfig
from tilestack.models.checkpoints import code_formats, config_of
from tilestack.nn import Linear
from tilestack.parallel.mesh import Mesh
from tilestack.parallel.processes import ProcessLost
from tilestack.parallel.tensor import (
    CannotSplit,
    Cut,
    cuts,
    split_decoder,
    what_cannot_split,
    what_does_not_divide,
)

AT_ONCE = 4096  # bytes of orders that one message brings; longer ones take a second
LENGTH = 8  # of them say how many there are
PATIENCE = timedelta(days=365)  # with a first process that has nothing to do
Order = list[Any]  # ["accept", request], ["cancel", id], ["warm up"], ["step", *state] or ["end"]


class Orders:
    """What the first process of all tells the others, over connections of the hosts' own."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def tell(self, orders: list[Order]) -> None:
        said = json.dumps(orders).encode()
        first = torch.zeros(AT_ONCE, dtype=torch.uint8)
        message = torch.frombuffer(bytearray(len(said).to_bytes(LENGTH, "little") + said), dtype=torch.uint8)
        first[: len(message)] = message[:AT_ONCE]
        dist.broadcast(first, 0, self.group)
        if len(message) > AT_ONCE:
            dist.broadcast(message[AT_ONCE:].clone(), 0, self.group)

    def hear(self) -> list[Order]:
        first = torch.empty(AT_ONCE, dtype=torch.uint8)
        dist.broadcast(first, 0, self.group)
        length = int.from_bytes(first[:LENGTH].numpy().tobytes(), "little")
        said = first[LENGTH : LENGTH + length]
        if (left := length - len(said)) > 0:
            rest = torch.empty(left, dtype=torch.uint8)
            dist.broadcast(rest, 0, self.group)
            said = torch.cat((said, rest))
        return json.loads(said.numpy().tobytes())


class SharedEngine(Engine):
    """An engine over a process's share of a model, which remembers what it read and whether a step was lost."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.seen = 0  # a check sum of all tokens that were read
        self.lost: Exception | None = None

    @property
    def state(self) -> list[int]:
        """In which all processes agree before a step: what was read, and how many answers that left."""
        return [self.seen, len(self.scheduler.running), len(self.scheduler.waiting)]

    def read(self, step: Step) -> list[News]:
        self.seen = zlib.crc32(array("q", step.read()).tobytes(), self.seen)
        return super().read(step)

    def fail(self, sequences: Iterable[Sequence], problem: Exception) -> list[News]:
        self.lost = self.lost or problem
        return super().fail([*self.scheduler.running, *self.scheduler.waiting], problem)

    def drop_everything(self) -> None:
        """A step was interrupted, as by Ctrl-C; the others are in the middle of it."""
        super().drop_everything()
        self.lost = self.lost or ProcessLost("a step was interrupted")


class LeadingEngine(SharedEngine):
    """The first process's engine, which requests come to; it has the others do what it does. Once a step is lost it takes
    nothing more."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.orders = Orders()
        self.untold: list[Order] = []

    def accept(self, request: Request) -> None:
        if self.lost is not None:
            raise ProcessLost("the processes that share the model have lost each other")
        if request.params.seed is None:  # which every process would draw for itself
            request.params = replace(request.params, seed=random.SystemRandom().getrandbits(63))
        super().accept(request)
        self.untold.append(["accept", request_as_words(request)])

    def cancel(self, id: str) -> list[News]:
        if id in self.requests:
            self.untold.append(["cancel", id])
        return super().cancel(id)

    def step(self) -> list[News]:
        self.tell(["step", *self.state])
        return super().step()

    def warm_up(self, report: Callable[[str, int, int], None]) -> None:
        """Let all prepare their steps."""
        self.tell(["warm up"])
        self.runner.warm_up(report)

    def fail_all(self, problem: Exception, finish: str = "error") -> list[News]:
        news = self.fail((), problem) if finish == "error" else []
        return [*news, *super().fail_all(problem, finish)]

    def tell(self, *last: Order) -> None:
        orders, self.untold = [*self.untold, *last], []
        self.orders.tell(orders)

    def close(self) -> None:
        """Let the others go. Where they are lost, they find the connection to this process closed as it ends."""
        if self.lost is None:
            self.tell(["end"])


def follow(engine: SharedEngine, orders: Orders) -> None:
    """Do what the first process says until it lets this one go. Signals are for that one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        for what, *given in orders.hear():
            if what == "accept":
                engine.accept(request_from_words(*given))
            elif what == "cancel":
                engine.cancel(*given)
            elif what == "warm up":
                engine.runner.warm_up(lambda *_: None)
            elif what == "step":
                if given != engine.state:
                    raise ProcessLost("two processes that share the model have drawn other tokens")
                engine.step()
                if engine.lost is not None:
                    raise engine.lost
            else:
                return


def load_shared(model: str | Path, settings: EngineSettings, mesh: Mesh, device: torch.device) -> SharedEngine:
    """This process's engine, over its share of a model by its name, folder or file; a LeadingEngine on the first."""
    refuse_settings(settings)
    config = config_of(model)
    refuse_model(model, config, mesh.size("tensor"))
    usual = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, settings.dtype or usual, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"no dtype {settings.dtype}; choose from float32, bfloat16, float16")
    taken = partial(take_share, cuts(config), mesh.index("tensor"), mesh.size("tensor"))
    decoder = models.load(model, dtype=dtype, device=device, filled=taken)
    split_decoder(decoder, mesh.group("tensor"))
    tokenizer = Tokenizer.load(model)
    tokenizer.check_against(config.vocabulary)
    return shared_engine(decoder, tokenizer, settings, mesh)


def take_share(shares: Mapping[str, Cut], rank: int, ranks: int, path: str, module: torch.nn.Module) -> None:
    """Keep of a module's own parameters what is this rank's."""
    for name, parameter in module.named_parameters(recurse=False):
        if cut := shares.get(f"{path}.{name}"):
            parameter.data = cut.part(parameter.data, rank, ranks).clone()
    if isinstance(module, Linear):
        module.out_features, module.in_features = module.weight.shape


def shared_engine(decoder: Decoder, tokenizer: Tokenizer | None, settings: EngineSettings, mesh: Mesh) -> SharedEngine:
    """The engine of a process that has its share of a decoder."""
    os.environ[JOBS_VARIABLE] = "1"  # to list kernels, a process would take steps that the others do not
    settings = replace(settings, decode="operators", graphs=bool(settings.graphs))
    if decoder.embedding.weight.is_cuda and settings.kv_memory is None:  # as many pages on all
        room = memory_for_pages(decoder, settings.step_tokens or 8192)
        settings = replace(settings, kv_memory=-mesh.largest(-room))
    kind = LeadingEngine if mesh.first else SharedEngine
    return kind(decoder, tokenizer, settings)


def refuse_settings(settings: EngineSettings) -> None:
    """Refuse what a shared engine has not; the message says what to leave out."""
    kinds = {
        "weights": settings.weights,
        "adapters": settings.adapters,
        "a model to speculate": settings.speculate not in (None, "lookup"),
        "batch_invariant": settings.batch_invariant,
        "decode=persistent": settings.decode == "persistent",
    }
    if found := [name for name, given in kinds.items() if given]:
        raise ValueError(f"processes that share a model do not take {' and '.join(found)}; leave that out")


def refuse_model(model: str | Path, config: ModelConfig, ranks: int) -> None:
    """Refuse a model that so many processes cannot share."""
    what = "layers whose weights are codes" if code_formats(model) else what_cannot_split(config)
    if what:
        raise CannotSplit(f"several processes cannot share {model}, which has {what}; serve it with one")
    if size := what_does_not_divide(config, ranks):
        fitting = [str(n) for n in range(2, config.kv_heads + 1) if not what_does_not_divide(config, n)]
        raise CannotSplit(
            f"{ranks} processes do not divide the {size}, of {model}; "
            + (f"{' or '.join(fitting)} would" if fitting else "serve it with one")
        )
