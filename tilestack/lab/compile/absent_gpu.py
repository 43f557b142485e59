"""Compiling kernels for GPUs that are not here, and what the assembler says of them: registers, spills, shared memory.

`AbsentGpu` stands in for Triton's driver. Inside it launchers run unchanged on meta tensors: every kernel they launch
is compiled for the absent GPU, loaded nowhere and remembered.

    case on meta tensors → launcher → kernel[grid](...) → Triton compiles → stand-in launcher notes it
                                                                    ptxas log + PTX → KernelReport → gate
"""

import contextlib
import io
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import make_backend
from triton.runtime.cache import get_cache_manager

from tilestack.contract import BackendError, Case, Implementation, Operator
from tilestack.contract.backends import interpreting
from tilestack.contract.cases import Make
from tilestack.contract.named import call_named, parameters_of
from tilestack.contract.operator import as_tuple
from tilestack.kernels.tiles import wide
from tilestack.lab.compile.launches import Launch
from tilestack.lab.compile.spills import spills_owed
from tilestack.lab.labels import dtype_name

# Bytes of shared memory one program may use, by compute capability.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
CAPABILITIES = {"triton": tuple(SHARED_LIMIT), "gluon": (90,)}  # what each backend's kernels are written for

INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tcgen05": r"\btcgen05\.mma",
    "ld.v4": r"\bld\.global[\w.:]*\.(?:v[48]|v2\.[a-z]64)\b",
    "st.v4": r"\bst\.global[\w.:]*\.(?:v[48]|v2\.[a-z]64)\b",
    "cp.async": r"\bcp\.async\.c[ag]\.",
    "tma": r"\bcp\.async\.bulk\.tensor",
}
TENSOR_CORES = ("wgmma", "mma", "tcgen05")
HALF_DOT = r"tt\.dot .*: tensor<(?:\d+x)?(\d+)x\d+x(?:b?f16|f8\w+|i8)"  # in Triton's IR; Gluon names its instructions
WAIT = "griddepcontrol.wait"  # of a kernel that begins before the one in front has ended (kernels/early.py)
REACHES_MEMORY = r"\b(?:ld|st|atom|red)\.global[\w.:]*|\bcp\.async\.(?!bulk\.prefetch)[\w.:]*"
LOG = "ptxas.log"  # in Triton's cache, beside the kernel
WGMMA_ROWS = 64  # the fewest rows that Hopper's warpgroup instruction takes, from four warps

make_cubin = CUDABackend.make_cubin


@dataclass(frozen=True)
class KernelReport:
    """One compiled kernel: with which constants, what the assembler made of it, and who launches it."""

    kernel: str
    capability: int
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    registers: int  # per thread
    spill_bytes: int  # stores and loads together
    stack_bytes: int
    shared_bytes: int
    warnings: list[str]  # the assembler's C75xx messages
    instructions: dict[str, int]  # in the PTX, by the names of INSTRUCTIONS
    half_dots: list[int]  # rows of each `tl.dot` whose operands have 16 bits or fewer
    seconds: float  # spent compiling just now; 0 when Triton had it in its cache
    digest: str = field(repr=False)  # equal for identical compilations
    ptx: str = field(repr=False)
    operator: str = ""  # these six are empty for a kernel launched outside an operator
    backend: str = ""
    case: str = ""
    dtype: str = ""
    direction: str = ""
    config: str = ""

    def row(self) -> dict[str, Any]:
        """The report as JSON takes it, without the PTX, with the verdict."""
        return {name: value for name, value in asdict(self).items() if name != "ptx"} | dict(failures=gate(self))


def gate(report: KernelReport) -> list[str]:
    """Why a kernel must not ship on its GPU; empty when it may."""
    reasons = []
    if report.spill_bytes > (owed := spills_owed(report.kernel, report.capability)):
        at_most = f", owed are at most {owed} on sm_{report.capability}" if owed else ""
        reasons.append(f"spills {report.spill_bytes} bytes of registers{at_most}")
    if report.shared_bytes > (limit := SHARED_LIMIT[report.capability]):
        reasons.append(f"asks for {report.shared_bytes} bytes of shared memory, sm_{report.capability} has {limit}")
    reasons += report.warnings
    before, waits, _ = report.ptx.partition(WAIT)
    if waits and (reached := re.search(REACHES_MEMORY, before)):
        reasons.append(f"does {reached[0]} before it waits for the kernel in front")
    wide_dots = [rows for rows in report.half_dots if rows >= WGMMA_ROWS and report.num_warps % 4 == 0]
    if report.half_dots and not any(report.instructions[name] for name in TENSOR_CORES):
        reasons.append("multiplies half-precision tiles without tensor cores")
    elif report.capability == 90 and wide_dots and not report.instructions["wgmma"]:
        reasons.append(f"multiplies half-precision tiles of {max(wide_dots)} rows without wgmma")
    return reasons


class Call(NamedTuple):
    """One call of an implementation, in its first configuration or the named one."""

    operator: Operator
    implementation: Implementation
    case: Case
    dtype: torch.dtype
    direction: str
    capability: int
    config: str = ""


def compiled_kernels(call: Call, only: Collection[str] | None = None) -> list[KernelReport]:
    """A report of every kernel that a call launches, or of those of them whose keys are among `only`; empty when the
    implementation refuses the call or launches none."""
    with AbsentGpu(call.capability, only) as gpu:
        make_call(call, gpu)
        return [
            replace(
                report,
                operator=call.operator.name,
                backend=call.implementation.backend,
                case=call.case.name,
                dtype=dtype_name(call.dtype),
                direction=call.direction,
                config=call.config,
            )
            for report in gpu.reports()
        ]


def launches_of(call: Call) -> list[Launch]:
    """Every launch of a call; nothing is compiled."""
    with AbsentGpu(call.capability, only=()) as gpu:
        make_call(call, gpu)
        return list(gpu.asked.values())


@torch.no_grad()
def make_call(call: Call, gpu: "AbsentGpu") -> None:
    """Has an implementation launch its kernels on a GPU that is not there; none when it refuses the call."""
    operator, implementation, case, dtype, direction, _, config = call
    arguments = operator.bind(**case.build(Make(dtype, "meta")))
    tensors = {name: arguments[name] for name in operator.tensors if arguments[name] is not None}
    if any((a := implementation.accepted(name, t)) and t.dtype not in a for name, t in tensors.items()):
        return
    needs = tuple(name in tensors and tensors[name].is_floating_point() for name in operator.tensors)
    if direction == "backward" and not callable(implementation.backward):
        return
    if implementation.when is not None and call_named(implementation.when, arguments) is not True:
        return
    extras = implementation.extras_of(arguments)
    named = (
        dict(config=implementation.configs[config or next(iter(implementation.configs))])
        if implementation.configs
        else {}
    )
    outputs = as_tuple(implementation.forward(*arguments.values(), **named))
    asked = {n: v for n, v in (named | dict(needs=needs)).items() if extras and n in parameters_of(extras.forward)}
    handed = extras.forward(*arguments.values(), **asked)[1:] if extras and extras.names(operator) else ()
    if direction == "backward":
        gpu.forget()
        available = arguments | dict(zip(operator.outputs, outputs, strict=True))
        available |= {name: torch.empty_like(out) for name, out in zip(operator.grads, outputs, strict=True)}
        available |= named | dict(needs=needs)
        call_named(implementation.own_backward, available)
        if extras:
            call_named(extras.backward, available | dict(zip(extras.names(operator), handed, strict=True)))


class AbsentGpu:
    """A Triton driver for a GPU that is not there: `with AbsentGpu(90) as gpu:` compiles what is launched inside, or of
    that only the launches whose keys are among `only`."""

    class utils:
        @staticmethod
        def get_device_properties(device: str) -> dict[str, int]:
            # A limit out of reach lets too large a kernel arrive at the gate instead of failing its launch.
            return dict(max_shared_mem=1 << 30, multiprocessor_count=132, max_num_regs=65536, warpSize=32)

        @staticmethod
        def load_binary(name: str, binary: bytes, shared: int, device: str) -> tuple:
            return name, name, 0, 0, 1024  # module, function, registers, spills, the most threads of a program

    def __init__(self, capability: int, only: Collection[str] | None = None):
        if capability not in SHARED_LIMIT:
            raise BackendError(
                f"no limits are known for sm_{capability}; it is one of {', '.join(map(str, SHARED_LIMIT))}"
            )
        if interpreting() or not isinstance(wide, triton.JITFunction):
            raise BackendError(
                "the kernels were loaded for Triton's interpreter, which compiles nothing; start again without TRITON_INTERPRET"
            )
        self.target = GPUTarget("cuda", capability, 32)
        self.launcher_cls = NotedLaunch
        self.only = only
        self.asked: dict[str, Launch] = {}
        self.launched: dict[str, NotedLaunch] = {}
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> "AbsentGpu":
        driver = triton.runtime.driver._active  # `active` would look for a GPU
        self.replaced = driver, knobs.compilation.listener, knobs.runtime.jit_cache_hook, CUDABackend.make_cubin
        triton.runtime.driver.set_active(self)
        knobs.compilation.listener = self.time_compilation
        knobs.runtime.jit_cache_hook = self.note_launch
        CUDABackend.make_cubin = make_cubin_and_log
        return self

    def __exit__(self, *_: object) -> None:
        driver, knobs.compilation.listener, knobs.runtime.jit_cache_hook, CUDABackend.make_cubin = self.replaced
        triton.runtime.driver.set_active(driver)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        # Triton keeps compiled kernels by device: no real one has this name, and where nothing is compiled none is kept.
        return f"absent sm_{self.target.arch}{', compiling nothing' if self.only == () else ''}"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def time_compilation(self, *, metadata: dict, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.seconds[metadata["hash"]] = times.total / 1e6

    def note_launch(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """What Triton asks before it compiles a kernel; True has it pass over the launch."""
        parameters = [parameter.name for parameter in fn.jit_function.params]
        types = {name: described for name, described in compile["signature"].items() if described != "constexpr"}
        without_divisor = {parameters[path[0]] for path, divisors in compile["configs"][0].items() if not divisors}
        launch = Launch(
            kernel=fn.name,
            key=f"{fn.module}.{fn.name} {key}",
            types=types,
            constants={parameters[path[0]]: json_constant(value) for path, value in compile["constants"].items()},
            odd=without_divisor & types.keys(),
            num_warps=compile["num_warps"],
            num_stages=compile["num_stages"],
        )
        self.asked[launch.key] = launch
        return self.only is not None and launch.key not in self.only

    def forget(self) -> None:
        """Leaves out of the reports what was launched so far."""
        self.asked.clear()
        self.launched.clear()

    def reports(self) -> list[KernelReport]:
        """A report of each kernel launched so far."""
        return [launch.report(self.seconds.get(digest, 0.0)) for digest, launch in self.launched.items()]


class NotedLaunch:
    """What Triton makes of a compiled kernel to launch it; this one notes on the active driver that it was."""

    def __init__(self, source: Any, metadata: Any):
        self.source, self.metadata = source, metadata

    def __call__(self, *_: Any) -> None:
        triton.runtime.driver.active.launched[self.metadata.hash] = self

    def report(self, seconds: float) -> KernelReport:
        metadata, ptx = self.metadata, self.intermediate("ptx")
        log = self.assembler_log(ptx)
        numbers = lambda pattern: [int(found) for found in re.findall(pattern, log)]
        parameters = self.source.fn.params
        constants = {parameters[path[0]].name: value for path, value in self.source.constants.items()}
        return KernelReport(
            kernel=self.source.name,
            capability=metadata.target.arch,
            constants={p.name: json_constant(constants[p.name]) for p in parameters if p.is_constexpr},
            num_warps=metadata.num_warps,
            num_stages=metadata.num_stages,
            registers=max(numbers(r"Used (\d+) registers")),
            spill_bytes=sum(numbers(r"(\d+) bytes spill (?:stores|loads)")),
            stack_bytes=max(numbers(r"(\d+) bytes stack frame"), default=0),
            shared_bytes=metadata.shared,
            warnings=sorted({line.strip() for line in re.findall(r"\(C75\d\d\).*", log)}),
            instructions={name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()},
            half_dots=[int(rows) for rows in re.findall(HALF_DOT, self.intermediate("ttir"))],
            seconds=round(seconds, 3),
            digest=metadata.hash,
            ptx=ptx,
        )

    def intermediate(self, stage: str) -> str:
        """The kernel in one of Triton's intermediate languages; Gluon has no `ttir`."""
        name = self.source.name[:150]  # as Triton cuts it
        files = get_cache_manager(self.metadata.hash).get_group(f"{name}.json") or {}
        return Path(files[f"{name}.{stage}"]).read_text() if f"{name}.{stage}" in files else ""

    def assembler_log(self, ptx: str) -> str:
        """What ptxas -v prints; of a kernel that was compiled when nobody kept that, it is assembled again."""
        cache, target = get_cache_manager(self.metadata.hash), self.metadata.target
        if cache.get_file(LOG) is None:
            make_cubin_and_log(make_backend(target), ptx, {"hash": self.metadata.hash}, self.metadata, target.arch)
        return Path(cache.get_file(LOG)).read_text()


def make_cubin_and_log(backend: Any, ptx: str, metadata: dict[str, Any], options: Any, capability: int) -> bytes:
    """Triton's own call of the assembler, whose options are those of the real compilation; what it prints is kept in the
    cache."""
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as printed:
        knobs.nvidia.dump_ptxas_log = True
        cubin = make_cubin(backend, ptx, metadata, options, capability)
    get_cache_manager(metadata["hash"]).put(printed.getvalue(), LOG, binary=False)
    return cubin


def json_constant(constant: Any) -> Any:
    """A constant as JSON can hold it."""
    return constant if isinstance(constant, bool | int | float | str | None) else str(constant)
