"""Inputs for proving and measuring operators: each case is a name and a recipe that builds the arguments anywhere."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilestack.contract.labels import label_of_arguments, label_of_sizes


class Make:
    """Builds reproducible random arguments in one dtype on one device (`meta` for shapes alone)."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0):
        self.dtype = dtype
        self.device = torch.device(device)
        self.generator = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        if self.device.type == "meta":
            return self.shape_alone(shape, dtype or self.dtype)
        # Drawn in one precision for every dtype, so that a case has the same values up to rounding in each of them.
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.mul_(scale).add_(mean).to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        if self.device.type == "meta":
            return self.shape_alone(shape, dtype or self.dtype)
        drawn = torch.rand(shape, generator=self.generator, device=self.device)
        return drawn.mul_(high - low).add_(low).to(dtype or self.dtype)

    def integers(self, *shape: int, low: int = 0, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        if self.device.type == "meta":
            return self.shape_alone(shape, dtype)
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def shape_alone(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """No numbers are drawn on `meta`, for which PyTorch would load its compiler, a second's work in every program."""
        return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Case:
    """One set of arguments: `check` cases prove an operator and stay small, `gpu` cases prove it too where there is a GPU,
    being too large for the interpreter, `bench` cases have sizes worth measuring."""

    name: str
    build: Callable[[Make], dict[str, Any]]
    kind: str = "check"
    sizes: tuple[tuple[str, Any], ...] = ()  # by the names that the builder gives them, where it does

    @property
    def label(self) -> str:
        """The case in words; `name` is its identity, in results and on the command line."""
        return label_of_sizes(self.sizes) if self.sizes else label_of_arguments(self.build(Make(device="meta")))


def cases(
    build: Callable[..., dict[str, Any]],
    *,
    check: Iterable[tuple],
    gpu: Iterable[tuple] = (),
    bench: Iterable[tuple] = (),
) -> list[Case]:
    """A case for each size: `build(make, *size)` makes the arguments, and the size is the name (`3x1000`, `4x33xtanh`)."""
    parameters = list(inspect.signature(build).parameters.values())[1:]
    named = all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in parameters)

    def case(size: tuple, kind: str) -> Case:
        sizes = tuple((known.name, value) for known, value in zip(parameters, size, strict=False)) if named else ()
        return Case("x".join(map(str, size)) or "scalar", lambda make: build(make, *size), kind, sizes)

    kinds = dict(check=check, gpu=gpu, bench=bench)
    return [case(size, kind) for kind, sizes in kinds.items() for size in sizes]


# Row lengths that break kernels: one, odd, just below, at and above a power of two, a few blocks, and nothing at all.
ROW_CHECKS = [(1, 1), (3, 33), (2, 127), (4, 128), (2, 129), (5, 1000), (0, 16), (3, 0), (2, 3, 40)]
ROW_BENCHES = [
    (16384, 256), (8192, 1024), (8192, 4096), (8192, 5120), (4096, 13824), (1024, 16384), (4096, 16384), (4096, 27648),
    (2048, 65536), (4096, 4097),
]  # fmt: skip
