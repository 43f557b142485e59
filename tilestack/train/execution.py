"""How a step is executed: where, in which precision, compiled or not, remembering activations or computing them again."""

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from tilestack.nn.lora import lora_parameters
from tilestack.train.recipe import Precision, Recipe

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, PyTorch takes deterministic algorithms only; where it has none, it warns and goes on."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Where a step computes in another precision than its parameters have."""
    if precision.compute == precision.parameters:
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision.compute])


def set_precision(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Put a model on its device, in its dtype, its products in fp8 where they shall be."""
    model.to(device, DTYPES[precision.parameters])
    for _, adapter in lora_parameters(model):
        adapter.data = adapter.data.float()  # few and thin: kept wide, they need no master copy
    if precision.fp8:
        from tilestack.train.fp8 import use_fp8

        use_fp8(model, device, head=precision.fp8_head)


def prepare(model: nn.Module, recipe: Recipe, device: torch.device) -> Any:
    """The model as the steps run it: on its device, in its precision, with what the recipe asks for around it."""
    set_precision(model, recipe.precision, device)
    if device.type == "cpu":
        keep_freed_memory()
    if recipe.run.activation_checkpointing:
        model.checkpointing = True  # type: ignore[assignment]
        # A mixture of experts notes its balance in the forward, and its repetition shall not: then checkpoints compile.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    return model if recipe.run.compile == "off" else Compiled(model, recipe.run.compile)


def keep_freed_memory() -> None:
    """Let the C library keep what is freed. It gives large blocks back to the system, so that every step would have its
    activations paged in anew; where it cannot be told (only glibc can), they are."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def uses_graphs(mode: str, device: torch.device) -> bool:
    """Whether a compile mode replays CUDA graphs."""
    return device.type == "cuda" and mode in ("reduce-overhead", "max-autotune")


def layers_of(model: nn.Module) -> nn.ModuleList:
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} has no list of layers, whose linear layers fp8 could take")
    return layers


class Compiled:
    """A model for training steps whose forward is compiled for fixed shapes; everything else is the model's own.

    Evaluation and sampling, whose shapes change, take the model itself."""

    def __init__(self, model: nn.Module, mode: str):
        self.model = model
        compiled = functools.partial(torch.compile, mode=None if mode == "default" else mode, dynamic=False)
        self.forward: Any = compiled(model)
        self.hidden: Any = compiled(model.hidden) if hasattr(model, "hidden") else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
