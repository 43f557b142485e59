"""The step of each optimizer against torch's, fused and foreach: 262 M parameters in 100 tensors, and the tensors of a model.

A step is timed like any operator: CUDA graphs of whole steps, candidates taking turns (timing.py). Bytes are those a
step cannot avoid: parameters, gradients and states read once, parameters and states written once.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tilestack import optim
from tilestack.contract import backend
from tilestack.lab.bench.roofs import Roofs, measure_roofs
from tilestack.lab.bench.timing import Call, Candidate, measure
from tilestack.lab.labels import dtype_name
from tilestack.lab.rows import Row, Stored, set_ratios
from tilestack.lab.stale import is_current, present_source
from tilestack.ops.gram import iteration_cost

Shape = tuple[int, ...]
OURS = "triton"


def qwen3_shapes(layers: int = 28, hidden: int = 1024, inner: int = 3072, vocabulary: int = 151936) -> list[Shape]:
    """The 310 tensors of Qwen3-0.6B: tied embedding, 16 query and 8 key-value heads of 128 with their norms."""
    heads, kv_heads, head = 16, 8, 128
    attention = [(heads * head, hidden), (kv_heads * head, hidden), (kv_heads * head, hidden), (hidden, heads * head)]
    norms: list[Shape] = [(head,), (head,), (hidden,), (hidden,)]
    layer = [*attention, *norms, (inner, hidden), (inner, hidden), (hidden, inner)]
    return [(vocabulary, hidden), *(layer * layers), (hidden,)]


CASES: dict[str, Callable[[], list[Shape]]] = {
    "100x2560x1024": lambda: [(2560, 1024)] * 100,
    "100x2048x1280": lambda: [(2048, 1280)] * 100,
    "qwen3-0.6b": qwen3_shapes,
}
ONLY = {"100x2560x1024": lambda name: name != "muon", "100x2048x1280": lambda name: name == "muon"}  # cases of some

Maker = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def torch_adamw(params: list[torch.nn.Parameter], **way: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, capturable=params[0].is_cuda, **way)


def clipped_adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Clipping and the fused step after it, as PyTorch's users write it."""
    optimizer: Any = torch_adamw(params, fused=True)
    step, optimizer.clip_norm = optimizer.step, 1.0

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, optimizer.clip_norm, foreach=True)
        step()

    optimizer.step = clip_and_step
    return optimizer


def hidden_matrices(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Those that Muon is for: an embedding has more rows than any of them."""
    return [param for param in params if param.ndim == 2 and max(param.shape) < 1 << 16]


# What is timed per optimizer: ours, then torch's own ways. 8-bit AdamW has none in torch and is held against AdamW's.
CONTESTS: dict[str, dict[str, Maker]] = {
    "adamw": {
        OURS: optim.AdamW,
        "fused": functools.partial(torch_adamw, fused=True),
        "foreach": functools.partial(torch_adamw, foreach=True),
    },
    "adamw_clipped": {OURS: functools.partial(optim.AdamW, clip_norm=1.0), "fused": clipped_adamw},
    "adamw_stochastic": {OURS: functools.partial(optim.AdamW, stochastic_rounding=True)},
    "adamw_master": {OURS: functools.partial(optim.AdamW, master_weights=True)},
    "adamw8bit": {OURS: optim.AdamW8bit, "fused": functools.partial(torch_adamw, fused=True)},
    "sgd": {
        OURS: functools.partial(optim.SGD, momentum=0.9),
        "fused": functools.partial(torch.optim.SGD, momentum=0.9, fused=True),
        "foreach": functools.partial(torch.optim.SGD, momentum=0.9, foreach=True),
    },
    "muon": {
        OURS: lambda params: optim.Muon(hidden_matrices(params)),
        "torch.optim": lambda params: torch.optim.Muon(hidden_matrices(params)),
    },
}
HALF_ONLY = ("adamw_stochastic", "adamw_master")
DTYPES = ("float32", "bfloat16")


def is_timed(name: str, case: str, dtype: str) -> bool:
    """Whether an optimizer is one to time on a case in a dtype."""
    return ONLY.get(case, lambda name: True)(name) and (name not in HALF_ONLY or dtype == "bfloat16")


def refuse_unknown_optimizers(optimizers: Sequence[str], cases: Sequence[str], dtypes: Sequence[str]) -> None:
    """An error that says what there is, where a name is none or nothing is left to time."""
    for what, names, known in (("optimizer", optimizers, CONTESTS), ("case", cases, CASES), ("dtype", dtypes, DTYPES)):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"bench optim has no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    if not any(is_timed(*chosen) for chosen in itertools.product(optimizers, cases, dtypes)):
        asked = [", ".join(names) for names in (optimizers, cases, dtypes)]
        raise ValueError("bench optim does not time {} on {} in {}; leave --case or --dtype out".format(*asked))


def bytes_of_a_step(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Gradients are read, twice where they are clipped; parameters and states are read and written, but a master copy is
    read in the parameter's stead."""
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)
    states = [state for param in params for state in optimizer.state[param].values() if isinstance(state, Tensor)]
    has_master = any("master_param" in optimizer.state[param] for param in params)
    clipping = getattr(optimizer, "clip_norm", None) is not None
    written = size(params) + size(states)
    read = (
        written
        - (size(params) if has_master else 0)
        + size(p.grad for p in params if p.grad is not None) * (2 if clipping else 1)
    )
    return read + written


def flops_of_a_step(shapes: Sequence[Shape]) -> float:
    """The products of Newton–Schulz, half of each symmetric one."""
    on_meta = hidden_matrices([torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes])
    return sum(iteration_cost(param, steps=5).flops for param in on_meta)


def optimizer_calls(
    make: Maker, shapes: list[Shape], dtype: torch.dtype, device: str, moved: dict[str, int], name: str, n: int
) -> list[Call]:
    """n optimizers on parameters of their own, each after the first step that makes its states."""
    made: list[Call] = []
    for _ in range(n):
        params = [torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param) * 1e-2
        optimizer = make(params)
        optimizer.step()
        moved[name] = bytes_of_a_step([param for param in params if param in optimizer.state], optimizer)
        made.append(optimizer.step)
    return made


def bench_optim(
    optimizers: Sequence[str],
    cases: Sequence[str],
    dtypes: Sequence[str],
    device: str,
    shapes: dict[str, list[Shape]] | None = None,
    kept: Sequence[Stored] = (),
) -> Iterator[list[Stored]]:
    """The rows of every optimizer on every case, contest by contest, but for those that are kept of the present source.

    `shapes` replaces the cases' own, for a smaller machine.
    """
    roofs = measure_roofs(device)
    current = {(row["op"], row["case"], row["dtype"]) for row in kept if is_current(row)}
    for name, case, dtype in itertools.product(optimizers, cases, dtypes):
        if is_timed(name, case, dtype) and (name, case, dtype) not in current:
            tensors = shapes[case] if shapes else CASES[case]()
            yield [
                row.as_dict() for row in optimizer_contest(name, case, tensors, getattr(torch, dtype), device, roofs)
            ]


def optimizer_contest(
    name: str, case: str, shapes: list[Shape], dtype: torch.dtype, device: str, roofs: Roofs
) -> list[Row]:
    """The rows of one optimizer on one case, ours and torch's side by side."""
    moved: dict[str, int] = {}
    candidates = {
        label: Candidate(
            functools.partial(optimizer_calls, make, shapes, dtype, device, moved, label),
            functools.partial(backend, OURS if device == "cuda" else "torch"),
        )
        for label, make in CONTESTS[name].items()
    }
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    timings = measure(candidates, 4 * elements * dtype.itemsize, device)
    flops = flops_of_a_step(shapes) if name == "muon" else 0
    arithmetic = "bfloat16" if flops else dtype_name(dtype)
    rows = []
    for label, timing in timings.items():
        who = label if label != OURS or device == "cuda" else "torch"
        row = Row(name, case, dtype_name(dtype), "step", who, source=present_source(name, who), **vars(timing))
        if row.time_us:
            row.set_rates(flops, moved[label], roofs.floor_us(flops, moved[label], arithmetic))
        rows.append(row)
    set_ratios(rows)
    return rows
