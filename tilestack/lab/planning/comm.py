"""How fast processes talk to each other: collectives over sizes, each checked before it is timed.

Bandwidths are those of nccl-tests, so that figures compare. S is the larger of the buffers that a rank has, t the time of the
slowest rank, n the number of ranks:

    algorithm bandwidth   S / t
    bus bandwidth         S / t · what a link carries of each byte, which does not depend on n where links are the limit:
                          2 (n - 1) / n for all_reduce, (n - 1) / n for all_gather, reduce_scatter and all_to_all, 1 for send_recv

In send_recv every rank sends to the next and receives from the one before. all_to_all_uneven is what experts on several GPUs
need (parallel/experts.py): of n (n + 1) / 2 shares a rank keeps one, sends two to the next, three to the one after that, and so
on, so that a link carries 1 - 2 / (n (n + 1)) of each byte.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Newer versions of PyTorch have other names for the same, and warn of these.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ELEMENT = 4  # bytes of a float32
LARGEST = 1 << 40  # bytes; what fits is for the machine to say


class Call(NamedTuple):
    """A collective, ready to run: `run` fills `out`, which then has to be `expected`."""

    run: Callable[[], object]
    out: Tensor
    expected: Tensor


@dataclass(frozen=True)
class Collective:
    prepare: Callable[[int, dist.ProcessGroup, torch.device], Call]  # (elements of the larger buffer, …)
    carried: Callable[[int], float]  # by a link, of each byte, with n ranks
    parts: Callable[[int], int] = lambda n: n  # equal ones that a buffer is made of


class WrongResult(RuntimeError):
    """A collective that did not give what it should."""


def numbers(rank: int, count: int, device: torch.device) -> Tensor:
    """What a rank contributes: small whole numbers, whose sums are exact, and others on every rank."""
    return ((torch.arange(count, device=device) * 7 + rank * 13) % 31).float()


def numbers_of_all(group: dist.ProcessGroup, count: int, device: torch.device) -> Tensor:
    """The sum of what all ranks contribute."""
    total = torch.zeros(count, device=device)
    for rank in range(group.size()):
        total += numbers(rank, count, device)
    return total


def all_reduce(count: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    out = numbers(group.rank(), count, device)
    return Call(lambda: dist.all_reduce(out, group=group), out, numbers_of_all(group, count, device))


def all_gather(count: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    each = count // group.size()
    out = torch.empty(each * group.size(), device=device)
    mine = numbers(group.rank(), each, device)
    expected = torch.cat([numbers(rank, each, device) for rank in range(group.size())])
    return Call(lambda: GATHER(out, mine, group=group), out, expected)


def reduce_scatter(count: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    each = count // group.size()
    out = torch.empty(each, device=device)
    mine = numbers(group.rank(), each * group.size(), device)
    expected = numbers_of_all(group, each * group.size(), device)[group.rank() * each :][:each]
    return Call(lambda: SCATTER(out, mine, group=group), out, expected)


def all_to_all(count: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    each = count // group.size()
    out = torch.empty(each * group.size(), device=device)
    mine = numbers(group.rank(), each * group.size(), device)
    parts = [numbers(rank, each * group.size(), device)[group.rank() * each :][:each] for rank in range(group.size())]
    return Call(lambda: dist.all_to_all_single(out, mine, group=group), out, torch.cat(parts))


def all_to_all_uneven(count: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    rank, ranks = group.rank(), group.size()
    shares = ranks * (ranks + 1) // 2
    each = count // shares
    size = lambda sender, receiver: each * ((receiver - sender) % ranks + 1)
    start = lambda sender, receiver: sum(size(sender, before) for before in range(receiver))
    out, mine = torch.empty(count, device=device), numbers(rank, count, device)
    sent, received = ([size(rank, other) for other in range(ranks)], [size(other, rank) for other in range(ranks)])
    parts = [numbers(r, count, device)[start(r, rank) :][: size(r, rank)] for r in range(ranks)]
    return Call(lambda: dist.all_to_all_single(out, mine, received, sent, group=group), out, torch.cat(parts))


def send_recv(count: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    rank, ranks = group.rank(), group.size()
    after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    out, mine = torch.empty(count, device=device), numbers(rank, count, device)

    def run() -> None:
        calls = [dist.P2POp(dist.isend, mine, after, group), dist.P2POp(dist.irecv, out, before, group)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    return Call(run, out, numbers((rank - 1) % ranks, count, device))


COLLECTIVES = {
    "all_reduce": Collective(all_reduce, lambda n: 2 * (n - 1) / n),
    "all_gather": Collective(all_gather, lambda n: (n - 1) / n),
    "reduce_scatter": Collective(reduce_scatter, lambda n: (n - 1) / n),
    "all_to_all": Collective(all_to_all, lambda n: (n - 1) / n),
    "all_to_all_uneven": Collective(all_to_all_uneven, lambda n: 1 - 2 / (n * (n + 1)), lambda n: n * (n + 1) // 2),
    "send_recv": Collective(send_recv, lambda n: 1.0),
}


@dataclass(frozen=True)
class CollectiveTime:
    """How long a collective took at one size, and what that is in bandwidth."""

    collective: str
    bytes: int
    seconds: float
    algorithm_bandwidth: float  # bytes a second
    bus_bandwidth: float


def measure_collectives(
    names: Sequence[str], sizes: Sequence[int], repeats: int, group: dist.ProcessGroup, device: torch.device
) -> Iterator[CollectiveTime]:
    """Each collective at each size, on all ranks of a group alike."""
    for name in names:
        for size in sizes:
            yield measure_one(name, size, repeats, group, device)


def measure_one(name: str, size: int, repeats: int, group: dist.ProcessGroup, device: torch.device) -> CollectiveTime:
    ranks, collective = group.size(), COLLECTIVES[name]
    parts = collective.parts(ranks)
    count = max(size // ELEMENT // parts, 1) * parts  # as many elements in each
    call = collective.prepare(count, group, device)
    call.run()
    refuse_wrong(name, count, torch.equal(call.out, call.expected), group, device)
    call.out.zero_()  # which all_reduce adds up in, again and again
    call.run()
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    dist.barrier(group)
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call.run()
    synchronize()
    seconds = torch.tensor((time.perf_counter() - start) / repeats, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    moved, slowest = count * ELEMENT, float(seconds)
    return CollectiveTime(name, moved, slowest, moved / slowest, moved / slowest * collective.carried(ranks))


def refuse_wrong(name: str, count: int, right: bool, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise on all ranks where the result of one is wrong."""
    wrong = torch.zeros(group.size(), device=device)
    wrong[group.rank()] = not right
    dist.all_reduce(wrong, group=group)
    if ranks := wrong.nonzero().flatten().tolist():
        raise WrongResult(
            f"{name} of {count * ELEMENT:,} bytes is wrong on rank {', '.join(map(str, ranks))}; nothing was timed"
        )


def bytes_of_size(text: str) -> int:
    """Bytes of a size such as 64K, 1M or 4096."""
    found = re.fullmatch(r"([0-9]{1,15})([KMG]?)", text.strip().upper())
    size = int(found[1]) * UNITS[found[2]] if found else 0
    if not ELEMENT <= size <= LARGEST:
        raise ValueError(
            f"a size is a number of bytes from {ELEMENT}, with K, M or G (1024 of each other), not {text!r}"
        )
    return size


def collectives_named(names: Sequence[str]) -> list[str]:
    if unknown := [name for name in names if name not in COLLECTIVES]:
        raise ValueError(f"there is no collective {', '.join(unknown)}; choose from {', '.join(COLLECTIVES)}")
    return list(dict.fromkeys(names)) or list(COLLECTIVES)
