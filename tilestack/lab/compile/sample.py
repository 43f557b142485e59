"""A sample of what many calls launch: every kernel, in the few specialisations that are likeliest to fail a gate."""

from collections.abc import Iterable

from tilestack.lab.compile.absent_gpu import TENSOR_CORES, Call, KernelReport, compiled_kernels, launches_of
from tilestack.lab.compile.launches import Launch, cover, largest_launches
from tilestack.lab.compile.spills import SPILLS_OWED
from tilestack.lab.labels import dtype_name

Walk = list[tuple[Call, list[Launch]]]


def walk(calls: Iterable[Call]) -> Walk:
    """Each call with what it launches; nothing is compiled."""
    return [(call, launches_of(call)) for call in calls]


def compile_largest(walked: Walk) -> list[KernelReport]:
    """The largest launch of each kernel, and what owes spills."""
    return compile_chosen(
        walked, largest_launches(launch for _, launches in walked for launch in launches) | owing(walked)
    )


def compile_cover(walked: Walk) -> list[KernelReport]:
    """In the first dtype a cover of all launches, and what owes spills. In every other dtype the largest launch of each
    kernel that is new or multiplies tiles: there, and hardly elsewhere, a dtype decides about instructions and registers."""
    launches: dict[str, list[Launch]] = {}
    for call, of_call in walked:
        launches.setdefault(dtype_name(call.dtype), []).extend(of_call)
    first, *others = launches
    chosen = cover(launches[first]) | owing(walked)
    reports = compile_chosen(walked, chosen)
    multiplies = {launch.kernel: False for launch in launches[first]}
    for report in reports:
        multiplies[report.kernel] |= any(report.instructions[name] for name in TENSOR_CORES)
    rest = [
        largest_launches(launch for launch in launches[dtype] if multiplies.get(launch.kernel, True))
        for dtype in others
    ]
    return reports + compile_chosen(walked, set[Launch]().union(*rest) - chosen)


def owing(walked: Walk) -> set[Launch]:
    """The launches in which SPILLS_OWED says that kernels spill most on the GPU of the calls."""
    return {launch for call, launches in walked for launch in launches if owes(call, launch.kernel)}


def owes(call: Call, kernel: str) -> bool:
    """Whether it is in this call that a kernel spills most."""
    if kernel not in SPILLS_OWED or call.capability not in SPILLS_OWED[kernel].most:
        return False
    return SPILLS_OWED[kernel].where == (call.operator.name, call.case.name, dtype_name(call.dtype))


def compile_chosen(walked: Walk, chosen: Iterable[Launch]) -> list[KernelReport]:
    """Reports of these launches, each compiled for the first call that asks for it."""
    missing = {launch.key for launch in chosen}
    reports: dict[str, KernelReport] = {}
    for call, launches in walked:
        if keys := missing & {launch.key for launch in launches}:
            reports |= {report.digest: report for report in compiled_kernels(call, keys)}
            missing -= keys
    return list(reports.values())
