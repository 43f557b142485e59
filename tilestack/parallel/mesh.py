"""Where each process of a run stands: a grid of ranks, and along each side of it a group that talks to each other.

    tensor 2, 8 processes            tensor 0   tensor 1
                            data 0 |  rank 0     rank 1        a row shares the weights of a model,
                            data 1 |  rank 2     rank 3        a column trains the same part of it
                            data 2 |  rank 4     rank 5        on different texts
                            data 3 |  rank 6     rank 7

Sides from the outermost to the innermost are pipeline, data, context and tensor, so that the ranks that talk most, those of
`tensor`, are neighbours on one machine. Ranks of `pipeline` have some layers each (stages.py). Ranks of `context` share the rows
of a text (sequence.py). To gradients it is all one whether ranks differ in rows or in parts of rows: `replicas` are the ranks of
data and context together.

`expert` is no side of its own: it divides the replicas into groups of neighbours that share the experts of a mixture (experts.py).
Those that have the same experts, one of each group, are `copies`:

    data 4, expert 2        copies 0   rank 0: experts 0, 1   rank 1: experts 2, 3
                            copies 1   rank 2: experts 0, 1   rank 3: experts 2, 3
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

T = TypeVar("T")
HOST_WORK = timedelta(days=1)  # that one process may do while the others wait, such as tokenising a corpus


@dataclass(frozen=True)
class Layout:
    """How many ranks each side of the grid has, from the outermost to the innermost."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1  # of the replicas, those that share the experts

    @classmethod
    def fit(cls, world: int, *, tensor: int = 1, context: int = 1, pipeline: int = 1, expert: int = 1) -> "Layout":
        """The layout of so many processes; those that the other sides leave are `data`."""
        each = tensor * context * pipeline
        if world % each:
            sides = {"tensor": tensor, "context": context, "pipeline": pipeline}
            asked = " · ".join(f"parallel.{name} = {size}" for name, size in sides.items() if size > 1)
            raise ValueError(
                f"{asked} needs a multiple of {each} processes, and there {'is' if world == 1 else 'are'} {world}; "
                f"start {max(1, world // each) * each} (--processes, or torchrun --nproc-per-node), or change the layout"
            )
        if (replicas := world // each * context) % expert:
            raise ValueError(
                f"parallel.expert = {expert} needs a multiple of {expert} processes that read other tokens, and there "
                f"{'is' if replicas == 1 else 'are'} {replicas}; start {expert * each // math.gcd(expert, context)} or a multiple "
                "of that (--processes, or torchrun --nproc-per-node), or change the layout"
            )
        return cls(pipeline=pipeline, data=world // each, context=context, tensor=tensor, expert=expert)

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    @property
    def replicas(self) -> int:
        """Ranks that train the same part of the model, on other rows or on other parts of rows."""
        return self.data * self.context

    @property
    def copies(self) -> int:
        """Ranks that have the same experts."""
        return self.replicas // self.expert

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, side) for side in SIDES)


SIDES = tuple(field.name for field in fields(Layout) if field.name != "expert")


class Mesh:
    """This process's place in a layout. Of one process, it is made without torch.distributed."""

    def __init__(self, layout: Layout = Layout(), device: torch.device | None = None):  # noqa: B008
        """With more than one process, the default process group must be there, as many as the layout has."""
        self.layout = layout
        self.devices = None
        if layout.world > 1:
            if layout.world != dist.get_world_size():
                raise ValueError(f"{layout} is of {layout.world} processes, and there are {dist.get_world_size()}")
            kind = (device or torch.device("cpu")).type
            self.devices = init_device_mesh(kind, layout.sizes, mesh_dim_names=SIDES)
            self.sides = {side: self.devices[side] for side in SIDES}
            both = self.devices["data", "context"]._flatten("replicas") if layout.context > 1 else self.devices["data"]
            self.sides["replicas"] = both  # data and context together
            if layout.expert > 1:
                grid = layout.pipeline, layout.copies, layout.expert, layout.tensor
                divided = init_device_mesh(kind, grid, mesh_dim_names=("stages", "copies", "expert", "parts"))
                self.sides |= {side: divided[side] for side in ("copies", "expert")}
            # Of the hosts, whatever the device: what is said here needs no GPU, and waits as long as it takes.
            self.hosts = dist.new_group(backend="gloo", timeout=HOST_WORK)

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.devices else 0

    @property
    def first(self) -> bool:
        """Whether this is the process that prints, logs and writes."""
        return self.rank == 0

    def size(self, side: str) -> int:
        return getattr(self.layout, side)

    def index(self, side: str) -> int:
        return self.sides[side].get_local_rank() if self.size(side) > 1 else 0

    def group(self, side: str) -> dist.ProcessGroup:
        return self.sides[side].get_group()

    def sum(self, tensor: Tensor, side: str) -> None:
        """Replace a tensor by its sum over the ranks of a side."""
        if self.size(side) > 1:
            dist.all_reduce(tensor, group=self.group(side))

    def sums(self, values: Mapping[str, Tensor], side: str) -> dict[str, Tensor]:
        """Numbers summed over the ranks of a side, in float64."""
        stacked = torch.stack([value.detach().double() for value in values.values()])
        self.sum(stacked, side)
        return dict(zip(values, stacked, strict=True))

    def share(self, items: Sequence[T], side: str) -> Sequence[T]:
        """This rank's part of items that all ranks of a side have: one after another, as even as can be."""
        index, ranks = self.index(side), self.size(side)
        return items[len(items) * index // ranks : len(items) * (index + 1) // ranks]

    def largest(self, number: int) -> int:
        """The largest of the numbers that the processes give."""
        if self.world == 1:
            return number
        given = torch.tensor(number)
        dist.all_reduce(given, dist.ReduceOp.MAX, self.hosts)
        return int(given)

    def wait_for_all(self) -> None:
        """Go on when every process has come here."""
        if self.world > 1:
            dist.barrier(self.hosts)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Inside, the first process has left before the others come: they find what it has put on the disk."""
        if not self.first:
            self.wait_for_all()
        yield
        if self.first:
            self.wait_for_all()

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, on the hosts of all, which give one of its shape."""
        if self.world > 1:
            dist.broadcast(tensor, 0, self.hosts)
        return tensor

    def texts(self, text: str, side: str | None = None) -> list[str]:
        """The texts that the ranks of a side give, or all ranks, in their order; none is empty. Every process asks."""
        if self.world == 1:
            return [text]
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self.from_every_rank(torch.tensor(len(mine)))]
        found = self.from_every_rank(torch.nn.functional.pad(mine, (0, max(sizes) - len(mine))))
        ranks = dist.get_process_group_ranks(self.group(side)) if side else range(self.world)
        return [found[rank][: sizes[rank]].numpy().tobytes().decode() for rank in ranks]

    def from_every_rank(self, tensor: Tensor) -> list[Tensor]:
        """Tensors of one shape on the hosts, one of each rank."""
        if self.world == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(found, tensor, self.hosts)
        return found
