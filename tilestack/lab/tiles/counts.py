"""What kernels moved, counted: a row for each launch, tensor and kind of access, and what the operator has to move."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tilestack.lab.labels import case_label, dtype_name
from tilestack.lab.tiles.steps import Launch, Recording
from tilestack.lab.units import in_bytes

NOTABLE = 1.5  # times an element is touched, and times the sectors that had to be, from which on they are coloured


@dataclass(frozen=True)
class Count:
    """All accesses of a kind to a tensor in a launch."""

    launch: int
    kernel: str
    tensor: str
    kind: str
    steps: int
    asked: int  # bytes, of all lanes that are on
    distinct: int  # bytes of the elements that were touched so at all
    times: float  # that an element which was touched was touched on average
    masked: float  # share of the lanes
    sectors: int
    fewest: int
    outside: int  # lanes

    @property
    def efficiency(self) -> float:
        """The share of the sectors' bytes that the requests had to have."""
        return self.fewest / self.sectors if self.sectors else 1.0


def counts_of(recording: Recording) -> list[Count]:
    return [count for number, launch in enumerate(recording.launches, 1) for count in counts_of_launch(number, launch)]


def counts_of_launch(number: int, launch: Launch) -> list[Count]:
    """In the order of the kernel's arguments."""
    found = []
    for (place, kind), tally in sorted(launch.tallies.items()):
        region = launch.regions[place]
        touched = launch.touches[place, kind]
        elements = int((touched > 0).sum())
        found.append(
            Count(
                launch=number,
                kernel=launch.kernel,
                tensor=region.name,
                kind=kind,
                steps=tally.steps,
                asked=tally.asked,
                distinct=elements * region.itemsize,
                times=float(touched.sum() / elements) if elements else 0.0,
                masked=tally.masked / tally.lanes if tally.lanes else 0.0,
                sectors=tally.sectors,
                fewest=tally.fewest,
                outside=tally.outside,
            )
        )
    return found


def bytes_needed(recording: Recording) -> int:
    """The bytes that the operator cannot avoid to move, by its own cost."""
    return int(recording.claim.operator.cost(recording.arguments, recording.claim.direction)[1])


def call_in_words(recording: Recording) -> str:
    claim = recording.claim
    dtype = dtype_name(claim.dtype)
    label = case_label(claim.operator.name, claim.case.name)
    layout = "" if claim.variant == "plain" else f" · {claim.variant}"
    return f"{claim.operator.name} · {claim.implementation.backend} · {claim.direction} · {label} · {dtype}{layout}"


def as_json(recording: Recording) -> dict[str, Any]:
    """The call, its bytes, and every count."""
    claim, counts = recording.claim, counts_of(recording)
    return dict(
        op=claim.operator.name,
        backend=claim.implementation.backend,
        case=claim.case.name,
        dtype=dtype_name(claim.dtype),
        direction=claim.direction,
        layout=claim.variant,
        error=recording.error,
        asked=sum(count.asked for count in counts),
        needed=bytes_needed(recording),
        launches=[
            dict(kernel=launch.kernel, grid=list(launch.grid), programs=launch.executed)
            for launch in recording.launches
        ],
        counts=[asdict(count) for count in counts],
    )


def total_in_words(recording: Recording) -> str:
    """What was asked for in all, beside what the operator has to move."""
    asked = sum(count.asked for count in counts_of(recording))
    needed = bytes_needed(recording)
    times = f", {asked / needed:.2f}× what the operator has to move ({in_bytes(needed)})" if needed else ""
    return f"{in_bytes(asked)} asked for{times}"


def render_counts(recording: Recording) -> Group:
    """A table for each launch, which fits into eighty columns."""
    counts = counts_of(recording)
    outside = ["outside"] * any(count.outside for count in counts)
    shown: list[Any] = [Text(call_in_words(recording), "bold")]
    for number, launch in enumerate(recording.launches, 1):
        grid = "×".join(str(size) for size in launch.grid if size > 1) or "1"
        table = Table("tensor", "access", box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ["asked for", "distinct", "each", "masked", "sectors", "needed", *outside]:
            table.add_column(column, justify="right")
        for count in (count for count in counts if count.launch == number):
            table.add_row(*cells(count)[: len(table.columns)])
        shown += ["", Text.assemble((launch.kernel, "bold cyan"), f" on {grid} program{'s' * (grid != '1')}"), table]
    return Group(*shown, "")


def cells(count: Count) -> list[Text]:
    """A row of the table; what stands out is coloured: elements touched more than once, sectors of which much is unwanted."""
    return [
        Text(count.tensor),
        Text(count.kind),
        Text(in_bytes(count.asked)),
        Text(in_bytes(count.distinct)),
        Text(f"{count.times:.2f}×", "yellow" * (count.times > NOTABLE)),
        Text(f"{count.masked:.0%}"),
        Text(f"{count.sectors:,}"),
        Text(f"{count.efficiency:.1%}", "red" * (count.efficiency * NOTABLE < 1)),
        Text(f"{count.outside:,}", "red" * (count.outside > 0)),
    ]
